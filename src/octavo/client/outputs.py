"""From the engine's outputs of a step to what users see: text, stop strings, log-probabilities, families of n sequences.

`OutputProcessor.process` is the only loop over the batch in the API process. The processor also keeps all that is needed to go on
after the engine died: prompt, parameters and the tokens that were delivered. Knows no sockets, no queues and no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from octavo.errors import ContextLengthError, InvalidRequestError, OctavoError, OverloadedError, RequestFailedError
from octavo.protocol import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorKind,
    FinishReason,
    OutputError,
    TokenLogprobs,
)
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.tokenizer.detokenizer import Detokenizer, make_detokenizer
from octavo.tokenizer.stop_strings import StopStrings
from octavo.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True)
class Logprob:
    """A token's log-probability at a position; `rank` counts from 1."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# One position: the token that is there, then the best ones.
PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence, under vLLM's names. With DELTA text, token_ids and logprobs are the step's news.

    `finish_reason` is stop, length, abort, or None while it goes on. `stop_reason` is the stop string or stop token's id, None for
    the end of sequence. `num_tokens` counts all tokens so far, whatever the output kind.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_tokens: int = 0

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of the monotonic clock; of n sequences the first start and the last end."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_in_queue(self) -> float | None:
        return None if self.first_scheduled_time is None else max(0.0, self.first_scheduled_time - self.arrival_time)


@dataclass(slots=True)
class RequestOutput:
    """What a request brought, under vLLM's names.

    `outputs` are by index: with CUMULATIVE and FINAL_ONLY all n sequences, with DELTA those that the step moved. `prompt_logprobs`
    has an entry per prompt token, the first None; with DELTA it comes once, with the first output. `metrics` is the request's own
    record, which later steps go on writing.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None


@dataclass(slots=True)
class ProcessedStep:
    """`outputs` by family id, at most one each; `aborts` are the engine's ids of sequences that it need not go on with."""

    outputs: list[tuple[str, RequestOutput | OctavoError]] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)


class RequestState:
    """One sequence: what it was asked, what it delivered. `request.output_token_ids` is not used; `token_ids` is the record."""

    __slots__ = (
        "cumulative_logprob",
        "detokenizer",
        "family",
        "finish_reason",
        "index",
        "logprobs",
        "min_tokens",
        "new_from",
        "params",
        "parts",
        "request",
        "stop_reason",
        "stops",
        "token_ids",
    )

    def __init__(
        self, request: EngineCoreRequest, family: Family, index: int, params: SamplingParams, tokenizer: Tokenizer
    ) -> None:
        self.request = request
        self.family = family
        self.index = index
        self.params = params
        self.token_ids = list(request.output_token_ids)
        self.new_from = len(
            self.token_ids
        )  # tokens from here on, and with DELTA all of `parts` and `logprobs`, are news
        self.parts: list[str] = []
        self.logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.min_tokens = params.min_tokens
        self.detokenizer: Detokenizer | None = None
        self.stops: StopStrings | None = None
        if params.detokenize:
            self.detokenizer = make_detokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                prompt_token_ids=request.prompt_token_ids,
            )
            if params.stop_strings:
                self.stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)

    def advance(self, output: EngineCoreOutput) -> bool:
        """Takes in a step's tokens; whether a stop string ended the sequence."""
        ids, finish = output.new_token_ids, output.finish_reason
        matched = None
        if self.detokenizer is None:
            self.token_ids.extend(ids)
        elif self.stops is None:
            self.token_ids.extend(ids)
            text = self.detokenizer.push(self._shown(ids, finish) if finish is not None else ids)
            self.parts.append(text if finish is None else text + self.detokenizer.flush())
        else:
            matched, num_used = self._advance_to_stop(self.detokenizer, self.stops, ids, finish)
            ids = ids[:num_used]
        if matched is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP.value, matched
        elif finish is not None:
            self.finish_reason, self.stop_reason = finish.value, output.stop_reason
        return matched is not None

    def _shown(self, ids: list[int], finish: FinishReason) -> list[int]:
        """`ids` without the token that ended the sequence by being a stop token."""
        return ids[:-1] if finish is FinishReason.STOP and not self.params.include_stop_str_in_output else ids

    def _advance_to_stop(
        self, detokenizer: Detokenizer, stops: StopStrings, ids: list[int], finish: FinishReason | None
    ) -> tuple[str | None, int]:
        """The stop string that was completed, and how many of `ids` are taken in.

        Token by token, so that the end does not depend on how many tokens a step brings.
        """
        shown = ids if finish is None else self._shown(ids, finish)
        for i, token_id in enumerate(shown):
            self.token_ids.append(token_id)
            text, matched = stops.push(detokenizer.push((token_id,)), len(self.token_ids) >= self.min_tokens)
            self.parts.append(text)
            if matched is not None:
                return matched, i + 1
        self.token_ids.extend(ids[len(shown) :])
        if finish is None:
            return None, len(ids)
        text, matched = stops.push(detokenizer.flush(), len(self.token_ids) >= self.min_tokens)
        self.parts.append(text if matched is not None else text + stops.flush())
        return matched, len(ids)

    def completion(self, delta: bool) -> CompletionOutput:
        """The sequence as users see it; with `delta` its news, which are then no news any more."""
        text = self.parts[0] if len(self.parts) == 1 else "".join(self.parts)
        ids, logprobs = self.token_ids, self.logprobs
        if delta:
            ids = ids[self.new_from :]
            self.parts = []
            if logprobs is not None:
                self.logprobs = []
        else:
            ids = list(ids)
            self.parts = [text]
            logprobs = None if logprobs is None else list(logprobs)
        self.new_from = len(self.token_ids)
        return CompletionOutput(
            self.index,
            text,
            ids,
            self.cumulative_logprob,
            logprobs,
            self.finish_reason,
            self.stop_reason,
            self.new_from,
        )

    def resumed(self) -> EngineCoreRequest:
        """The request to send again: the engine goes on behind what was delivered."""
        params = self.request.sampling_params
        if self.token_ids and params.prompt_logprobs is not None:
            params = params.clone(prompt_logprobs=None)  # delivered with the first token
        return msgspec.structs.replace(self.request, sampling_params=params, output_token_ids=list(self.token_ids))


class Family:
    """The n sequences of one request."""

    __slots__ = (
        "id",
        "kind",
        "members",
        "metrics",
        "moved",
        "num_cached_tokens",
        "num_open",
        "prompt",
        "prompt_ids",
        "prompt_logprobs",
        "scorer",
    )

    def __init__(
        self, family: str, n: int, prompt: str | None, request: EngineCoreRequest, params: SamplingParams
    ) -> None:
        self.id = family
        self.kind = params.output_kind
        self.prompt = prompt
        self.prompt_ids = request.prompt_token_ids
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self.scorer: RequestState | None = None  # the sequence whose prompt log-probabilities are taken
        self.num_cached_tokens: int | None = None
        self.num_open = n
        self.members: list[RequestState] = []
        self.moved: list[RequestState] = []
        self.metrics = RequestMetrics(request.arrival_time)

    def output(self) -> RequestOutput | None:
        """The step's output, None if there is nothing to tell yet."""
        finished = self.num_open == 0
        delta = self.kind is RequestOutputKind.DELTA
        if self.kind is RequestOutputKind.FINAL_ONLY and not finished:
            self.moved.clear()
            return None
        shown = self.moved if delta else self.members
        if len(shown) > 1:
            shown.sort(key=lambda state: state.index)
        prompt_logprobs = self.prompt_logprobs
        if delta:
            self.prompt_logprobs = None
        output = RequestOutput(
            self.id,
            self.prompt,
            self.prompt_ids,
            prompt_logprobs,
            [state.completion(delta) for state in shown],
            finished,
            self.metrics,
            self.num_cached_tokens,
        )
        self.moved.clear()
        return output


class OutputProcessor:
    """All requests of one client. Not thread-safe; lives on the client's loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, RequestState] = {}  # by the engine's id, those that still go on
        self._families: dict[str, Family] = {}

    def add(
        self, request: EngineCoreRequest, *, family: str, index: int, n: int, prompt: str | None, params: SamplingParams
    ) -> None:
        """Expects outputs for `request`, the `index`-th of the `n` sequences of `family`.

        `params` are the user's; the request's own may differ in what only the engine needs.
        """
        if request.request_id in self._states:
            raise ValueError(f"request id {request.request_id!r} is in use")
        group = self._families.get(family)
        if group is None:
            group = self._families[family] = Family(family, n, prompt, request, params)
        state = RequestState(request, group, index, params, self._tokenizer)
        group.members.append(state)
        self._states[request.request_id] = state

    def process(self, message: EngineCoreOutputs) -> ProcessedStep:
        """Takes in a step. Outputs of requests that are not known (any more) are passed over."""
        step = ProcessedStep()
        now = time.monotonic()
        moved: list[Family] = []
        for output in message.outputs:
            state = self._states.get(output.request_id)
            if state is None:
                continue
            if output.error is not None or output.finish_reason is FinishReason.ERROR:
                self._fail(state, output, step)
            elif self._take(state, output, now, step):
                family = state.family
                if not family.moved:
                    moved.append(family)
                if state not in family.moved:
                    family.moved.append(state)
        for family in moved:
            if family.moved and (result := family.output()) is not None:
                step.outputs.append((family.id, result))
        return step

    def abort(self, family: str) -> list[str]:
        """Forgets a family; the engine's ids of its sequences that still go on."""
        group = self._families.pop(family, None)
        return [] if group is None else self._drop(group)

    def resume_requests(self) -> list[EngineCoreRequest]:
        """All sequences that still go on, to be sent to a new engine, in the order in which they came."""
        for family in self._families.values():
            if family.prompt_logprobs is not None and family.scorer is not None and not family.scorer.token_ids:
                family.prompt_logprobs, family.scorer = [None], None  # the prompt is computed again from its start
        return [state.resumed() for state in self._states.values()]

    def has_requests(self) -> bool:
        return bool(self._states)

    # Parts of a step

    def _take(self, state: RequestState, output: EngineCoreOutput, now: float, step: ProcessedStep) -> bool:
        """Takes in what the step brought one sequence; whether that is news for the user."""
        family, metrics = state.family, state.family.metrics
        if family.num_cached_tokens is None:
            family.num_cached_tokens = output.num_cached_tokens
            metrics.first_scheduled_time = output.scheduled_time or None
        if output.prompt_logprobs is not None:
            self._score_prompt(state, output.prompt_logprobs)
        if output.new_token_ids:
            metrics.last_token_time = now
            if metrics.first_token_time is None:
                metrics.first_token_time = now
        elif output.finish_reason is None:
            return False
        num_before = len(state.token_ids)
        stopped = state.advance(output)
        if output.logprobs is not None and state.logprobs is not None:
            self._add_logprobs(state, output.logprobs[: len(state.token_ids) - num_before])
        if state.finish_reason is not None:
            self._finish(state, now)
            if stopped and output.finish_reason is None:
                step.aborts.append(output.request_id)
        return True

    def _finish(self, state: RequestState, now: float) -> None:
        del self._states[state.request.request_id]
        family = state.family
        family.num_open -= 1
        if family.num_open == 0:
            family.metrics.finished_time = now
            del self._families[family.id]

    def _fail(self, state: RequestState, output: EngineCoreOutput, step: ProcessedStep) -> None:
        """One sequence's failure is the whole request's: a user cannot use a part of what was asked."""
        del self._states[output.request_id]
        family = state.family
        del self._families[family.id]
        family.moved.clear()
        step.aborts.extend(self._drop(family))
        step.outputs.append((family.id, as_exception(output.error)))

    def _drop(self, family: Family) -> list[str]:
        ids = [state.request.request_id for state in family.members]
        return [request_id for request_id in ids if self._states.pop(request_id, None) is not None]

    def _add_logprobs(self, state: RequestState, rows: Sequence[TokenLogprobs]) -> None:
        assert state.logprobs is not None and state.cumulative_logprob is not None
        for row in rows:
            state.logprobs.append(self._position(row))
            state.cumulative_logprob += row.logprobs[0]

    def _score_prompt(self, state: RequestState, rows: Sequence[TokenLogprobs]) -> None:
        """Takes the prompt's log-probabilities from one sequence of the family; the prompt is the same for all."""
        family = state.family
        if family.prompt_logprobs is None:
            return
        if family.scorer is None:
            family.scorer = state
        if family.scorer is state:
            family.prompt_logprobs.extend(self._position(row) for row in rows)

    def _position(self, row: TokenLogprobs) -> PositionLogprobs:
        """Entry 0 is the token itself with its own rank; the others are ranked by their order. A token among the best appears once."""
        text = self._tokenizer.token_str
        ids, logprobs = row.token_ids, row.logprobs
        position = {ids[0]: Logprob(logprobs[0], row.rank, text(ids[0]))}
        for rank in range(1, len(ids)):
            if ids[rank] != ids[0]:
                position[ids[rank]] = Logprob(logprobs[rank], rank, text(ids[rank]))
        return position


def as_exception(error: OutputError | None) -> OctavoError:
    """The exception that an output's error stands for."""
    if error is None:
        return RequestFailedError("the engine failed on this request")
    match error.kind:
        case ErrorKind.CONTEXT_LENGTH:
            return ContextLengthError(error.message)
        case ErrorKind.OVERLOADED:
            return OverloadedError(error.message)
        case ErrorKind.INVALID:
            return InvalidRequestError(error.message)
        case ErrorKind.INTERNAL:
            return RequestFailedError(error.message)
