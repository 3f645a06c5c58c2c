"""Prometheus metrics under vLLM's names and buckets, so that its dashboards work.

Two sources: the engine's StepStats (gauges, cache and preemption counters), read when scraped; and what each request looked
like from here (latencies, tokens, outcomes), recorded when it happens. Token counters count what was delivered, which is
what the usage in the answers counts, aborted requests included. Knows nothing of HTTP or text.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from octavo.config import AsyncEngineArgs
from octavo.protocol import StepStats
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.client.client import EngineClient
    from octavo.client.outputs import RequestMetrics, RequestOutput

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
GAP_BUCKETS = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BUCKETS = (1, 2, 5, 10, 20)
STEP_PARTS = ("base", "decode", "decode_context", "prompt_token", "prompt_context")  # as in StepStats.step_model
FINISH_REASONS = ("stop", "length", "abort", "error")


def token_buckets(longest: int) -> list[int]:
    """1, 2, 5, 10, 20, ... up to `longest` tokens."""
    steps = [m * 10**e for e in range(8) for m in (1, 2, 5)]
    return [step for step in steps if step <= longest] or [1]


class Metrics:
    """The books of one server. `render()` is the text of /metrics."""

    def __init__(self, client: EngineClient, args: AsyncEngineArgs) -> None:
        self._registry = CollectorRegistry()
        self._model = args.served_name
        ProcessCollector(registry=self._registry)
        self._registry.register(_EngineCollector(client, args))
        lengths = token_buckets(client.max_model_len or 1 << 17)

        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that began to answer.")
        self.tokens = _Tallies(self._model)
        self._registry.register(self.tokens)
        success = Counter(
            "vllm:request_success", "Finished requests.", ["model_name", "finished_reason"], registry=self._registry
        )
        self.finished = {reason: success.labels(self._model, reason) for reason in FINISH_REASONS}
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_BUCKETS
        )
        self.per_token = self._histogram("request_time_per_output_token_seconds", "Mean gap of a request.", GAP_BUCKETS)
        self.latency = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", REQUEST_BUCKETS)
        self.queue_time = self._histogram("request_queue_time_seconds", "Arrival to first step.", REQUEST_BUCKETS)
        self.inference_time = self._histogram(
            "request_inference_time_seconds", "First step to last token.", REQUEST_BUCKETS
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "First step to first token.", REQUEST_BUCKETS
        )
        self.decode_time = self._histogram("request_decode_time_seconds", "First to last token.", REQUEST_BUCKETS)
        self.prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self.output_length = self._histogram("request_generation_tokens", "Generated tokens of a request.", lengths)
        self.params_n = self._histogram("request_params_n", "Parameter n.", N_BUCKETS)
        self.params_max_tokens = self._histogram("request_params_max_tokens", "Parameter max_tokens.", lengths)
        self.http = Counter(
            "http_requests", "Answers by route and status.", ["handler", "method", "status"], registry=self._registry
        )
        client.add_stats_listener(self._on_step)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _on_step(self, stats: StepStats) -> None:
        if stats.batch_tokens:
            self.tokens.steps.observe(stats.batch_tokens)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"vllm:{name}", help, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str, help: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(
            f"vllm:{name}", help, ["model_name"], registry=self._registry, buckets=tuple(buckets)
        ).labels(self._model)  # fmt: skip


class RequestTimer:
    """Records one request of the engine (one prompt, n sequences) from arrival to end.

    Times are of `time.monotonic`. The first `finish` counts; later ones are ignored.
    """

    __slots__ = ("_arrival", "_done", "_last", "_metrics", "_num_prompt", "_num_tokens", "_params", "_record")

    def __init__(self, metrics: Metrics, arrival: float, num_prompt_tokens: int, params: SamplingParams) -> None:
        self._metrics = metrics
        self._params = params
        self._arrival = arrival
        self._record: RequestMetrics | None = None
        self._last: float | None = None
        self._num_prompt = num_prompt_tokens
        self._num_tokens = 0
        self._done = False

    def observe(self, output: RequestOutput, num_new_tokens: int) -> None:
        """One output of the client, which brought `num_new_tokens`."""
        metrics = self._metrics
        now = time.monotonic()
        if self._last is None:
            self._begin(output)
        elif num_new_tokens:
            metrics.tokens.gaps.observe(now - self._last)
        self._last = now
        if num_new_tokens:
            self._num_tokens += num_new_tokens
            metrics.tokens.num_generated += num_new_tokens
        if output.finished:
            self.finish(output.outputs[0].finish_reason if output.outputs else "stop")

    def _begin(self, output: RequestOutput) -> None:
        metrics = self._metrics
        self._record = output.metrics
        metrics.prompt_tokens.inc(self._num_prompt)
        metrics.prompt_length.observe(self._num_prompt)
        first = output.metrics.first_token_time if output.metrics is not None else None
        metrics.first_token.observe((first or time.monotonic()) - self._arrival)

    def finish(self, reason: str | None) -> None:
        """The end, with its finish_reason; `abort` when the client left, None when the request was refused and never began."""
        if self._done:
            return
        self._done = True
        if reason is None:
            return
        metrics = self._metrics
        metrics.finished[reason if reason in metrics.finished else "error"].inc()
        metrics.latency.observe(time.monotonic() - self._arrival)
        metrics.output_length.observe(self._num_tokens)
        metrics.params_n.observe(self._params.n)
        metrics.params_max_tokens.observe(self._params.max_tokens or 0)
        if self._record is not None:
            self._observe_phases(self._record)

    def _observe_phases(self, record: RequestMetrics) -> None:
        metrics = self._metrics
        scheduled, first, last = record.first_scheduled_time, record.first_token_time, record.last_token_time
        if scheduled is not None:
            metrics.queue_time.observe(max(0.0, scheduled - self._arrival))
            if first is not None and last is not None:
                metrics.prefill_time.observe(max(0.0, first - scheduled))
                metrics.inference_time.observe(max(0.0, last - scheduled))
        if first is not None and last is not None:
            metrics.decode_time.observe(last - first)
            if self._num_tokens > self._params.n:
                metrics.per_token.observe((last - first) / (self._num_tokens / self._params.n - 1))


class _Tally:
    """A histogram in plain numbers. For one thread."""

    def __init__(self, name: str, help: str, buckets: Sequence[float]) -> None:
        self._name, self._help, self._buckets = f"vllm:{name}", help, buckets
        self._sum = 0.0
        self._counts = [0] * (len(buckets) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def metric(self, model: str) -> Metric:
        family = HistogramMetricFamily(self._name, self._help, labels=["model_name"])
        bounds = [*map(floatToGoString, self._buckets), "+Inf"]
        family.add_metric([model], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        return family


class _Tallies(Collector):
    """What is counted for every token and every step: plain numbers, as the library's locks would cost more than the chunk itself.

    Written and scraped on the event loop's thread only.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self.num_generated = 0
        self.gaps = _Tally("inter_token_latency_seconds", "Between tokens of a request.", GAP_BUCKETS)
        self.steps = _Tally("iteration_tokens_total", "Tokens of an engine step.", STEP_BUCKETS)

    def collect(self) -> Iterable[Metric]:
        counter = CounterMetricFamily("vllm:generation_tokens", "Generated tokens delivered.", labels=["model_name"])
        counter.add_metric([self._model], self.num_generated)
        yield counter
        yield self.gaps.metric(self._model)
        yield self.steps.metric(self._model)


class _EngineCollector(Collector):
    """The engine's own numbers, as its last step reported them."""

    def __init__(self, client: EngineClient, args: AsyncEngineArgs) -> None:
        self._client = client
        self._args = args

    def collect(self) -> Iterable[Metric]:
        model = self._args.served_name
        stats = self._client.stats
        if stats is not None:
            yield from self._gauges(stats, model)
            yield from self._counters(stats, model)
            yield from self._pace(stats, model)
        ready = self._client.engine_info
        if ready is not None:
            info = {
                "model_name": model,
                "block_size": str(ready.block_size),
                "cache_dtype": self._args.kv_cache_dtype,
                "enable_prefix_caching": str(self._args.enable_prefix_caching),
                "num_cpu_blocks": str(ready.num_blocks),
                "num_gpu_blocks": "0",
            }
            family = GaugeMetricFamily(
                "vllm:cache_config_info", "The KV cache's configuration; always 1.", labels=list(info)
            )
            family.add_metric(list(info.values()), 1)
            yield family
            if stats is not None and stats.num_used_blocks:
                held = GaugeMetricFamily(
                    "octavo:kv_slots_used_ratio",
                    "Share of the allocated KV slots that hold a token.",
                    labels=["model_name"],
                )
                held.add_metric([model], stats.num_kv_tokens / (stats.num_used_blocks * ready.block_size))
                yield held

    @staticmethod
    def _gauges(stats: StepStats, model: str) -> Iterable[Metric]:
        usage = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
        for name, told, value in (
            ("num_requests_running", "Sequences in the batch.", stats.num_running),
            ("num_requests_waiting", "Sequences waiting.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of KV blocks held by requests; 1 is all.", usage),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", told, labels=["model_name"])
            family.add_metric([model], value)
            yield family

    @staticmethod
    def _pace(stats: StepStats, model: str) -> Iterable[Metric]:
        """What keeps prompts from holding up streams: the target, and the step times that it is held by."""
        target = GaugeMetricFamily(
            "octavo:itl_target_seconds", "Longest step while streams decode; 0: no target.", labels=["model_name"]
        )
        target.add_metric([model], stats.itl_target)
        yield target
        parts = GaugeMetricFamily(
            "octavo:step_time_seconds",
            "What a step takes, as learnt: a base, and for each decode, prompt token, and 1,024 tokens of their contexts.",
            labels=["model_name", "part"],
        )
        for part, seconds in zip(STEP_PARTS, stats.step_model, strict=False):
            parts.add_metric([model, part], seconds)
        yield parts

    @staticmethod
    def _counters(stats: StepStats, model: str) -> Iterable[Metric]:
        for name, told, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found there.", stats.prefix_hits),
            ("num_preemptions", "Sequences sent back to the queue for want of blocks.", stats.num_preemptions),
            ("spec_decode_num_drafts", "Drafts of what a sequence goes on with.", stats.num_drafts),
            ("spec_decode_num_draft_tokens", "Tokens of these drafts.", stats.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Tokens of drafts that held.", stats.num_accepted_tokens),
        ):
            family = CounterMetricFamily(f"vllm:{name}", told, labels=["model_name"])
            family.add_metric([model], value)
            yield family
