"""Layers with a mixture of experts, and layers with a window, on random weights: time of a step against the bytes that it must read.

Needs only the extension. A model of `--layers` mixtures (and nothing else: no attention) is run on rows drawn at random, so that each step
chooses other experts; the bytes are those of the chosen experts' packed weights, and the limit is the pace at which the same machine, in the
same run, streams one product with as many rows over weights beyond the caches. `--windows` times attention alone, at several contexts.
Usage: python benchmarks/program_experts.py [--rows 1 32] [--windows]
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from octavo import _native, ops
from octavo.ops.batch import AttentionSpec, Batch, KvLayout, MoeSpec
from octavo.ops.cpu.program import CpuProgram
from octavo.ops.packed import PackedWeight, WeightKind, WeightPart

VOCAB, BLOCK, TOKENS = 4096, 16, 512


def weight(rng: np.random.Generator, n: int, k: int) -> PackedWeight:
    """4 bits without minimums, 0.5625 bytes per weight; so small that the layers leave their rows, hence the choice of experts, as they were."""
    scales = rng.uniform(-1e-3, 1e-3, (n, k // 32)).astype(np.float16)
    return PackedWeight(WeightKind.W4, n, k, (WeightPart(rng.integers(0, 256, (n, k // 32, 16), np.uint8), scales),))


def plain(rng: np.random.Generator, n: int, k: int) -> PackedWeight:
    return PackedWeight(WeightKind.F32, n, k, (WeightPart(rng.standard_normal((n, k), np.float32)),))


class Mixtures:
    """x = x + moe(norm(x)), `layers` times."""

    kv_layout, vocab_size = KvLayout(1, 1, 8), VOCAB

    def __init__(self, layers: int, width: int, experts: int, inner: int, top_k: int) -> None:
        rng = np.random.default_rng(0)
        self.embedding, self.ones = plain(rng, VOCAB, width), np.ones(width, np.float32)
        self.spec, self.expert_bytes = MoeSpec(top_k, True), 3 * width * inner * 9 // 16
        self.layers = [
            (plain(rng, experts, width), [[weight(rng, 2 * inner, width)] for _ in range(experts)], [[weight(rng, width, inner)] for _ in range(experts)])
            for _ in range(layers)
        ]  # fmt: skip

    def forward(self, batch: Batch) -> ops.Value:
        x = ops.embed(batch.input_ids_T, self.embedding)
        for router, gate_up, down in self.layers:
            h = ops.rms_norm(x, self.ones, 1e-6)
            x = ops.add(x, ops.moe(h, ops.linear(h, (router,)), gate_up, down, self.spec))
        return x

    def logits(self, x: ops.Value, rows: ops.Value) -> ops.Value:
        return ops.linear(ops.gather_rows(x, rows), (self.embedding,))


class Attention:
    """Attention alone: `layers` times with a window, or without."""

    vocab_size = VOCAB

    def __init__(self, layers: int, window: int, heads: int = 16, kv_heads: int = 4, dim: int = 128) -> None:
        rng = np.random.default_rng(0)
        self.embedding, self.head = plain(rng, VOCAB, (heads + 2 * kv_heads) * dim), plain(rng, VOCAB, heads * dim)
        self.kv_layout = KvLayout(layers, kv_heads, dim, (window,))
        self.specs = [AttentionSpec(i, heads, kv_heads, dim, dim**-0.5, window) for i in range(layers)]
        self.widths = (heads * dim, kv_heads * dim, kv_heads * dim)

    def forward(self, batch: Batch) -> ops.Value:
        q, k, v = ops.split(ops.embed(batch.input_ids_T, self.embedding), self.widths)
        for spec in self.specs:
            q = ops.attention(q, k, v, batch, spec)
        return q

    def logits(self, x: ops.Value, rows: ops.Value) -> ops.Value:
        return ops.linear(ops.gather_rows(x, rows), (self.head,))


def program_of(model: Mixtures | Attention, num_blocks: int) -> CpuProgram:
    return CpuProgram(model, num_blocks=num_blocks, block_size=BLOCK, kv_dtype="bfloat16", max_tokens=TOKENS, max_rows=TOKENS, max_positions=1 << 20)


def rows_at(ids: np.ndarray, context: int, blocks: int) -> Batch:
    """One sequence each, all at position `context`, with the blocks in order; many share blocks where the pool is small."""
    size = len(ids)
    table = (np.arange(size * blocks, dtype=np.int32) % max(blocks, 1)).reshape(1, size, blocks)
    return Batch(
        ids.astype(np.int32), np.full(size, context, np.int32), np.full((1, size), -1, np.int32), np.arange(size + 1, dtype=np.int32),
        np.full(size, context + 1, np.int32), table,
    )  # fmt: skip


def pace_of_one_product(width: int, rows: int) -> float:
    """Bytes per second of 4-bit weights, [3072, width] each, over 96 MiB of them."""
    rng = np.random.default_rng(1)
    packed = []
    while sum(w.nbytes for w in packed) < 96 << 20:
        w = weight(rng, 3072, width)
        packed.append(_native.pack("w4", w.n, w.k, [(p.codes, p.scales, p.mins) for p in w.parts]))
    x = rng.standard_normal((rows, width), np.float32)
    runs = [packed[i : i + 16] for i in range(0, len(packed) - 15, 16)]  # as long as a step of some layers: another process disturbs both alike
    return packed[0].nbytes / min(_native.time_linear(x, run, 1, "") for _ in range(20) for run in runs)


def time_mixtures(args: argparse.Namespace) -> None:
    model = Mixtures(args.layers, args.width, args.experts, args.inner, args.top_k)
    program = program_of(model, 1)
    print(f"{args.layers} layers of {args.experts} experts of {args.width} x {args.inner}, {args.top_k} each, {program.isa}")
    rng = np.random.default_rng(2)
    for rows in args.rows:
        steps = [rows_at(rng.integers(0, VOCAB, rows), 0, 1) for _ in range(12)]
        touched = [experts_touched(model, step) for step in steps]
        program.forward(steps[-1])
        taken = np.array([[timed(program, step) for step in steps] for _ in range(5)])
        paces = np.array(touched) * model.expert_bytes / taken
        fastest = int(paces.max(axis=0).argmax())
        touched, best, middle = touched[fastest], taken[:, fastest].min(), np.median(taken)
        wanted = touched * model.expert_bytes
        # Many rows share an expert's weights in one pass of at most so many rows as a product of that size has.
        alike = max(1, round(rows * args.top_k * args.layers / touched))
        limit = wanted / pace_of_one_product(args.width, alike)
        print(f"  {rows:4d} rows: {touched / args.layers:5.1f} experts a layer, {wanted / 1e6:7.2f} MB, {best * 1e3:7.2f} ms ({middle * 1e3:.2f} median), "
              f"{wanted / best / 1e9:5.1f} GB/s, {100 * limit / best:4.0f} % of one product's pace with {alike} rows")  # fmt: skip
        if args.profile:
            profile(program, steps[0])


def experts_touched(model: Mixtures, step: Batch) -> int:
    """Distinct experts over all layers, by the definition of the routing, of the rows as they are embedded."""
    h = model.embedding.parts[0].codes[step.input_ids_T]
    h = h / np.sqrt((h * h).mean(axis=1, keepdims=True))
    return sum(len(np.unique(np.argsort(-(h @ r.parts[0].codes.T), axis=1)[:, : model.spec.top_k])) for r, _, _ in model.layers)


def timed(program: CpuProgram, batch: Batch) -> float:
    start = time.perf_counter()
    program.forward(batch)
    return time.perf_counter() - start


def profile(program: CpuProgram, batch: Batch) -> None:
    program.profile(True)
    for _ in range(20):
        program.forward(batch)
    spent: Counter[str] = Counter()
    for name, value in program.take_profile():
        spent[name] += value / 20
    program.profile(False)
    for name, value in spent.most_common():
        print(f"    {name:22s} {value * 1e3:8.3f} ms")


def time_windows(contexts: Sequence[int], window: int) -> None:
    print(f"attention of one row, 8 layers of 16 heads, 4 of K and V, 128 wide; window {window}, or none")
    for context in contexts:
        blocks = context // BLOCK + 1
        taken = []
        for size in (window, 0):
            program = program_of(Attention(8, size), blocks)
            batch = rows_at(np.arange(1), context, blocks)
            taken.append(min(timed(program, batch) for _ in range(20)))
        print(f"  context {context:6d}: {taken[0] * 1e3:7.3f} ms, {taken[1] * 1e3:7.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 32, 256])
    for name, value in (("layers", 6), ("width", 1024), ("experts", 64), ("inner", 384), ("top-k", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--windows", action="store_true")
    args = parser.parse_args()
    time_windows((1024, 4096, 16384), 512) if args.windows else time_mixtures(args)


if __name__ == "__main__":
    main()
