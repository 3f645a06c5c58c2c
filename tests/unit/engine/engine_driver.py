"""Drives an EngineCore by hand: requests in one line, one step per call, every output kept. No device, no clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.config import CacheConfig, SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.engine.request import Request
from octavo.protocol import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    ModelRunnerOutput,
    SampledTokens,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)
from octavo.sampling_params import SamplingParams

EOS = 2


def make_request(request_id: str = "a", prompt: list[int] | int = 5, **fields: Any) -> EngineCoreRequest:
    """A request; `prompt` as tokens, or how many. What is no field of the message is one of the sampling parameters."""
    names = set(EngineCoreRequest.__struct_fields__)
    params = {"max_tokens": 8, "seed": 1} | {name: value for name, value in fields.items() if name not in names}
    message = {
        "stop_token_ids": [EOS],
        "eos_token_ids": [EOS],
        "arrival_time": 0.0,
        "sampling_params": SamplingParams(**params),
    } | {name: value for name, value in fields.items() if name in names}
    tokens = [100 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    return EngineCoreRequest(request_id=request_id, prompt_token_ids=tokens, **message)


class Driver:
    """An engine of 16 blocks of 4 tokens, 4 seats and a budget of 16 tokens, unless told otherwise."""

    def __init__(self, **options: Any) -> None:
        limits = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_model_len": 64,
            "max_num_queued_requests": 100,
            "policy": "fcfs",
            "itl_target_ms": 0.0,
            "num_speculative_tokens": 0,
        }
        cache = {"num_blocks": 16, "block_size": 4, "enable_prefix_caching": True, "windows": (0,)}
        vocab_size = options.pop("vocab_size", 0)
        for name, value in options.items():
            (limits if name in limits else cache)[name] = value
        assert len(limits) + len(cache) == 11, f"unknown options among {list(options)}"
        self.core = EngineCore(SchedulerConfig(**limits), CacheConfig(**cache), vocab_size)
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.pool
        self.now = 0.0
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self.last: EngineCoreOutputs | None = None

    def add(self, request_id: str = "a", prompt: list[int] | int = 5, **fields: Any) -> None:
        self.now += 1.0
        fields.setdefault("arrival_time", self.now)
        self.core.add(make_request(request_id, prompt, **fields), self.now)

    def request(self, request_id: str) -> Request:
        return self.core.requests[request_id]

    def plan(self) -> SchedulerOutput:
        """The next plan, which there must be; the books are checked."""
        self.now += 1.0
        plan = self.core.schedule(self.now)
        self.core.check()
        assert plan is not None
        return plan

    def answer(self, plan: SchedulerOutput, token: Callable[[ScheduledRequest], int] | int = 7) -> EngineCoreOutputs:
        """Bring the result: this token, or what the function says, for each request that samples."""
        sampled = []
        for s in plan.scheduled:
            result = SampledTokens(s.request_id)
            if s.samples:
                result.token_ids = sampled_tokens(s, token)
            if s.prompt_logprobs is not None:
                request = self.core.requests[s.request_id]
                end = min(s.num_computed_tokens + len(s.token_ids) + 1, request.num_prompt_tokens)
                targets = request.token_ids[s.num_computed_tokens + 1 : end]
                result.prompt_logprobs = [TokenLogprobs([target], [-1.0], 1) for target in targets]
            sampled.append(result)
        return self.keep(self.core.update(plan, ModelRunnerOutput(plan.step, sampled), self.now, 0.25))

    def keep(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        self.core.check()
        self.last = outputs
        for output in outputs.outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        return outputs

    def report(self) -> EngineCoreOutputs:
        return self.keep(self.core.report(self.now))

    def step(self, token: Callable[[ScheduledRequest], int] | int = 7) -> SchedulerOutput:
        plan = self.plan()
        self.answer(plan, token)
        return plan

    def steps(self, count: int, token: Callable[[ScheduledRequest], int] | int = 7) -> list[SchedulerOutput]:
        return [self.step(token) for _ in range(count)]

    def run(self, token: Callable[[ScheduledRequest], int] | int = 7, most: int = 10_000) -> list[SchedulerOutput]:
        """Until nothing is left, neither to compute nor to report."""
        plans: list[SchedulerOutput] = []
        while self.core.has_work():
            if self.core.requests:
                plans.append(self.step(token))
            else:
                self.report()
            assert len(plans) <= most
        return plans

    def tokens(self, request_id: str) -> list[int]:
        """All that has been delivered."""
        return [token for output in self.outputs[request_id] for token in output.new_token_ids]

    def running(self) -> list[str]:
        return [r.request_id for r in self.scheduler.running]


def sampled_tokens(s: ScheduledRequest, token: Callable[[ScheduledRequest], int] | int) -> list[int]:
    """That token behind the known ones, and once more behind each draft that held."""
    wanted = token(s) if callable(token) else token
    drafts = s.draft_token_ids
    held = next((i for i, draft in enumerate(drafts) if draft != wanted), len(drafts))
    return [wanted] * (held + 1)


def shares(plan: SchedulerOutput) -> dict[str, tuple[int, int]]:
    """Of each scheduled request: from where, and how many tokens."""
    return {s.request_id: (s.num_computed_tokens, len(s.token_ids)) for s in plan.scheduled}
