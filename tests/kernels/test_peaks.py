"""Needs the extension: the machine's limits are measured for every variant that runs here, and steps of toy programs put beside them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from toy_models import BLOCK, LONGEST, Mixture, Toy, Windows

from octavo import _native
from octavo.bench.costs import Cut, Work, cost_of
from octavo.bench.kernels import StepBench, blocks_for, measure_products, works_of
from octavo.errors import ConfigError
from octavo.ops.cpu.measure import best_isa, measure_peaks
from octavo.ops.cpu.peaks import Peaks
from octavo.ops.cpu.program import CpuProgram

VARIANTS = [*_native.isa_names(), "portable16"]
KINDS = ("f32", "f16", "bf16", "f8", "w8", "w4", "t4")
BRIEF = 0.002  # seconds


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_products_have_a_peak(isa: str, kind: str) -> None:
    rate = _native.peak_products(kind, BRIEF, isa)
    assert math.isfinite(rate)
    assert rate > 1e6


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("huge_pages", [True, False])
def test_reading_has_a_peak(isa: str, huge_pages: bool) -> None:
    rate = _native.peak_read(3 << 20, BRIEF, huge_pages, isa)
    assert math.isfinite(rate)
    assert rate > 1e6


def test_what_cannot_be_measured_is_refused() -> None:
    for call in (
        lambda: _native.peak_products("w5", BRIEF, ""),
        lambda: _native.peak_products("w4", 0.0, ""),
        lambda: _native.peak_products("w4", math.nan, ""),
        lambda: _native.peak_products("w4", BRIEF, "z80"),
        lambda: _native.peak_read(100, BRIEF, True, ""),
        lambda: _native.peak_read(1 << 50, BRIEF, True, ""),
        lambda: _native.peak_read(1 << 20, -1.0, True, ""),
        lambda: _native.peak_read(1 << 20, BRIEF, True, "z80"),
    ):
        with pytest.raises(ValueError, match="."):
            call()


def test_all_peaks_at_once() -> None:
    peaks = measure_peaks("", BRIEF)
    assert peaks.isa == best_isa() in _native.isa_names()
    assert peaks.num_threads == _native.num_threads()
    figures = (peaks.f32, peaks.bf16, peaks.w4, peaks.w8, peaks.memory, peaks.memory_small_pages, peaks.cache or 1.0)
    assert all(math.isfinite(figure) and figure > 0 for figure in figures)


@pytest.fixture(scope="module")
def peaks() -> Peaks:
    return Peaks("any", 1, 1e11, 1e11, 1e11, 1e11, 1e10, 1e10, None, 0)


MODELS: dict[str, Callable[[], Toy]] = {
    "one layer": lambda: Toy(("w4m", "w8", "bf16")),
    "groups of layers": lambda: Windows(("w4m",)),
    "experts": lambda: Mixture(("w4",), parted=True),
}


def program_of(model: Toy, works: list[Work]) -> CpuProgram:
    blocks = blocks_for(works, BLOCK, len(model.kv_layout.windows))
    return CpuProgram(
        model, num_blocks=blocks, block_size=BLOCK, kv_dtype="bfloat16", max_tokens=96, max_rows=96, max_positions=LONGEST
    )  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_every_instruction_of_a_step_is_accounted_for(name: str, peaks: Peaks) -> None:
    model = MODELS[name]()
    works = works_of((1, 5, 70), 100)
    assert [(work.tokens, work.cuts[0].length, work.picked) for work in works] == [(1, 100, 1), (5, 100, 5), (70, 70, 0), (70, 100, 0)]
    program = program_of(model, works)
    bench = StepBench(program, peaks, BRIEF)
    for work in works:
        step = bench.measure(work)
        ran = [shape for shape in program.shapes if work.picked or not shape.picked]
        assert sum(f.count for f in step.figures) == len(ran) + bool(work.picked)
        assert all(f.seconds > 0 and f.limit.seconds >= 0 for f in step.figures)
        sampled = [f for f in step.figures if f.name.startswith("sample")]
        assert len(sampled) == bool(work.picked)
        memory = sum(f.cost.memory_bytes for f in step.figures)
        assert memory == sum(cost_of(shape, work).memory_bytes for shape in ran)
        assert step.seconds > 0


def test_the_last_layer_is_told_apart_where_it_works_on_other_rows(peaks: Peaks) -> None:
    """A chunk of a prompt that ends in a sampled row: what is done behind the last attention is done for that row."""
    works = works_of((1, 70), 100)
    bench = StepBench(program_of(Toy(("w4m",)), works), peaks, BRIEF)
    step = bench.measure(Work((Cut(70, 70),), 1))
    rows = {f.name: f.rows for f in step.figures}
    assert rows["linear w4 160x96"] == 70 and rows["linear w4 96x96, picked rows"] == rows["linear w4 208x96, picked rows"] == 1
    assert "linear w4 96x96" in {f.name for f in bench.measure(works[0]).figures}


def test_shapes_name_what_the_program_runs(peaks: Peaks) -> None:
    program = program_of(Toy(("w4m",)), works_of((1,), 64))
    bench = StepBench(program, peaks, BRIEF)
    program.profile(True)
    program.forward(bench.batch(Work((Cut(1, 64),), 1)))
    names = [name for name, _ in program.take_profile()]
    assert [name.split()[0] for name in names] == [shape.op for shape in program.shapes]
    assert [name.split()[1] for name in names if " " in name] == [f"{s.n}x{s.k}" for s in program.shapes if s.op == "linear"]


def test_sequences_and_groups_have_blocks_of_their_own(peaks: Peaks) -> None:
    works = works_of((5,), 100)
    program = program_of(Windows(("f32",)), works)
    bench = StepBench(program, peaks, BRIEF)
    batch = bench.batch(works[0])
    assert len(np.unique(batch.block_table_GSB)) == batch.block_table_GSB.size == 2 * 5 * 7
    assert np.array_equal(batch.slot_mapping_GT, batch.block_table_GSB[:, :, 6] * BLOCK + 99 % BLOCK)
    with pytest.raises(ConfigError, match="needs 84 KV blocks, the pool has 70"):
        bench.batch(Work((Cut(1, 100),) * 6, 6))


def test_no_block_of_the_pool_is_left_unwritten(peaks: Peaks) -> None:
    """All blocks are copies of a computed one: wherever a table points, a row sees the same keys, and not zeros."""
    works = works_of((3,), 48)
    program, again = program_of(Toy(("f32",)), works), program_of(Toy(("f32",)), works)
    batch = StepBench(program, peaks, BRIEF).batch(works[0])
    batch.input_ids_T[:] = 7
    seen = []
    for each in (program, again):
        each.forward(batch)
        seen.append(each.logits(np.arange(3, dtype=np.int32)).copy())
    filled, empty = seen
    assert np.array_equal(filled[0], filled[1])
    assert np.array_equal(filled[0], filled[2])
    assert not np.array_equal(filled, empty)


def test_products_of_any_shape(peaks: Peaks) -> None:
    few = Peaks(**{**{name: getattr(peaks, name) for name in Peaks.__slots__}, "cache_bytes": 1 << 16})
    figures = list(measure_products(("w4", "bf16"), ((64, 96), (128, 64)), (1, 3), few, seconds=BRIEF))
    assert [(f.name, f.rows) for f in figures][:3] == [("w4 64x96", 1), ("w4 64x96", 3), ("w4 128x64", 1)]
    assert len(figures) == 8
    assert all(f.seconds > 0 for f in figures)
    assert figures[1].cost.operations == 2 * 3 * 64 * 96
