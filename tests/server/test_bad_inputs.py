"""Every kind of bad request, on every route that shares the field, streamed and not: one status, one envelope, one code."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from error_bodies import BASE, CHAT, COMPLETIONS, check_error
from played_engine import CONTEXT, MODEL, VOCAB, Served, Server

GENERATING = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
STREAMED = pytest.mark.parametrize("stream", [False, True])


def without(body: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in names}


# (what, changes to a good body, status, param, code); fields of both generating routes.
SHARED: list[tuple[str, dict[str, Any], int, str | None, str | None]] = [
    ("model is no string", {"model": 3}, 400, "model", "invalid_type"),
    ("model unknown", {"model": "gpt-9"}, 404, "model", "model_not_found"),
    ("model is a path", {"model": "../../x"}, 404, "model", "model_not_found"),
    ("model is an absolute path", {"model": "/etc/passwd"}, 404, "model", "model_not_found"),
    ("model with NUL", {"model": "a\0b"}, 404, "model", "model_not_found"),
    ("max_tokens 0", {"max_tokens": 0}, 400, "max_tokens", "integer_below_min_value"),
    ("max_tokens -1", {"max_tokens": -1}, 400, "max_tokens", "integer_below_min_value"),
    ("max_tokens text", {"max_tokens": "12"}, 400, "max_tokens", "invalid_type"),
    ("max_tokens 1.5", {"max_tokens": 1.5}, 400, "max_tokens", "invalid_type"),
    ("max_tokens true", {"max_tokens": True}, 400, "max_tokens", "invalid_type"),
    ("min_tokens above", {"min_tokens": 5}, 400, "min_tokens", "invalid_value"),
    ("min_tokens below 0", {"min_tokens": -1}, 400, "min_tokens", "invalid_value"),
    ("min_tokens never reached", {"min_tokens": 5000, "max_tokens": None}, 400, "min_tokens", "invalid_value"),
    ("n 0", {"n": 0}, 400, "n", "integer_below_min_value"),
    ("n 129", {"n": 129}, 400, "n", "integer_above_max_value"),
    ("n 10^9", {"n": 10**9}, 400, "n", "integer_above_max_value"),
    ("n greedy", {"n": 2, "temperature": 0}, 400, "n", "invalid_value"),
    ("temperature below", {"temperature": -0.1}, 400, "temperature", "decimal_below_min_value"),
    ("temperature above", {"temperature": 2.01}, 400, "temperature", "decimal_above_max_value"),
    ("temperature text", {"temperature": "hot"}, 400, "temperature", "invalid_type"),
    ("top_p 0", {"top_p": 0}, 400, "top_p", "decimal_below_min_value"),
    ("top_p -0.1", {"top_p": -0.1}, 400, "top_p", "decimal_below_min_value"),
    ("top_p 1.1", {"top_p": 1.1}, 400, "top_p", "decimal_above_max_value"),
    ("top_k -2", {"top_k": -2}, 400, "top_k", "integer_below_min_value"),
    ("min_p 2", {"min_p": 2}, 400, "min_p", "decimal_above_max_value"),
    ("presence_penalty 2.2", {"presence_penalty": 2.2}, 400, "presence_penalty", "decimal_above_max_value"),
    ("presence_penalty -2.2", {"presence_penalty": -2.2}, 400, "presence_penalty", "decimal_below_min_value"),
    ("frequency_penalty 2.2", {"frequency_penalty": 2.2}, 400, "frequency_penalty", "decimal_above_max_value"),
    ("frequency_penalty -2.2", {"frequency_penalty": -2.2}, 400, "frequency_penalty", "decimal_below_min_value"),
    ("repetition_penalty 0", {"repetition_penalty": 0}, 400, "repetition_penalty", "decimal_below_min_value"),
    ("logit_bias id", {"logit_bias": {str(VOCAB): 1}}, 400, "logit_bias", "invalid_value"),
    ("logit_bias key", {"logit_bias": {"abc": 1}}, 400, "logit_bias", "invalid_value"),
    ("logit_bias negative key", {"logit_bias": {"-1": 1}}, 400, "logit_bias", "invalid_value"),
    ("logit_bias value", {"logit_bias": {"1": 101}}, 400, "logit_bias", "decimal_above_max_value"),
    ("logit_bias entries", {"logit_bias": {str(i): 1 for i in range(1025)}}, 400, "logit_bias", "invalid_value"),
    ("logit_bias list", {"logit_bias": [1]}, 400, "logit_bias", "invalid_type"),
    ("stop 5 items", {"stop": list("abcde")}, 400, "stop", "array_above_max_length"),
    ("stop empty", {"stop": ""}, 400, "stop", "string_below_min_length"),
    ("stop holds empty", {"stop": ["a", ""]}, 400, "stop", "string_below_min_length"),
    ("stop long", {"stop": "x" * 10_000}, 400, "stop", "string_above_max_length"),
    ("stop number", {"stop": 3}, 400, "stop", "invalid_type"),
    ("stop numbers", {"stop": [3]}, 400, "stop", "invalid_type"),
    ("stop_token_ids above", {"stop_token_ids": [VOCAB]}, 400, "stop_token_ids", "invalid_value"),
    ("stop_token_ids below", {"stop_token_ids": [-1]}, 400, "stop_token_ids", "invalid_value"),
    ("allowed_token_ids above", {"allowed_token_ids": [VOCAB]}, 400, "allowed_token_ids", "invalid_value"),
    ("allowed_token_ids none", {"allowed_token_ids": []}, 400, "allowed_token_ids", "empty_array"),
    ("bad_words", {"bad_words": ["x"]}, 400, "bad_words", "unsupported_parameter"),
    ("seed 2^70", {"seed": 2**70}, 400, "seed", "integer_above_max_value"),
    ("seed text", {"seed": "x"}, 400, "seed", "invalid_type"),
    ("seed of 400 digits", {"seed": 10**400}, 400, "seed", "invalid_value"),
    ("temperature of 400 digits", {"temperature": 10**400}, 400, "temperature", "invalid_value"),
    ("cache_salt empty", {"cache_salt": ""}, 400, "cache_salt", "string_below_min_length"),
    ("cache_salt long", {"cache_salt": "x" * 2000}, 400, "cache_salt", "string_above_max_length"),
    ("cache_salt number", {"cache_salt": 3}, 400, "cache_salt", "invalid_type"),
    ("priority", {"priority": 1}, 400, "priority", "unsupported_value"),
    ("chat_template", {"chat_template": "{{ 1 }}"}, 400, "chat_template", "unsupported_parameter"),
    ("best_of", {"best_of": 2}, 400, "best_of", "unsupported_parameter"),
    ("beam search", {"use_beam_search": True}, 400, "use_beam_search", "unsupported_parameter"),
    ("guided_json", {"guided_json": {}}, 400, "guided_json", "unsupported_parameter"),
    ("structured_outputs", {"structured_outputs": {"regex": "a"}}, 400, "structured_outputs", "unsupported_parameter"),
    ("suffix", {"suffix": "x"}, 400, "suffix", "unsupported_parameter"),
    ("truncate 0", {"truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens", "invalid_value"),
    ("truncate beyond", {"truncate_prompt_tokens": 10**6}, 400, "truncate_prompt_tokens", "invalid_value"),
    ("prompt_logprobs 21", {"prompt_logprobs": 21}, 400, "prompt_logprobs", None),
    ("stream text", {"stream": "yes"}, 400, "stream", "invalid_type"),
]

ONLY_COMPLETIONS: list[tuple[str, dict[str, Any], int, str | None, str | None]] = [
    ("prompt number", {"prompt": 3}, 400, "prompt", "invalid_type"),
    ("prompt object", {"prompt": {}}, 400, "prompt", "invalid_type"),
    ("prompt empty list", {"prompt": []}, 400, "prompt", "empty_array"),
    ("prompt empty ids", {"prompt": [[]]}, 400, "prompt", "invalid_value"),
    ("prompt mixed", {"prompt": ["a", 1]}, 400, "prompt", "invalid_type"),
    ("prompt 129", {"prompt": ["a"] * 129}, 400, "prompt", "array_above_max_length"),
    ("prompts times n", {"prompt": ["a"] * 2, "n": 100}, 400, "prompt", "array_above_max_length"),
    ("id negative", {"prompt": [1, -1]}, 400, "prompt", "invalid_value"),
    ("id beyond", {"prompt": [1, VOCAB]}, 400, "prompt", "invalid_value"),
    ("id beyond in the second", {"prompt": [[1], [999_999]]}, 400, "prompt", "invalid_value"),
    ("id bool", {"prompt": [1, True]}, 400, "prompt", "invalid_value"),
    ("id bool first", {"prompt": [True]}, 400, "prompt", "invalid_value"),
    ("id 1.5", {"prompt": [1.5]}, 400, "prompt", "invalid_value"),
    ("id huge", {"prompt": [10**40]}, 400, "prompt", "invalid_value"),
    ("too long", {"prompt": "x" * CONTEXT}, 400, "prompt", "context_length_exceeded"),
    ("too long ids", {"prompt": [1] * 3000}, 400, "prompt", "context_length_exceeded"),
    ("too long with answer", {"max_tokens": CONTEXT}, 400, "prompt", "context_length_exceeded"),
    ("second too long", {"prompt": ["a", "x" * CONTEXT]}, 400, "prompt", "context_length_exceeded"),
    ("logprobs 21", {"logprobs": 21}, 400, "logprobs", "integer_above_max_value"),
    ("logprobs bool", {"logprobs": True}, 400, "logprobs", "invalid_type"),
    ("logprobs -1", {"logprobs": -1}, 400, "logprobs", "integer_below_min_value"),
]


def chat(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


def user(content: Any) -> dict[str, Any]:
    return chat({"role": "user", "content": content})


IMAGE = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
BAD_NAME = {"type": "function", "function": {"name": "no spaces!"}}
BAD_PARAMETERS = {"type": "function", "function": {"name": "f", "parameters": [1]}}
NAMED = {"type": "function", "function": {"name": "g"}}

ONLY_CHAT: list[tuple[str, dict[str, Any], int, str | None, str | None]] = [
    ("messages empty", {"messages": []}, 400, "messages", "empty_array"),
    ("messages null", {"messages": None}, 400, "messages", "missing_required_parameter"),
    ("messages text", {"messages": "hi"}, 400, "messages", "invalid_type"),
    ("message number", chat(1), 400, "messages[0]", "invalid_type"),
    ("role unknown", chat({"role": "king", "content": "x"}), 400, "messages[0].role", "invalid_value"),
    ("role number", chat({"role": 1, "content": "x"}), 400, "messages[0].role", "invalid_type"),
    ("role missing", chat({"content": "x"}), 400, "messages[0].role", "missing_required_parameter"),
    ("content number", user(3), 400, "messages[0].content", "invalid_type"),
    ("content missing", chat({"role": "user"}), 400, "messages[0].content", "missing_required_parameter"),
    ("part unknown", user([{"type": "smell"}]), 400, "messages[0].content[0].type", "invalid_value"),
    ("part text number", user([{"type": "text", "text": 1}]), 400, "messages[0].content[0].text", "invalid_type"),
    ("image", user(IMAGE), 400, "messages[0].content[1].image_url", "invalid_value"),
    ("template refuses", chat({"role": "tool", "content": "x"}), 400, "messages", "invalid_value"),
    ("too long", user("x" * CONTEXT), 400, "messages", "context_length_exceeded"),
    ("too long with answer", {"max_tokens": CONTEXT}, 400, "messages", "context_length_exceeded"),
    ("both maxima", {"max_completion_tokens": 4}, 400, "max_tokens", "invalid_value"),
    (
        "max_completion_tokens 0",
        {"max_tokens": None, "max_completion_tokens": 0},
        400,
        "max_completion_tokens",
        "integer_below_min_value",
    ),
    ("top_logprobs 21", {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "integer_above_max_value"),
    ("top_logprobs -1", {"logprobs": True, "top_logprobs": -1}, 400, "top_logprobs", "integer_below_min_value"),
    ("top_logprobs alone", {"top_logprobs": 2}, 400, "top_logprobs", "invalid_value"),
    ("logprobs number", {"logprobs": 1}, 400, "logprobs", "invalid_type"),
    (
        "both prompts",
        {"continue_final_message": True, "add_generation_prompt": True},
        400,
        "continue_final_message",
        None,
    ),
    ("kwargs shadow", {"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs", "invalid_value"),
    ("kwargs tokenize", {"chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs", "invalid_value"),
    ("format unknown", {"response_format": {"type": "xml"}}, 400, "response_format", "invalid_value"),
    ("format json", {"response_format": {"type": "json_object"}}, 400, "response_format", "unsupported_value"),
    (
        "format without schema",
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        400,
        "response_format.json_schema.schema",
        "missing_required_parameter",
    ),
    (
        "format with bad schema",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
        400,
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    ("tools", {"tools": [TOOL]}, 400, "tools", "unsupported_parameter"),
    ("tools 129", {"tools": [TOOL] * 129}, 400, "tools", "array_above_max_length"),
    ("tool name", {"tools": [TOOL, BAD_NAME]}, 400, "tools[1].function.name", "invalid_value"),
    ("tool parameters", {"tools": [BAD_PARAMETERS]}, 400, "tools[0].function.parameters", "invalid_value"),
    ("tool_choice absent", {"tools": [TOOL], "tool_choice": NAMED}, 400, "tool_choice", "invalid_value"),
    ("tool_choice alone", {"tool_choice": "required"}, 400, "tool_choice", "invalid_value"),
    ("tool_choice odd", {"tool_choice": 3}, 400, "tool_choice", "invalid_value"),
    ("audio", {"audio": {"voice": "x"}}, 400, "audio", "unsupported_parameter"),
    ("modalities", {"modalities": ["text", "audio"]}, 400, "modalities", "unsupported_parameter"),
    ("functions", {"functions": [{"name": "f"}]}, 400, "functions", "unsupported_parameter"),
]

CASES = [
    pytest.param(path, changes, status, param, code, id=f"{path.split('/')[2]}: {what}")
    for path, table in ((COMPLETIONS, SHARED + ONLY_COMPLETIONS), (CHAT, SHARED + ONLY_CHAT))
    for what, changes, status, param, code in table
]


@STREAMED
@pytest.mark.parametrize(("path", "changes", "status", "param", "code"), CASES)
async def test_refused(
    served: Served, path: str, changes: dict[str, Any], status: int, param: str | None, code: str | None, stream: bool
) -> None:
    response = await served.post(path, {**BASE[path], "stream": stream, **changes})
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    info = check_error(response.content)
    assert info.type == "invalid_request_error"
    assert info.param == param
    if code is not None:
        assert info.code == code
    assert not served.engine.seen, "a refused request reached the engine"


@STREAMED
@GENERATING
async def test_numbers_of_a_full_context(served: Served, path: str, stream: bool) -> None:
    long = {"prompt": "x" * 3000} if path == COMPLETIONS else user("x" * 3000)
    response = await served.post(path, {**BASE[path], "stream": stream, **long})
    numbers = [int(number) for number in re.findall(r"\d+", check_error(response.content).message)]
    assert CONTEXT in numbers and any(3000 <= number < 3100 for number in numbers)


@GENERATING
@pytest.mark.parametrize("name", ["model", "prompt", "messages"])
async def test_missing(served: Served, path: str, name: str) -> None:
    if name not in BASE[path]:
        return
    response = await served.post(path, without(BASE[path], name))
    info = check_error(response.content)
    assert (response.status_code, info.param, info.code) == (400, name, "missing_required_parameter")


BROKEN: list[tuple[str, bytes, str | None, str | None]] = [
    ("empty", b"", None, None),
    ("text", b"hello", None, None),
    ("cut", b'{"model": "x"', None, None),
    ("two values", b"{} {}", None, None),
    ("single quotes", b"{'model': 1}", None, None),
    ("byte order mark", b"\xef\xbb\xbf{}", None, None),
    ("list", b"[]", None, "invalid_type"),
    ("number", b"3", None, "invalid_type"),
    ("null", b"null", None, "invalid_type"),
    ("string", b'"x"', None, "invalid_type"),
    ("UTF-8", b'{"model": "\xff"}', None, None),
    ("UTF-8 in an unknown field", b'{"x": "\xc3\x28"}', None, None),
    ("UTF-16", '{"model": "x"}'.encode("utf-16"), None, None),
    ("NaN", b'{"temperature": NaN}', "temperature", "invalid_value"),
    ("Infinity", b'{"temperature": Infinity}', "temperature", "invalid_value"),
    ("-Infinity", b'{"logit_bias": {"1": -Infinity}}', "logit_bias", "invalid_value"),
    ("1e999", b'{"temperature": 1e999}', "temperature", "invalid_value"),
    ("1e999 in a list", b'{"stop_token_ids": [1e999]}', "stop_token_ids", "invalid_value"),
    ("deep list", b'{"x": ' + b"[" * 65 + b"]" * 65 + b"}", None, "invalid_value"),
    ("very deep list", b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None, "invalid_value"),
    ("deep object", b'{"x": ' + b'{"x":' * 65 + b"1" + b"}" * 65 + b"}", None, "invalid_value"),
    ("deep and cut", b"[" * 100_000, None, "invalid_value"),
    ("half a surrogate pair", b'{"user": "\\ud83d"}', "user", "invalid_value"),
    ("half a pair with text", b'{"user": "a\\ud83d b"}', "user", "invalid_value"),
    ("half a pair in a list", b'{"stop": ["\\udc00"]}', "stop", "invalid_value"),
    ("half a pair in an unknown field", b'{"x": {"y": "\\ud83dx"}}', "x", "invalid_value"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(("body", "param", "code"), [pytest.param(*case[1:], id=case[0]) for case in BROKEN])
async def test_broken_json(served: Served, path: str, body: bytes, param: str | None, code: str | None) -> None:
    response = await served.http.post(path, content=body, headers={"content-type": "application/json"})
    info = check_error(response.content)
    if param is not None and path in ("/tokenize", "/detokenize") and b"1e999" in body:
        return  # a number of an unknown field is never read
    assert (response.status_code, info.param, info.code) == (400, param, code)


async def test_depth_of_64_is_allowed(served: Served) -> None:
    body = json.dumps(BASE[CHAT])[:-1] + ', "x": ' + "[" * 63 + "]" * 63 + "}"
    response = await served.http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200


async def test_brackets_in_strings_are_no_depth(served: Served) -> None:
    text = "[{" * 500 + '"\\' + "[" * 500
    assert (await served.post(CHAT, {**BASE[CHAT], **user(text)})).status_code == 200


@GENERATING
@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
async def test_content_type(served: Served, path: str, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = await served.http.post(path, content=json.dumps(BASE[path]), headers=headers)
    assert response.status_code == 415
    check_error(response.content)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/ld+json"])
async def test_kinds_of_json(served: Served, kind: str) -> None:
    response = await served.http.post(CHAT, content=json.dumps(BASE[CHAT]), headers={"content-type": kind})
    assert response.status_code == 200


async def test_unknown_route_and_method(served: Served) -> None:
    response = await served.http.get("/v1/nothing")
    assert response.status_code == 404
    assert check_error(response.content).code is None
    for path in ("/v1/completions/", "//v1/completions", "/V1/completions", "/v1/models/"):
        assert (await served.post(path, {})).status_code == 404

    response = await served.http.get(CHAT)
    assert response.status_code == 405
    assert response.headers["allow"] == "OPTIONS, POST"
    check_error(response.content)
    response = await served.http.delete("/v1/models")
    assert response.status_code == 405 and response.headers["allow"] == "GET, HEAD, OPTIONS"


@STREAMED
async def test_stream_options_need_a_stream(served: Served, stream: bool) -> None:
    for path in (COMPLETIONS, CHAT):
        response = await served.post(path, {**BASE[path], "stream": stream, "stream_options": {"include_usage": True}})
        assert response.status_code == (200 if stream else 400)
        if not stream:
            info = check_error(response.content)
            assert (info.param, info.code) == ("stream_options", "invalid_value")


@GENERATING
async def test_large_body(server: Server, path: str) -> None:
    served = await server(max_body_bytes=2048)
    response = await served.post(path, {**BASE[path], "user": "x" * 3000})
    assert response.status_code == 413
    assert response.headers["connection"] == "close"
    check_error(response.content)

    async def pieces() -> Any:
        for _ in range(100):
            yield b" " * 1000

    response = await served.http.post(path, content=pieces(), headers={"content-type": "application/json"})
    assert response.status_code == 413


async def test_unknown_fields_are_reported(served: Served) -> None:
    body = {**BASE[CHAT], "foo": 1, "bad name\r\nx: y": 2, "metadata": {"a": "b"}, "store": True, "user": "me"}
    response = await served.post(CHAT, body)
    assert response.status_code == 200
    assert response.headers["x-octavo-ignored-fields"] == "foo, ?, metadata, store"
    streamed = await served.post(CHAT, {**BASE[CHAT], "foo": 1, "stream": True})
    assert streamed.headers["x-octavo-ignored-fields"] == "foo"
    plain = await served.post(CHAT, BASE[CHAT])
    assert "x-octavo-ignored-fields" not in plain.headers


async def test_strict_mode(server: Server) -> None:
    served = await server(strict=True)
    response = await served.post(CHAT, {**BASE[CHAT], "foo": 1})
    info = check_error(response.content)
    assert (response.status_code, info.param, info.code) == (400, "foo", "unknown_parameter")
    assert (await served.post(CHAT, {**BASE[CHAT], "store": True})).status_code == 200

    twice = json.dumps(BASE[CHAT])[:-1] + ', "max_tokens": 3}'
    response = await served.http.post(CHAT, content=twice, headers={"content-type": "application/json"})
    assert response.status_code == 400
    lax = await server()
    response = await lax.http.post(CHAT, content=twice, headers={"content-type": "application/json"})
    assert response.json()["usage"]["completion_tokens"] == 3


async def test_values_that_ask_for_nothing_pass(served: Served) -> None:
    nothing = {
        "best_of": 1, "suffix": "", "tools": [], "response_format": {"type": "text"}, "tool_choice": "none", "functions": [],
        "use_beam_search": False, "bad_words": [], "length_penalty": 1.0, "logit_bias": {}, "stop": [], "n": None, "audio": None,
        "modalities": ["text"], "cache_salt": None,
    }  # fmt: skip
    for path in (COMPLETIONS, CHAT):
        response = await served.post(path, {**BASE[path], **nothing})
        assert response.status_code == 200, response.text
        assert "x-octavo-ignored-fields" not in response.headers
    assert (await served.post(CHAT, {**BASE[CHAT], "tools": [TOOL], "tool_choice": "none"})).status_code == 200


async def test_empty_prompt(server: Server) -> None:
    with_bos = await server()
    response = await with_bos.post(COMPLETIONS, {**BASE[COMPLETIONS], "prompt": ""})
    assert response.status_code == 200 and response.json()["usage"]["prompt_tokens"] == 1
    without_bos = await server(tokenizer={"bos": None})
    for prompt in ("", [""], ["a", ""]):
        response = await without_bos.post(COMPLETIONS, {**BASE[COMPLETIONS], "prompt": prompt})
        info = check_error(response.content)
        assert (response.status_code, info.param) == (400, "prompt")
    assert (await without_bos.post(COMPLETIONS, BASE[COMPLETIONS])).status_code == 200


async def test_nul_is_text(served: Served) -> None:
    response = await served.post(COMPLETIONS, {**BASE[COMPLETIONS], "prompt": "a\0b", "echo": True})
    assert response.json()["choices"][0]["text"].startswith("a\0b")


@STREAMED
@GENERATING
async def test_queue_full(served: Served, path: str, stream: bool) -> None:
    full = {"prompt": "#full#"} if path == COMPLETIONS else user("#full#")
    response = await served.post(path, {**BASE[path], "stream": stream, **full})
    info = check_error(response.content)
    assert (response.status_code, info.type, info.code) == (503, "server_error", "overloaded")
    assert int(response.headers["retry-after"]) >= 1


@STREAMED
@GENERATING
async def test_more_than_the_pool_ever_holds(served: Served, path: str, stream: bool) -> None:
    large = {"prompt": "#pool#"} if path == COMPLETIONS else user("#pool#")
    response = await served.post(path, {**BASE[path], "stream": stream, **large})
    info = check_error(response.content)
    assert (response.status_code, info.code) == (400, "context_length_exceeded")
    assert info.param == ("prompt" if path == COMPLETIONS else "messages")


@STREAMED
async def test_one_of_several_prompts_is_refused(served: Served, stream: bool) -> None:
    body = {**BASE[COMPLETIONS], "prompt": ["#hold#", "#full#"], "stream": stream}
    assert (await served.post(COMPLETIONS, body)).status_code == 503
    assert not served.engine.running


@GENERATING
@STREAMED
async def test_failure_before_the_first_token(served: Served, path: str, stream: bool) -> None:
    failing = {"prompt": "#fail 0#"} if path == COMPLETIONS else user("#fail 0#")
    response = await served.post(path, {**BASE[path], "stream": stream, **failing})
    info = check_error(response.content)
    assert (response.status_code, info.type, info.code) == (500, "server_error", "internal_error")


@GENERATING
async def test_failure_in_mid_stream(served: Served, path: str) -> None:
    failing = {"prompt": "#fail 2#"} if path == COMPLETIONS else user("#fail 2#")
    whole = await served.post(path, {**BASE[path], **failing})
    assert whole.status_code == 500

    response = await served.post(path, {**BASE[path], "stream": True, **failing})
    assert response.status_code == 200
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert "[DONE]" not in events
    assert check_error(events[-1].encode()).code == "internal_error"
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks and all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])


@GENERATING
async def test_starting_and_dead(server: Server, path: str) -> None:
    served = await server(start=False)
    for stream in (False, True):
        response = await served.post(path, {**BASE[path], "stream": stream})
        assert response.status_code == 503 and response.headers["retry-after"]
        check_error(response.content)
    await served.client.start()
    assert (await served.post(path, BASE[path])).status_code == 200
    served.engine.kill()
    for _ in range(100):
        response = await served.post(path, BASE[path])
        if response.status_code != 200:
            break
    assert response.status_code == 503
    assert check_error(response.content).code == "engine_dead"


async def test_bugs_are_answered_without_detail(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise KeyError("/secret/path")

    monkeypatch.setattr(type(served.client), "validate", broken)
    response = await served.post(CHAT, BASE[CHAT])
    info = check_error(response.content)
    assert (response.status_code, info.code) == (500, "internal_error")


async def test_tokenize_and_detokenize_share_the_rules(served: Served) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/tokenize", {"prompt": "x"}, "model"),
        ("/tokenize", {"model": MODEL}, "prompt"),
        ("/tokenize", {"model": MODEL, "prompt": 1}, "prompt"),
        ("/tokenize", {"model": MODEL, "messages": []}, "messages"),
        ("/tokenize", {"model": MODEL, **chat({"role": "king", "content": "x"})}, "messages[0].role"),
        ("/tokenize", {"model": MODEL, **user(IMAGE)}, "messages[0].content[1].image_url"),
        ("/detokenize", {"model": MODEL}, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": [-1]}, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": [True]}, "tokens"),
    ]
    for path, body, param in cases:
        response = await served.post(path, body)
        assert response.status_code == 400
        assert check_error(response.content).param == param
    response = await served.post("/tokenize", {"model": "other", "prompt": "x"})
    assert response.status_code == 404 and check_error(response.content).code == "model_not_found"
