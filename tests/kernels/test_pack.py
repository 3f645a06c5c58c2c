"""Packing: every source layout a checkpoint brings, read back value by value; merged projections; refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cases import (
    FORMS,
    ISAS,
    QUANTISED,
    TABLE,
    TABLES,
    Form,
    inputs,
    looked_up,
    of_parts,
    pack,
    part,
    rows,
    weight,
)

from octavo import _native
from octavo.ops.packed import PackedWeight, WeightKind, WeightPart, merge

every_isa = pytest.mark.parametrize("isa", ISAS)
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


@every_isa
@every_form
@pytest.mark.parametrize("n, k", [(1, 32), (8, 64), (16, 96), (29, 160), (50, 32)])
def test_values_come_back(isa: str, form: Form, n: int, k: int) -> None:
    w = weight(form, n, k if form.group != 16 else k + 16)
    packed = pack(w, isa)
    assert np.array_equal(_native.dequantize(packed), w.dequantize())
    assert (packed.kind, packed.n, packed.k) == (form.kind.value, n, w.k)
    assert (packed.group, packed.has_mins, packed.has_zeros) == (form.group, form.mins, form.zeros)
    assert packed.lanes in (8, 16)


@pytest.mark.parametrize("form, per_channel", [
    (Form(WeightKind.W4, 32, True), 2 * (16 + 4)),
    (Form(WeightKind.W4, 32), 2 * (16 + 2)),
    (Form(WeightKind.W4, 64), 32 + 2),
    (Form(WeightKind.W4, 64, zeros=True), 32 + 4),
    (Form(WeightKind.W8, 64, wide=True), 64 + 4),
    (Form(WeightKind.F8, 64, wide=True), 64 + 4),
    (Form(WeightKind.W8, 32), 2 * (32 + 2)),
    (Form(WeightKind.W8, 16, True), 2 * (32 + 8)),
    (Form(WeightKind.T4, 32), 2 * (16 + 2)),
    (Form(WeightKind.T4, 64, wide=True), 32 + 4),
    (Form(WeightKind.F32), 64 * 4),
    (Form(WeightKind.BF16), 64 * 2),
], ids=str)  # fmt: skip
def test_packed_weights_are_as_small_as_the_file(form: Form, per_channel: int) -> None:
    assert pack(weight(form, 33, 64), "portable").nbytes == 40 * per_channel  # padded to 8 channels


@every_isa
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_merging_is_concatenation(isa: str, data: st.DataObject) -> None:
    """Sources of any sizes end and begin inside one panel, with and without minimums beside each other."""
    form = data.draw(st.sampled_from(FORMS))
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    k = inputs(form, 64)
    parts = tuple(part(form, size, k, seed) for seed, size in enumerate(sizes))
    if form.mins and form.kind is WeightKind.W8 and data.draw(st.booleans()):
        parts = (*parts[:-1], WeightPart(parts[-1].codes, parts[-1].scales))
    merged = of_parts(form, k, *parts)
    packed = pack(merged, isa)
    assert np.array_equal(_native.dequantize(packed), merged.dequantize())
    x = rows(3, k)
    alone = [_native.linear(x, pack(of_parts(form, k, p), isa), isa=isa) for p in parts]
    assert np.array_equal(_native.linear(x, packed, isa=isa), np.concatenate(alone, axis=1))


def stored_blocks(n: int, groups: int, offset: int) -> np.ndarray:
    """Blocks of scale, minimum and 16 bytes of codes, `offset` bytes into a read-only buffer, as in a mapped file."""
    block = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])
    rng = np.random.default_rng(0)
    raw = np.zeros((n, groups), block)
    raw["d"], raw["m"] = rng.uniform(0, 1, raw.shape), rng.uniform(-1, 0, raw.shape)
    raw["qs"] = rng.integers(0, 256, (n, groups, 16))
    return np.frombuffer(b"\x00" * offset + raw.tobytes(), block, n * groups, offset).reshape(n, groups)


@every_isa
@pytest.mark.parametrize("offset", [0, 1, 7])
def test_views_into_stored_blocks(isa: str, offset: int) -> None:
    blocks = stored_blocks(21, 3, offset)
    w = PackedWeight(WeightKind.W4, 21, 96, (WeightPart(blocks["qs"], blocks["d"], blocks["m"]),))
    assert np.array_equal(_native.dequantize(pack(w, isa)), w.dequantize())


@every_isa
@every_form
def test_reversed_and_skipping_views(isa: str, form: Form) -> None:
    k = inputs(form, 64)
    whole = part(form, 40, 2 * k)

    def cut(array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else array[::-3, ::-2]

    codes = cut(whole.codes)
    view = WeightPart(codes, cut(whole.scales), cut(whole.mins), cut(whole.zeros))
    w = of_parts(form, k, view)
    assert np.array_equal(_native.dequantize(pack(w, isa)), w.dequantize())


def test_half_precision_may_come_as_bits() -> None:
    w = weight(Form(WeightKind.F16), 9, 40)
    as_bits = _native.pack("f16", 9, 40, [(w.parts[0].codes.view(np.uint16), None, None)])
    assert np.array_equal(_native.dequantize(as_bits), w.dequantize())
    q = part(QUANTISED[1], 9, 64)
    sources = [(q.codes, q.scales.view(np.uint16), q.mins.view(np.uint16))]
    assert np.array_equal(
        _native.dequantize(_native.pack("w4", 9, 64, sources)), weight(QUANTISED[1], 9, 64).dequantize()
    )


@every_isa
def test_special_scales_survive(isa: str) -> None:
    """Subnormal, largest, infinite and absent fp16 numbers: widened exactly."""
    bits = np.array([[0x0001, 0x03FF, 0x0400, 0x7BFF, 0x8001, 0xFBFF, 0x7C00, 0x0000]], np.uint16)
    codes = np.ones((1, 8, 32), np.int8)
    values = _native.dequantize(_native.pack("w8", 1, 256, [(codes, bits, None)], isa))
    assert np.array_equal(values[0, ::32], bits.view(np.float16).astype(np.float32)[0])


@every_isa
@pytest.mark.parametrize("form", TABLES, ids=str)
def test_a_table_packs_as_its_numbers(isa: str, form: Form) -> None:
    w = weight(form, 29, 160)
    assert _native.dequantize(pack(w, isa)).tobytes() == _native.dequantize(pack(looked_up(w), isa)).tobytes()


@every_isa
def test_tables_do_not_mix(isa: str) -> None:
    """Neighbours become one matrix only where their codes stand for the same numbers."""
    one, same = weight(TABLES[0], 5, 64, 1), weight(TABLES[0], 6, 64, 2)
    other = PackedWeight(WeightKind.T4, 7, 64, weight(TABLES[0], 7, 64, 3).parts, table=TABLE[::-1].copy())
    four = weight(Form(WeightKind.W4, 32), 3, 64)
    merged = merge([one, same, other, four])
    assert [w.n for w in merged] == [11, 7, 3]
    values = np.concatenate([_native.dequantize(pack(w, isa)) for w in merged])
    assert np.array_equal(values, np.concatenate([w.dequantize() for w in (one, same, other, four)]))
    x = rows(3, 64)
    y = np.concatenate([_native.linear(x, pack(w, isa), isa=isa) for w in merged], axis=1)
    assert np.array_equal(y, np.concatenate([_native.linear(x, pack(w, isa), isa=isa) for w in (one, same, other, four)], axis=1))


def test_a_table_is_sixteen_bytes_of_t4() -> None:
    w = weight(TABLES[0], 4, 64)
    p = w.parts[0]
    mins = WeightPart(p.codes, p.scales, np.zeros_like(p.scales))
    for kind, parts, table in [
        (WeightKind.T4, w.parts, None), (WeightKind.W4, w.parts, TABLE), (WeightKind.T4, w.parts, TABLE[:8]),
        (WeightKind.T4, w.parts, TABLE.astype(np.int16)), (WeightKind.T4, (mins,), TABLE),
    ]:  # fmt: skip
        with pytest.raises(ValueError):
            PackedWeight(kind, 4, 64, parts, table=table)


class TestRefusals:
    q = part(QUANTISED[1], 4, 64)
    bytes = np.zeros((4, 2, 32), np.int8), q.scales

    def refuse(self, error: type[Exception], match: str, *args: object) -> None:
        with pytest.raises(error, match=match):
            _native.pack(*args)

    def test_kind_and_isa(self) -> None:
        self.refuse(ValueError, "w4", "w5", 4, 64, [(self.q.codes, self.q.scales, None)])
        self.refuse(ValueError, "portable", "w4", 4, 64, [(self.q.codes, self.q.scales, None)], "mmx")

    @pytest.mark.parametrize("n, k", [(0, 64), (4, 0), (-4, 64), (1 << 40, 1 << 40), (5, 64), (4, 96), (4, 32)])
    def test_sizes(self, n: int, k: int) -> None:
        with pytest.raises(ValueError):
            _native.pack("w4", n, k, [(self.q.codes, self.q.scales, None)])

    def test_sources(self) -> None:
        self.refuse(ValueError, "at least one", "w4", 4, 64, [])
        self.refuse(ValueError, "a source is", "w4", 4, 64, [()])
        self.refuse(TypeError, "not an array", "w4", 4, 64, [(None, self.q.scales, None)])
        other = part(Form(WeightKind.W8, 16), 4, 64), part(Form(WeightKind.W8, 32), 4, 64)
        self.refuse(ValueError, "same group", "w8", 8, 64, [(p.codes, p.scales, None) for p in other])

    def test_codes(self) -> None:
        scales = self.q.scales
        self.refuse(TypeError, "dtype", "w4", 4, 64, [(self.q.codes.view(np.int8), scales, None)])
        self.refuse(ValueError, "shape", "w4", 4, 64, [(self.q.codes[:, 0], scales, None)])
        self.refuse(ValueError, "of 16 bytes", "w4", 4, 64, [(self.q.codes[:, :, :8], scales, None)])
        self.refuse(
            ValueError, "adjacent", "w4", 4, 64, [(np.repeat(self.q.codes, 2, axis=2)[:, :, ::2], scales, None)]
        )
        self.refuse(ValueError, "byte order", "f32", 4, 8, [(np.zeros((4, 8), ">f4"), None, None)])

    def test_table(self) -> None:
        sources = [(self.q.codes, self.q.scales, None)]
        self.refuse(ValueError, "goes with t4", "t4", 4, 64, sources)
        self.refuse(ValueError, "goes with t4", "w4", 4, 64, sources, "", TABLE)
        self.refuse(ValueError, "16 numbers", "t4", 4, 64, sources, "", TABLE[:15].copy())
        self.refuse(TypeError, "incompatible", "t4", 4, 64, sources, "", TABLE.astype(np.int16))
        self.refuse(ValueError, "no mins", "t4", 4, 64, [(self.q.codes, self.q.scales, self.q.scales)], "", TABLE)
        self.refuse(ValueError, "no mins", "t4", 4, 64, [(self.q.codes, self.q.scales, None, self.q.scales)], "", TABLE)

    def test_scales(self) -> None:
        codes, scales = self.q.codes, self.q.scales
        self.refuse(ValueError, "missing", "w4", 4, 64, [(codes, None, None)])
        self.refuse(ValueError, "scales", "w4", 4, 64, [(codes, scales[:, :1], None)])
        self.refuse(ValueError, "mins", "w4", 4, 64, [(codes, scales, scales[:2])])
        self.refuse(TypeError, "dtype", "w4", 4, 64, [(codes, scales.astype(np.float64), None)])
        self.refuse(ValueError, "not both", "w4", 4, 64, [(codes, scales, scales, scales)])
        self.refuse(ValueError, "of one dtype", "w4", 8, 64, [(codes, scales, None), (codes, scales.astype(np.float32), None)])
        self.refuse(ValueError, "or all zeros", "w4", 8, 64, [(codes, scales, scales), (codes, scales, None)])
        self.refuse(ValueError, "or all zeros", "w8", 8, 64, [(*self.bytes, scales), (*self.bytes, None, scales)])
        self.refuse(ValueError, "fp16 scales", "w8", 4, 64, [(np.zeros((4, 4, 16), np.int8), np.zeros((4, 4), np.float32), None)])
        self.refuse(TypeError, "dtype", "f8", 4, 64, [(np.zeros((4, 2, 32), np.uint8), scales, None)])
        self.refuse(ValueError, "no scales", "f32", 4, 8, [(np.zeros((4, 8), np.float32), scales, None)])
        self.refuse(ValueError, "no mins", "f32", 4, 8, [(np.zeros((4, 8), np.float32), None, scales)])
