"""Small models written in ops, each with what families differ in, and batches for them. What a program needs of a model, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo import ops
from octavo.ops.batch import AttentionSpec, Batch, KvLayout, MoeSpec
from octavo.ops.packed import PackedWeight, WeightKind, WeightPart, f32_to_bf16

BLOCK, BLOCKS, VOCAB, LONGEST = 16, 48, 208, 128


def random_weight(rng: np.random.Generator, kind: str, n: int, k: int) -> PackedWeight:
    """Of about 0.1 each. kind: f32, f16, bf16, w4, w4m (with minimums), w4o (inputs in an order of its own), w4z (one group with
    zero points), w8, w8h (groups of 16), w8o, f8, t4."""
    values = (rng.standard_normal((n, k)) * 0.1).astype(np.float32)
    if kind == "f32":
        return PackedWeight(WeightKind.F32, n, k, (WeightPart(values),))
    if kind == "f16":
        return PackedWeight(WeightKind.F16, n, k, (WeightPart(values.astype(np.float16)),))
    if kind == "bf16":
        return PackedWeight(WeightKind.BF16, n, k, (WeightPart(f32_to_bf16(values)),))
    if kind == "f8":
        codes = rng.integers(0, 256, (n, k // 32, 32)).astype(np.uint8)
        codes[codes & 0x7F == 0x7F] = 0
        return PackedWeight(WeightKind.F8, n, k, (WeightPart(codes, (rng.random((n, k // 32)) * 0.001 + 0.001).astype(np.float32)),))
    group = 16 if kind == "w8h" else k if kind == "w4z" else 32
    scales = (rng.random((n, k // group)) * 0.01 + 0.005).astype(np.float16)
    order = rng.permutation(k).astype(np.int32) if kind.endswith("o") else None
    if kind.startswith("w8"):
        codes = rng.integers(-127, 128, (n, k // group, group)).astype(np.int8)
        return PackedWeight(WeightKind.W8, n, k, (WeightPart(codes, (scales * 0.1).astype(np.float16)),), order)
    nibbles = rng.integers(0, 256, (n, k // group, group // 2)).astype(np.uint8)
    if kind == "t4":
        table = rng.integers(-127, 128, 16, np.int8)
        return PackedWeight(WeightKind.T4, n, k, (WeightPart(nibbles, (scales * 0.1).astype(np.float16)),), table=table)
    mins = (scales * np.float16(-7.5)).astype(np.float16) if kind == "w4m" else None
    zeros = rng.integers(5, 10, scales.shape).astype(np.float16) if kind == "w4z" else None
    return PackedWeight(WeightKind.W4, n, k, (WeightPart(nibbles, scales, mins, zeros),), order)


def norm_weight(rng: np.random.Generator, size: int) -> np.ndarray:
    return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)


def rotary(rot: int, theta: float = 100.0) -> np.ndarray:
    angles = np.arange(LONGEST)[:, None] * theta ** (-np.arange(0, rot, 2) / rot)[None]
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


@dataclass(frozen=True)
class Cut:
    """A sequence of which positions [start, end) are computed in this step."""

    start: int
    end: int


def batch_of(cuts: Sequence[Cut], windows: Sequence[int] = (0,), ids: Sequence[np.ndarray] | None = None, seed: int = 3, behind: int = 0) -> Batch:
    """Blocks at random places, other ones for each group; blocks wholly behind a window are given back, `behind` stands in their entries.

    ids: of each sequence, its tokens from position 0; random unless given.
    """
    rng = np.random.default_rng(seed)
    if ids is None:
        ids = [np.random.default_rng(100 + i).integers(0, VOCAB, cut.end) for i, cut in enumerate(cuts)]
    counts = [-(-cut.end // BLOCK) for cut in cuts]
    table = np.zeros((len(windows), len(cuts), max(counts) + 1), np.int32)
    free = iter(rng.permutation(BLOCKS))
    slots = []
    for g, window in enumerate(windows):
        for s, (cut, count) in enumerate(zip(cuts, counts, strict=True)):
            seen_from = max(0, cut.start - window + 1) // BLOCK if window else 0
            table[g, s, :seen_from] = behind
            table[g, s, seen_from:count] = [next(free) for _ in range(seen_from, count)]
        slots.append([table[g, s, p // BLOCK] * BLOCK + p % BLOCK for s, cut in enumerate(cuts) for p in range(cut.start, cut.end)])
    return Batch(
        input_ids_T=np.concatenate([i[c.start : c.end] for i, c in zip(ids, cuts, strict=True)]).astype(np.int32),
        positions_T=np.concatenate([np.arange(c.start, c.end) for c in cuts]).astype(np.int32),
        slot_mapping_GT=np.array(slots, np.int32),
        query_start_S=np.cumsum([0, *(c.end - c.start for c in cuts)]).astype(np.int32),
        seq_lens_S=np.array([c.end for c in cuts], np.int32),
        block_table_GSB=table,
    )


class Toy:
    """Embedding, attention layers as `layers` says, norm, head. Subclasses add what comes after attention."""

    width, heads, kv_heads, dim = 96, 6, 2, 16
    layers: tuple[AttentionSpec, ...] = (AttentionSpec(0, 6, 2, 16, 0.25),)
    kv_layout = KvLayout(1, 2, 16)
    vocab_size = VOCAB

    def __init__(self, mix: Sequence[str] = ("f32",), seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.mix, self.made = tuple(mix), 0
        self.embedding = self.weight(VOCAB, self.width)
        self.qkv = [self.weight((self.heads + 2 * self.kv_heads) * self.dim, self.width) for _ in self.layers]
        self.out = [self.weight(self.width, self.heads * self.dim) for _ in self.layers]
        self.norms = [norm_weight(self.rng, self.width) for _ in range(2 * len(self.layers) + 1)]
        self.table = rotary(self.dim)

    def weight(self, n: int, k: int) -> PackedWeight:
        """The next one: kinds in turn."""
        self.made += 1
        return random_weight(self.rng, self.mix[(self.made - 1) % len(self.mix)], n, k)

    def split(self, x: ops.Value, layer: int) -> Sequence[ops.Value]:
        sizes = [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim]
        return ops.split(ops.linear(x, (self.qkv[layer],)), sizes)

    def attend(self, x: ops.Value, layer: int, batch: Batch) -> ops.Value:
        q, k, v = self.split(ops.rms_norm(x, self.norms[2 * layer], 1e-5), layer)
        q = ops.rope(q, batch.positions_T, self.table, self.dim)
        k = ops.rope(k, batch.positions_T, self.table, self.dim)
        return ops.linear(ops.attention(q, k, v, batch, self.layers[layer]), (self.out[layer],))

    def feed(self, x: ops.Value, layer: int) -> ops.Value:
        return x

    def forward(self, batch: Batch) -> ops.Value:
        x = ops.embed(batch.input_ids_T, self.embedding, 2.0)
        for layer in range(len(self.layers)):
            x = self.feed(ops.add(x, self.attend(x, layer, batch)), layer)
        return x

    def logits(self, x: ops.Value, rows: ops.Value) -> ops.Value:
        return ops.linear(ops.rms_norm(ops.gather_rows(x, rows), self.norms[-1], 1e-5), (self.embedding,))


TOP_3 = MoeSpec(3, True)


class Mixture(Toy):
    """One layer with 7 experts beside one that all tokens share, behind a gate (Qwen2-MoE)."""

    experts, inner = 7, 64

    def __init__(self, mix: Sequence[str] = ("f32",), spec: MoeSpec = TOP_3, parted: bool = False, shared: bool = True) -> None:
        super().__init__(mix)
        self.spec = spec
        self.router = random_weight(self.rng, "f32", self.experts, self.width)
        self.gate = random_weight(self.rng, "f32", 1, self.width) if shared else None
        half = [(self.inner,), (self.inner,)] if parted else [(2 * self.inner,)]
        self.gate_up = [[self.weight(n, self.width) for (n,) in half] for _ in range(self.experts)]
        self.down = [[self.weight(self.width, self.inner)] for _ in range(self.experts)]
        self.shared = self.weight(2 * self.inner, self.width), self.weight(self.width, self.inner)

    def feed(self, x: ops.Value, layer: int) -> ops.Value:
        h = ops.rms_norm(x, self.norms[2 * layer + 1], 1e-5)
        y = ops.moe(h, ops.linear(h, (self.router,)), self.gate_up, self.down, self.spec)
        if self.gate:
            both = ops.linear(ops.silu_mul(ops.linear(h, (self.shared[0],))), (self.shared[1],))
            y = ops.add(y, ops.sigmoid_rows(both, ops.linear(h, (self.gate,))))
        return ops.add(x, y)


class Windows(Toy):
    """Three layers in two groups, one of which sees 20 positions and caps its scores (Gemma 2)."""

    layers = (
        AttentionSpec(0, 6, 2, 16, 0.25, window=20, soft_cap=5.0, group=1),
        AttentionSpec(0, 6, 2, 16, 0.25, group=0),
        AttentionSpec(1, 6, 2, 16, 0.25, window=20, soft_cap=5.0, group=1),
    )
    kv_layout = KvLayout(2, 2, 16, (0, 20))


class Parallel(Toy):
    """Attention and two products over slices, all of the same normalised input, added up (GPT-J, Cohere); a product of the residual itself."""

    def __init__(self, mix: Sequence[str] = ("f32",)) -> None:
        super().__init__(mix)
        self.both, self.left, self.right = self.weight(2 * self.width, self.width), self.weight(self.width, self.width), self.weight(self.width, self.width)
        self.last = self.weight(self.width, self.width)
        self.inner = norm_weight(self.rng, self.width)

    def forward(self, batch: Batch) -> ops.Value:
        x = ops.embed(batch.input_ids_T, self.embedding)
        y = ops.add(x, self.attend(x, 0, batch))
        h = ops.layer_norm(x, self.norms[1], None, 1e-5)
        a, b = ops.split(ops.linear(h, (self.both,)), [self.width, self.width])
        left = ops.scale(ops.linear(a, (self.left,)), 0.5)
        y = ops.add(left, ops.add(y, ops.linear(ops.rms_norm(b, self.inner, 1e-5), (self.right,))))
        return ops.add(ops.linear(y, (self.last,)), y)


class Elements(Toy):
    """Learned positions, layer norm, plain gelu, norms over all of q and k, rope in pairs with a query table of its own, norms behind products,
    a scaled residual, capped and scaled logits."""

    def __init__(self, mix: Sequence[str] = ("f32",)) -> None:
        super().__init__(mix)
        self.positions = random_weight(self.rng, "f32", LONGEST, self.width)
        self.up, self.down = self.weight(256, self.width), self.weight(self.width, 256)
        self.up_bias = (0.1 * self.rng.standard_normal(256)).astype(np.float32)
        self.bias = (0.1 * self.rng.standard_normal(self.width)).astype(np.float32)
        self.q_norm, self.k_norm = norm_weight(self.rng, 96), norm_weight(self.rng, 32)
        self.pairs, self.query_pairs = rotary(12), rotary(12) * np.float32(1.25)
        self.behind = norm_weight(self.rng, self.width)

    def attend(self, x: ops.Value, layer: int, batch: Batch) -> ops.Value:
        q, k, v = self.split(ops.layer_norm(x, self.norms[0], self.bias, 1e-5), layer)
        q, k = ops.rms_norm(q, self.q_norm, 1e-6), ops.rms_norm(k, self.k_norm, 1e-6)
        q = ops.rope(q, batch.positions_T, self.query_pairs, self.dim, pairs=True)
        k = ops.rope(k, batch.positions_T, self.pairs, self.dim, pairs=True)
        y = ops.linear(ops.attention(q, k, v, batch, self.layers[layer]), (self.out[layer],))
        return ops.rms_norm(y, self.behind, 1e-6)

    def feed(self, x: ops.Value, layer: int) -> ops.Value:
        h = ops.gelu(ops.linear(ops.layer_norm(x, self.norms[1], None, 1e-5), (self.up,), self.up_bias))
        return ops.add(x, ops.scale(ops.linear(h, (self.down,)), 0.22))

    def forward(self, batch: Batch) -> ops.Value:
        x = ops.embed(batch.input_ids_T, self.embedding)
        x = ops.add(x, ops.embed(batch.positions_T, self.positions))
        return self.feed(ops.add(x, self.attend(x, 0, batch)), 0)

    def logits(self, x: ops.Value, rows: ops.Value) -> ops.Value:
        return ops.soft_cap(ops.scale(super().logits(x, rows), 0.5), 3.0)
