"""Shapes of messages: what OpenAI's clients send is taken, anything else is refused with its place."""

import pytest

from octavo.errors import InvalidRequestError
from octavo.tokenizer.messages import MAX_MESSAGES, normalise_messages


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "user", "content": "hi"}, "hi"),
        ({"role": "user", "content": ""}, ""),
        ({"role": "assistant", "content": ""}, ""),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"role": "system", "content": [{"type": "text", "text": "be brief"}]}, "be brief"),
        ({"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "42"}]}, "42"),
        ({"role": "user", "content": ["plain", {"text": "untyped"}]}, "plain\nuntyped"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"role": "assistant", "content": None, "refusal": "no"}, ""),
        ({"role": "user", "content": []}, ""),
        ({"role": "developer", "content": "x"}, "x"),
    ],
)
def test_content(message, content):
    assert normalise_messages([message])[0]["content"] == content


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_tool_calls_need_no_content(content):
    [message] = normalise_messages([{"role": "assistant", "tool_calls": [CALL], **content}])
    assert message["content"] == ""
    assert message["tool_calls"] == [{**CALL, "function": {"name": "f", "arguments": {"x": 1}}}]


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [('{"x": {}}', {"x": {}}), ("", {}), (None, {}), ({"y": 2}, {"y": 2}), ("{broken", "{broken"), ("[1]", "[1]")],
)
def test_arguments(arguments, seen):
    call = {"function": {"name": "f", "arguments": arguments}}
    [message] = normalise_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0] == {"type": "function", "function": {"name": "f", "arguments": seen}}


def test_null_fields_are_left_out_and_others_stay():
    given = {"role": "user", "content": "hi", "name": "ann", "tool_calls": None, "audio": None, "extra": {"a": 1}}
    assert normalise_messages([given]) == [{"role": "user", "content": "hi", "name": "ann", "extra": {"a": 1}}]
    assert given["audio"] is None  # the caller's own is untouched


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        (None, "messages", "missing_required_parameter"),
        ("hi", "messages", "invalid_type"),
        ({}, "messages", "invalid_type"),
        ([], "messages", "empty_array"),
        ([{"role": "user", "content": ""}] * (MAX_MESSAGES + 1), "messages", "array_above_max_length"),
        ([None], "messages[0]", "invalid_type"),
        ([{"content": "x"}], "messages[0].role", "missing_required_parameter"),
        ([{"role": 1, "content": "x"}], "messages[0].role", "invalid_type"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role", "invalid_value"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], "messages[1].content", "missing_required_parameter"),
        ([{"role": "assistant", "content": None}], "messages[0].content", "missing_required_parameter"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content", "missing_required_parameter"),
        ([{"role": "user", "content": 3}], "messages[0].content", "invalid_type"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content", "invalid_type"),
        ([{"role": "user", "content": [3]}], "messages[0].content[0]", "invalid_type"),
        ([{"role": "user", "content": [{}]}], "messages[0].content[0].type", "missing_required_parameter"),
        ([{"role": "user", "content": [{"type": []}]}], "messages[0].content[0].type", "invalid_type"),
        ([{"role": "user", "content": [{"type": "smell"}]}], "messages[0].content[0].type", "invalid_value"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "missing_required_parameter"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text", "invalid_type"),
        ([{"role": "user", "content": ["x", {"type": "image_url", "image_url": {"url": "file:///etc"}}]}], "messages[0].content[1]", "unsupported_value"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0]", "unsupported_value"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls", "invalid_type"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "messages[0].tool_calls[0]", "invalid_type"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0].function", "missing_required_parameter"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}], "messages[0].tool_calls[0].function", "invalid_type"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}], "messages[0].tool_calls[0].function.arguments", "invalid_type"),
    ],
)  # fmt: skip
def test_refusals_name_the_place(messages, param, code):
    with pytest.raises(InvalidRequestError) as caught:
        normalise_messages(messages)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert str(caught.value).startswith(param)
    assert len(str(caught.value)) < 300
    assert "etc" not in str(caught.value)
