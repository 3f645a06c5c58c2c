"""Throughput of a function that completes prompts: everything at once, nothing in between. Knows no engine: the caller brings it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from octavo.bench.datasets import BenchRequest
from octavo.bench.report import Summary, totalled

# Prompts and numbers of output tokens in, (prompt tokens, output tokens) of each out.
Generate = Callable[[Sequence[str | list[int]], Sequence[int]], Sequence[tuple[int, int]]]


def measure(requests: Sequence[BenchRequest], generate: Generate) -> Summary:
    """Runs all requests in one call."""
    began = time.perf_counter()
    lengths = generate([request.prompt for request in requests], [request.num_output for request in requests])
    seconds = time.perf_counter() - began
    prompt, output = sum(length[0] for length in lengths), sum(length[1] for length in lengths)
    return totalled("throughput", seconds, len(requests), prompt, output)
