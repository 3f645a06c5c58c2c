"""Needs Python only. Bytes and operations of instructions whose figures are known by hand, and the limits that follow."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.costs import (
    Bound,
    Cost,
    Cut,
    Limit,
    Work,
    cost_of,
    limit_of,
    memory_bytes,
    product_cost,
    sampling_cost,
)
from octavo.bench.kernel_report import (
    Figure,
    Part,
    StepFigures,
    as_json,
    draw_products,
    draw_steps,
    peaks_text,
    products_text,
    step_markdown,
    step_text,
)
from octavo.bench.weights import FORMS, random_weight
from octavo.errors import ConfigError
from octavo.ops.cpu.peaks import Peaks, better, cache_sizes, cached_bytes
from octavo.ops.cpu.shapes import Shape
from octavo.ops.packed import WeightKind

PEAKS = Peaks("avx2", 2, f32=100e9, bf16=200e9, w4=500e9, w8=250e9, memory=20e9, memory_small_pages=15e9, cache=80e9, cache_bytes=1 << 20)
DECODE = Work((Cut(1, 2048),) * 8, 8)
PREFILL = Work((Cut(512, 2048),), 0)


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 50))
def test_pairs_are_those_of_a_causal_window(rows: int, before: int, window: int) -> None:
    cut = Cut(rows, rows + before)
    seen = [[p for p in range(at + 1) if not window or p > at - window] for at in range(before, before + rows)]
    assert cut.pairs(window) == sum(map(len, seen))
    assert cut.visible(window) == len(set().union(*seen))


def test_a_product_reads_its_weight_once() -> None:
    shape = Shape("linear", reads=648, writes=2304, kind=WeightKind.W4, n=576, k=576, weight_bytes=207_360)
    cost = cost_of(shape, DECODE)
    assert (cost.operations, cost.memory_bytes, cost.cache_bytes) == (2 * 8 * 576 * 576, 207_360, 8 * (648 + 2304))
    assert cost.kind is WeightKind.W4
    head = dataclasses.replace(shape, picked=True)
    assert cost_of(head, PREFILL) == Cost(kind=WeightKind.W4)  # no logits are wanted
    assert cost_of(head, DECODE) == cost
    assert product_cost(shape, 8, cost.cache_bytes) == cost


def test_attention_reads_each_sequence_once_for_all_heads() -> None:
    shape = Shape("attention", reads=2304, writes=2304, heads=9, kv_heads=3, head_dim=64, kv_bytes=2)
    decode = cost_of(shape, DECODE)
    assert decode.memory_bytes == 8 * 2048 * 2 * 3 * 64 * 2
    assert decode.operations == 8 * 2048 * 4 * 9 * 64
    prefill = cost_of(shape, PREFILL)
    assert prefill.memory_bytes == 2048 * 2 * 3 * 64 * 2
    assert prefill.operations == 4 * 9 * 64 * sum(range(1537, 2049))
    windowed = cost_of(dataclasses.replace(shape, window=100), PREFILL)
    assert windowed.memory_bytes == 611 * 2 * 3 * 64 * 2
    assert windowed.operations == 4 * 9 * 64 * 512 * 100


@pytest.mark.parametrize(
    ("shape", "operations", "memory"),
    [
        (Shape("norm", elements=576, reads=2304, writes=2304), 8 * 576 * 4, 0),
        (Shape("norm", elements=576, reads=2304, writes=720, quantises=True), 8 * 576 * 7, 0),
        (Shape("quantize", elements=1536, reads=6144, writes=1920, quantises=True), 8 * 1536 * 3, 0),
        (Shape("rope", elements=768, reads=3072, writes=3072), 8 * 768 * 3, 0),
        (Shape("act", elements=1536, reads=12288, writes=6144), 8 * 1536 * 20, 0),
        (Shape("add", elements=576, reads=4608, writes=2304), 8 * 576, 0),
        (Shape("gather", elements=576, reads=2304, writes=2304), 0, 0),
        (Shape("kv_write", reads=1536, kv_heads=3, head_dim=64, kv_bytes=2), 0, 8 * 2 * 3 * 64 * 2),
        (Shape("embed", writes=2304, kind=WeightKind.W8, n=1000, k=576, weight_bytes=612_000), 8 * 576, 8 * 612),
        (Shape("combine", elements=576, top_k=4, reads=9216, writes=2304), 8 * 576 * 8, 0),
        (Shape("experts", kind=WeightKind.W4, n=128, k=64, weight_bytes=5120, experts=60, top_k=4), 2 * 8 * 4 * 128 * 64, 32 * 5120),
        (Shape("experts", kind=WeightKind.W4, n=128, k=64, weight_bytes=5120, experts=7, top_k=4), 2 * 8 * 4 * 128 * 64, 7 * 5120),
    ],
)
def test_costs_of_eight_rows(shape: Shape, operations: float, memory: float) -> None:
    cost = cost_of(shape, DECODE)
    assert (cost.operations, cost.memory_bytes, cost.cache_bytes) == (operations, memory, 8 * (shape.reads + shape.writes))


def test_costs_add_up() -> None:
    assert Cost(1, 2, 3) + Cost(10, 20, 30) == Cost(11, 22, 33)
    with pytest.raises(ValueError, match="kinds"):
        Cost(kind=WeightKind.W4) + Cost()
    shapes = [Shape("linear", kind=WeightKind.W8, n=2, k=2, weight_bytes=10), Shape("add", reads=5)]
    assert memory_bytes(shapes, DECODE) == 10


def test_the_longest_of_three_is_the_limit() -> None:
    far = 1e9  # a step that no cache holds
    assert limit_of(Cost(1e9, 40e6, 8e3, WeightKind.W4), PEAKS, far) == limit(2e-3, Bound.MEMORY)
    assert limit_of(Cost(2e9, 40e6, 8e3, WeightKind.W4), PEAKS, far) == limit(4e-3, Bound.ARITHMETIC)
    assert limit_of(Cost(2e9, 40e6, 8e3, WeightKind.W8), PEAKS, far) == limit(8e-3, Bound.ARITHMETIC)
    assert limit_of(Cost(2e9, 0, 0, WeightKind.T4), PEAKS, far) == limit(8e-3, Bound.ARITHMETIC)
    assert limit_of(Cost(2e9, 0, 0, WeightKind.BF16), PEAKS, far) == limit(1e-2, Bound.ARITHMETIC)
    for kind in (WeightKind.F8, WeightKind.F16, WeightKind.F32, None):
        assert limit_of(Cost(2e9, 0, 0, kind), PEAKS, far) == limit(2e-2, Bound.ARITHMETIC)
    assert limit_of(Cost(0, 0, 800e3), PEAKS, far) == limit(1e-5, Bound.CACHE)
    assert limit_of(Cost(0, 0, 2e6), PEAKS, far) == limit(1e-4, Bound.CACHE)  # more than the cache holds
    assert limit_of(Cost(0, 400e3, 0), PEAKS, 400e3) == limit(5e-6, Bound.MEMORY)  # all of it stays in the cache


def limit(seconds: float, bound: Bound) -> object:
    return type(limit_of(Cost(), PEAKS, 0))(pytest.approx(seconds), bound)


def test_without_a_cache_of_its_own_memory_is_the_limit() -> None:
    bare = dataclasses.replace(PEAKS, cache=None, cache_bytes=0)
    assert limit_of(Cost(0, 0, 2e6), bare, 0).seconds == pytest.approx(1e-4)
    assert limit_of(Cost(0, 2e6, 0), bare, 2e6).seconds == pytest.approx(1e-4)


def test_the_better_of_two_rounds_counts() -> None:
    other = dataclasses.replace(PEAKS, f32=99e9, w4=501e9, memory=21e9, cache=79e9)
    assert better(PEAKS, other) == better(other, PEAKS) == dataclasses.replace(PEAKS, w4=501e9, memory=21e9)
    bare = dataclasses.replace(PEAKS, cache=None)
    assert better(bare, bare) == bare


def test_cache_sizes_are_the_systems(tmp_path: Path) -> None:
    assert cache_sizes(tmp_path / "absent") == (0, 0)
    for index, (level, size) in enumerate([("1", "32K"), ("2", "512K"), ("3", "32768K"), ("4", "x")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "level").write_text(level + "\n")
        (folder / "size").write_text(size + "\n")
    (tmp_path / "index9").mkdir()
    assert cache_sizes(tmp_path) == (512 << 10, 32 << 20)
    assert 1 << 20 < cached_bytes(512 << 10, 32 << 20, 2) <= 16 << 20
    assert cached_bytes(2 << 20, 32 << 20, 16) == 0  # no room between L2 and L3
    assert cached_bytes(0, 32 << 20, 2) == cached_bytes(512 << 10, 0, 2) == 0


def figures() -> tuple[Figure, ...]:
    product = Cost(2e6, 200e3, 1e3, WeightKind.W4)
    sampling = sampling_cost(8, 1000)
    return (
        Figure("linear w4 100x10", 8, 30, 2e-3, product, limit_of(product, PEAKS, 1e9)),
        Figure("sample greedily", 8, 1, 1e-3, sampling, limit_of(sampling, PEAKS, 1e9)),
    )


def test_a_step_as_text_and_json() -> None:
    step = StepFigures("decode of 8, 64 tokens each", 8, 64, 4e-3, 1e-3, figures())
    assert step.limit_seconds == pytest.approx(1e-5 + 4e-7)
    lines = step_text(step).splitlines()
    assert lines[0] == "decode of 8, 64 tokens each: 2,000 tokens/s, 4 ms: products 50%, sampling 25%, rest 25%; 0% of the limit"
    assert lines[3].split() == ["linear", "w4", "100x10", "30", "66.7", "2.000", "50.0%", "0.1", "1.0", "memory", "0.010", "0%"]
    assert lines[-2].split()[-2:] == ["1.000", "25.0%"]
    assert len({len(line.rstrip()) for line in lines[1:3]}) == 1
    told = json.loads(json.dumps(as_json(PEAKS, [step])))
    assert told["peaks"]["w4"] == 500e9
    assert told["steps"][0]["ops"][0]["bound"] == "memory"
    assert told["steps"][0]["ops"][0]["share"] == pytest.approx(5e-3)
    assert told["steps"][0]["parts"] == {"products": 2e-3, "sampling": 1e-3, "rest": 1e-3}
    assert "products" not in told
    assert "bf16 200" in peaks_text(PEAKS)
    assert "L3" not in peaks_text(dataclasses.replace(PEAKS, cache=None))


def test_a_step_for_a_page() -> None:
    few = [Figure(f"norm {n}", 8, n, 1e-6, Cost(1.0), Limit(5e-7, Bound.CACHE)) for n in (1, 2)]
    lines = step_markdown(StepFigures("decode of 8, 64 tokens each", 8, 64, 4e-3, 1e-3, (*figures(), *few))).splitlines()
    assert lines[0].startswith("**Decode of 8, 64 tokens each**, 4 ms: products 50%, other instructions 0%, sampling 25%, rest 25%; 0% of the limit.")
    assert lines[4] == "| linear w4 100x10 | 30 | 2.000 | 50.0% | 0.010 | memory | 0% |"
    assert lines[6] == "| less than 0.1% each | 3 | 0.002 | 0.1% | 0.001 |  | 50% |"
    assert lines[7] == "| rest: start of threads, Python |  | 1.000 | 25.0% |  |  |  |"
    assert lines[-1].startswith("| whole step |  | 4.000 | 100.0%")
    assert len({line.count("|") for line in lines[2:]}) == 1


@pytest.mark.parametrize(
    ("name", "kind", "part"),
    [
        ("linear w4 8x8, picked rows", WeightKind.W4, Part.PRODUCTS), ("experts w8 8x8", WeightKind.W8, Part.PRODUCTS), ("attention", None, Part.ATTENTION),
        ("attention, window 20", None, Part.ATTENTION), ("embed", None, Part.OTHER), ("norm + quantize 64", None, Part.OTHER),
        ("sample greedily", None, Part.SAMPLING),
    ],
)  # fmt: skip
def test_each_instruction_is_of_one_part(name: str, kind: WeightKind | None, part: Part) -> None:
    assert Figure(name, 1, 1, 1e-3, Cost(kind=kind), Limit(0.0, Bound.MEMORY)).part is part


def test_products_as_text_and_json() -> None:
    assert len(products_text(figures()).splitlines()) == 4
    assert [each["rows"] for each in as_json(PEAKS, products=figures())["products"]] == [8, 8]


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    step = StepFigures("decode of 8", 8, 64, 4e-3, 1e-3, figures())
    draw_steps(tmp_path / "steps.png", [step, step])
    draw_products(tmp_path / "products.svg", figures())
    assert (tmp_path / "steps.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "products.svg").stat().st_size > 1000
    with pytest.raises(ConfigError, match="plot"):
        draw_steps(tmp_path / "nowhere" / "x.png", [step])


@pytest.mark.parametrize("form", FORMS)
def test_random_weights_have_their_form(form: str) -> None:
    weight = random_weight(form, 8, 192)
    assert (weight.n, weight.k) == (8, 192)
    assert form.startswith(weight.kind.value)
    assert weight.group == {"w8c": 192, "f8": 64, "w4g128": 64, "w4gs128": 64, "w4g64": 64, "w4gs64": 64}.get(form, 0 if "f" in form else 32)
    assert weight.has_mins == (form == "w4")
    assert weight.has_zeros == (form in ("w4g64", "w4g128"))


def test_no_such_weights() -> None:
    with pytest.raises(ConfigError, match="w5"):
        random_weight("w5", 8, 64)
    with pytest.raises(ConfigError, match="multiple of 32"):
        random_weight("w4", 8, 40)
