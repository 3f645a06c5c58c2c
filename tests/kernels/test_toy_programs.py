"""Needs the extension: programs with experts, groups of layers and the single-element ops, against the definition and by bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from toy_models import BLOCK, BLOCKS, LONGEST, Cut, Elements, Mixture, Parallel, Toy, Windows, batch_of, random_weight

from octavo.errors import ConfigError
from octavo.ops.batch import Batch, MoeSpec
from octavo.ops.cpu import program as programs
from octavo.ops.cpu.program import CpuProgram
from octavo.ops.cpu.threads import available_cpus, set_num_threads
from octavo.runner.reference import ReferenceProgram

MODELS: dict[str, Callable[[], Toy]] = {
    "experts f32": lambda: Mixture(("f32",)),
    "experts f32, softmax over all, gelu": lambda: Mixture(("f32",), MoeSpec(2, False, gelu=True)),
    "experts f16, gate and up apart": lambda: Mixture(("f16",), MoeSpec(7, True), parted=True, shared=False),
    "experts w4": lambda: Mixture(("w4",)),
    "experts w8, one each": lambda: Mixture(("w8h",), MoeSpec(1, False), shared=False),
    "experts of all kinds": lambda: Mixture(("w4m", "bf16", "w8", "f32", "f16")),
    "experts of all kinds, gate and up apart": lambda: Mixture(("w4m", "bf16", "w8"), parted=True),
    "windows f32": lambda: Windows(("f32",)),
    "windows w4": lambda: Windows(("w4m",)),
    "parallel f32": lambda: Parallel(("f32",)),
    "parallel w4": lambda: Parallel(("w4",)),
    "parallel of all kinds": lambda: Parallel(("w8", "bf16", "w4m", "f16")),
    "parallel, each in an order of its own": lambda: Parallel(("w8", "w4o", "w8o", "w4o")),
    "elements f8": lambda: Elements(("f8",)),
    "experts f8 and one group": lambda: Mixture(("f8", "w4z")),
    "experts t4": lambda: Mixture(("t4", "w4"), parted=True),
    "parallel t4, tables of their own": lambda: Parallel(("t4", "t4", "w8", "t4")),
    "elements t4": lambda: Elements(("t4",)),
    "elements f32": lambda: Elements(("f32",)),
    "elements w4": lambda: Elements(("w4m",)),
    "elements of all kinds": lambda: Elements(("w4", "bf16", "w8", "f16")),
}
CUTS = [Cut(0, 21), Cut(41, 46), Cut(60, 61), Cut(0, 1)]


def program_of(model: Toy, isa: str = "", kv_dtype: str = "float32") -> CpuProgram:
    return CpuProgram(
        model, num_blocks=BLOCKS, block_size=BLOCK, kv_dtype=kv_dtype, max_rows=128, max_positions=LONGEST, max_tokens=128, isa=isa
    )


def reference_of(model: Toy) -> ReferenceProgram:
    return ReferenceProgram(model, num_blocks=BLOCKS, block_size=BLOCK, kv_dtype="float32", max_rows=32, max_positions=LONGEST)


def rows_of(program: CpuProgram | ReferenceProgram, batch: Batch) -> np.ndarray:
    """Logits of all rows."""
    program.forward(batch)
    return program.logits(np.arange(len(batch.input_ids_T), dtype=np.int32)).copy()


@pytest.mark.parametrize("isa", ["", "portable", "portable16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_program_is_the_definition(name: str, isa: str) -> None:
    model = MODELS[name]()
    batch = batch_of(CUTS, model.kv_layout.windows)
    expected = rows_of(reference_of(model), batch)
    error = np.abs(rows_of(program_of(model, isa), batch) - expected)
    # A value at a rounding edge may move by one step of 1/127 of its group (8 bits), or of 1/256 of itself (bf16); through three layers, or
    # experts that such a step swaps, farther: hence the medians.
    exact = name.endswith("f32") or "f32," in name or "f16," in name
    assert np.median(error) < (1e-6 if exact else 5e-3) * np.abs(expected).max()
    assert error.max() < (2e-5 if exact else 0.1) * np.abs(expected).max()


@pytest.mark.parametrize("name", MODELS)
def test_rows_do_not_depend_on_the_batch(name: str) -> None:
    """Alone, in other orders, in pieces, on other numbers of threads: the same bits."""
    model = MODELS[name]()
    windows = model.kv_layout.windows
    ids = [np.random.default_rng(9 + i).integers(0, 208, LONGEST) for i in range(4)]
    ends = [21, 46, 61, 1]
    program = program_of(model, kv_dtype="bfloat16")
    whole = {}
    for i, end in enumerate(ends):
        whole[i] = rows_of(program, batch_of([Cut(0, end)], windows, [ids[i]]))[:, :]
    try:
        for threads in (1, 2, 5):
            set_num_threads(threads)
            for order in ([0, 3], [3, 0], [1, 0], [3, 2]):
                out = rows_of(program, batch_of([Cut(0, ends[i]) for i in order], windows, [ids[i] for i in order], seed=threads))
                assert out.tobytes() == np.concatenate([whole[i] for i in order]).tobytes()
    finally:
        set_num_threads(available_cpus())


@pytest.mark.parametrize("isa", ["", "portable"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_that_are_picked_early_are_those_of_all(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By bits, and however often and in whatever order rows of one batch are asked for."""
    model = MODELS[name]()
    batch = batch_of(CUTS, model.kv_layout.windows)
    early = program_of(model, isa, "bfloat16")
    monkeypatch.setattr(programs, "pick_early", lambda nodes, logits: (nodes, logits))
    late = program_of(model, isa, "bfloat16")
    whole = rows_of(late, batch)
    early.forward(batch)
    for rows in ([27], range(28), [20, 25, 26, 27], [3, 3, 3], range(27, -1, -1), [27]):
        assert early.logits(np.array(rows, np.int32)).tobytes() == whole[list(rows)].tobytes()


@pytest.mark.parametrize("name", ["windows f32", "windows w4"])
def test_decode_over_the_edge_of_a_window(name: str) -> None:
    """Token by token with blocks given back behind the window: the bits of one prefill, whatever stands in those entries."""
    model = MODELS[name]()
    windows, ids = model.kv_layout.windows, np.random.default_rng(5).integers(0, 208, 60)
    program = program_of(model)
    full = batch_of([Cut(0, 60)], windows, [ids])
    whole = rows_of(program, full)
    program = program_of(model)
    for start in range(60):
        step = batch_of([Cut(start, start + 1)], windows, [ids])
        gone = max(0, start - windows[1] + 1) // BLOCK
        step.block_table_GSB[:] = full.block_table_GSB[:, :, : step.block_table_GSB.shape[2]]
        step.block_table_GSB[1, 0, :gone] = start % BLOCKS
        step.slot_mapping_GT[:] = full.slot_mapping_GT[:, start : start + 1]
        assert rows_of(program, step).tobytes() == whole[start : start + 1].tobytes()


def test_groups_are_checked() -> None:
    model = MODELS["windows f32"]()
    program = program_of(model)
    for field, message in (("slot_mapping_GT", "slot outside"), ("block_table_GSB", "block id outside")):
        batch = batch_of(CUTS, model.kv_layout.windows)
        getattr(batch, field)[1].flat[0] = BLOCKS * BLOCK
        with pytest.raises(ValueError, match=message):
            program.forward(batch)
    batch = batch_of(CUTS, (0,))
    with pytest.raises(ValueError, match="groups"):
        program.forward(batch)


def test_learned_positions_end_where_their_table_ends() -> None:
    model = Elements()
    model.pairs = model.query_pairs = np.repeat(model.pairs, 2, axis=0)
    program = program_of(model)
    batch = batch_of([Cut(0, 1)])
    batch.positions_T[0] = LONGEST
    with pytest.raises(ValueError, match="context"):
        program.forward(batch)


def test_a_nan_among_the_experts_stays_in_its_row() -> None:
    model = MODELS["experts f32"]()
    clean = rows_of(program_of(model), batch_of(CUTS))
    model.embedding.parts[0].codes[7] = np.nan
    batch = batch_of(CUTS)
    batch.input_ids_T[batch.input_ids_T == 7] = 8
    same = rows_of(program_of(model), batch)[:, 8:]
    batch.input_ids_T[-1] = 7
    bad = rows_of(program_of(model), batch)[:, 8:]
    assert np.isnan(bad[-1]).all() and bad[:-1].tobytes() == same[:-1].tobytes() and not np.isnan(clean).any()


def test_orders_of_inputs_are_refused_where_no_instruction_takes_them() -> None:
    with pytest.raises(ValueError, match="in another order"):
        program_of(Toy(("w4o",)))  # an embedding
    model = Mixture(("f32",))
    model.gate_up[3][0] = random_weight(model.rng, "w4o", 2 * model.inner, model.width)
    with pytest.raises(ConfigError, match="desc_act"):
        program_of(model)
