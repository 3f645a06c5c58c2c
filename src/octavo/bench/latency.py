"""Latency of one batch in this process: every request the same length, all at once, several times. Knows no engine: the caller brings it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from octavo.bench.report import Spread, Summary, totalled
from octavo.bench.throughput import Generate


def measure_latency(prompts: Sequence[list[int]], num_output: int, generate: Generate, repeats: int, on_done: Callable[[], object]) -> Summary:
    """Runs the batch `repeats` times whole, and as often for one token only: what is left of the whole is the decoding.

    TTFT: until a batch's first tokens are all there. TPOT: of the rest, per token of a request. E2E: the whole batch.
    """
    first: list[float] = []
    whole: list[float] = []
    for _ in range(repeats):
        for length, times in ((1, first), (num_output, whole)):
            began = time.perf_counter()
            generate(prompts, [length] * len(prompts))
            times.append(time.perf_counter() - began)
        on_done()
    seconds, size = sum(whole), len(prompts) * repeats
    prompt, output = sum(len(p) for p in prompts) * repeats, num_output * size
    per_token = [(b - a) / (num_output - 1) for a, b in zip(first, whole, strict=True)] if num_output > 1 else []
    spreads = {"ttft_ms": Spread.of(first), "tpot_ms": Spread.of(per_token), "e2e_ms": Spread.of(whole)}
    return totalled(f"batch of {len(prompts)}", seconds, size, prompt, output, **spreads)
