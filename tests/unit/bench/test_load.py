"""Needs Python only. The load generator against servers that say exactly what they are told to."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from octavo.bench.datasets import BenchRequest, sharegpt_requests
from octavo.bench.http import Exchange, HttpError, Target, get
from octavo.bench.load import closed_loop, model_of, open_loop, parse_gauges
from octavo.errors import ConfigError

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


STREAM = [
    CHUNKED,
    chunk(event(choices=[{"text": "a"}])),
    chunk(event(choices=[{"text": "b"}])[:9]),  # an event that two chunks share
    chunk(event(choices=[{"text": "b"}])[9:]),
    chunk(event(choices=[{"text": "", "finish_reason": "length"}])),
    chunk(event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 2})),
    chunk(b"data: [DONE]\n\n") + chunk(b""),
]


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://127.0.0.1:8000", Target("127.0.0.1", 8000)),
        ("localhost:8000", Target("localhost", 8000)),
        ("http://[::1]:8000/", Target("::1", 8000)),
        ("https://example.org/v1", Target("example.org", 443, True)),
        ("http://example.org/deep/path/v1/", Target("example.org", 80, False, "/deep/path")),
    ],
)
def test_targets(url: str, target: Target) -> None:
    assert Target.parse(url) == target


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:b", "http://a:99999"])
def test_what_is_no_target(url: str) -> None:
    with pytest.raises(ConfigError, match="url = "):
        Target.parse(url)


@pytest.mark.parametrize(
    "pieces",
    [
        [CHUNKED, chunk(b"one\r\ntw"), chunk(b"o\nthree"), chunk(b"")],
        [OK + b"Content-Length: 14\r\n\r\none\r", b"\ntwo\nthree"],
        [OK + b"\r\none\ntwo\n", b"three"],
    ],
)
async def test_lines_of_every_kind_of_body(serve_bytes: Any, pieces: list[bytes]) -> None:
    async with serve_bytes(pieces, 0.001) as server, Exchange(Target("127.0.0.1", server.port), "GET", "/") as response:
        assert [line async for line in response.lines()] == [b"one", b"two", b"three"]


async def test_a_key_is_sent(serve_bytes: Any) -> None:
    async with serve_bytes([OK + b"Content-Length: 2\r\n\r\nok"]) as server:
        assert await get(Target("127.0.0.1", server.port, key="secret", path="/p"), "/x") == (200, b"ok")
    assert server.requests[0].startswith(b"GET /p/x HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret\r\n" in server.requests[0]


async def test_nobody_there(unused_tcp_port: int) -> None:
    with pytest.raises(HttpError, match="no answer from"):
        await get(Target("127.0.0.1", unused_tcp_port), "/")


@pytest.mark.parametrize("pieces", [[b""], [b"SSH-2.0\r\n"], [OK + b"Content-Length: 5\r\n\r\nab"]])
async def test_no_http(serve_bytes: Any, pieces: list[bytes]) -> None:
    async with serve_bytes(pieces) as server:
        with pytest.raises(HttpError):
            await get(Target("127.0.0.1", server.port), "/")


async def test_a_record_of_a_stream(serve_bytes: Any) -> None:
    done = []
    async with serve_bytes(STREAM, 0.001) as server:
        run = await closed_loop(Target("127.0.0.1", server.port), "m", [BenchRequest("hi", 2)], 1, done.append)
    (record,) = run.records
    assert done == [record]
    assert record.error is None
    assert (record.num_prompt, record.num_output, len(record.stamps)) == (7, 2, 2)
    assert record.began < record.stamps[0] < record.stamps[1] < record.ended <= record.began + run.seconds
    body = next(json.loads(r.partition(b"\r\n\r\n")[2]) for r in server.requests if r.startswith(b"POST"))
    assert body["prompt"] == "hi"
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"], body["stream"]) == (2, 2, True, True)


async def test_a_closed_loop_keeps_so_many_open(serve_bytes: Any) -> None:
    async with serve_bytes(STREAM, 0.005) as server:
        target = Target("127.0.0.1", server.port)
        run = await closed_loop(target, "m", [BenchRequest("hi", 2)] * 12, 3)
        posts = sum(request.startswith(b"POST") for request in server.requests)
    assert [record.num_output for record in run.records] == [2] * 12
    assert posts == 12
    # One more at most: the sampler asks for /metrics meanwhile.
    assert 3 <= server.most_open <= 4


@pytest.mark.parametrize("gauges", [True, False])
async def test_gauges_are_read_only_if_wanted(serve_bytes: Any, gauges: bool) -> None:
    async with serve_bytes(STREAM, 0.005) as server:
        await closed_loop(Target("127.0.0.1", server.port), "m", [BenchRequest("hi", 2)], 1, gauges=gauges)
    assert any(request.startswith(b"GET /metrics") for request in server.requests) == gauges


async def test_an_open_loop_does_not_wait(serve_bytes: Any) -> None:
    async with serve_bytes(STREAM, 0.02) as server:
        run = await open_loop(Target("127.0.0.1", server.port), "m", [BenchRequest("hi", 2)] * 20, 1000.0, 1)
    assert all(record.error is None for record in run.records)
    assert server.most_open > 5


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy"], "status 503: busy"),
        ([OK + b"\r\n" + event(error={"message": "gone"})], "gone"),
        ([OK + b"\r\n" + event(choices=[{"text": "a"}])], "without usage"),
        ([OK + b"\r\ndata: {no json\n\n"], "Expecting"),
        ([CHUNKED + b"5\r\nab"], "bytes"),
    ],
)
async def test_what_goes_wrong_is_recorded(serve_bytes: Any, pieces: list[bytes], said: str) -> None:
    async with serve_bytes(pieces) as server:
        run = await closed_loop(Target("127.0.0.1", server.port), "m", [BenchRequest("hi", 2)], 1)
    assert said in (run.records[0].error or "")


async def test_the_first_model(serve_bytes: Any) -> None:
    body = b'{"data": [{"id": "m"}, {"id": "n"}]}'
    async with serve_bytes([OK + b"\r\n" + body]) as server:
        assert await model_of(Target("127.0.0.1", server.port)) == "m"
    async with serve_bytes([OK + b"\r\n" + b'{"data": []}']) as server:
        with pytest.raises(ConfigError, match="--model"):
            await model_of(Target("127.0.0.1", server.port))


def test_gauges_of_a_metrics_page() -> None:
    text = """# HELP vllm:kv_cache_usage_perc Share
vllm:kv_cache_usage_perc{model_name="a b"} 0.25
vllm:num_requests_running{model_name="a"} 3.0
vllm:num_requests_running_other{model_name="a"} 9.0
vllm:num_preemptions_total{model_name="a"} 2.0
octavo:kv_slots_used_ratio{model_name="a"} 0.975
"""
    sample = parse_gauges(text, 1.0)
    assert (sample.usage, sample.running, sample.preemptions, sample.slots, sample.waiting) == (0.25, 3.0, 2.0, 0.975, None)


async def test_gauges_are_sampled_during_a_run(serve_bytes: Any) -> None:
    # The same bytes answer both: a stream of tokens that is a page of metrics, too.
    page = b'octavo:kv_slots_used_ratio 0.5\nvllm:kv_cache_usage_perc{m="1"} 0.1\n' + event(
        choices=[{"text": "a"}], usage={"prompt_tokens": 1, "completion_tokens": 1}
    )
    async with serve_bytes([OK + b"\r\n", page]) as server:
        run = await closed_loop(Target("127.0.0.1", server.port), "m", [BenchRequest("hi", 1)] * 3, 1)
        await asyncio.sleep(0)
    assert [(sample.slots, sample.usage) for sample in run.samples][:1] == [(0.5, 0.1)]


def test_conversations_of_a_file_cut_off_in_one(tmp_path) -> None:
    whole = '[{"conversations": [{"value": "hello"}, {"value": "hi there"}]}, {"conversations": [{"value": "a"}, {"val'
    path = tmp_path / "cut.json"
    path.write_text(whole)
    requests = sharegpt_requests(path, 2, None, 0)
    assert [r.prompt for r in requests] == ["hello", "hello"]


def test_a_file_without_conversations_is_refused(tmp_path) -> None:
    path = tmp_path / "no.json"
    path.write_text("no json at all")
    with pytest.raises(ConfigError, match="no conversation"):
        sharegpt_requests(path, 2, None, 0)
