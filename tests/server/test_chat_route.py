"""POST /v1/chat/completions: what comes back, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from played_engine import CONTEXT, MODEL, Served, Server

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def body(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HI, "max_tokens": 6, "seed": 1, **changes}


async def whole(served: Served, **changes: Any) -> dict[str, Any]:
    response = await served.post(PATH, body(**changes))
    assert response.status_code == 200, response.text
    return response.json()


async def events(served: Served, **changes: Any) -> list[dict[str, Any]]:
    response = await served.post(PATH, body(stream=True, **changes))
    assert response.status_code == 200, response.text
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"#say {text}#"}]


def prompt_of(served: Served) -> str:
    names = {256: "<bos>", 257: "<eos>", 258: "<|im_start|>", 259: "<|im_end|>"}
    return "".join(names.get(i) or chr(i) for i in served.engine.seen[-1].prompt_token_ids)


async def test_shape(served: Served) -> None:
    answer = await whole(served, messages=say("Hello!"), max_tokens=50)
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello!", "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] is None and choice["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 7


async def test_first_chunk_has_the_role_and_last_the_reason(served: Served) -> None:
    chunks = await events(served)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in chunk for chunk in chunks)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"messages": say("Grüße, 漢字 👍🏽"), "max_tokens": 100},
    {"messages": say("one two three"), "stop": ["two"], "max_tokens": 100},
    {"n": 3, "temperature": 1, "seed": 7},
    {"logprobs": True, "top_logprobs": 2},
    {"logprobs": True},
    {"return_token_ids": True},
]


@pytest.mark.parametrize("tokens_per_step", [1, 3])
@pytest.mark.parametrize("changes", VARIANTS, ids=range(len(VARIANTS)))
async def test_stream_says_the_same_as_the_whole(served: Served, changes: dict[str, Any], tokens_per_step: int) -> None:
    served.engine.tokens_per_step = tokens_per_step
    answer = await whole(served, **changes)
    chunks = await events(served, stream_options={"include_usage": True}, **changes)
    assert chunks[-1]["usage"] == answer["usage"] and chunks[-1]["choices"] == []
    for choice in answer["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["delta"]["content"] for c in mine) == choice["message"]["content"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        scored = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert scored == (choice["logprobs"]["content"] if choice["logprobs"] else [])
        if "return_token_ids" in changes:
            assert [i for c in mine for i in c.get("token_ids") or ()] == choice["token_ids"]
    if "return_token_ids" in changes:
        assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"] == served.engine.seen[-1].prompt_token_ids


async def test_choices_differ_and_repeat(served: Served) -> None:
    first = await whole(served, n=3, temperature=1, seed=7)
    second = await whole(served, n=3, temperature=1, seed=7)
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert len(set(texts)) == 3
    assert texts == [choice["message"]["content"] for choice in second["choices"]]
    assert first["usage"]["completion_tokens"] == 18


async def test_bytes_of_logprobs_join_to_the_text(served: Served) -> None:
    answer = await whole(served, messages=say("漢字👍"), logprobs=True, max_tokens=100)
    content = answer["choices"][0]["logprobs"]["content"]
    data = b"".join(bytes(entry["bytes"]) for entry in content)
    assert data == "漢字👍<eos>".encode()


async def test_top_logprobs_are_ordered_and_finite(served: Served) -> None:
    answer = await whole(served, messages=say("a"), logprobs=True, top_logprobs=3, max_tokens=1)
    [entry] = answer["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"]) == ("a", -0.2)
    assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [
        ("b", -0.1),
        ("a", -0.2),
        ("d", -9999.0),
    ]


async def test_max_tokens_defaults_to_the_rest_of_the_context(served: Served) -> None:
    answer = await whole(served, max_tokens=None)
    assert answer["usage"]["total_tokens"] == CONTEXT
    answer = await whole(served, max_tokens=None, max_completion_tokens=5)
    assert answer["usage"]["completion_tokens"] == 5


async def test_models_default_of_max_tokens(server: Server) -> None:
    served = await server(default_sampling={"max_tokens": 9})
    assert (await whole(served, max_tokens=None))["usage"]["completion_tokens"] == 9
    large = await server(default_sampling={"max_tokens": 10**6})
    assert (await whole(large, max_tokens=None))["usage"]["total_tokens"] == CONTEXT


async def test_the_template_makes_the_prompt(served: Served) -> None:
    await whole(served, messages=[{"role": "system", "content": "be"}, *HI])
    assert (
        prompt_of(served) == "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    await whole(served, add_generation_prompt=False, chat_template_kwargs={"suffix": "!"})
    assert prompt_of(served) == "<|im_start|>user\nhi<|im_end|>\n!"
    await whole(served, add_special_tokens=True)
    assert prompt_of(served).startswith("<|im_start|>user")


async def test_continued_message(served: Served) -> None:
    messages = [*HI, {"role": "assistant", "content": "This is a song"}]
    for echo in (False, True):
        answer = await whole(
            served, messages=messages, continue_final_message=True, add_generation_prompt=False, echo=echo
        )
        assert prompt_of(served).endswith("<|im_start|>assistant\nThis is a song")
        message = answer["choices"][0]["message"]
        assert message["role"] == "assistant"
        assert message["content"].startswith("This is a song") == echo
    chunks = await events(served, messages=messages, continue_final_message=True, echo=True)
    assert chunks[1]["choices"][0]["delta"]["content"] == "This is a song"


SHAPES: list[list[dict[str, Any]]] = [
    [*HI, {"role": "assistant", "content": ""}, *HI],
    [{"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, *HI],
    [{"role": "developer", "content": "a"}, *HI],
    [
        *HI,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        *HI,
    ],
    [*HI, {"role": "assistant", "content": [], "tool_calls": [{"type": "function", "function": {"name": "f"}}]}, *HI],
    [{"role": "user", "content": "hi", "name": "someone", "extra": 1}],
]


@pytest.mark.parametrize("messages", SHAPES, ids=range(len(SHAPES)))
async def test_openai_shapes_of_messages(served: Served, messages: list[dict[str, Any]]) -> None:
    await whole(served, messages=messages)


async def test_without_a_template(server: Server) -> None:
    served = await server(tokenizer={"template": None})
    response = await served.post(PATH, body())
    assert response.status_code == 400 and response.json()["error"]["param"] == "messages"
    given = await server(
        tokenizer={"template": None}, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    await whole(given)
    assert prompt_of(given) == "hi"


async def test_response_role(server: Server) -> None:
    served = await server(response_role="bot")
    assert (await whole(served))["choices"][0]["message"]["role"] == "bot"
    assert (await events(served))[0]["choices"][0]["delta"]["role"] == "bot"
