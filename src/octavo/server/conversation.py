"""What a chat request holds beside plain text: media, tools, formats of the answer. All of them are refused, each at its place.

The shapes of messages themselves are `octavo.tokenizer.messages`'s. Knows nothing of templates.
"""

from __future__ import annotations

import re
from typing import Any

from octavo.server.errors import invalid
from octavo.tokenizer.messages import MEDIA_PARTS

MAX_TOOLS = 128
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def check_media(messages: list[dict[str, Any]]) -> None:
    """Refuses parts that are no text. What they point to is never looked at, so the answer tells nothing about it."""
    for index, message in enumerate(messages):
        content = message.get("content")
        for at, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind in MEDIA_PARTS:
                place = f"messages[{index}].content[{at}].{kind}"
                raise invalid(f"{place}: this model reads text only", place)


def check_tools(tools: list[Any] | None, tool_choice: Any) -> None:
    """Refuses what is malformed, then tools as such: this server does not parse tool calls.

    Tools with tool_choice "none" pass: the answer is then the same without them.
    """
    for index, tool in enumerate(tools or ()):
        if index >= MAX_TOOLS:
            raise invalid(f"tools: at most {MAX_TOOLS}", "tools", "array_above_max_length")
        _check_tool(tool, f"tools[{index}]")
    if tool_choice is not None and tool_choice != "none":
        _check_tool_choice(tools or [], tool_choice)
    if tools and tool_choice != "none":
        raise invalid("tools: calling tools is not supported by this server", "tools", "unsupported_parameter")


def _check_tool(tool: Any, place: str) -> None:
    if not isinstance(tool, dict):
        raise invalid(f"{place}: must be an object", place, "invalid_type")
    if tool.get("type") != "function":
        raise invalid(f"{place}.type: must be function", f"{place}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{place}.function: must be an object", f"{place}.function", "invalid_type")
    name = function.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise invalid(f"{place}.function.name: must be 1..64 of A-Z a-z 0-9 _ . -", f"{place}.function.name")
    parameters = function.get("parameters")
    if parameters is not None and not (isinstance(parameters, dict) and parameters.get("type", "object") == "object"):
        raise invalid(
            f"{place}.function.parameters: must be a JSON schema of an object", f"{place}.function.parameters"
        )


def _check_tool_choice(tools: list[Any], tool_choice: Any) -> None:
    names = [tool["function"]["name"] for tool in tools]
    if tool_choice in ("auto", "required"):
        if not tools:
            raise invalid(f"tool_choice = {tool_choice}: there are no tools", "tool_choice")
        return
    function = tool_choice.get("function") if isinstance(tool_choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid("tool_choice: must be none, auto, required or the name of a function", "tool_choice")
    if name not in names:
        raise invalid("tool_choice: names a function that is not in tools", "tool_choice")


def check_response_format(given: dict[str, Any] | None) -> None:
    """Only text is served; what is malformed is told apart from what is merely not supported."""
    if given is None:
        return
    kind = given.get("type")
    if kind == "text":
        return
    if kind not in ("json_object", "json_schema"):
        raise invalid("response_format.type: must be text", "response_format")
    if kind == "json_schema":
        _check_json_schema(given.get("json_schema"))
    raise invalid(f"response_format = {kind}: this server answers text only", "response_format", "unsupported_value")


def _check_json_schema(given: Any) -> None:
    place = "response_format.json_schema"
    if not isinstance(given, dict):
        raise invalid(f"{place} is missing", place, "missing_required_parameter")
    if given.get("schema") is None:
        raise invalid(f"{place}.schema is missing", f"{place}.schema", "missing_required_parameter")
    if not isinstance(given["schema"], dict):
        raise invalid(f"{place}.schema: must be a JSON schema", f"{place}.schema")


def last_text(messages: list[dict[str, Any]], role: str) -> str:
    """The text of the last message if it is of `role`, else nothing: what `echo` puts before a continued message."""
    last = messages[-1]
    return str(last["content"]) if last["role"] == role else ""
