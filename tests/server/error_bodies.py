"""The one schema of all error bodies, and good requests to spoil."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec
from played_engine import MODEL

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BASE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": MODEL, "prompt": "hello", "max_tokens": 4},
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
}


class Info(msgspec.Struct, forbid_unknown_fields=True):
    """The one schema of all error bodies."""

    message: str
    type: Literal["invalid_request_error", "authentication_error", "server_error"]
    param: str | None
    code: (
        Literal[
            "context_length_exceeded",
            "model_not_found",
            "invalid_api_key",
            "invalid_type",
            "invalid_value",
            "invalid_prompt",
            "unsupported_value",
            "unsupported_parameter",
            "unknown_parameter",
            "missing_required_parameter",
            "integer_above_max_value",
            "integer_below_min_value",
            "decimal_above_max_value",
            "decimal_below_min_value",
            "array_above_max_length",
            "empty_array",
            "string_above_max_length",
            "string_below_min_length",
            "overloaded",
            "draining",
            "not_ready",
            "engine_dead",
            "internal_error",
        ]
        | None
    )


class Body(msgspec.Struct, forbid_unknown_fields=True):
    error: Info


def check_error(content: bytes) -> Info:
    """A body of the schema that says something, and neither too much nor about this machine."""
    info = msgspec.json.decode(content, type=Body, strict=True).error
    assert 0 < len(info.message) <= 1000
    assert not re.search(r"/secret|/tmp|Traceback|\.py\b", info.message)
    return info
