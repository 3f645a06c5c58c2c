"""Paged attention and the cache writes: against float64, and by bits across batches, chunks, threads and block placement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest

from octavo import _native

kernels = _native.kernels
ISAS = sorted({*_native.isa_names(), "portable16"})
CHUNK = 128  # kAttentionChunk


@dataclass(frozen=True)
class Shape:
    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    block_size: int = 16
    bf16: bool = False
    window: int = 0
    soft_cap: float = 0.0

    @property
    def scale(self):
        return float(self.dim) ** -0.5


def to_bf16(x):
    """float32 to bfloat16 bits, nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def new_cache(shape, num_blocks):
    """Pools full of NaN: a slot that nobody has written must never be seen."""
    lead = (num_blocks, shape.kv_heads, shape.block_size // 16)
    dtype, poison = (np.uint16, 0x7FC0) if shape.bf16 else (np.float32, np.nan)
    return np.full((*lead, shape.dim, 16), poison, dtype), np.full((*lead, 16, shape.dim), poison, dtype)


@dataclass
class Sequence:
    """One sequence's tokens so far, of which the last `rows` are queries of this step."""

    q: np.ndarray  # [length, heads * dim]
    k: np.ndarray  # [length, kv_heads * dim]
    v: np.ndarray
    rows: int

    @property
    def length(self):
        return len(self.k)


def make(rng, shape, length, rows):
    q = rng.normal(size=(length, shape.heads * shape.dim)).astype(np.float32)
    k, v = rng.normal(size=(2, length, shape.kv_heads * shape.dim)).astype(np.float32)
    return Sequence(q, k, v, rows)


def attend(shape, sequences, seed=0, write_isa="", **options):
    """The kernel on a batch, with blocks placed at random: the queries' rows, one array for each sequence."""
    rng = np.random.default_rng(seed)
    counts = [-(-s.length // shape.block_size) for s in sequences]
    spare = 3
    ids = rng.permutation(sum(counts) + spare).astype(np.int32)
    table = np.full((len(sequences), max(counts) + 1), -7, np.int32)
    k_cache, v_cache = new_cache(shape, len(ids))
    at = 0
    for i, (s, count) in enumerate(zip(sequences, counts, strict=True)):
        table[i, :count] = ids[at : at + count]
        at += count
        t = np.arange(s.length)
        slots = (table[i][t // shape.block_size] * shape.block_size + t % shape.block_size).astype(np.int32)
        kernels.kv_write(s.k, s.v, slots, k_cache, v_cache, isa=write_isa)
    q = np.concatenate([s.q[s.length - s.rows :] for s in sequences])
    start = np.zeros(len(sequences) + 1, np.int32)
    start[1:] = np.cumsum([s.rows for s in sequences])
    lens = np.array([s.length for s in sequences], np.int32)
    wide = np.full((len(q), q.shape[1] + 8), np.nan, np.float32)  # rows apart, the gap must stay as it is
    out = wide[:, : q.shape[1]]
    kernels.attention(
        q, out, start, lens, table, k_cache, v_cache, shape.scale, shape.soft_cap, shape.window, **options
    )
    assert np.isnan(wide[:, q.shape[1] :]).all()
    return [out[a:b].copy() for a, b in pairwise(start)]


def reference(shape, s):
    """float64 attention of the sequence's last rows, over what the cache holds."""
    k, v = (from_bf16(to_bf16(x)) if shape.bf16 else x for x in (s.k, s.v))
    group = shape.heads // shape.kv_heads
    q = s.q[s.length - s.rows :].reshape(s.rows, shape.heads, shape.dim).astype(np.float64)
    k = np.repeat(k.reshape(s.length, shape.kv_heads, shape.dim), group, axis=1).astype(np.float64)
    v = np.repeat(v.reshape(s.length, shape.kv_heads, shape.dim), group, axis=1).astype(np.float64)
    scores = np.einsum("rhd,thd->hrt", q, k) * shape.scale
    if shape.soft_cap:
        scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
    row, token = np.arange(s.length - s.rows, s.length)[:, None], np.arange(s.length)[None]
    hidden = token > row
    if shape.window:
        hidden |= token <= row - shape.window
    scores[:, hidden] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("hrt,thd->rhd", p, v).reshape(s.rows, -1)


def assert_close(shape, sequences, outputs):
    for s, out in zip(sequences, outputs, strict=True):
        # Values are averages of N(0, 1): 1e-5 is some 80 ulp of 1, for sums of up to 700 terms.
        np.testing.assert_allclose(out, reference(shape, s), atol=1e-5, rtol=1e-5)


SHAPES = [
    Shape(),
    Shape(bf16=True),
    Shape(heads=9, kv_heads=3, bf16=True),
    Shape(heads=4, kv_heads=4, dim=128, block_size=32, bf16=True),
    Shape(heads=8, kv_heads=1, dim=128, block_size=64),
    Shape(heads=7, kv_heads=1, dim=72, block_size=16, bf16=True),
    Shape(heads=2, kv_heads=2, dim=8, block_size=128),
    Shape(heads=2, kv_heads=1, dim=256, block_size=128, bf16=True),
    Shape(heads=10, kv_heads=2, dim=40, window=37),
    Shape(heads=6, kv_heads=2, window=200, bf16=True, block_size=32),
    Shape(heads=2, kv_heads=2, dim=24, window=1),
    Shape(heads=6, kv_heads=2, soft_cap=5.0),
    Shape(heads=4, kv_heads=2, dim=80, soft_cap=30.0, window=130, bf16=True),
    Shape(heads=4, kv_heads=1, dim=256, window=150, soft_cap=50.0, bf16=True),
    Shape(heads=4, kv_heads=4, dim=96, window=64, soft_cap=20.0),
    Shape(heads=100, kv_heads=1, dim=16),
]


def batch_of(rng, shape, sizes):
    """Sequences of the given (length, rows); with very many heads only the short ones, for the sake of time."""
    return [make(rng, shape, *size) for size in sizes if shape.heads < 50 or size[0] < 140]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(isa, shape):
    rng = np.random.default_rng(0)
    sizes = [(1, 1), (16, 16), (17, 1), (33, 20), (128, 1), (129, 2), (300, 40), (257, 257), (290, 1), (145, 7)]
    sequences = batch_of(rng, shape, sizes)
    assert_close(shape, sequences, attend(shape, sequences, isa=isa))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_independent(isa, shape):
    rng = np.random.default_rng(1)
    sizes = [(260, 260), (40, 1), (135, 20), (270, 1), (5, 3)]
    sequences = batch_of(rng, shape, sizes)
    batch = attend(shape, sequences, isa=isa, threads=1)
    for options in ({"threads": 2}, {"threads": 3, "share": False}, {"threads": 5, "seed": 9}):
        again = attend(shape, sequences, isa=isa, **options)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(batch, again, strict=True)), options
    for s, expected in zip(sequences, batch, strict=True):
        (alone,) = attend(shape, [s], isa=isa, seed=4, threads=2)
        assert alone.tobytes() == expected.tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[5], SHAPES[9]], ids=str)
def test_chunked_prefill_gives_the_same_bits(isa, chunk, shape):
    rng = np.random.default_rng(2)
    whole = make(rng, shape, 291, 291)
    (expected,) = attend(shape, [whole], isa=isa)
    ends = [*range(chunk, whole.length, chunk), whole.length]
    if chunk == 1:
        ends = [e for e in ends if e < 20 or e % 16 < 2 or abs(e - 256) < 3]
    parts, rows = [], []
    for end in ends:
        first = max(0, end - chunk) if chunk == 1 else (end - 1) // chunk * chunk
        parts.append(Sequence(whole.q[:end], whole.k[:end], whole.v[:end], end - first))
        rows.append(slice(first, end))
    for end_rows, out in zip(rows, attend(shape, parts, isa=isa, threads=2), strict=True):
        assert out.tobytes() == expected[end_rows].tobytes()


@pytest.mark.parametrize("length", [CHUNK + 1, 2000])
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_that_share_a_long_context_change_no_bit(length, threads):
    shape = Shape(heads=9, kv_heads=3, bf16=True)
    rng = np.random.default_rng(3)
    sequences = [make(rng, shape, length, 1), make(rng, shape, 3, 1), make(rng, shape, length // 2, 4)]
    expected = attend(shape, sequences, threads=1)
    for options in ({"share": True}, {"share": False}, {"share": True, "repeat": 20}):
        out = attend(shape, sequences, threads=threads, **options)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(expected, out, strict=True))
    assert_close(shape, sequences, expected)


def test_a_unit_that_ends_with_a_short_chunk_and_the_next_are_not_confused():
    """Both may lie where one thread's share ends, wherever that is: at most one of them is shared by two threads."""
    shape = Shape(heads=9, kv_heads=3, bf16=True)
    rng = np.random.default_rng(9)
    heavy, light = make(rng, shape, 2 * CHUNK + 1, 30), make(rng, shape, 2 * CHUNK, 1)
    filler = make(rng, shape, 700, 30)
    alone = [attend(shape, [s], threads=1)[0] for s in (heavy, light)]
    for length in range(30, 700, 19):
        s = Sequence(filler.q[:length], filler.k[:length], filler.v[:length], 30)
        for threads in (2, 3, 5):
            out = attend(shape, [heavy, light, heavy, light, s], threads=threads)
            assert [o.tobytes() for o in out[:4]] == [a.tobytes() for a in alone * 2], (length, threads)


def test_a_nan_stays_in_its_sequence_and_head():
    shape = Shape()
    rng = np.random.default_rng(4)
    sequences = [make(rng, shape, 150, 20), make(rng, shape, 150, 20)]
    clean = attend(shape, sequences)
    bad = replace(sequences[0], q=sequences[0].q.copy())
    bad.q[140, 3 * shape.dim] = np.nan  # row 10 of the queries, head 3
    first, second = attend(shape, [bad, sequences[1]])
    assert second.tobytes() == clean[1].tobytes()
    hit = np.zeros((20, shape.heads, shape.dim), bool)
    hit[10, 3] = True
    assert np.isnan(first.reshape(hit.shape)[hit]).all()
    assert (first.reshape(hit.shape)[~hit] == clean[0].reshape(hit.shape)[~hit]).all()


def test_a_later_token_of_garbage_is_not_seen_by_earlier_rows():
    shape = Shape()
    whole = make(np.random.default_rng(5), shape, 200, 200)
    (clean,) = attend(shape, [whole])
    bad = replace(whole, k=whole.k.copy(), v=whole.v.copy())
    bad.k[123:] = np.nan
    bad.v[123:] = np.inf
    (out,) = attend(shape, [bad])
    assert out[:123].tobytes() == clean[:123].tobytes()
    assert not np.isfinite(out[123:]).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("length", "rows", "window"), [(700, 1, 100), (700, 5, 129), (300, 40, 17), (530, 1, 512)])
def test_blocks_behind_the_window_are_not_looked_at(isa, block_size, length, rows, window):
    """Their entries are 0, block 0 is full of NaN, and the bits are those of a table that still has them."""
    shape = Shape(bf16=True, window=window, block_size=block_size, soft_cap=10.0)
    s = make(np.random.default_rng(8), shape, length, rows)
    (expected,) = attend(shape, [s], isa=isa)
    count = -(-length // block_size)
    k_cache, v_cache = new_cache(shape, count + 1)
    t = np.arange(length)
    kernels.kv_write(s.k, s.v, (t + block_size).astype(np.int32), k_cache, v_cache, isa=isa)
    table = np.arange(1, count + 1, dtype=np.int32)[None]
    table[:, : (length - rows - window + 1) // block_size] = 0
    assert (table == 0).any() or block_size == 64
    for threads in (1, 3):
        y = np.empty_like(s.q[length - rows :])
        kernels.attention(
            s.q[length - rows :], y, np.array([0, rows], np.int32), np.array([length], np.int32), table, k_cache, v_cache,
            shape.scale, shape.soft_cap, window, isa=isa, threads=threads,
        )  # fmt: skip
        assert y.tobytes() == expected.tobytes()


def test_output_may_be_the_query():
    shape = Shape()
    s = make(np.random.default_rng(6), shape, 50, 50)
    (expected,) = attend(shape, [s])
    k_cache, v_cache = new_cache(shape, 4)
    kernels.kv_write(s.k, s.v, np.arange(50, dtype=np.int32), k_cache, v_cache)
    q = s.q.copy()
    table, lens = np.arange(4, dtype=np.int32)[None], np.array([50], np.int32)
    kernels.attention(q, q, np.array([0, 50], np.int32), lens, table, k_cache, v_cache, shape.scale)
    assert q.tobytes() == expected.tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_kv_write_layout(isa, threads, bf16, block_size):
    shape = Shape(kv_heads=3, dim=24, bf16=bf16, block_size=block_size)
    rng = np.random.default_rng(7)
    rows, num_blocks = 40, 256 // block_size
    slots = rng.permutation(num_blocks * block_size)[:rows].astype(np.int32)
    slots[[3, 11]] = -1
    slots[12] = num_blocks * block_size  # outside the pool: not written
    k, v = rng.normal(size=(2, rows, 72)).astype(np.float32)
    k[5, 5], v[6, 6] = np.nan, np.inf
    k_cache, v_cache = new_cache(shape, num_blocks)
    want_k, want_v = k_cache.copy(), v_cache.copy()
    kernels.kv_write(k, v, slots, k_cache, v_cache, isa=isa, threads=threads)
    for row, slot in enumerate(slots):
        if not 0 <= slot < num_blocks * block_size:
            continue
        block, tile, lane = slot // block_size, slot % block_size // 16, slot % 16
        want_k[block, :, tile, :, lane] = (to_bf16(k[row]) if bf16 else k[row]).reshape(3, 24)
        want_v[block, :, tile, lane, :] = (to_bf16(v[row]) if bf16 else v[row]).reshape(3, 24)
    for got, want in ((k_cache, want_k), (v_cache, want_v)):
        if bf16:  # every NaN is as good as another
            got, want = from_bf16(got), from_bf16(want)
        np.testing.assert_array_equal(got, want)


def test_malformed_arguments_are_refused():
    shape = Shape()
    k_cache, v_cache = new_cache(shape, 2)
    q = np.zeros((3, shape.heads * shape.dim), np.float32)
    good = {
        "query_start": [0, 3],
        "seq_lens": [20],
        "block_table": [[0, 1]],
    }

    def attention(**changed):
        arrays = [np.array(v, np.int32) for v in {**good, **changed}.values()]
        kernels.attention(q, np.empty_like(q), *arrays, k_cache, v_cache, 1.0)

    with pytest.raises(ValueError, match="query_start"):
        attention(query_start=[0, 2])
    with pytest.raises(ValueError, match="query_start"):
        attention(seq_lens=[2])
    with pytest.raises(ValueError, match="too short"):
        attention(seq_lens=[33])
    for block in (-1, 2):
        with pytest.raises(ValueError, match="outside the pool"):
            attention(block_table=[[0, block]])
    with pytest.raises(ValueError, match="multiple of the kv heads"):
        kernels.attention(
            q[:, : 3 * shape.dim].copy(), q[:, : 3 * shape.dim].copy(), *(np.array(v, np.int32) for v in good.values()),
            k_cache, v_cache, 1.0,
        )  # fmt: skip
    with pytest.raises(ValueError, match="slots"):
        kernels.kv_write(q[:, :128].copy(), q[:, :128].copy(), np.zeros(2, np.int32), k_cache, v_cache)
