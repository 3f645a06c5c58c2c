"""An engine process without a model: `python fake_engine.py FD PARENT_PID`. Its next token is a hash of the prefix and the seed.

The core, the loop and the process around them are the real ones. The model path is JSON: {"step_seconds": ...}. Token ids with a meaning:
CRASH in a known sequence kills the process at the next step, RAISE makes the step raise, HANG makes it take for ever.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from types import SimpleNamespace

from octavo.config import CacheConfig, EngineArgs, SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.errors import ConfigError
from octavo.host.process import main
from octavo.protocol import EngineReady, ModelRunnerOutput, Phase, SampledTokens, SchedulerOutput, TokenLogprobs

VOCAB_SIZE = 32_000
CRASH, RAISE, HANG = 31_001, 31_002, 31_003
FIRST_MEANING = 31_000  # sampled tokens stay below


def next_token(token_ids: list[int], seed: int | None) -> int:
    """The continuation: a function of the whole prefix, and of the seed unless it is None (greedy)."""
    digest = hashlib.blake2b(repr((token_ids, seed)).encode(), digest_size=8).digest()
    return 100 + int.from_bytes(digest, "little") % (FIRST_MEANING - 100)  # never an end of sequence


def expected(prompt: list[int], count: int, seed: int | None = None) -> list[int]:
    """What an undisturbed request generates."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


class HashRunner:
    """Keeps each request's sequence, as a device would keep its KV; checks that the plan agrees with it."""

    def __init__(self, step_seconds: float = 0.0) -> None:
        self.step_seconds = step_seconds
        self.sequences: dict[str, list[int]] = {}
        self.params = {}

    def launch(self, plan: SchedulerOutput) -> SchedulerOutput:
        for request_id in plan.released_request_ids:
            self.sequences.pop(request_id, None)
        for new in plan.new_requests:
            self.sequences[new.request_id] = new.prompt_token_ids + new.output_token_ids
            self.params[new.request_id] = new.sampling_params
        tokens = {token for scheduled in plan.scheduled for token in scheduled.token_ids}
        if CRASH in tokens:
            os.kill(os.getpid(), signal.SIGKILL)
        if RAISE in tokens:
            raise RuntimeError("a step that was to raise")
        time.sleep(3600 if HANG in tokens else self.step_seconds)
        return plan

    def sample(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return ModelRunnerOutput(plan.step, [self._sample(scheduled) for scheduled in plan.scheduled])

    def _sample(self, scheduled) -> SampledTokens:
        sequence, params = self.sequences[scheduled.request_id], self.params[scheduled.request_id]
        start = scheduled.num_computed_tokens
        drafts = scheduled.draft_token_ids
        assert (sequence + drafts)[start : start + len(scheduled.token_ids)] == scheduled.token_ids
        result = SampledTokens(scheduled.request_id, [], None if params.logprobs is None else [])
        for draft in [*drafts, None] if scheduled.samples else ():
            token = next_token(sequence, None if params.greedy else params.seed)
            sequence.append(token)
            result.token_ids.append(token)
            if result.logprobs is not None:
                result.logprobs.append(TokenLogprobs([token], [-1.0 / (1 + token)], 1))
            if token != draft:
                break
        return result


def build(args: EngineArgs, model_path: str) -> SimpleNamespace:
    options = json.loads(model_path)
    if options.get("refuse"):
        raise ConfigError(options["refuse"])
    budget = args.max_num_batched_tokens or 512
    max_model_len = args.max_model_len or 4096
    scheduler = SchedulerConfig(
        max_num_seqs=min(args.max_num_seqs, budget),
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        max_num_queued_requests=args.max_num_queued_requests,
        policy=args.scheduling_policy,
    )
    cache = CacheConfig(block_size=16, num_blocks=options.get("num_blocks", 2048), enable_prefix_caching=args.enable_prefix_caching)
    ready = EngineReady(
        max_model_len, VOCAB_SIZE, 16, cache.num_blocks, 0, cache.num_blocks * 16, 0, args.max_num_seqs, budget, 1, "fake", [Phase("all", 0.0)], os.getpid()
    )
    runner = HashRunner(options.get("step_seconds", 0.0))
    return SimpleNamespace(core=EngineCore(scheduler, cache, VOCAB_SIZE), runner=runner, ready=ready)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], build))
