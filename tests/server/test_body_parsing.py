"""Whatever bytes come as a body: a typed request or a refusal, nothing else."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from error_bodies import check_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from played_engine import MODEL, Served

from octavo.errors import InvalidRequestError
from octavo.server.errors import ApiError
from octavo.server.render import read_prompts
from octavo.server.schema import BODIES, CompletionRequest, ignored_header, parse

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = sorted({field.name for body in BODIES for field in msgspec.structs.fields(body)} | {"tools", "best_of", "foo"})


def parsed_or_refused(kind: type[Any], body: bytes, strict: bool) -> None:
    try:
        request, ignored = parse(kind, body, strict=strict)
    except InvalidRequestError as refusal:
        assert refusal.param
        refusal.message.encode()
    except ApiError as refusal:
        assert 400 <= refusal.status < 500
    else:
        assert isinstance(request, kind)
        assert ignored_header(ignored).isascii()
        assert b"\n" not in ignored_header(ignored)


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(BODIES), st.booleans())
def test_any_bytes(body: bytes, kind: type[Any], strict: bool) -> None:
    parsed_or_refused(kind, body, strict)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6), st.sampled_from(BODIES), st.booleans())
def test_any_values(fields: dict[str, Any], kind: type[Any], strict: bool) -> None:
    fields.setdefault("model", "m")
    parsed_or_refused(kind, json.dumps(fields).encode(), strict)


@settings(max_examples=80, deadline=None)
@given(JSON)
def test_any_prompt(prompt: Any) -> None:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    try:
        request, _ = parse(CompletionRequest, body)
        prompts = read_prompts(request.prompt)
    except (InvalidRequestError, ApiError):
        return
    assert prompts
    assert all(isinstance(item, str) for item in prompts) or all(type(i) is int for item in prompts for i in item)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ('\u6f22 " [', ['\u6f22 " [']),
    ],
)
def test_forms_of_prompt(prompt: Any, expected: list[Any]) -> None:
    for text in (json.dumps(prompt), "\n " + json.dumps(prompt, indent=2) + " "):
        assert read_prompts(msgspec.Raw(text.encode())) == expected


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
    st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4),
)
async def test_no_values_are_a_fault_of_the_server(served: Served, path: str, fields: dict[str, Any]) -> None:
    good = {"model": MODEL, "prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    body = json.dumps({**good, **fields}).encode()
    response = await served.http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        check_error(response.content)
    assert not served.engine.running
