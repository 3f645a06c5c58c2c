"""The engine as a pure state machine: messages in, a plan out, a result in, messages out.

    add, abort, reset_prefix_cache    what the client wants
    schedule -> plan                  what the runner is to compute (None: nothing)
    update(plan, result) -> outputs   what came of it; or fail_step(plan) if the step raised
    report -> outputs                 refusals and figures without a step

Rules that hold whatever comes in:
 - Nothing is dropped silently: each added request ends in exactly one output with a finish_reason, unless the client aborted it.
 - Nothing that a request brings can end the engine: what raises while one request is handled ends that request with an INTERNAL
   error, its blocks are returned, and what they hold can no longer be found by others.
 - Time is an argument, and so is what a step took, from which the scheduler's pace learns. Nothing here reads a clock, a file, a
   socket or a random number.

Knows nothing of processes, of the device, or of text.
"""

from __future__ import annotations

import math
from array import array

from octavo.config import CacheConfig, SchedulerConfig
from octavo.engine.block_pool import InvariantError, num_blocks_for
from octavo.engine.kv_groups import held_blocks
from octavo.engine.policy import order_key
from octavo.engine.request import Request, RequestStatus
from octavo.engine.scheduler import Scheduler
from octavo.engine.stats import Totals, num_kv_tokens, step_stats
from octavo.errors import ContextLengthError, InvalidRequestError, OverloadedError
from octavo.protocol import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorKind,
    FinishReason,
    ModelRunnerOutput,
    OutputError,
    SampledTokens,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)


class EngineCore:
    """One step at a time: `schedule`, then `update` or `fail_step` with that plan, then `schedule` again."""

    def __init__(self, scheduler: SchedulerConfig, cache: CacheConfig, vocab_size: int = 0) -> None:
        """`vocab_size` 0: token ids are not compared with a vocabulary."""
        self.config = scheduler
        self.cache = cache
        self.block_size = cache.block_size
        self.vocab_size = vocab_size
        self.totals = Totals()
        self.scheduler = Scheduler(scheduler, cache, self.totals)
        self.requests: dict[str, Request] = {}  # waiting and running
        self._pending: list[EngineCoreOutput] = []  # for the next outputs
        self._num_added = 0

    # --- what the client wants ---

    def add(self, message: EngineCoreRequest, now: float) -> None:
        """Queue a request. One that is refused, or that has come back already complete, is answered by the next outputs."""
        try:
            self._check(message)
            self._num_added += 1
            key = order_key(self.config.policy, message, self._num_added)
            request = Request(message, key, self.config.max_model_len, len(self.scheduler.groups))
            finish_reason, stop_reason = request.end_reason()
            if finish_reason is not None:
                self._pending.append(
                    EngineCoreOutput(message.request_id, [], finish_reason, stop_reason, scheduled_time=now)
                )
                return
            self.scheduler.add(request)
            self.requests[request.request_id] = request
        except Exception as error:
            self._pending.append(_error_output(message.request_id, _kind_of(error), str(error)))

    def abort(self, request_ids: list[str]) -> None:
        """End these requests without a further output. Ids that are unknown or have ended are ignored."""
        for request_id in request_ids:
            request = self.requests.pop(request_id, None)
            if request is not None:
                self.scheduler.finish(request)
        if self._pending:
            self._pending = [output for output in self._pending if output.request_id not in request_ids]

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes that no running request holds."""
        self.scheduler.pool.reset_cache()

    # --- steps ---

    def has_work(self) -> bool:
        """Whether `schedule` would plan something, or `report` would bring an output."""
        return bool(self.requests or self._pending)

    def schedule(self, now: float) -> SchedulerOutput | None:
        """The plan of the next step; None if there is nothing to compute (then `report` may have something)."""
        plan = self.scheduler.schedule(self.totals.num_steps + 1, now)
        broken, self.scheduler.broken = self.scheduler.broken, []
        for request, message in broken:
            self.requests.pop(request.request_id, None)
            self._pending.append(_error_output(request.request_id, ErrorKind.INTERNAL, message))
        if plan is not None:
            self.totals.num_steps = plan.step
        return plan

    def update(
        self, plan: SchedulerOutput, result: ModelRunnerOutput, now: float, step_seconds: float
    ) -> EngineCoreOutputs:
        """Take the step's result into the books. A result that does not answer the plan fails the whole step."""
        if result.step != plan.step or [s.request_id for s in result.sampled] != [s.request_id for s in plan.scheduled]:
            return self.fail_step(plan, "the runner's result does not answer its plan", now)
        self.scheduler.pace.observe(self.scheduler.shape, step_seconds)
        members = self._settle(plan)
        for request, scheduled, sampled in zip(members, plan.scheduled, result.sampled, strict=True):
            if request.is_finished:
                continue  # aborted while the step ran
            try:
                output = self._advance(request, scheduled, sampled)
            except Exception as error:
                output = self._fail(request, f"{type(error).__name__}: {error}")
            if output is not None:
                self._pending.append(output)
        return self._outputs(now, plan.num_tokens, step_seconds)

    def fail_step(self, plan: SchedulerOutput, message: str, now: float) -> EngineCoreOutputs:
        """The whole step raised: its requests end with an INTERNAL error, all others go on."""
        for request in self._settle(plan):
            if not request.is_finished:
                self._pending.append(self._fail(request, message))
        # How far the runner came is not known, so it is told once more what to forget.
        self.scheduler.released_ids.extend(plan.released_request_ids)
        return self._outputs(now, plan.num_tokens, 0.0)

    def report(self, now: float) -> EngineCoreOutputs:
        """What is to be told without a step: refusals, and the figures. Also the heartbeat."""
        return self._outputs(now, 0, 0.0)

    def _settle(self, plan: SchedulerOutput) -> list[Request]:
        if plan.step != self.totals.num_steps or len(plan.scheduled) != len(self.scheduler.in_flight):
            raise InvariantError(f"step {plan.step} is not in flight")
        return self.scheduler.settle()

    def _advance(self, request: Request, scheduled: ScheduledRequest, sampled: SampledTokens) -> EngineCoreOutput | None:
        """One request's part of a step that succeeded: its tokens are computed, its full blocks can be found, its next tokens known."""
        if sampled.error is not None:
            return self._fail(request, sampled.error)
        if scheduled.samples and (wrong := self._what_is_wrong(scheduled, sampled.token_ids)):
            return self._fail(request, wrong)
        start = scheduled.num_computed_tokens
        news, finish_reason, stop_reason = self._take_tokens(request, scheduled, sampled.token_ids)
        num_prompt_tokens = min(request.num_computed_tokens, request.num_prompt_tokens) - min(
            start, request.num_prompt_tokens
        )
        self.totals.prompt_tokens += num_prompt_tokens
        self._publish(request)
        if self.scheduler.groups.sliding:
            self.scheduler.free_unseen(request)  # after publishing: until they are needed the blocks can still be found
        if scheduled.num_drafts:
            self.scheduler.take_back_drafts(request)

        prompt_logprobs = request.take_new_prompt_logprobs(start, sampled.prompt_logprobs)
        if not scheduled.samples:
            return self._output(request, [], prompt_logprobs) if prompt_logprobs else None
        output = self._output(request, news, prompt_logprobs)
        output.logprobs = None if sampled.logprobs is None else sampled.logprobs[: len(news)]
        output.finish_reason, output.stop_reason = finish_reason, stop_reason
        if finish_reason is not None:
            self._remove(request)
        return output

    def _what_is_wrong(self, scheduled: ScheduledRequest, token_ids: list[int]) -> str | None:
        """Why these cannot be what was sampled behind the known tokens and the drafts of a share; None if they can."""
        for token_id in token_ids:
            if token_id is None or (self.vocab_size and not 0 <= token_id < self.vocab_size):
                return f"the runner sampled {token_id}, which is no token"
        drafts = scheduled.draft_token_ids
        if not token_ids or token_ids[:-1] != drafts[: len(token_ids) - 1] or len(token_ids) > len(drafts) + 1:
            return f"the runner sampled {token_ids}, which is no answer to the drafts {drafts}"
        return None

    def _take_tokens(
        self, request: Request, scheduled: ScheduledRequest, token_ids: list[int]
    ) -> tuple[list[int], FinishReason | None, int | None]:
        """The step's rows are computed, as far as their drafts held; what was sampled becomes known, up to the sequence's end, if it comes."""
        request.num_computed_tokens = scheduled.num_computed_tokens + len(scheduled.token_ids) - scheduled.num_drafts
        news: list[int] = []
        finish_reason: FinishReason | None = None
        stop_reason: int | None = None
        for token_id in token_ids if scheduled.samples else ():
            request.token_ids.append(token_id)
            news.append(token_id)
            finish_reason, stop_reason = request.end_reason()
            if finish_reason is not None:
                break
        num_held = max(0, len(news) - 1)
        request.num_computed_tokens += num_held
        totals = self.totals
        totals.generation_tokens += len(news)
        if scheduled.num_drafts:
            totals.num_drafts += 1
            totals.num_draft_tokens += scheduled.num_drafts
            totals.num_accepted_tokens += num_held
        return news, finish_reason, stop_reason

    def _publish(self, request: Request) -> None:
        num_full = request.num_computed_tokens // self.block_size
        pool = self.scheduler.pool
        if num_full > request.num_published_blocks and pool.enable_prefix_caching:
            hashes = request.hashes_of_full_blocks(num_full, self.block_size)
            for table in request.block_tables:
                for i in range(request.num_published_blocks, num_full):
                    pool.publish(table[i], hashes[i])
            request.num_published_blocks = num_full

    def _output(
        self, request: Request, new_token_ids: list[int], prompt_logprobs: list[TokenLogprobs] | None
    ) -> EngineCoreOutput:
        output = EngineCoreOutput(request.request_id, new_token_ids, prompt_logprobs=prompt_logprobs)
        if not request.is_reported:
            request.is_reported = True
            output.num_cached_tokens = request.num_cached_tokens
            output.scheduled_time = request.scheduled_time or 0.0
        return output

    def _fail(self, request: Request, message: str) -> EngineCoreOutput:
        self._remove(request, is_doubtful=True)
        return _error_output(request.request_id, ErrorKind.INTERNAL, message)

    def _remove(self, request: Request, is_doubtful: bool = False) -> None:
        del self.requests[request.request_id]
        self.scheduler.finish(request, is_doubtful)

    def _outputs(self, now: float, batch_tokens: int, step_seconds: float) -> EngineCoreOutputs:
        outputs, self._pending = self._pending, []
        s = self.scheduler
        stats = step_stats(self.totals, s.running, len(s.waiting), s.pool, s.block_size, batch_tokens, step_seconds)
        stats.itl_target, stats.step_model = s.pace.figures()
        return EngineCoreOutputs(outputs, stats, now)

    # --- checks ---

    def _check(self, message: EngineCoreRequest) -> None:
        """Raises for a request that cannot be taken: by its own fault, because it can never fit, or because too many wait."""
        params, prompt = message.sampling_params, message.prompt_token_ids
        if message.request_id in self.requests:
            raise InvalidRequestError(f"request_id = {message.request_id!r}: is in use", "request_id")
        if not prompt:
            raise InvalidRequestError("prompt: must hold at least one token", "prompt", "empty_array")
        if not math.isfinite(message.arrival_time):
            raise InvalidRequestError(f"arrival_time = {message.arrival_time}: must be finite", "arrival_time")
        for field in ("prompt_token_ids", "output_token_ids", "stop_token_ids", "eos_token_ids"):
            self._check_token_ids(field, getattr(message, field))
        if self.vocab_size:
            params.check_vocabulary(self.vocab_size)

        most = self.config.max_model_len
        if len(prompt) >= most:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens; with at least one new one the context of {most} tokens is exceeded"
            )
        num_tokens = most if params.max_tokens is None else min(most, len(prompt) + params.max_tokens)
        chunk = self.config.max_num_batched_tokens
        if self.cache.most_blocks(num_tokens - 1, chunk) > self.cache.num_blocks:
            room = self.cache.longest_sequence(chunk, num_tokens - 1)
            raise ContextLengthError(
                f"prompt and max_tokens need KV memory for {num_tokens - 1} tokens; all of it holds {room}"
            )
        # Seats count too: otherwise a burst on an idle engine would be refused although it could run at once.
        limit = self.config.max_num_queued_requests + self.scheduler.max_num_seqs
        if len(self.requests) >= limit:
            raise OverloadedError(f"{len(self.requests)} requests are running or waiting, the limit is {limit}")

    def _check_token_ids(self, field: str, token_ids: list[int]) -> None:
        most = self.vocab_size - 1 if self.vocab_size else 2**31 - 1
        try:
            array("i", token_ids)  # the quickest way to see that all are integers of 32 bits
            worst = next(
                (t for t in (min(token_ids, default=0), max(token_ids, default=0)) if not 0 <= t <= most), None
            )
        except (TypeError, OverflowError):
            raise InvalidRequestError(f"{field}: must hold integers in 0..{most}", field) from None
        if worst is not None:
            raise InvalidRequestError(f"{field} = {worst}: token ids must be in 0..{most}", field)

    def check(self) -> None:
        """Compare all books with each other. Raises InvariantError. Costs O(pool): for tests, and for when there is nothing to do."""
        s = self.scheduler
        ended = [r for r in s.in_flight if r.is_finished]
        s.pool.check([held_blocks(r.block_tables, r.num_freed_blocks) for r in s.running + ended])
        if [r.key for r in s.running] != sorted(r.key for r in s.running):
            raise InvariantError("running requests are out of order")
        if len(s.running) + len(s.waiting) != len(self.requests) or any(r.is_finished for r in self.requests.values()):
            raise InvariantError(
                f"{len(self.requests)} requests, but {len(s.running)} running and {len(s.waiting)} waiting"
            )
        running = {r.request_id for r in s.running}
        for r in self.requests.values():
            reach = r.num_computed_tokens + r.num_in_flight_tokens
            if (r.status is RequestStatus.RUNNING) != (r.request_id in running):
                raise InvariantError(f"{r.request_id} is {r.status}, but not among the running, or the reverse")
            self._check_tables(r)
            if not 0 <= r.num_computed_tokens < r.num_tokens < r.max_num_tokens or reach > r.num_tokens + r.num_draft_tokens:
                raise InvariantError(
                    f"{r.request_id}: {r.num_computed_tokens} computed, {r.num_in_flight_tokens} in flight, {r.num_tokens} known"
                )
        if not 0 <= num_kv_tokens(s.running, s.pool, self.block_size) <= s.pool.num_used * self.block_size:
            raise InvariantError("more tokens than slots in use")

    def _check_tables(self, r: Request) -> None:
        """All tables reach as far as the tokens, and lack what the windows have left behind, no more and hardly less."""
        s, reach = self.scheduler, r.num_computed_tokens + r.num_in_flight_tokens
        least, most = s.groups.behind(max(0, r.num_computed_tokens - 1)), s.groups.behind(r.num_computed_tokens)
        for group, (table, freed) in enumerate(zip(r.block_tables, r.num_freed_blocks, strict=True)):
            if len(table) != num_blocks_for(reach, self.block_size):
                raise InvariantError(f"{r.request_id} holds {len(table)} blocks for {reach} tokens in group {group}")
            if not least[group] <= freed <= most[group] or any(table[:freed]):
                raise InvariantError(f"{r.request_id} has freed {freed} blocks of group {group}: {table}")
            s.pool.check_group(group, table[freed:])


def _kind_of(error: Exception) -> ErrorKind:
    """A refusal's kind for the client, which makes the same exception of it again."""
    if isinstance(error, ContextLengthError):
        return ErrorKind.CONTEXT_LENGTH
    if isinstance(error, InvalidRequestError):
        return ErrorKind.INVALID
    if isinstance(error, OverloadedError):
        return ErrorKind.OVERLOADED
    return ErrorKind.INTERNAL


def _error_output(request_id: str, kind: ErrorKind, message: str) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, [], FinishReason.ERROR, error=OutputError(kind, message))
