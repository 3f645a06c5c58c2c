"""The messages of a conversation in the one shape that chat templates read.

Takes OpenAI's shapes (a string, a list of text parts, null beside tool calls) and gives strings; refuses anything else with the place
in the request. Knows no template and no tokenizer.
"""

from __future__ import annotations

from typing import Any, NoReturn

import msgspec

from octavo.errors import InvalidRequestError

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
MEDIA_PARTS = frozenset(
    {
        "image_url",
        "input_image",
        "image",
        "input_audio",
        "audio",
        "audio_url",
        "video",
        "video_url",
        "file",
        "input_file",
    }
)
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
MAX_MESSAGES = 8192


def normalise_messages(messages: object) -> list[dict[str, Any]]:
    """Copies of `messages` whose content is a string; text parts are joined by newlines, null becomes "".

    Fields that are null are left out, arguments of tool calls that hold a JSON object become that object, all else stays. Raises
    InvalidRequestError with the place (`messages[2].content[0].text`).
    """
    if messages is None:
        _refuse("messages", "is missing", "missing_required_parameter")
    if not isinstance(messages, list):
        _refuse("messages", "must be a list of messages", "invalid_type")
    if not messages:
        _refuse("messages", "must hold at least one message", "empty_array")
    if len(messages) > MAX_MESSAGES:
        _refuse("messages", f"{len(messages)} messages are more than {MAX_MESSAGES}", "array_above_max_length")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _refuse(param: str, why: str, code: str) -> NoReturn:
    raise InvalidRequestError(f"{param}: {why}", param, code)


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        _refuse(where, "must be an object", "invalid_type")
    role = message.get("role")
    if role is None:
        _refuse(f"{where}.role", "is missing", "missing_required_parameter")
    if not isinstance(role, str):
        _refuse(f"{where}.role", "must be a string", "invalid_type")
    if role not in ROLES:
        _refuse(f"{where}.role", f"{role[:40]!r} is not one of {', '.join(sorted(ROLES))}", "invalid_value")
    result = {key: value for key, value in message.items() if value is not None}
    calls = _tool_calls(message.get("tool_calls"), f"{where}.tool_calls")
    if calls:
        result["tool_calls"] = calls
    else:
        result.pop("tool_calls", None)  # templates test for the key alone
    result["content"] = _content(message, role, bool(calls), f"{where}.content")
    return result


def _content(message: dict[str, Any], role: str, has_calls: bool, where: str) -> str:
    content = message.get("content")
    if content is None:
        if role == "assistant" and (
            has_calls or message.get("function_call") is not None or message.get("refusal") is not None
        ):
            return ""
        _refuse(where, "is missing", "missing_required_parameter")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(where, "must be a string or a list of parts", "invalid_type")
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        _refuse(where, "must be an object", "invalid_type")
    kind = part.get("type", "text" if "text" in part else None)
    if kind is None:
        _refuse(f"{where}.type", "is missing", "missing_required_parameter")
    if not isinstance(kind, str):
        _refuse(f"{where}.type", "must be a string", "invalid_type")
    if kind in MEDIA_PARTS:
        _refuse(where, f"{kind} is not supported: this model reads text only", "unsupported_value")
    if kind not in TEXT_PARTS:
        _refuse(f"{where}.type", f"{kind[:40]!r} is not a known kind of part", "invalid_value")
    field = "refusal" if kind == "refusal" else "text"
    text = part.get(field)
    if text is None:
        _refuse(f"{where}.{field}", "is missing", "missing_required_parameter")
    if not isinstance(text, str):
        _refuse(f"{where}.{field}", "must be a string", "invalid_type")
    return text


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        _refuse(where, "must be a list", "invalid_type")
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        _refuse(where, "must be an object", "invalid_type")
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        _refuse(
            f"{where}.function",
            "must be an object with a name",
            "invalid_type" if function is not None else "missing_required_parameter",
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _arguments(arguments)
    elif arguments is None:
        arguments = {}
    elif not isinstance(arguments, dict):
        _refuse(f"{where}.function.arguments", "must be a string of JSON", "invalid_type")
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _arguments(text: str) -> Any:
    """The object that `text` holds, for templates that write it in their own way; the text itself if it holds none: a model's slip in an
    earlier turn must not end the conversation."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
