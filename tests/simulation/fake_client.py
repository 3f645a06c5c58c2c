"""A client that knows what it is owed: for each request the exact tokens, how it ends, and how many terminal messages (one).

The expectation is worked out from the request alone, by rules written down here a second time and not taken from the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fake_runner import next_token, require

from octavo.protocol import EngineCoreOutput, EngineCoreRequest, ErrorKind, FinishReason


@dataclass
class Expected:
    """All that a request will bring, told in advance."""

    tokens: list[int]
    finish_reason: FinishReason
    stop_reason: int | None


def expect(request: EngineCoreRequest, vocab_size: int, max_model_len: int) -> Expected:
    """What the fake model answers to this request, from its beginning (whatever of it has been delivered)."""
    params = request.sampling_params
    assert params.max_tokens is not None
    tokens: list[int] = []
    while True:
        tokens.append(next_token(request.prompt_token_ids + tokens, params.seed or 0, vocab_size))
        if tokens[-1] in request.stop_token_ids and len(tokens) >= params.min_tokens:
            told = None if tokens[-1] in request.eos_token_ids else tokens[-1]
            return Expected(tokens, FinishReason.STOP, told)
        if len(tokens) == params.max_tokens or len(request.prompt_token_ids) + len(tokens) == max_model_len:
            return Expected(tokens, FinishReason.LENGTH, None)


@dataclass
class Stream:
    """One live request as its client sees it."""

    request: EngineCoreRequest
    expected: Expected
    order: tuple[int, float, int]
    step_added: int
    wait_bound: int | None  # in steps
    delivered: list[int] = field(default_factory=list)
    prompt_scores: list[int] = field(default_factory=list)
    has_output: bool = False
    may_fail: bool = False  # a fault was injected into it
    num_passed_tokens: int = 0  # of later ones that were admitted before it

    @property
    def max_num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.expected.tokens)


class FakeClient:
    """`streams` are the live requests; `refusals` the answers that must come for what was never admitted."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.streams: dict[str, Stream] = {}
        self.refusals: list[tuple[str, ErrorKind]] = []
        self.num_finished = 0
        self.num_tokens = 0

    def receive(self, output: EngineCoreOutput) -> None:
        """Compare one output with what was to come. Raises Violation."""
        request_id = output.request_id
        if output.error is not None and (request_id, output.error.kind) in self.refusals:
            require(
                output.finish_reason is FinishReason.ERROR and not output.new_token_ids, f"{request_id}: half a refusal"
            )
            self.refusals.remove((request_id, output.error.kind))
            return
        stream = self.streams.get(request_id)
        require(stream is not None, f"{request_id}: an output after its end: {output}")
        assert stream is not None
        if output.error is not None:
            require(stream.may_fail, f"{request_id}: {output.error}")
            require(output.error.kind is ErrorKind.INTERNAL, f"{request_id}: {output.error}")
            require(output.finish_reason is FinishReason.ERROR, f"{request_id}: an error without an end")
            self._end(request_id)
            return
        self._receive_tokens(stream, output)

    def _receive_tokens(self, stream: Stream, output: EngineCoreOutput) -> None:
        request_id, expected = output.request_id, stream.expected
        if not stream.has_output and not (output.finish_reason and not output.new_token_ids):
            limit = len(stream.request.prompt_token_ids) - (not stream.request.output_token_ids)
            require(0 <= output.num_cached_tokens <= limit, f"{request_id}: {output.num_cached_tokens} tokens cached")
            require(output.scheduled_time > 0, f"{request_id}: the first output tells no scheduled_time")
        stream.has_output = True
        stream.prompt_scores += [entry.token_ids[0] for entry in output.prompt_logprobs or ()]
        stream.delivered += output.new_token_ids
        self.num_tokens += len(output.new_token_ids)
        so_far = expected.tokens[: len(stream.delivered)]
        require(stream.delivered == so_far, f"{request_id}: delivered {stream.delivered}, expected {expected.tokens}")
        if stream.delivered:
            self._check_prompt_scores(stream)
        is_end = len(stream.delivered) == len(expected.tokens)
        require(
            (output.finish_reason is not None) == is_end, f"{request_id}: {output} at {len(stream.delivered)} tokens"
        )
        if is_end:
            ended = (output.finish_reason, output.stop_reason)
            require(
                ended == (expected.finish_reason, expected.stop_reason), f"{request_id}: {ended}, expected {expected}"
            )
            self._end(request_id)

    def _check_prompt_scores(self, stream: Stream) -> None:
        """All scores of the prompt come once, in order, at the latest with the first token."""
        wanted = stream.request.sampling_params.prompt_logprobs is not None
        targets = stream.request.prompt_token_ids[1:] if wanted else []
        scores = stream.prompt_scores
        require(scores == targets, f"{stream.request.request_id}: scores of {scores}, not of {targets}")

    def _end(self, request_id: str) -> None:
        del self.streams[request_id]
        self.num_finished += 1
