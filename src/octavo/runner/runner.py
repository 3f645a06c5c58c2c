"""ModelRunner: executes a plan. Keeps for each request only what sampling needs; knows nothing of queues, stops or text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.ops.batch import Batch
from octavo.ops.cpu.sampling import score
from octavo.protocol import (
    BlockCopy,
    ModelRunnerOutput,
    NewRequest,
    SampledTokens,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)
from octavo.runner.batch import build_batch
from octavo.sampling.sampler import Sampler, SamplingState, token_logprobs


class Program(Protocol):
    """A model on a device: octavo.ops.cpu.program.CpuProgram, or octavo.runner.reference.ReferenceProgram."""

    max_rows: int

    def forward(self, batch: Batch) -> None: ...
    def logits(self, rows_R: NDArray[np.int32]) -> NDArray[np.float32]: ...
    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None: ...


@dataclass(slots=True)
class Running:
    """A step between `launch` and `sample`."""

    plan: SchedulerOutput
    batch: Batch


@dataclass(slots=True)
class Known:
    """A request that the runner knows: its prompt, for prompt_logprobs, and its sampling state."""

    prompt: list[int]
    sampling: SamplingState


class ModelRunner:
    """Runs plans on one program, one step at a time."""

    def __init__(self, program: Program, block_size: int, max_num_seqs: int, isa: str = "") -> None:
        self._program = program
        self._block_size = block_size
        # Requests that a plan releases give back their rows before its new ones take theirs.
        self._sampler = Sampler(max_num_seqs, isa)
        self._known: dict[str, Known] = {}
        self._isa = isa

    def launch(self, plan: SchedulerOutput) -> Running:
        """Computes the hidden states of the plan's tokens. On a CPU that is done when this returns."""
        self._update_known(plan.released_request_ids, plan.new_requests)
        self._copy(plan.block_copies)
        batch = build_batch(plan.scheduled, self._block_size)
        self._program.forward(batch)
        return Running(plan, batch)

    def sample(self, running: Running) -> ModelRunnerOutput:
        """Scores and samples what the plan asks for."""
        plan, starts = running.plan, running.batch.query_start_S.tolist()
        prompt_logprobs = {
            r.request_id: self._prompt_logprobs(r, start) for r, start in zip(plan.scheduled, starts, strict=False) if r.prompt_logprobs is not None
        }
        sampling = [(r, end - 1 - r.num_drafts, end) for r, end in zip(plan.scheduled, starts[1:], strict=True) if r.samples]
        tokens: dict[str, list[tuple[int, TokenLogprobs | None]]] = {}
        if sampling:
            logits = self._program.logits(np.array([row for _, first, end in sampling for row in range(first, end)], np.int32))
            wanted = [(self._known[r.request_id].sampling, r.draft_token_ids) for r, _, _ in sampling]
            sampled = self._sampler.sample(logits, wanted)
            tokens = {r.request_id: result for (r, _, _), result in zip(sampling, sampled, strict=True)}
        results = [_result(r.request_id, tokens.get(r.request_id), prompt_logprobs.get(r.request_id)) for r in plan.scheduled]
        return ModelRunnerOutput(plan.step, results)

    def _update_known(self, released: list[str], new: list[NewRequest]) -> None:
        for request_id in released:
            known = self._known.pop(request_id, None)
            if known is not None:
                self._sampler.release(known.sampling)
        for request in new:
            self._known[request.request_id] = Known(request.prompt_token_ids, self._sampler.add(request))

    def _copy(self, copies: list[BlockCopy]) -> None:
        if copies:
            self._program.copy_blocks([c.source for c in copies], [c.target for c in copies])

    def _prompt_logprobs(self, request: ScheduledRequest, first_row: int) -> list[TokenLogprobs]:
        """Scores of the prompt tokens that this chunk's rows predict."""
        prompt, begin = self._known[request.request_id].prompt, request.num_computed_tokens + 1
        targets = prompt[begin : begin + len(request.token_ids)]
        num_top = request.prompt_logprobs or 0
        found: list[TokenLogprobs] = []
        for i in range(0, len(targets), self._program.max_rows):
            some = targets[i : i + self._program.max_rows]
            rows = np.arange(first_row + i, first_row + i + len(some), dtype=np.int32)
            scores = score(self._program.logits(rows), np.array(some, np.int32), num_top, self._isa)
            found += [token_logprobs(scores, j, token, num_top) for j, token in enumerate(some)]
        return found


def _result(
    request_id: str, sampled: list[tuple[int, TokenLogprobs | None]] | None, prompt_logprobs: list[TokenLogprobs] | None
) -> SampledTokens:
    if sampled is None:
        return SampledTokens(request_id, prompt_logprobs=prompt_logprobs)
    if not sampled:
        return SampledTokens(request_id, error="the model's logits for this request are not finite")
    logprobs = [scores for _, scores in sampled if scores is not None] or None
    return SampledTokens(request_id, [token for token, _ in sampled], logprobs, prompt_logprobs)
