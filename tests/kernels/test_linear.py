"""Products with packed weights: against the definition, and by bits across rows, threads and memory.

The binding fills outputs and scratch with NaNs and guards the scratch's end, so whatever a kernel forgets or oversteps shows here.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from linear_cases import FORMS, ISAS, PLAIN, QUANTISED, TABLES, Form, looked_up, pack, rows, weight

from octavo import _native
from octavo.ops import reference
from octavo.ops.packed import NIBBLES, PackedWeight, WeightKind, bf16_to_f32, f32_to_bf16, unpack_nibbles

W4 = Form(WeightKind.W4, 32, True)
# Around the lanes (8, 16), the row tiles (4, 6), the groups (32) and the blocks of k (256).
SHAPES = [(1, 32), (7, 64), (16, 96), (37, 288), (70, 544)]
PLAIN_KS = {32: 1, 64: 63, 96: 97, 288: 257, 544: 515}  # plain weights need no whole groups
ROWS = [1, 2, 3, 4, 5, 7, 8, 13, 70]

every_isa = pytest.mark.parametrize("isa", ISAS)
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def shaped(form: Form, n: int, k: int) -> PackedWeight:
    return weight(form, n, k if form.group else PLAIN_KS[k])


def effective(x: np.ndarray, kind: WeightKind) -> np.ndarray:
    """What the activations are after the kind's rounding, in float64."""
    if kind in (WeightKind.BF16, WeightKind.F8):
        return bf16_to_f32(f32_to_bf16(x)).astype(np.float64)
    if kind in (WeightKind.F32, WeightKind.F16):
        return x.astype(np.float64)
    codes, scales = reference.quantize_rows(x)
    return (codes.astype(np.float64) * scales[..., None]).reshape(x.shape[0], -1)[:, : x.shape[1]]


def exact(x: np.ndarray, w: PackedWeight) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and a bound of fp32's error: one rounding per term, relative to the sum of magnitudes.

    A quantised group rounds its product, its sum, and the scales' product: never more than its 16 or 32 inputs would.
    """
    x64, w64 = effective(x, w.kind), np.concatenate([dequantized64(w)])
    return x64 @ w64.T, (np.abs(x64) @ magnitudes(w).T) * (w.k + 8) * 2.0**-24 + 1e-30


def dequantized64(w: PackedWeight) -> np.ndarray:
    if not w.group:
        return w.dequantize().astype(np.float64)
    p = w.parts[0]
    values = reference_codes(w)
    if p.zeros is not None:
        values = values - p.zeros.astype(np.float64)[..., None]
    elif w.kind is WeightKind.W4 and p.mins is None:
        values = values - 8
    values = values * p.scales.astype(np.float64)[..., None]
    return (values if p.mins is None else values + p.mins.astype(np.float64)[..., None]).reshape(w.n, -1)


def magnitudes(w: PackedWeight) -> np.ndarray:
    """|code * scale| + |min|: the two are added separately, so they may cancel; a zero point is (in w4, by default) such a minimum."""
    if not w.group:
        return np.abs(w.dequantize().astype(np.float64))
    p = w.parts[0]
    scales = p.scales.astype(np.float64)
    values, offsets = np.abs(reference_codes(w) * scales[..., None]), np.zeros_like(scales)
    if p.mins is not None:
        offsets = p.mins.astype(np.float64)
    elif p.zeros is not None:
        offsets = p.zeros.astype(np.float64) * scales
    elif w.kind is WeightKind.W4:
        offsets = 8 * scales
    return (values + np.abs(offsets)[..., None]).reshape(w.n, -1)


def reference_codes(w: PackedWeight) -> np.ndarray:
    codes = w.parts[0].codes
    if w.kind is WeightKind.F8:
        return f8_numbers()[codes]
    numbers = unpack_nibbles(codes) if w.kind in NIBBLES else codes
    return (numbers if w.table is None else w.table[numbers]).astype(np.float64)


def f8_numbers() -> np.ndarray:
    """e4m3 as its definition says: (-1)^s 2^(e - 7) 1.m, or for e = 0 2^-6 0.m."""
    numbers = []
    for sign, e, m in itertools.product((1, -1), range(16), range(8)):
        numbers.append(sign * (2.0 ** (e - 7) * (1 + m / 8) if e else 2.0**-6 * m / 8))
    return np.array(numbers)


@every_isa
@every_form
@pytest.mark.parametrize("n, k", SHAPES)
def test_matches_the_definition(isa: str, form: Form, n: int, k: int) -> None:
    w = shaped(form, n, k)
    packed = pack(w, isa)
    for count in ROWS:
        x = rows(count, w.k)
        y = _native.linear(x, packed, isa=isa)
        want, bound = exact(x, w)
        assert y.shape == (count, n)
        assert (np.abs(y - want) <= bound).all(), f"{count} rows: off by {np.abs(y - want).max()}"


@pytest.mark.parametrize("isa", ["portable", "portable16"])
@pytest.mark.parametrize("form", QUANTISED, ids=str)
def test_portable_code_has_the_references_bits(isa: str, form: Form) -> None:
    """Integers are exact and the floats' order is fixed; without fma, numpy's arithmetic is the same."""
    w = weight(form, 37, 288)
    x = rows(13, w.k)
    assert np.array_equal(_native.linear(x, pack(w, isa), isa=isa), reference.BACKEND.linear(x, [w], None))


@every_isa
@pytest.mark.parametrize("form", TABLES, ids=str)
@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("epilogue", ["none", "gelu"])
def test_a_table_has_the_bits_of_its_numbers(isa: str, form: Form, n: int, k: int, epilogue: str) -> None:
    """However the nibbles are looked up: alone, by row tiles, or all at once for many rows."""
    w = weight(form, n, k)
    packed, numbers = pack(w, isa), pack(looked_up(w), isa)
    assert packed.nbytes < 0.58 * numbers.nbytes
    for count in (1, 2, 5, 13, 19, 20, 21, 70):
        x = rows(count, w.k)
        ours, wanted = (_native.linear(x, weights, epilogue=epilogue, isa=isa, threads=2) for weights in (packed, numbers))
        assert ours.tobytes() == wanted.tobytes()


@every_isa
@every_form
def test_a_row_alone_has_the_bits_it_has_in_a_batch(isa: str, form: Form) -> None:
    w = shaped(form, 37, 544 if form.group != 288 else 576)
    packed = pack(w, isa)
    x = rows(131, w.k)
    together = _native.linear(x, packed, isa=isa)
    for i in range(0, 131, 5):
        assert np.array_equal(_native.linear(x[i : i + 1], packed, isa=isa)[0], together[i])
    for start, stop in [(0, 2), (1, 4), (3, 7), (5, 10), (60, 66), (64, 131), (30, 43)]:
        assert np.array_equal(_native.linear(x[start:stop], packed, isa=isa), together[start:stop])


@every_isa
@every_form
@pytest.mark.parametrize("epilogue", ["none", "silu_mul"])
def test_any_number_of_threads_gives_the_same_bits(isa: str, form: Form, epilogue: str) -> None:
    w = shaped(form, 70, 96)
    packed = pack(w, isa)
    for count in (1, 6, 70):
        x = rows(count, w.k)
        once = _native.linear(x, packed, epilogue=epilogue, isa=isa, threads=1)
        for threads in (2, 3, 5, 16):
            assert np.array_equal(_native.linear(x, packed, epilogue=epilogue, isa=isa, threads=threads), once)


@every_isa
@every_form
def test_not_a_number_stays_in_its_row(isa: str, form: Form) -> None:
    w = shaped(form, 37, 96)
    packed = pack(w, isa)
    x = rows(11, w.k)
    clean = _native.linear(x, packed, isa=isa)
    x[2, 5], x[3, w.k - 1], x[7, 0] = np.nan, np.inf, -np.inf
    y = _native.linear(x, packed, isa=isa)
    sick = [2, 3, 7]
    assert not np.isfinite(y[sick]).any()
    assert np.array_equal(np.delete(y, sick, 0), np.delete(clean, sick, 0))


@every_isa
@every_form
def test_rows_may_be_strided(isa: str, form: Form) -> None:
    w = shaped(form, 16, 96)
    packed = pack(w, isa)
    wide = np.full((9, w.k + 13), np.nan, np.float32)
    wide[:, 3 : 3 + w.k] = rows(9, w.k)
    view = wide[::2, 3 : 3 + w.k]
    assert np.array_equal(_native.linear(view, packed, isa=isa), _native.linear(view.copy(), packed, isa=isa))


@every_isa
@every_form
@pytest.mark.parametrize("n", [16, 37])
def test_bias_and_residual_are_added_after_the_sum(isa: str, form: Form, n: int) -> None:
    w = shaped(form, n, 64)
    packed = pack(w, isa)
    rng = np.random.default_rng(3)
    bias = rng.standard_normal(n).astype(np.float32)
    for count in (1, 5):
        x = rows(count, w.k)
        residual = rng.standard_normal((count, n + 5)).astype(np.float32)[:, :n]
        plain = _native.linear(x, packed, isa=isa)
        assert np.array_equal(_native.linear(x, packed, bias, isa=isa), plain + bias)
        assert np.array_equal(_native.linear(x, packed, None, residual, "add", isa), residual + plain)
        assert np.array_equal(_native.linear(x, packed, bias, residual, "add", isa), residual + (plain + bias))


def activated(t: np.ndarray, epilogue: str) -> np.ndarray:
    gate, up = np.split(t.astype(np.float64), 2, axis=1)
    if epilogue == "silu_mul":
        return gate / (1 + np.exp(np.minimum(-gate, 700))) * up
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + np.tanh(inner)) * up


@every_isa
@pytest.mark.parametrize("form", [W4, Form(WeightKind.W4, 64), Form(WeightKind.W8, 32), TABLES[0], *PLAIN], ids=str)
@pytest.mark.parametrize("epilogue", ["silu_mul", "gelu_mul"])
# Halves: less than a tile, whole tiles, tiles and a rest, whole tiles of 8 but not of 16.
@pytest.mark.parametrize("half", [3, 32, 37, 24, 100])
def test_gates(isa: str, form: Form, epilogue: str, half: int) -> None:
    w = shaped(form, 2 * half, 64)
    packed = pack(w, isa)
    bias = np.random.default_rng(5).standard_normal(2 * half).astype(np.float32)
    for count in (1, 5, 70):
        x = rows(count, w.k) * np.float32(0.01)
        for b in (None, bias):
            t = _native.linear(x, packed, b, isa=isa)
            y = _native.linear(x, packed, b, epilogue=epilogue, isa=isa)
            assert y.shape == (count, half)
            # tanh's error is relative to 1, so the tail of gelu is held to the size of its input
            scale = np.abs(t[:, :half] * t[:, half:])
            assert (np.abs(y - activated(t, epilogue)) <= 1e-6 * scale + 1e-37).all()


@every_isa
@pytest.mark.parametrize("form", [W4, Form(WeightKind.W8, 32), *PLAIN], ids=str)
def test_scale_and_gelu_in_the_product_are_those_after_it(isa: str, form: Form) -> None:
    w = shaped(form, 37, 64)
    packed, bias = pack(w, isa), np.random.default_rng(5).standard_normal(37).astype(np.float32)
    for count in (1, 5, 70):
        x = rows(count, w.k) * np.float32(0.01)
        for b in (None, bias):
            t = _native.linear(x, packed, b, isa=isa)
            apart = np.empty_like(t)
            _native.kernels.unary(t, apart, 0, isa=isa)
            assert _native.linear(x, packed, b, epilogue="gelu", isa=isa).tobytes() == apart.tobytes()
            _native.kernels.unary(t, apart, 1, 0.22, isa=isa)
            assert _native.linear(x, packed, b, isa=isa, scale=0.22).tobytes() == apart.tobytes()
            assert _native.linear(x, packed, b, apart, "add", isa, scale=0.22).tobytes() == (apart + apart).tobytes()


def test_no_rows() -> None:
    y = _native.linear(np.empty((0, 32), np.float32), pack(weight(W4, 5, 32), ""))
    assert y.shape == (0, 5)


def test_variants_with_fma_agree_by_bits() -> None:
    """Integer parts are exact everywhere, so only the rounding of fma tells variants apart."""
    fused = [isa for isa in ISAS if not isa.startswith("portable")]
    for form in QUANTISED:
        w = weight(form, 37, 288)
        x = rows(9, w.k)
        results = [_native.linear(x, pack(w, isa), isa=isa) for isa in fused]
        for y in results[1:]:
            assert np.array_equal(y, results[0])


@pytest.mark.parametrize("lanes", [8, 16])
def test_a_packed_weight_serves_every_variant_of_its_lanes(lanes: int) -> None:
    packed = {isa: pack(weight(W4, 37, 64), isa) for isa in ISAS}
    same = [isa for isa in ISAS if packed[isa].lanes == lanes]
    x = rows(5, 64)
    for one in same:
        for other in same:
            assert np.array_equal(
                _native.linear(x, packed[one], isa=other), _native.linear(x, packed[other], isa=other)
            )


class TestRefusals:
    """Everything that would make native code read or write elsewhere is told, and told apart."""

    x = rows(3, 64)

    @pytest.fixture(autouse=True)
    def weight_of_six_channels(self) -> None:
        self.packed = pack(weight(W4, 6, 64), "portable")

    def refuse(self, error: type[Exception], match: str, *args: object, **options: object) -> None:
        with pytest.raises(error, match=match):
            _native.linear(*args, **options)

    def test_x(self) -> None:
        self.refuse(ValueError, "columns", rows(3, 96), self.packed)
        self.refuse(ValueError, "adjacent", rows(3, 128)[:, ::2], self.packed)
        self.refuse(ValueError, "overlap", np.broadcast_to(self.x[:1], (3, 64)), self.packed)
        self.refuse(ValueError, "overlap", self.x[::-1], self.packed)
        self.refuse(TypeError, "incompatible", self.x.astype(np.float64), self.packed)
        self.refuse(TypeError, "incompatible", self.x[0], self.packed)

    def test_bias_and_residual(self) -> None:
        self.refuse(ValueError, "bias", self.x, self.packed, np.zeros(5, np.float32))
        self.refuse(ValueError, "residual", self.x, self.packed, None, np.zeros((3, 6), np.float32))
        self.refuse(ValueError, "residual", self.x, self.packed, epilogue="add")
        self.refuse(ValueError, "residual", self.x, self.packed, None, np.zeros((3, 5), np.float32), "add")
        self.refuse(ValueError, "residual", self.x, self.packed, None, np.zeros((2, 6), np.float32), "add")

    def test_epilogue(self) -> None:
        self.refuse(ValueError, "silu_mul", self.x, self.packed, epilogue="relu")
        odd = pack(weight(W4, 7, 64), "portable")
        self.refuse(ValueError, "even", self.x, odd, epilogue="silu_mul")
        self.refuse(ValueError, "scale", self.x, self.packed, epilogue="silu_mul", scale=2.0)

    def test_isa(self) -> None:
        self.refuse(ValueError, "portable", self.x, self.packed, isa="sse9")
        self.refuse(ValueError, "lanes", self.x, self.packed, isa="portable16")


@every_isa
class TestQuantizeRows:
    @pytest.mark.parametrize("k", [1, 33, 100, 576])
    def test_columns_are_taken_in_the_order_asked_for(self, isa: str, k: int) -> None:
        x, order = rows(9, k), np.random.default_rng(2).permutation(k).astype(np.int32)
        for threads in (1, 2, 7):
            ordered = _native.quantize_rows(x, isa, threads, order)
            for ours, wanted in zip(ordered, _native.quantize_rows(np.ascontiguousarray(x[:, order]), isa), strict=True):
                assert np.array_equal(ours, wanted)
        with pytest.raises(ValueError, match="columns"):
            _native.quantize_rows(x, isa, 1, order[:-1])
        with pytest.raises(ValueError, match="columns"):
            _native.quantize_rows(x, isa, 1, order + 1)

    @pytest.mark.parametrize("k", [1, 31, 32, 33, 100, 576])
    def test_has_the_references_bits(self, isa: str, k: int) -> None:
        x = rows(9, k)
        for threads in (1, 2, 7):
            q, scale, total = _native.quantize_rows(x, isa, threads)
            codes, scales = reference.quantize_rows(x)
            assert np.array_equal(q.reshape(codes.shape), codes)
            assert np.array_equal(scale, scales)
            assert np.array_equal(total, codes.sum(axis=-1))

    def test_halves_go_to_the_even_neighbour(self, isa: str) -> None:
        x = np.zeros((1, 32), np.float32)
        x[0, :8] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]
        q, scale, _ = _native.quantize_rows(x, isa)
        assert scale[0, 0] == 1
        assert q[0, :8].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]

    def test_an_empty_group_has_scale_zero(self, isa: str) -> None:
        q, scale, total = _native.quantize_rows(np.zeros((2, 64), np.float32), isa)
        assert not q.any() and not scale.any() and not total.any()

    @pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("at", [0, 7, 31])
    def test_a_group_that_is_not_finite_has_no_scale(self, isa: str, poison: float, at: int) -> None:
        x = rows(3, 96)
        clean = _native.quantize_rows(x, isa)
        x[1, 32 + at] = poison
        q, scale, total = _native.quantize_rows(x, isa)
        assert np.isnan(scale[1, 1]) and not q[1, 32:64].any()
        for now, before in zip((scale, total), clean[1:], strict=True):
            assert np.array_equal(np.delete(now.ravel(), 4), np.delete(before.ravel(), 4))

    def test_subnormal_rows_stay_within_a_byte(self, isa: str) -> None:
        tiny = np.float32(1e-45)
        x = (np.arange(32, dtype=np.float32) * 6 * tiny)[None]
        q, scale, _ = _native.quantize_rows(x, isa)
        assert np.abs(q.astype(int)).max() <= 127 and scale[0, 0] == tiny
        q, scale, _ = _native.quantize_rows(np.full((1, 32), tiny), isa)
        assert scale[0, 0] == 0 and not q.any()
