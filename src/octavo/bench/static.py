"""Static batching, the baseline: groups of N requests, padded to the longest prompt and run to the longest output, one group after the other.

What engines without continuous batching do. Run on the same kernels, so that the difference to `throughput` is that of the batching alone.
Knows no engine: the caller brings it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from octavo.bench.datasets import BenchRequest
from octavo.bench.report import Spread, Summary, totalled
from octavo.bench.throughput import Generate

# Token ids of a prompt.
Encode = Callable[[str | list[int]], list[int]]
# Called with the number of requests that have ended.
Progress = Callable[[int], object]


def measure_static(requests: Sequence[BenchRequest], generate: Generate, encode: Encode, size: int, on_done: Progress) -> Summary:
    """Runs the groups in the requests' order. Only the tokens that a request asked for are counted, not what it was padded with."""
    prompts = [encode(request.prompt) for request in requests]
    ended: list[float] = []
    began = time.perf_counter()
    for start in range(0, len(requests), size):
        group = range(start, min(start + size, len(requests)))
        longest, most = max(len(prompts[i]) for i in group), max(requests[i].num_output for i in group)
        generate([padded(prompts[i], longest) for i in group], [most] * len(group))
        ended += [time.perf_counter() - began] * len(group)
        on_done(len(group))
    seconds = time.perf_counter() - began
    prompt, output = sum(len(p) for p in prompts), sum(request.num_output for request in requests)
    return totalled(f"static batches of {size}", seconds, len(requests), prompt, output, e2e_ms=Spread.of(ended))


def padded(ids: list[int], length: int) -> list[int]:
    """Padding stands before the prompt, as for every decoder; its own tokens again: their cost is what counts here."""
    missing = length - len(ids)
    return (ids * (missing // len(ids) + 1))[:missing] + ids
