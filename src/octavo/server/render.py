"""From a validated body to what the engine is asked: token ids and SamplingParams.

Knows the chat template and the tokenizer; starts nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw

from octavo.errors import ContextLengthError, InvalidRequestError
from octavo.sampling_params import MAX_LOGIT_BIAS, MAX_N, RequestOutputKind, SamplingParams
from octavo.server.errors import invalid
from octavo.server.schema import ChatCompletionRequest, CompletionRequest, SamplingFields, TokenizeRequest
from octavo.server.state import ServerState
from octavo.tokenizer.chat_template import RESERVED

# OpenAI's limit; SamplingParams itself allows more to programs.
MAX_STOPS = 4
MAX_CACHE_SALT = 1024

# What a request says elsewhere, or may not say at all.
TEMPLATE_ARGUMENTS = RESERVED | {"chat_template", "tokenize"}

# Texts above this many characters are rendered and encoded beside the event loop, so that other streams go on.
LONG_TEXT = 16_384

_COPIED = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids", "skip_special_tokens",
    "spaces_between_special_tokens",
)  # fmt: skip

_STRINGS = msgspec.json.Decoder(list[str])
_IDS = msgspec.json.Decoder(list[int])
_ID_LISTS = msgspec.json.Decoder(list[list[int]])


@dataclass(slots=True)
class Prompt:
    """What one engine request starts from. `text` is None when the client sent token ids."""

    token_ids: list[int]
    text: str | None = None


# --- prompts ---


async def completion_prompts(state: ServerState, body: CompletionRequest, n: int) -> list[Prompt]:
    """The prompts of a completions request with `n` sequences each, in order. Raises InvalidRequestError for the field `prompt`."""
    given = read_prompts(body.prompt)
    limit = state.server_args.max_prompts
    if len(given) > limit or len(given) * n > max(limit, MAX_N):
        raise invalid(
            f"prompt: {len(given)} prompts with n = {n}; at most {limit} prompts and {max(limit, MAX_N)} sequences",
            "prompt", "array_above_max_length",
        )  # fmt: skip
    special = body.add_special_tokens is not False
    for item in given:
        if isinstance(item, str):
            await check_length(state, item, body, "prompt")
    prompts = [
        Prompt(await encode(state, item, special, "prompt"), item) if isinstance(item, str) else Prompt(list(item))
        for item in given
    ]
    for prompt in prompts:
        check_token_ids(state, prompt.token_ids, "prompt")
        if not prompt.token_ids:
            if prompt.text is None or state.client.tokenizer.bos_token_id is None:
                raise invalid("prompt: an empty prompt has no token to go on from", "prompt")
            prompt.token_ids = [state.client.tokenizer.bos_token_id]
        prompt.token_ids = truncate(state, prompt.token_ids, body)
    return prompts


def read_prompts(raw: Raw) -> Sequence[str | list[int]]:
    """The four forms of `prompt`: text, texts, token ids, lists of token ids."""
    data = bytes(raw).lstrip()
    if data[:1] == b'"':
        return [_decode(msgspec.json.Decoder(str), data)]
    if data[:1] != b"[":
        raise invalid(
            "prompt: must be a string, a list of strings, or a list (of lists) of token ids", "prompt", "invalid_type"
        )
    first = data[1:].lstrip()[:1]
    if first == b"]":
        raise invalid("prompt: the list is empty", "prompt", "empty_array")
    if first == b'"':
        return list(_decode(_STRINGS, data))
    if first == b"[":
        return list(_decode(_ID_LISTS, data))
    return [_decode(_IDS, data)]


def _decode(decoder: msgspec.json.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as exc:
        # A bool or a fraction in a list of ids is a wrong id; anything else is a wrong type.
        wrong_id = decoder is not _STRINGS and any(f"got `{kind}`" in str(exc) for kind in ("bool", "float"))
        code = "invalid_value" if wrong_id or "out of range" in str(exc) else "invalid_type"
        raise invalid(
            "prompt: must hold only strings, only token ids, or only lists of token ids", "prompt", code
        ) from None
    except msgspec.DecodeError:
        raise invalid("prompt: holds text that is not valid Unicode", "prompt") from None


async def encode(state: ServerState, text: str, add_special_tokens: bool, param: str) -> list[int]:
    """Token ids of `text`; a long one is encoded in a thread. Raises InvalidRequestError for text that is no Unicode."""
    tokenizer = state.client.tokenizer
    if len(text) <= LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens, param=param)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens, param=param)


async def check_length(state: ServerState, text: str, body: SamplingFields, param: str) -> None:
    """Refuses text that cannot fit the context however it is encoded, so that nobody can have megabytes encoded for nothing."""
    longest = state.client.max_model_len
    if longest is None or len(text) <= LONG_TEXT or body.truncate_prompt_tokens is not None:
        return
    tokenizer = state.client.tokenizer
    longest_token = await asyncio.to_thread(
        lambda: tokenizer.max_token_bytes
    )  # the first time it looks at the whole vocabulary
    fewest = len(text.encode("utf-8", "replace")) // longest_token
    if fewest >= longest:
        raise ContextLengthError(
            f"{param}: at least {fewest} tokens, but the model's context is {longest} tokens; shorten the prompt", param
        )


def check_token_ids(state: ServerState, token_ids: Sequence[int], param: str) -> None:
    """Raises InvalidRequestError for an id that the model does not have."""
    vocab_size = vocabulary(state)
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise invalid(f"{param}: token ids must be in 0..{vocab_size - 1}", param)


def vocabulary(state: ServerState) -> int:
    """How many token ids the model has, which may be more than the tokenizer knows."""
    info = state.client.engine_info
    return info.vocab_size if info is not None else state.client.tokenizer.vocab_size


def truncate(state: ServerState, token_ids: list[int], body: SamplingFields) -> list[int]:
    """The last `truncate_prompt_tokens` tokens; -1 keeps what leaves room for the answer."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return token_ids
    longest = state.client.max_model_len or 0
    if keep < -1 or keep == 0 or keep > longest:
        raise invalid(f"truncate_prompt_tokens = {keep}: must be -1 or in 1..{longest}", "truncate_prompt_tokens")
    if keep == -1:
        keep = max(1, longest - max(1, body.max_tokens or 1))
    return token_ids[-keep:]


async def chat_prompt(
    state: ServerState, body: ChatCompletionRequest | TokenizeRequest, messages: list[dict[str, Any]]
) -> Prompt:
    """The prompt that the chat template makes of `messages`, which are normalised. Raises InvalidRequestError."""
    if state.chat_template is None:
        raise invalid(
            "messages: the model has no chat template; the server can be given one with --chat-template", "messages"
        )
    continues = bool(body.continue_final_message)
    opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    kwargs = dict(body.chat_template_kwargs or {})
    for name in kwargs:
        if name in TEMPLATE_ARGUMENTS or name in state.client.tokenizer.special_tokens:
            raise invalid(f"chat_template_kwargs: {name} is not the template's to be told here", "chat_template_kwargs")
    render = partial(
        state.chat_template.render, messages, add_generation_prompt=opens, continue_final_message=continues, **kwargs
    )
    is_long = sum(len(message["content"]) for message in messages) > LONG_TEXT
    text = await asyncio.to_thread(render) if is_long else render()
    if isinstance(body, ChatCompletionRequest):
        await check_length(state, text, body, "messages")
    return Prompt(await encode(state, text, bool(body.add_special_tokens), "messages"), text)


# --- parameters ---


def sampling_params(
    state: ServerState,
    body: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The request's values over the model's defaults, checked. Raises InvalidRequestError."""
    _check_common(state, body)
    values: dict[str, Any] = {name: value for name, value in state.default_sampling.items() if name != "max_tokens"}
    for name in _COPIED:
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    values["logit_bias"] = _logit_bias(state, body.logit_bias)
    values["output_kind"] = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    try:
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **values)
    except InvalidRequestError as exc:
        raise renamed(exc, body) from None


def renamed(exc: InvalidRequestError, body: SamplingFields) -> InvalidRequestError:
    """A fault of SamplingParams under the names that this route has for its fields."""
    param, code = exc.param, exc.code
    if param == "min_tokens":
        code = "invalid_value"
    if isinstance(body, ChatCompletionRequest):
        if param == "max_tokens" and body.max_completion_tokens is not None:
            param = "max_completion_tokens"
        elif param == "logprobs":
            param = "top_logprobs"
        elif param == "prompt":
            param = "messages"
    if isinstance(exc, ContextLengthError):
        return ContextLengthError(exc.message, param)
    return InvalidRequestError(exc.message, param, code)


def fitted(state: ServerState, body: SamplingFields, prompt_len: int, params: SamplingParams) -> SamplingParams:
    """`params` with max_tokens set for a prompt of so many tokens: the client's, else the model's default or what fits.

    Raises ContextLengthError, InvalidRequestError.
    """
    default = state.default_sampling.get("max_tokens") if params.max_tokens is None else None
    try:
        params = state.client.validate(prompt_len, params)
    except InvalidRequestError as exc:
        raise renamed(exc, body) from None
    room = params.max_tokens or 0
    if (body.min_tokens or 0) > room:
        raise invalid(f"min_tokens = {body.min_tokens}: only {room} tokens can be generated", "min_tokens")
    return params if default is None else params.clone(max_tokens=max(params.min_tokens, min(default, room)))


def wants_usage(state: ServerState, body: SamplingFields) -> bool:
    """Whether a stream ends with a usage chunk."""
    asked = body.stream_options is not None and bool(body.stream_options.include_usage)
    return asked or state.server_args.enable_force_include_usage


def names_ids(state: ServerState, body: SamplingFields) -> bool:
    """Whether logprobs name tokens `token_id:N`."""
    asked = body.return_tokens_as_token_ids
    return state.server_args.return_tokens_as_token_ids if asked is None else asked


def _check_common(state: ServerState, body: SamplingFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options: only allowed when stream is true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs: not available when stream is true", "prompt_logprobs")
    if isinstance(body.stop, list) and len(body.stop) > MAX_STOPS:
        raise invalid(f"stop: at most {MAX_STOPS} strings", "stop", "array_above_max_length")
    for name in ("stop_token_ids", "allowed_token_ids"):
        check_token_ids(state, getattr(body, name) or (), name)
    for name in ("logprobs", "prompt_logprobs"):
        _check_num_logprobs(state, getattr(body, name), name)
    _check_cache_salt(body.cache_salt)
    if body.priority and state.engine_args.scheduling_policy != "priority":
        raise invalid(
            f"priority = {body.priority}: this server's scheduling policy knows no priorities",
            "priority",
            "unsupported_value",
        )


def _check_num_logprobs(state: ServerState, value: int | bool | None, name: str) -> None:
    most: int = state.engine_args.max_logprobs
    if value is not None and not isinstance(value, bool) and value > most:
        raise invalid(f"{name} = {value}: must be at most {most}", name, "integer_above_max_value")


def _check_cache_salt(salt: str | None) -> None:
    if salt is None:
        return
    if not salt:
        raise invalid("cache_salt: must not be empty", "cache_salt", "string_below_min_length")
    if len(salt) > MAX_CACHE_SALT:
        raise invalid(f"cache_salt: at most {MAX_CACHE_SALT} characters", "cache_salt", "string_above_max_length")


def _logit_bias(state: ServerState, given: dict[str, float] | None) -> dict[int, float] | None:
    """JSON knows only string keys; they must be token ids in plain decimal."""
    if given is None:
        return None
    if len(given) > MAX_LOGIT_BIAS:
        raise invalid(f"logit_bias: at most {MAX_LOGIT_BIAS} entries", "logit_bias")
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid(f"logit_bias: {key[:100]!r} is not a token id", "logit_bias")
    bias = {int(key): value for key, value in given.items()}
    check_token_ids(state, list(bias), "logit_bias")
    return bias
