"""The kernels that work row by row: norms, rope, activations, embedding, add, gather. Against float64, and by bits."""

from __future__ import annotations

import numpy as np
import pytest

from octavo import _native

kernels = _native.kernels
ISAS = sorted({*_native.isa_names(), "portable16"})
ULP = 2.0**-23  # of 1
WIDTHS = [1, 7, 8, 24, 31, 32, 100, 576, 1037]


def poisoned(rows, width, gap=5):
    """A NaN matrix whose rows lie apart, and the memory that it is a view of."""
    memory = np.full((rows, width + gap), np.nan, np.float32)
    return memory[:, :width], memory


def normal(seed, rows, width):
    return np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)


def norm_reference(x, weight, bias, eps, layer_norm):
    x = x.astype(np.float64)
    if layer_norm:
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return y + bias if bias is not None else y


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("layer_norm", [False, True])
def test_norm(isa, width, layer_norm):
    x, weight = normal(1, 5, width) + 0.5, normal(2, 1, width)[0]
    bias = normal(3, 1, width)[0] if layer_norm and width != 24 else None
    y, memory = poisoned(5, width)
    kernels.norm(x, y, weight, 1e-5, bias=bias, layer_norm=layer_norm, isa=isa)
    expected = norm_reference(x, weight, bias, 1e-5, layer_norm)
    # The sums keep a relative error of a few ulp; differences with the mean lose more when the mean is large against them.
    np.testing.assert_allclose(y, expected, rtol=8 * ULP, atol=8 * ULP * (4 if layer_norm else 1))
    assert np.isnan(memory[:, width:]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_dim", [8, 24, 64])
def test_norm_per_head_in_place(isa, head_dim):
    x, weight = normal(1, 4, head_dim * 3), normal(2, 1, head_dim)[0]
    expected = norm_reference(x.reshape(4, 3, head_dim), weight, None, 1e-6, False).reshape(4, -1)
    kernels.norm(x, x, weight, 1e-6, head_dim=head_dim, isa=isa)
    np.testing.assert_allclose(x, expected, rtol=8 * ULP)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [8, 33, 576, 600])
@pytest.mark.parametrize("head_dim", [0, 1])
def test_norm_with_quantisation_is_norm_then_quantisation(isa, width, head_dim):
    """`head_dim` 1 stands for norms over slices (of the whole width): they take another path."""
    head_dim *= width
    x, weight = normal(1, 7, width), normal(2, 1, width)[0]
    x[3] = 0
    x[5, width - 1] = np.nan
    plain = np.empty_like(x)
    kernels.norm(x, plain, weight, 1e-5, isa=isa)
    codes, scales, sums = _native.quantize_rows(plain, isa=isa)
    for store in (True, False):
        y, _ = poisoned(7, width)
        q, scale, total = np.full_like(codes, 99), np.full_like(scales, np.nan), np.full_like(sums, np.nan)
        kernels.norm(
            x, y, weight, 1e-5, q=q, scale=scale, sum=total, store=store, head_dim=head_dim, isa=isa, threads=2
        )
        assert q.tobytes() == codes.tobytes()
        np.testing.assert_array_equal(scale, scales)
        assert total.tobytes() == sums.tobytes()
        if store:
            np.testing.assert_array_equal(y, plain)
        elif not head_dim:
            assert np.isnan(y).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("head_dim", "rot"), [(64, 64), (64, 32), (80, 20), (8, 6), (128, 128), (24, 2)])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("pairs", [False, True])
def test_rope(isa, head_dim, rot, in_place, pairs):
    heads, rows = 3, 6
    x = normal(1, rows, heads * head_dim)
    angles = np.random.default_rng(2).uniform(0, 6, size=(50, rot // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    positions = np.array([0, 49, 7, 7, 3, 20], np.int32)
    wide = x.reshape(rows, heads, head_dim).astype(np.float64)
    one, other = (slice(0, rot, 2), slice(1, rot, 2)) if pairs else (slice(rot // 2), slice(rot // 2, rot))
    a, b = wide[..., one], wide[..., other]
    cos, sin = (table[positions][:, None, i * (rot // 2) : (i + 1) * (rot // 2)] for i in (0, 1))
    expected = wide.copy()
    expected[..., one], expected[..., other] = a * cos - b * sin, b * cos + a * sin
    expected = expected.reshape(rows, -1)
    y, memory = (x, None) if in_place else poisoned(rows, heads * head_dim)
    kernels.rope(x, y, positions, table, head_dim, pairs, isa=isa, threads=2)
    np.testing.assert_allclose(y, expected, atol=8 * ULP, rtol=0)
    assert memory is None or np.isnan(memory[:, heads * head_dim :]).all()


def act_reference(x, kind):
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    if kind == 0:
        return gate / (1 + np.exp(-gate)) * up
    return gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", [0, 1])
def test_act(isa, width, kind):
    x = normal(width, 3, 2 * width) * np.float32(4)
    x[0, 0], x[1, 0] = 80, -80
    y, memory = poisoned(3, width)
    kernels.act(x, y, kind, isa=isa)
    # Within 16 ulp of the result; gelu's 1 + tanh cancels for negative gates, which leaves an absolute error.
    np.testing.assert_allclose(y, act_reference(x, kind), rtol=16 * ULP, atol=64 * ULP if kind else 1e-30)
    assert np.isnan(memory[:, width:]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_activations_pass_nan_on(isa):
    x = np.array([[np.nan, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, np.nan]], np.float32)
    for kind in (0, 1):
        y = np.zeros((2, 2), np.float32)
        kernels.act(x, y, kind, isa=isa)
        assert np.isnan(y).tolist() == [[True, False], [False, True]]


UNARY = {"gelu": (0, 1.0), "scale": (1, 0.22), "soft_cap": (2, 30.0), "tight soft_cap": (2, 0.5)}


def unary_reference(x, kind, factor):
    x = x.astype(np.float64)
    if kind == 0:
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x * np.float32(factor) if kind == 1 else factor * np.tanh(x / factor)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("in_place", [False, True])
def test_unary(isa, width, name, in_place):
    kind, factor = UNARY[name]
    x = normal(width, 3, width) * np.float32(4)
    x[0, 0], x[1, 0], x[2, width - 1] = 80, -80, 0
    expected = unary_reference(x, kind, factor)
    y, memory = (x, None) if in_place else poisoned(3, width)
    kernels.unary(x, y, kind, factor, isa=isa, threads=2)
    # Within 16 ulp, as the gates above; what is only multiplied is rounded once.
    np.testing.assert_allclose(y, expected, rtol=ULP if kind == 1 else 16 * ULP, atol=64 * ULP if kind == 0 else 0)
    assert memory is None or np.isnan(memory[:, width:]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", WIDTHS)
def test_gate_rows(isa, width):
    x, gates = normal(1, 5, width), np.array([[0.3], [-2.5], [100.0], [-100.0], [np.nan]], np.float32)
    y, memory = poisoned(5, width)
    kernels.gate_rows(x, gates, y, isa=isa, threads=2)
    expected = x.astype(np.float64) / (1 + np.exp(-gates.astype(np.float64)))
    np.testing.assert_allclose(y[:4], expected[:4], rtol=8 * ULP, atol=1e-37)
    assert np.isnan(y[4]).all() and np.isnan(memory[:, width:]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", WIDTHS)
def test_add(isa, width):
    x, b = normal(1, 3, width), normal(2, 3, width)
    y, memory = poisoned(3, width)
    kernels.add(x, b, y, isa=isa, threads=2)
    np.testing.assert_array_equal(y, x + b)
    assert np.isnan(memory[:, width:]).all()
    expected = x + b
    kernels.add(x, b, b, isa=isa)
    np.testing.assert_array_equal(b, expected)


@pytest.mark.parametrize("isa", ISAS)
def test_gather(isa):
    x = normal(1, 6, 37)
    index = np.array([5, 0, 0, -1, 3], np.int32)
    y, memory = poisoned(5, 37)
    kernels.gather(x, y, index, isa=isa, threads=2)
    np.testing.assert_array_equal(y[[0, 1, 2, 4]], x[index[[0, 1, 2, 4]]])
    assert np.isnan(y[3]).all()
    assert np.isnan(memory[:, 37:]).all()


LEVELS = np.array([5, -128, -104, 1, 127, 113, -83, 0, 13, -49, 88, -35, 69, -22, 38, -10], np.int8)


def tables(vocab, width):
    """Embedding tables of every kind: (kind, source of pack, exact float32 values)."""
    rng = np.random.default_rng(9)
    values = rng.normal(size=(vocab, width)).astype(np.float32)
    bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    yield "f32", (values, None, None), values
    yield "bf16", (bf16, None, None), (bf16.astype(np.uint32) << 16).view(np.float32)
    yield "f16", (values.astype(np.float16), None, None), values.astype(np.float16).astype(np.float32)
    scales = rng.uniform(0.01, 1, size=(vocab, width // 32)).astype(np.float16)
    codes = rng.integers(-127, 128, size=(vocab, width // 32, 32), dtype=np.int8)
    exact = codes.astype(np.float32) * scales.astype(np.float32)[..., None]
    yield "w8", (codes, scales, None), exact.reshape(vocab, width)
    mins = rng.normal(size=scales.shape).astype(np.float16)
    nibbles = rng.integers(0, 256, size=(vocab, width // 32, 16), dtype=np.uint8)
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).astype(np.float64)
    exact = codes * scales.astype(np.float64)[..., None] + mins.astype(np.float64)[..., None]
    yield "w4", (nibbles, scales, mins), exact.reshape(vocab, width)
    exact = LEVELS[codes.astype(int)].astype(np.float32) * scales.astype(np.float32)[..., None]
    yield "t4", (nibbles, scales, None), exact.reshape(vocab, width)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_embed(isa, scale):
    vocab, width = 37, 96
    ids = np.array([0, 36, 5, 37, -1, 2**31 - 1, 5], np.int32)
    for kind, source, values in tables(vocab, width):
        weight = _native.pack(kind, vocab, width, [source], isa, LEVELS if kind == "t4" else None)
        y, memory = poisoned(len(ids), width)
        kernels.embed(ids, weight, y, scale, isa=isa, threads=2)
        expected = (values[[0, 36, 5, 5]].astype(np.float64) * scale).astype(np.float32)
        np.testing.assert_allclose(y[[0, 1, 2, 6]], expected, rtol=0 if kind != "w4" else 2 * ULP, atol=4 * ULP)
        assert np.isnan(y[3:6]).all()
        assert np.isnan(memory[:, width:]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_rows_do_not_depend_on_each_other(isa):
    x, weight, width = normal(1, 9, 1200), normal(2, 1, 600)[0], 600
    table = normal(3, 20, 8)
    positions = np.arange(9, dtype=np.int32)

    def run(rows, threads):
        part, at = np.ascontiguousarray(x[rows]), np.ascontiguousarray(positions[rows])
        out = [np.empty((len(part), w), np.float32) for w in (width, width, width, 1200, 1200, 1200, 1200, 1200, 1200)]
        half = np.ascontiguousarray(part[:, :width])
        kernels.norm(half, out[0], weight, 1e-5, isa=isa, threads=threads)
        kernels.norm(half, out[1], weight, 1e-5, layer_norm=True, isa=isa, threads=threads)
        kernels.act(part, out[2], isa=isa, threads=threads)
        kernels.rope(part, out[3], at, table, 24, isa=isa, threads=threads)
        kernels.rope(part, out[4], at, table, 24, True, isa=isa, threads=threads)
        for i, (kind, factor) in enumerate([(0, 1.0), (1, 0.3), (2, 5.0)]):
            kernels.unary(part, out[5 + i], kind, factor, isa=isa, threads=threads)
        kernels.gate_rows(part, np.ascontiguousarray(part[:, :1]), out[8], isa=isa, threads=threads)
        return out

    whole = run(slice(0, 9), 1)
    for threads in (2, 4, 20):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(run(slice(0, 9), threads), whole, strict=True))
    for row in range(9):
        alone = run(slice(row, row + 1), 2)
        assert all(a.tobytes() == b[row].tobytes() for a, b in zip(alone, whole, strict=True))


def test_malformed_arguments_are_refused():
    x, y, w = normal(1, 2, 16), np.empty((2, 16), np.float32), np.ones(16, np.float32)
    with pytest.raises(ValueError, match="width"):
        kernels.norm(x, np.empty((2, 15), np.float32), w, 1e-5)
    with pytest.raises(ValueError, match="weight"):
        kernels.norm(x, y, w[:8], 1e-5)
    with pytest.raises(ValueError, match="head_dim"):
        kernels.norm(x, y, w, 1e-5, head_dim=5)
    with pytest.raises(ValueError, match="rows"):
        kernels.add(x, x, np.empty((3, 16), np.float32))
    with pytest.raises(ValueError, match="dense"):
        kernels.add(x[:, ::2], x[:, ::2], y[:, :8])
    with pytest.raises(ValueError, match="index"):
        kernels.gather(x, y, np.array([0, 2], np.int32))
    with pytest.raises(ValueError, match="positions"):
        kernels.rope(x, y, np.array([0, 4], np.int32), np.zeros((4, 8), np.float32), 8)
    with pytest.raises(ValueError, match="kind"):
        kernels.unary(x, y, 3)
    with pytest.raises(ValueError, match="gate"):
        kernels.gate_rows(x, x, y)
    with pytest.raises(TypeError):
        kernels.add(x.astype(np.float64), x, y)
