"""Load on any OpenAI-compatible server: streams completions and notes when each token came.

Closed loop: so many requests at once, the next when one ends. Open loop: requests arrive at a rate, whatever the server does. Knows
HTTP and OpenAI's completions, and nothing of the engine behind them.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.datasets import BenchRequest
from octavo.bench.http import Exchange, HttpError, Target, get
from octavo.errors import ConfigError

SAMPLE_SECONDS = 0.25
GAUGES = {
    "slots": "octavo:kv_slots_used_ratio",
    "usage": "vllm:kv_cache_usage_perc",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "preemptions": "vllm:num_preemptions_total",
}

Progress = Callable[["Record"], None]


@dataclass(slots=True)
class Record:
    """One request as its client saw it. Times are of `time.perf_counter`; `stamps` has one for each chunk with text."""

    began: float
    ended: float = 0.0
    stamps: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_output: int = 0
    error: str | None = None


@dataclass(slots=True)
class Sample:
    """The server's gauges at a moment; what it does not tell is None."""

    time: float
    slots: float | None = None  # share of allocated KV slots that hold a token
    usage: float | None = None  # share of the KV pool that is allocated
    running: float | None = None
    waiting: float | None = None
    preemptions: float | None = None


@dataclass(slots=True)
class Run:
    """A measured run: wall time in seconds, one record per request in the requests' order, gauges over time."""

    seconds: float
    records: list[Record]
    samples: list[Sample]


async def model_of(target: Target) -> str:
    """The first model that the server lists. Raises ConfigError if it lists none, HttpError if it does not answer."""
    status, body = await get(target, "/v1/models")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"/v1/models answered {status} and no model; name one with --model") from None


async def closed_loop(
    target: Target, model: str, requests: Sequence[BenchRequest], concurrency: int, on_done: Progress | None = None, gauges: bool = True
) -> Run:
    """Sends all requests, `concurrency` at a time. Without `gauges` the server's are not read, which costs it some milliseconds each time."""
    records: list[Record | None] = [None] * len(requests)
    todo = iter(enumerate(requests))

    async def worker() -> None:
        for index, request in todo:
            record = records[index] = await _one(target, model, request)
            if on_done is not None:
                on_done(record)

    return await _measured(target, records, [worker() for _ in range(concurrency)], gauges)


async def open_loop(
    target: Target, model: str, requests: Sequence[BenchRequest], rate: float, seed: int, on_done: Progress | None = None
) -> Run:
    """Sends requests at `rate` per second on average, in a Poisson process, however many are still running."""
    rng = random.Random(seed)
    records: list[Record | None] = [None] * len(requests)

    async def arrive(index: int, request: BenchRequest, after: float) -> None:
        await asyncio.sleep(after)
        record = records[index] = await _one(target, model, request)
        if on_done is not None:
            on_done(record)

    at, tasks = 0.0, []
    for index, request in enumerate(requests):
        tasks.append(arrive(index, request, at))
        at += rng.expovariate(rate)
    return await _measured(target, records, tasks)


async def _measured(target: Target, records: list[Record | None], tasks: list[Any], gauges: bool = True) -> Run:
    samples: list[Sample] = []
    samplers = [asyncio.create_task(_sample(target, samples))] if gauges else []
    began = time.perf_counter()
    try:
        await asyncio.gather(*tasks)
    finally:
        seconds = time.perf_counter() - began
        for sampler in samplers:
            sampler.cancel()
    return Run(seconds, [record for record in records if record is not None], samples)


async def _one(target: Target, model: str, request: BenchRequest) -> Record:
    body = _body(model, request)
    record = Record(time.perf_counter())
    try:
        async with Exchange(target, "POST", "/v1/completions", body) as response:
            if response.status != 200:
                record.error = f"status {response.status}: {(await response.read())[:200].decode(errors='replace')}"
            else:
                async for line in response.lines():
                    if not _take(line, record):
                        break
    except (HttpError, OSError, ValueError, asyncio.IncompleteReadError) as error:
        record.error = str(error) or type(error).__name__
    record.ended = time.perf_counter()
    if record.error is None and not record.num_output:
        record.error = "the stream ended without usage"
    return record


def _body(model: str, request: BenchRequest) -> bytes:
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.num_output,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if not request.may_stop:
        body.update(min_tokens=request.num_output, ignore_eos=True)
    return json.dumps(body).encode()


def _take(line: bytes, record: Record) -> bool:
    """One line of the stream into the record; False at its end."""
    if not line.startswith(b"data:"):
        return True
    data = line[5:].strip()
    if data == b"[DONE]":
        return False
    now = time.perf_counter()
    event = json.loads(data)
    if event.get("error"):
        record.error = str(event["error"])[:200]
        return False
    if event.get("choices") and event["choices"][0].get("text"):
        record.stamps.append(now)
    if usage := event.get("usage"):
        record.num_prompt = usage["prompt_tokens"]
        record.num_output = usage["completion_tokens"]
    return True


async def _sample(target: Target, samples: list[Sample]) -> None:
    """Reads the server's gauges until cancelled, or until it turns out to have none."""
    while True:
        try:
            status, body = await get(target, "/metrics")
        except HttpError:
            return
        if status != 200:
            return
        samples.append(parse_gauges(body.decode(errors="replace"), time.perf_counter()))
        await asyncio.sleep(SAMPLE_SECONDS)


def parse_gauges(text: str, now: float) -> Sample:
    """Of a Prometheus page, the gauges that a report uses."""
    sample = Sample(now)
    for line in text.splitlines():
        for attribute, name in GAUGES.items():
            if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " "):
                setattr(sample, attribute, float(line.rsplit(maxsplit=1)[-1]))
    return sample
