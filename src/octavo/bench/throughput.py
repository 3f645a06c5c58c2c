"""Throughput of a function that completes prompts: everything at once, nothing in between. Knows no engine: the caller brings it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from octavo.bench.datasets import BenchRequest
from octavo.bench.report import Summary

# Prompts and numbers of output tokens in, (prompt tokens, output tokens) of each out.
Generate = Callable[[Sequence[str | list[int]], Sequence[int]], Sequence[tuple[int, int]]]


def measure(requests: Sequence[BenchRequest], generate: Generate) -> Summary:
    """Runs all requests in one call."""
    began = time.perf_counter()
    lengths = generate([request.prompt for request in requests], [request.num_output for request in requests])
    seconds = time.perf_counter() - began
    prompt, output = sum(length[0] for length in lengths), sum(length[1] for length in lengths)
    return Summary(
        label="throughput",
        seconds=round(seconds, 3),
        num_requests=len(requests),
        num_failed=0,
        num_prompt_tokens=prompt,
        num_output_tokens=output,
        requests_per_second=round(len(requests) / seconds, 3),
        output_tokens_per_second=round(output / seconds, 1),
        total_tokens_per_second=round((prompt + output) / seconds, 1),
    )
