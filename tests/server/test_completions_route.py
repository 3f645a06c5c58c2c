"""POST /v1/completions: what comes back, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from played_engine import CONTEXT, MODEL, Served, Server

PATH = "/v1/completions"


def body(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hello", "max_tokens": 6, "seed": 1, **changes}


async def whole(served: Served, **changes: Any) -> dict[str, Any]:
    response = await served.post(PATH, body(**changes))
    assert response.status_code == 200, response.text
    return response.json()


async def events(served: Served, **changes: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end in [DONE]."""
    response = await served.post(PATH, body(stream=True, **changes))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A choice put together from its chunks."""
    mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    scored = [choice["logprobs"] for choice in mine if choice["logprobs"]]
    assert [choice["finish_reason"] for choice in mine].count(None) == len(mine) - 1
    result = {
        "text": "".join(choice["text"] for choice in mine),
        "finish_reason": mine[-1]["finish_reason"],
        "stop_reason": mine[-1]["stop_reason"],
        "token_ids": [i for choice in mine for i in choice.get("token_ids") or ()],
    }
    if scored:
        result["logprobs"] = {key: [x for part in scored for x in part[key]] for key in scored[0]}
    return result


async def test_shape(served: Served) -> None:
    answer = await whole(served)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == MODEL
    assert answer["system_fingerprint"].startswith("octavo-")
    [choice] = answer["choices"]
    assert len(choice["text"]) == 6 and choice["finish_reason"] == "length" and choice["index"] == 0
    assert answer["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


async def test_defaults(served: Served) -> None:
    answer = (await served.post(PATH, {"model": MODEL, "prompt": "x" * 40})).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


VARIANTS: list[dict[str, Any]] = [
    {},
    {"prompt": "#say Grüße, 漢字 👍🏽 T́#", "max_tokens": 100},
    {"prompt": "#say Grüße, 漢字 👍🏽 T́#", "max_tokens": 9},
    {"prompt": "#say The end is near.#", "stop": "is ne", "max_tokens": 100},
    {
        "prompt": "#say The end is near.#",
        "stop": ["zzz", "is ne"],
        "include_stop_str_in_output": True,
        "max_tokens": 100,
    },
    {"prompt": "#say abc#", "ignore_eos": True, "max_tokens": 8, "skip_special_tokens": False},
    {"prompt": "#say abc#", "stop_token_ids": [ord("b")], "max_tokens": 8},
    {"echo": True},
    {"logprobs": 3},
    {"logprobs": 0},
    {"echo": True, "logprobs": 2},
    {"echo": True, "logprobs": 2, "n": 3, "temperature": 1, "seed": 5},
    {"prompt": ["ab", "#say xyz#", "hi"], "n": 2, "temperature": 0.7, "seed": 1, "echo": True},
    {"max_tokens": 0, "echo": True, "logprobs": 1},
    {"return_token_ids": True},
    {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 1},
]


@pytest.mark.parametrize("tokens_per_step", [1, 3])
@pytest.mark.parametrize("changes", VARIANTS, ids=range(len(VARIANTS)))
async def test_stream_says_the_same_as_the_whole(served: Served, changes: dict[str, Any], tokens_per_step: int) -> None:
    served.engine.tokens_per_step = tokens_per_step
    answer = await whole(served, **changes)
    chunks = await events(served, stream_options={"include_usage": True}, **changes)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == answer["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    for choice in answer["choices"]:
        streamed = joined(chunks, choice["index"])
        for key in ("text", "finish_reason", "stop_reason"):
            assert streamed[key] == choice[key], key
        if choice["logprobs"]:
            assert streamed["logprobs"] == choice["logprobs"]
        if changes.get("return_token_ids"):
            assert streamed["token_ids"] == choice["token_ids"]


async def test_several_prompts_times_n(served: Served) -> None:
    prompts = ["ab", "cd", "efg"]
    answer = await whole(served, prompt=prompts, n=2, temperature=1, seed=9)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert len({choice["text"] for choice in answer["choices"]}) == 6
    assert answer["usage"]["prompt_tokens"] == 7 and answer["usage"]["completion_tokens"] == 36
    again = await whole(served, prompt=prompts, n=2, temperature=1, seed=9)
    assert [c["text"] for c in again["choices"]] == [c["text"] for c in answer["choices"]]
    alone = await whole(served, prompt="cd", n=2, temperature=1, seed=9)
    assert [c["text"] for c in alone["choices"]] == [c["text"] for c in answer["choices"][2:4]]


async def test_token_ids_as_prompt(served: Served) -> None:
    text = await whole(served, prompt="hello")
    ids = await whole(served, prompt=list(b"hello"))
    assert ids["choices"][0]["text"] == text["choices"][0]["text"]
    several = await whole(served, prompt=[list(b"hello"), list(b"x")], echo=True)
    assert several["choices"][0]["text"].startswith("hello")


async def test_logprobs(served: Served) -> None:
    answer = await whole(served, prompt="#say abc#", logprobs=3, max_tokens=10)
    scored = answer["choices"][0]["logprobs"]
    assert scored["tokens"] == ["a", "b", "c", "<eos>"]
    assert scored["text_offset"] == [0, 1, 2, 3]
    assert scored["token_logprobs"] == [-0.2] * 4
    assert scored["top_logprobs"][0] == {"a": -0.2, "b": -0.1, "d": -9999.0}
    named = await whole(served, prompt="#say abc#", logprobs=1, max_tokens=1, return_tokens_as_token_ids=True)
    assert named["choices"][0]["logprobs"]["tokens"] == ["token_id:97"]


async def test_echo_with_logprobs(served: Served) -> None:
    answer = await whole(served, prompt="hey", echo=True, logprobs=1, max_tokens=2)
    [choice] = answer["choices"]
    scored = choice["logprobs"]
    assert choice["text"].startswith("hey") and len(choice["text"]) == 5
    assert scored["tokens"][:3] == ["h", "e", "y"] and len(scored["tokens"]) == 5
    assert scored["token_logprobs"][0] is None and scored["top_logprobs"][0] is None
    assert all(value is not None for value in scored["token_logprobs"][1:])
    assert scored["text_offset"] == [0, 1, 2, 3, 4]


async def test_scoring_only(served: Served) -> None:
    answer = await whole(served, prompt="Your answer: Yes", max_tokens=0, echo=True, logprobs=1)
    [choice] = answer["choices"]
    assert choice["text"] == "Your answer: Yes" and len(choice["logprobs"]["tokens"]) == 16
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["total_tokens"] == 16


async def test_prompt_logprobs(served: Served) -> None:
    answer = await whole(served, prompt="hey", prompt_logprobs=1, max_tokens=1)
    scores = answer["choices"][0]["prompt_logprobs"]
    assert scores[0] is None and len(scores) == 3
    assert scores[1]["101"] == {"logprob": -0.2, "rank": 2, "decoded_token": "e"}


@pytest.mark.parametrize(
    ("options", "last", "others"),
    [
        (None, False, False),
        ({}, False, False),
        ({"include_usage": False}, False, False),
        ({"include_usage": True}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
    ],
)
async def test_usage_in_streams(served: Served, options: dict[str, Any] | None, last: bool, others: bool) -> None:
    chunks = await events(served, stream_options=options)
    counted = [chunk for chunk in chunks if not chunk["choices"]]
    assert len(counted) == (1 if last else 0)
    told = [chunk.get("usage") for chunk in chunks if chunk["choices"]]
    if others:
        totals = [usage["completion_tokens"] for usage in told]
        assert totals == sorted(totals) and totals[-1] == 6 and totals[0] < 6
    else:
        assert not any(told)
    assert all(("usage" in chunk) == last for chunk in chunks)


async def test_usage_can_be_forced(server: Server) -> None:
    served = await server(enable_force_include_usage=True)
    assert (await events(served))[-1]["usage"]["completion_tokens"] == 6


async def test_model_defaults_are_below_the_request(server: Server) -> None:
    served = await server(default_sampling={"temperature": 0.0, "top_k": 7, "max_tokens": 3})
    await whole(served)
    await whole(served, temperature=0.9, top_k=2)
    first, second = (seen.sampling_params for seen in served.engine.seen)
    assert first.greedy and second.temperature == 0.9 and second.top_k == 2


async def test_every_sampling_field_reaches_the_engine(served: Served) -> None:
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 11, "min_p": 0.1, "seed": 42, "min_tokens": 2, "presence_penalty": 0.1,
        "frequency_penalty": 0.2, "repetition_penalty": 1.1, "allowed_token_ids": [97, 98], "skip_special_tokens": False,
        "spaces_between_special_tokens": False, "ignore_eos": True, "logprobs": 2, "max_tokens": 4,
    }  # fmt: skip
    await whole(served, **given, stop_token_ids=[5], logit_bias={"97": 3, "98": -1.5}, cache_salt="s")
    request = served.engine.seen[-1]
    for name, value in given.items():
        assert getattr(request.sampling_params, name) == value, name
    assert request.sampling_params.logit_bias == {97: 3.0, 98: -1.5}
    assert request.stop_token_ids == [5] and request.cache_salt == "s"


async def test_priority(server: Server) -> None:
    served = await server(engine={"scheduling_policy": "priority"})
    await whole(served, priority=-3)
    assert served.engine.seen[-1].priority == -3


async def test_truncation(served: Served) -> None:
    await whole(served, prompt="abcdefgh", truncate_prompt_tokens=3)
    assert served.engine.seen[-1].prompt_token_ids == list(b"fgh")
    await whole(served, prompt="x" * 5000, truncate_prompt_tokens=-1, max_tokens=10)
    assert len(served.engine.seen[-1].prompt_token_ids) == CONTEXT - 10


async def test_special_tokens_of_prompts(served: Served) -> None:
    await whole(served, prompt="<|im_start|>x", add_special_tokens=False)
    assert served.engine.seen[-1].prompt_token_ids == [258, ord("x")]


async def test_a_long_prompt_is_encoded_beside_the_loop(served: Served) -> None:
    answer = await served.post(PATH, body(prompt="x" * 20_000))
    assert answer.status_code == 400 and "20000 tokens" in answer.json()["error"]["message"]
    await whole(served, prompt="x" * 20_000, truncate_prompt_tokens=5)
    assert served.engine.seen[-1].prompt_token_ids == list(b"xxxxx")


async def test_what_cannot_fit_is_not_encoded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest token is `<|im_start|>`, 12 bytes: so many bytes are more tokens than the context, whatever they are."""
    monkeypatch.setattr(served.client.tokenizer, "encode", None)
    answer = await served.post(PATH, body(prompt="x" * 30_000))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "at least 2500 tokens" in error["message"] and "2048" in error["message"]
