"""POST /tokenize and /detokenize, in vLLM's shapes. Nothing is generated; the engine is not asked."""

from __future__ import annotations

import msgspec

from octavo.server.answers import DetokenizeAnswer, TokenizeAnswer
from octavo.server.asgi import Answer, Request, Response
from octavo.server.conversation import check_media
from octavo.server.errors import invalid
from octavo.server.render import chat_prompt, check_token_ids, encode
from octavo.server.schema import DetokenizeRequest, TokenizeRequest, parse
from octavo.server.state import ServerState
from octavo.tokenizer.messages import normalise_messages


async def tokenize(state: ServerState, request: Request) -> Answer:
    """Token ids of a text, or of a conversation as the chat template renders it."""
    body, request.ignored_fields = parse(TokenizeRequest, request.body, strict=state.server_args.strict)
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt: give it or messages, one of them", "prompt", "missing_required_parameter")
    if body.messages is not None:
        check_media(body.messages)
        token_ids = (await chat_prompt(state, body, normalise_messages(body.messages))).token_ids
    else:
        token_ids = await encode(state, body.prompt or "", body.add_special_tokens is not False, "prompt")
    names = [state.client.tokenizer.token_str(token_id) for token_id in token_ids] if body.return_token_strs else None
    answer = TokenizeAnswer(
        count=len(token_ids), max_model_len=state.client.max_model_len, tokens=token_ids, token_strs=names
    )  # fmt: skip
    return Response(msgspec.json.encode(answer))


async def detokenize(state: ServerState, request: Request) -> Answer:
    """The text of token ids, special tokens included."""
    body, request.ignored_fields = parse(DetokenizeRequest, request.body, strict=state.server_args.strict)
    state.check_model(body.model)
    check_token_ids(state, body.tokens, "tokens")
    known = [token_id for token_id in body.tokens if token_id < state.client.tokenizer.vocab_size]
    return Response(msgspec.json.encode(DetokenizeAnswer(state.client.tokenizer.decode(known, False))))
