"""Times one decode step at several batch sizes and one prefill chunk, and says which instruction takes how much of it.

usage: step_profile.py [MODEL] [--context N]. In process, on the machine's kernels; run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from statistics import median

import numpy as np

from octavo.config import EngineArgs
from octavo.host.build import build_engine
from octavo.loader.resolve import resolve_model
from octavo.ops.batch import Batch
from octavo.ops.cpu.program import CpuProgram

BLOCK = 16


def decode_batch(size: int, context: int) -> Batch:
    """`size` sequences, each with one new token behind `context` cached ones."""
    blocks = context // BLOCK + 1
    table = np.arange(size * blocks, dtype=np.int32).reshape(size, blocks)
    slots = table[:, -1] * BLOCK + context % BLOCK
    return Batch(
        np.arange(size, dtype=np.int32) + 500, np.full(size, context, np.int32), slots.astype(np.int32)[None], np.arange(size + 1, dtype=np.int32),
        np.full(size, context + 1, np.int32), table[None],
    )  # fmt: skip


def prefill_batch(tokens: int) -> Batch:
    positions = np.arange(tokens, dtype=np.int32)
    table = np.arange(tokens // BLOCK + 1, dtype=np.int32)[None]
    return Batch(positions + 500, positions, positions[None], np.array([0, tokens], np.int32), np.array([tokens], np.int32), table[None])


def seconds(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


def profile(program: CpuProgram, run: Callable[[], object], repeats: int) -> None:
    program.profile(True)
    for _ in range(repeats):
        run()
    spent: Counter[str] = Counter()
    for name, value in program.take_profile():
        spent[name] += value / repeats
    program.profile(False)
    total = sum(spent.values())
    for name, value in spent.most_common():
        print(f"    {name:22s} {value * 1e3:8.3f} ms {100 * value / total:5.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=256)
    args = parser.parse_args()
    engine = build_engine(EngineArgs(model=args.model, kv_cache_memory="2G"), str(resolve_model(args.model).path))
    program = engine.program
    assert isinstance(program, CpuProgram)
    print(f"{args.model}, {engine.ready.backend}; decode at context {args.context}")
    for size in (1, 2, 4, 8, 16, 32, 64):
        batch, rows = decode_batch(size, args.context), np.arange(size, dtype=np.int32)

        def step(batch: Batch = batch, rows: np.ndarray = rows) -> None:
            program.forward(batch)
            program.logits(rows)

        step()
        taken = seconds(step, 15)
        print(f"  decode of {size:3d}: {taken * 1e3:7.2f} ms, {size / taken:7.0f} tokens/s")
        if size in (1, 32):
            profile(program, step, 10)
    for tokens in (64, 256, 512):
        chunk = prefill_batch(tokens)
        taken = seconds(lambda chunk=chunk: program.forward(chunk), 5)
        print(f"  prefill of {tokens:4d}: {taken * 1e3:7.2f} ms, {tokens / taken:7.0f} tokens/s")
    profile(program, lambda: program.forward(prefill_batch(512)), 5)


if __name__ == "__main__":
    main()
