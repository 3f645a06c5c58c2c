"""The request bodies: their fields and types, what is refused, and how a body becomes a typed struct.

A body is first split into its top-level fields without decoding them, then each field is decoded by its own type. So a fault
has a name (`param`), an unknown field is known by name without being built in memory, and only what is asked for is ever built.
Ranges of sampling values are checked by SamplingParams. If a key appears twice, the last one wins; strict mode refuses it.

Knows nothing of tokens, engines or routes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from octavo.errors import InvalidRequestError
from octavo.server.errors import ApiError, invalid

MAX_DEPTH = 64
MAX_INTEGER = 10**30  # above, an integer is not a large value but nonsense
MAX_REPORTED_FIELDS = 20

T = TypeVar("T", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct):
    """What a stream carries beside the text."""

    include_usage: bool | None = None  # a last chunk with the usage
    continuous_usage_stats: bool | None = None  # and the usage so far in each chunk


class SamplingFields(msgspec.Struct, kw_only=True):
    """What both generating routes accept, under OpenAI's and vLLM's names. `null` means absent."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    user: str | None = None  # a label of the caller's; accepted as such


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions. `prompt`: a string, a list of strings, a list of token ids or a list of such lists."""

    prompt: Raw
    logprobs: int | None = None


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None  # refused unless tool_choice is "none"
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None  # type "text" only


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a `prompt`, or `messages` that go through the chat template."""

    model: str
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str
    tokens: list[int]


BODIES: tuple[type[msgspec.Struct], ...] = (
    CompletionRequest,
    ChatCompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
)

# Fields that change the answer and that this server cannot honour, with the values (beside null) that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning_effort": ("none",),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "tool_choice": ("none",),
    "tools": ([],),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}

# In these a fault is reported with its index.
LISTS_OF_OBJECTS = ("messages", "tools")

# OpenAI's fields that only concern OpenAI's own service. Reported as ignored, and no reason for strict mode to refuse.
WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "verbosity",
    }
)


def _decoders(body: type[msgspec.Struct]) -> dict[str, msgspec.json.Decoder[Any]]:
    return {field.name: msgspec.json.Decoder(field.type) for field in msgspec.structs.fields(body)}


DECODERS = {body: _decoders(body) for body in BODIES}
REQUIRED = {body: [field.name for field in msgspec.structs.fields(body) if field.required] for body in BODIES}
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)  # possessive: linear in the body
_BRACKETS = re.compile(rb"[\[\]{}]")
_SPLIT = msgspec.json.Decoder(dict[str, Raw])


def parse(kind: type[T], body: bytes, *, strict: bool = False) -> tuple[T, list[str]]:
    """A `kind` from a JSON body, and the names of the fields that it does not know.

    Raises ApiError (not JSON) or InvalidRequestError (a field's fault).
    """
    fields = _split(body, strict)
    decoders = DECODERS[kind]
    values: dict[str, Any] = {}
    ignored: list[str] = []
    for name, raw in fields.items():
        decoder = decoders.get(name)
        if decoder is not None:
            value = _decode(name, decoder, raw)
            if value is not None:
                values[name] = value
        elif name in UNSUPPORTED:
            _check_unsupported(name, raw)
        elif strict and name not in WITHOUT_EFFECT:
            raise invalid(f"unknown field {name[:100]!r}", _param_name(name), "unknown_parameter")
        else:
            ignored.append(name)

    for name in REQUIRED[kind]:
        if values.get(name) is None or (isinstance(values[name], Raw) and bytes(values[name]).strip() == b"null"):
            raise invalid(f"{name} is missing", name, "missing_required_parameter")
    return kind(**values), ignored


def ignored_header(names: list[str]) -> bytes:
    """The names for a header line; they are the client's text, so what is not plain is shown as `?`."""
    shown = [name if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) else "?" for name in names[:MAX_REPORTED_FIELDS]]
    return ", ".join(shown).encode()


def _split(body: bytes, strict: bool) -> dict[str, Raw]:
    """Top-level fields, undecoded."""
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError:
            raise ApiError(400, "the body is not valid UTF-8") from None
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH:
        _check_depth(body)
    try:
        fields = _SPLIT.decode(body)
    except msgspec.ValidationError:
        raise ApiError(400, "the body must be a JSON object", code="invalid_type") from None
    except (msgspec.DecodeError, RecursionError):
        raise _explain_broken(body) from None
    if strict:
        json.loads(body, object_pairs_hook=_refuse_duplicates)
    return fields


def _check_depth(body: bytes) -> None:
    depth = 0
    for bracket in _BRACKETS.findall(_STRINGS.sub(b"", body)):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels", code="invalid_value")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ApiError(400, "a key appears twice in one object", code="invalid_value")
    return result


class _NotANumber(float):
    """Stands for NaN, Infinity and -Infinity, which are Python's JSON but nobody else's."""


def _explain_broken(body: bytes) -> Exception:
    """Why strict JSON refused the body: a literal or a surrogate that has a place, or simply broken."""
    broken = ApiError(400, "could not parse the body as JSON")
    try:
        parsed = json.loads(body, parse_constant=lambda _: _NotANumber("nan"))
    except (ValueError, RecursionError):
        return broken
    if not isinstance(parsed, dict):
        return ApiError(400, "the body must be a JSON object", code="invalid_type")
    for name, value in parsed.items():
        for leaf in _leaves(value):
            if isinstance(leaf, _NotANumber):
                return invalid(f"{name[:100]}: NaN and Infinity are not JSON numbers", _param_name(name))
            if isinstance(leaf, str) and not _encodable(leaf):
                return invalid(f"{name[:100]}: holds half of a surrogate pair", _param_name(name))
    return broken


def _leaves(value: Any) -> Iterator[Any]:
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack.extend(value)
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)
        else:
            yield value


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _param_name(name: str) -> str:
    return name.encode("utf-8", "replace").decode()[:100]


def _decode(name: str, decoder: msgspec.json.Decoder[Any], raw: Raw) -> Any:
    try:
        value = decoder.decode(raw)
    except msgspec.ValidationError as exc:
        if bytes(raw).strip() == b"null":
            return None
        raise _field_error(name, str(exc)) from None
    except (msgspec.DecodeError, RecursionError):
        raise invalid(f"{name}: holds text that is not valid Unicode", name) from None
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise invalid(f"{name}: number out of range", name)
    return value


def _field_error(name: str, message: str) -> InvalidRequestError:
    """msgspec says `Expected X, got Y - at `$[0].role``; we say the same with the field's full name."""
    reason, _, place = message.partition(" - at ")
    path = re.search(r"`?\$((?:\[\d+\]|\.\w+)*)", place)
    param = name + (path.group(1) if path and (name in LISTS_OF_OBJECTS or "." in path.group(1)) else "")
    reason = reason.replace("`", "").replace(" | null", "")
    code = "invalid_type" if reason.startswith("Expected") else "invalid_value"
    return invalid(f"{param}: {reason[:1].lower()}{reason[1:]}", param, code)


def _check_unsupported(name: str, raw: Raw) -> None:
    """Passes values that ask for nothing, refuses the rest: to ignore them would be to answer another question."""
    value = _decode(name, _ANY, raw)
    if value is None or any(
        (value == neutral and type(value) is not bool) or value is neutral for neutral in UNSUPPORTED[name]
    ):
        return
    raise invalid(f"{name} is not supported by this server", name, "unsupported_parameter")


_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Any)
