"""Speed of the attention and sampling kernels, beside what the machine can do at all.

Prints GFLOP/s of prefill against the peak of fp32 multiply-adds, and GB/s of decode (every byte of K and V counted once) against reading
memory, both measured on the spot. Knows no model: shapes are options. Usage: python benchmarks/kernels_attention.py --help
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from octavo import _native
from octavo.ops.cpu.measure import measure_peaks
from octavo.ops.cpu.threads import set_num_threads

kernels = _native.kernels


def best(fn: Callable[[], object], threads: int, seconds: float = 0.6) -> float:
    """Seconds of the fastest call: other processes can only make a call slower. One thread is timed by its own CPU time."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    fn()
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = clock()
        fn()
        times.append(clock() - start)
    return min(times)


def attention(args: argparse.Namespace, isa: str, dtype: str, contexts: list[int], rows: int) -> tuple[float, float]:
    """(seconds, bytes of K and V) of one call: `rows` last positions of each context, blocks in random order."""
    rng = np.random.default_rng(0)
    blocks = [-(-c // args.block_size) for c in contexts]
    ids = rng.permutation(sum(blocks)).astype(np.int32)
    table = np.zeros((len(contexts), max(blocks)), np.int32)
    for row, (count, at) in enumerate(zip(blocks, np.cumsum([0, *blocks]), strict=False)):
        table[row, :count] = ids[at : at + count]
    lead = (len(ids), args.kv_heads, args.block_size // 16)
    data = rng.normal(size=(2, *lead, args.head_dim, 16)).astype(np.float32)
    if dtype == "bf16":
        data = (data.view(np.uint32) >> 16).astype(np.uint16)
    k, v = data[0].copy(), data[1].reshape(*lead, 16, args.head_dim).copy()
    q = rng.normal(size=(rows * len(contexts), args.heads * args.head_dim)).astype(np.float32)
    start = np.arange(len(contexts) + 1, dtype=np.int32) * rows
    lens, y = np.array(contexts, np.int32), np.empty_like(q)
    repeat = max(1, 1_000_000 // sum(c * rows for c in contexts))

    def call() -> None:
        kernels.attention(
            q, y, start, lens, table, k, v, args.head_dim**-0.5, isa=isa, threads=args.threads, repeat=repeat
        )

    size = 2 * sum(contexts) * args.kv_heads * args.head_dim * data.itemsize
    return best(call, args.threads) / repeat, size


def sampling(vocab: int, rows: int, top_k: int, top_p: float, temperature: float, threads: int, spread: float) -> float:
    """Seconds for `rows` rows of normally distributed logits; the kernel changes none of them."""
    logits = (np.random.default_rng(0).normal(size=(rows, vocab)) * spread).astype(np.float32)

    def full(value: float, dtype: type) -> np.ndarray:
        return np.full(rows, value, dtype)

    f32, i32, u64 = np.float32, np.int32, np.uint64
    fixed = [full(0, f32), full(0, f32), full(0, f32), full(1, f32), full(7, u64), np.arange(rows, dtype=u64)]
    call = [logits, full(temperature, f32), full(top_k, i32), full(top_p, f32), *fixed, full(-1, i32)]
    return best(lambda: _native.sample(*call, threads=threads), threads, 0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=_native.available_cpus())
    parser.add_argument("--isa", default="")
    parser.add_argument("--vocab", type=int, default=49152)
    args = parser.parse_args()

    set_num_threads(args.threads)
    peaks = measure_peaks(args.isa)
    flops, bandwidth = peaks.f32 / 1e9, peaks.memory / 1e9
    print(f"{args.threads} threads; fp32 {flops:.0f} GFLOP/s, memory read {bandwidth:.1f} GB/s")
    print(f"heads {args.heads}, kv heads {args.kv_heads}, head_dim {args.head_dim}, block size {args.block_size}\n")
    print("| prefill tokens | kv | ms | GFLOP/s | of fp32 |\n|---|---|---|---|---|")
    for dtype in ("f32", "bf16"):
        for length in (32, 128, 512, 2048):
            seconds, _ = attention(args, args.isa, dtype, [length], length)
            done = 2 * 2 * args.heads * args.head_dim * length * (length + 1) / 2 / seconds / 1e9
            print(f"| {length} | {dtype} | {seconds * 1e3:.3f} | {done:.1f} | {done / flops:.0%} |")
    print("\n| decode: sequences x context | kv | us | GB/s of K and V | of memory read |\n|---|---|---|---|---|")
    for dtype in ("f32", "bf16"):
        for count, context in ((1, 100), (1, 512), (1, 2048), (1, 16384), (8, 512), (32, 300), (32, 2048)):
            seconds, size = attention(args, args.isa, dtype, [context] * count, 1)
            rate = size / seconds / 1e9
            print(f"| {count} x {context} | {dtype} | {seconds * 1e6:.1f} | {rate:.1f} | {rate / bandwidth:.0%} |")
    print(f"\n| sampling, 32 rows of {args.vocab} | spread 1: us a row, one thread | spread 3 |\n|---|---|---|")
    cases = {
        "greedy": (0, 1.0, 0.0),
        "temperature": (0, 1.0, 1.0),
        "top_p 0.9": (0, 0.9, 1.0),
        "top_k 40": (40, 1.0, 1.0),
        "top_k 40, top_p 0.9": (40, 0.9, 0.7),
        "top_k 1000": (1000, 1.0, 1.0),
    }
    for name, case in cases.items():
        cells = [f"{sampling(args.vocab, 32, *case, 1, spread) / 32 * 1e6:.1f}" for spread in (1.0, 3.0)]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
