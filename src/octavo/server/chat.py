"""POST /v1/chat/completions: a conversation in, messages out, whole or as a stream.

Knows the shape of chat completions; how they come about is the client's matter.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.server import sse
from octavo.server.answers import ChatAnswer, ChatChoice, ChatLogprobs, ChatMessage, new_id
from octavo.server.asgi import Answer, EventStream, Request, Response
from octavo.server.conversation import check_media, check_response_format, check_tools, last_text
from octavo.server.errors import invalid
from octavo.server.generation import Generation
from octavo.server.logprobs import LogprobWriter, prompt_logprobs
from octavo.server.render import chat_prompt, fitted, names_ids, sampling_params, truncate, wants_usage
from octavo.server.schema import ChatCompletionRequest, parse
from octavo.server.state import ServerState
from octavo.tokenizer.messages import normalise_messages

if TYPE_CHECKING:
    from octavo.client.outputs import CompletionOutput, RequestOutput
    from octavo.sampling_params import SamplingParams


async def create_chat_completion(state: ServerState, request: Request) -> Answer:
    """Answers one chat request. Everything that can be refused is refused before the answer begins."""
    body, request.ignored_fields = parse(ChatCompletionRequest, request.body, strict=state.server_args.strict)
    state.check_model(body.model)
    check_media(body.messages)
    messages = normalise_messages(body.messages)
    check_tools(body.tools, body.tool_choice)
    check_response_format(body.response_format)
    params = _params(state, body)
    prompt = await chat_prompt(state, body, messages)
    prompt.token_ids = truncate(state, prompt.token_ids, body)
    params = fitted(state, body, len(prompt.token_ids), params)
    generation = Generation(state, request, body, [prompt], [params])
    writer = ChatWriter(state, body, messages, generation)
    if body.stream:
        return EventStream(await sse.primed(writer.stream()))
    return Response(msgspec.json.encode(await writer.collect()))


def _params(state: ServerState, body: ChatCompletionRequest) -> SamplingParams:
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        if max_tokens is not None:
            raise invalid("max_tokens: give it or max_completion_tokens, not both", "max_tokens")
        max_tokens = body.max_completion_tokens
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise invalid("top_logprobs: needs logprobs = true", "top_logprobs")
        if body.top_logprobs > state.engine_args.max_logprobs:
            message = f"top_logprobs = {body.top_logprobs}: must be at most {state.engine_args.max_logprobs}"
            raise invalid(message, "top_logprobs", "integer_above_max_value")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return sampling_params(state, body, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs)


class ChatWriter:
    """Turns a generation's outputs into the answer."""

    def __init__(
        self, state: ServerState, body: ChatCompletionRequest, messages: list[dict[str, Any]], generation: Generation
    ) -> None:
        self._state = state
        self._body = body
        self._generation = generation
        self._role = messages[-1]["role"] if body.continue_final_message else state.server_args.response_role
        self._echo = last_text(messages, self._role) if body.echo else ""
        self._id = new_id("chatcmpl")
        self._logprobs = LogprobWriter(state.client.tokenizer, body.top_logprobs or 0, names_ids(state, body))

    async def collect(self) -> ChatAnswer:
        """The whole answer."""
        final: RequestOutput | None = None
        async for batch in self._generation.outputs():
            final = batch[-1][1]
        assert final is not None
        with_ids = bool(self._body.return_token_ids)
        return ChatAnswer(
            id=self._id,
            created=int(time.time()),
            model=self._state.model_name,
            system_fingerprint=self._state.fingerprint,
            choices=[self._choice(choice, with_ids) for choice in final.outputs],
            usage=self._generation.usage(),
            prompt_logprobs=prompt_logprobs(final.prompt_logprobs),
            prompt_token_ids=self._generation.prompts[0].token_ids if with_ids else None,
        )

    def _choice(self, choice: CompletionOutput, with_ids: bool) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=ChatMessage(self._role, self._echo + choice.text),
            logprobs=self._scored(choice),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if with_ids else None,
        )

    def _scored(self, choice: CompletionOutput) -> ChatLogprobs | None:
        return None if choice.logprobs is None else self._logprobs.chat(choice.token_ids, choice.logprobs)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """One item of bytes for each batch of outputs; the first begins with the role of every choice."""
        body, generation = self._body, self._generation
        n = generation.params[0].n
        counted = wants_usage(self._state, body)
        head = sse.ChunkHead(
            self._id, "chat.completion.chunk", int(time.time()), self._state.model_name, self._state.fingerprint
        )
        chunks = sse.ChunkTemplates(head, field=b'"delta":{"content":', close=b"}", num_choices=n)
        continuous = counted and bool(body.stream_options and body.stream_options.continuous_usage_stats)
        usage = b',"usage":null' if counted else b""
        parts = self._opening(chunks, n, usage)
        async for batch in generation.outputs():
            if continuous:
                usage = b',"usage":' + sse.encode_json(generation.usage())
            for _, output in batch:
                for choice in output.outputs:
                    parts.append(self._chunk(chunks, choice, usage))
            data = b"".join(parts)
            parts = []
            if data:
                yield data
        end = chunks.usage(generation.usage()) if counted else b""
        yield end + sse.DONE

    def _opening(self, chunks: sse.ChunkTemplates, n: int, usage: bytes) -> list[bytes]:
        extra = b""
        if self._body.return_token_ids:
            extra = b',"prompt_token_ids":' + sse.encode_json(self._generation.prompts[0].token_ids)
        parts = [chunks.role(index, self._role, usage, extra) for index in range(n)]
        if self._echo:
            parts.extend(chunks.text(index, self._echo, usage) for index in range(n))
        return parts

    def _chunk(self, chunks: sse.ChunkTemplates, choice: CompletionOutput, usage: bytes) -> bytes:
        """The chunk of one choice's news, b"" if there are none that the client would see."""
        if choice.finish_reason is None and choice.logprobs is None and not self._body.return_token_ids:
            return chunks.text(choice.index, choice.text, usage) if choice.text else b""
        extra = b',"token_ids":' + sse.encode_json(choice.token_ids) if self._body.return_token_ids else b""
        finish = None if choice.finish_reason is None else (choice.finish_reason, choice.stop_reason)
        return chunks.choice(
            choice.index, choice.text, usage, logprobs=self._scored(choice), finish=finish, extra=extra
        )
