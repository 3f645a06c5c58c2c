"""POST /v1/completions: prompts in, choices out, whole or as a stream.

Knows the shape of completions; how they come about is the client's matter.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

import msgspec

from octavo.sampling_params import SamplingParams
from octavo.server import sse
from octavo.server.answers import CompletionAnswer, CompletionChoice, CompletionLogprobs, new_id
from octavo.server.asgi import Answer, EventStream, Request, Response
from octavo.server.errors import invalid
from octavo.server.generation import Generation
from octavo.server.logprobs import LogprobWriter, Position, prompt_logprobs
from octavo.server.render import completion_prompts, fitted, names_ids, sampling_params, wants_usage
from octavo.server.schema import CompletionRequest, parse
from octavo.server.state import ServerState

if TYPE_CHECKING:
    from octavo.client.outputs import CompletionOutput, RequestOutput

DEFAULT_MAX_TOKENS = 16


async def create_completion(state: ServerState, request: Request) -> Answer:
    """Answers one completions request. Everything that can be refused is refused before the answer begins."""
    body, request.ignored_fields = parse(CompletionRequest, request.body, strict=state.server_args.strict)
    state.check_model(body.model)
    params = _params(state, body)
    prompts = await completion_prompts(state, body, params.n)
    own = [fitted(state, body, len(prompt.token_ids), params) for prompt in prompts]
    generation = Generation(state, request, body, prompts, own, scores_only=body.max_tokens == 0)
    writer = CompletionWriter(state, body, generation)
    if body.stream:
        return EventStream(await sse.primed(writer.stream()))
    return Response(msgspec.json.encode(await writer.collect()))


def _params(state: ServerState, body: CompletionRequest) -> SamplingParams:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0:
        if not body.echo:
            raise invalid(
                "max_tokens = 0: must be at least 1, or echo must be true", "max_tokens", "integer_below_min_value"
            )
        max_tokens = 1  # the engine scores a prompt on the way to its next token
    scored = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        scored = max(body.logprobs, scored or 0)
    return sampling_params(state, body, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=scored)


class CompletionWriter:
    """Turns a generation's outputs into the answer. Choice `i` of prompt `p` has index p * n + i."""

    def __init__(self, state: ServerState, body: CompletionRequest, generation: Generation) -> None:
        self._body = body
        self._state = state
        self._generation = generation
        self._n = generation.params[0].n
        self._scores_only = body.max_tokens == 0
        self._id = new_id("cmpl")
        self._logprobs = LogprobWriter(state.client.tokenizer, body.logprobs or 0, names_ids(state, body))
        self._prompt_scores: list[Sequence[Position | None] | None] = [None] * len(generation.prompts)
        self._offsets = [0] * (self._n * len(generation.prompts))
        self._begun = [False] * len(self._offsets)

    async def collect(self) -> CompletionAnswer:
        """The whole answer."""
        choices: list[CompletionChoice] = []
        async for batch in self._generation.outputs():
            for prompt, output in batch:
                if output.finished:
                    choices.extend(self._choice(prompt, output, choice) for choice in output.outputs)
        choices.sort(key=lambda choice: choice.index)
        return CompletionAnswer(
            id=self._id, created=int(time.time()), model=self._state.model_name, system_fingerprint=self._state.fingerprint,
            choices=choices, usage=self._generation.usage(),
        )  # fmt: skip

    def _choice(self, prompt: int, output: RequestOutput, choice: CompletionOutput) -> CompletionChoice:
        index = prompt * self._n + choice.index
        text, token_ids, logprobs = self._with_echo(prompt, index, output, choice)
        with_ids = bool(self._body.return_token_ids)
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=choice.finish_reason,
            stop_reason=None if self._scores_only else choice.stop_reason,
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs) if self._body.prompt_logprobs is not None else None,
            prompt_token_ids=self._generation.prompts[prompt].token_ids if with_ids else None,
            token_ids=token_ids if with_ids else None,
        )

    def _with_echo(
        self, prompt: int, index: int, output: RequestOutput, choice: CompletionOutput
    ) -> tuple[str, list[int], CompletionLogprobs | None]:
        """A choice's text, its generated ids and its logprobs; with `echo` the prompt goes before the first of them."""
        text, token_ids = choice.text, choice.token_ids
        positions: Sequence[Position | None] | None = choice.logprobs
        if output.prompt_logprobs is not None:  # a stream brings them once, with whichever choice comes first
            self._prompt_scores[prompt] = output.prompt_logprobs
        if self._scores_only:
            text, token_ids, positions = "", [], [] if positions is not None else None
        if not (self._body.echo and not self._begun[index]):
            return text, token_ids, self._scored(index, token_ids, positions)

        self._begun[index] = True
        echoed = self._generation.prompts[prompt]
        text = (
            echoed.text if echoed.text is not None else self._state.client.tokenizer.decode(echoed.token_ids, False)
        ) + text
        if positions is None:
            return text, token_ids, None
        before = self._prompt_scores[prompt] or [None] * len(echoed.token_ids)
        return text, token_ids, self._scored(index, [*echoed.token_ids, *token_ids], [*before, *positions])

    def _scored(
        self, index: int, token_ids: list[int], positions: Sequence[Position | None] | None
    ) -> CompletionLogprobs | None:
        if positions is None or self._body.logprobs is None:
            return None
        result, self._offsets[index] = self._logprobs.completion(token_ids, positions, self._offsets[index])
        return result

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """One item of bytes for each batch of outputs."""
        body, generation = self._body, self._generation
        counted = wants_usage(self._state, body)
        head = sse.ChunkHead(
            self._id, "text_completion", int(time.time()), self._state.model_name, self._state.fingerprint
        )
        chunks = sse.ChunkTemplates(head, field=b'"text":', close=b"", num_choices=len(self._offsets))
        continuous = counted and bool(body.stream_options and body.stream_options.continuous_usage_stats)
        usage = b',"usage":null' if counted else b""
        async for batch in generation.outputs():
            if continuous:
                usage = b',"usage":' + sse.encode_json(generation.usage())
            parts = [
                chunk
                for prompt, output in batch
                for choice in output.outputs
                if (chunk := self._chunk(chunks, prompt, output, choice, usage))
            ]
            if parts:
                yield b"".join(parts)
        end = chunks.usage(generation.usage()) if counted else b""
        yield end + sse.DONE

    def _chunk(
        self, chunks: sse.ChunkTemplates, prompt: int, output: RequestOutput, choice: CompletionOutput, usage: bytes
    ) -> bytes:
        """The chunk of one choice's news, b"" if there are none that the client would see."""
        body = self._body
        index = prompt * self._n + choice.index
        if choice.finish_reason is None and choice.logprobs is None and not body.echo and not body.return_token_ids:
            return chunks.text(index, choice.text, usage) if choice.text else b""
        first = not self._begun[index]
        text, token_ids, logprobs = self._with_echo(prompt, index, output, choice)
        self._begun[index] = True
        extra = b""
        if body.return_token_ids:
            extra = b',"token_ids":' + sse.encode_json(token_ids)
            if first:
                extra += b',"prompt_token_ids":' + sse.encode_json(self._generation.prompts[prompt].token_ids)
        stop_reason = None if self._scores_only else choice.stop_reason
        finish = None if choice.finish_reason is None else (choice.finish_reason, stop_reason)
        return chunks.choice(index, text, usage, logprobs=logprobs, finish=finish, extra=extra)
