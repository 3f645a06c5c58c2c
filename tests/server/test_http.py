"""The server on a real socket: malformed HTTP, slow and rude clients, the openai package, signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import played_engine
import pytest
from error_bodies import BASE, CHAT, COMPLETIONS, check_error
from played_engine import MODEL, Served, Server

from octavo.config import ServerArgs
from octavo.errors import ConfigError, EngineDeadError
from octavo.server import sse
from octavo.server.serving import open_socket, serve


class Listening:
    """A served app on a port of its own."""

    def __init__(self, served: Served, port: int) -> None:
        self.served = served
        self.engine = served.engine
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    async def raw(self, data: bytes, *, half_close: bool = False) -> bytes:
        """Everything that the server answers to `data` until it closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            if half_close:
                writer.write_eof()
            async with asyncio.timeout(10):
                return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def listening(server: Server, **options: Any) -> AsyncIterator[Listening]:
    served = await server(**options)
    args = served.app.state.server_args
    listener = open_socket("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)  # so that a deaf client is felt soon
    ports: list[int] = []
    stop = asyncio.Event()
    task = asyncio.create_task(
        serve(served.app, args, listener=listener, stop=stop, on_listening=lambda host, port: ports.append(port))
    )
    while not ports:
        await asyncio.sleep(0.001)
    yield Listening(served, ports[0])
    stop.set()
    await task


@pytest.fixture
async def live(server: Server) -> AsyncIterator[Listening]:
    async with listening(server, shutdown_timeout=0.2) as running:
        yield running


def head_and_body(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    return int(lines[0].split()[1]), {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:])}, body


def request(path: str, body: dict[str, Any], *, close: bool = True, extra: bytes = b"") -> bytes:
    data = json.dumps(body).encode()
    ending = b"Connection: close\r\n" if close else b""
    return (
        b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%s%sContent-Length: %d\r\n\r\n"
        % (path.encode(), ending, extra, len(data))
        + data
    )


# --- malformed and excessive HTTP ---

JSON_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
MALFORMED = {
    "noise": b"\x00\x01\x02 hello\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
    "wrong version": b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    "bad chunk size": JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "negative length": JSON_HEAD + b"Content-Length: -5\r\n\r\n",
    "two lengths": JSON_HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}}",
    "length and chunks": JSON_HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "space in a name": b"GET /health HTTP/1.1\r\nHo st: x\r\n\r\n",
    "control in a value": b"GET /health HTTP/1.1\r\nHost: x\x01\r\n\r\n",
    "TLS": bytes.fromhex("16030100a5010000a10303") + bytes(64),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
async def test_malformed(live: Listening, data: bytes) -> None:
    status, headers, body = head_and_body(await live.raw(data))
    assert status == 400 and headers["connection"] == "close" and headers["x-request-id"]
    check_error(body)
    async with httpx.AsyncClient() as http:
        assert (await http.get(live.url + "/health")).status_code == 200


EXCESSIVE = {
    "one long line": b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
    "one line without end": b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 300_000,
    "long path": b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "many lines": b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 100 + b"\r\n",
    "many long lines": b"GET /health HTTP/1.1\r\nHost: x\r\n" + (b"X: " + b"y" * 1000 + b"\r\n") * 80 + b"\r\n",
}


@pytest.mark.parametrize("data", EXCESSIVE.values(), ids=EXCESSIVE)
async def test_excessive_head(live: Listening, data: bytes) -> None:
    status, headers, body = head_and_body(await live.raw(data))
    assert status == 431 and headers["connection"] == "close"
    check_error(body)


async def test_heads_within_the_limits(live: Listening) -> None:
    lines = b"".join(b"X-%d: y\r\n" % i for i in range(97))
    data = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + lines + b"\r\n"
    assert head_and_body(await live.raw(data))[0] == 200
    data = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX: " + b"y" * 60_000 + b"\r\n\r\n"
    assert head_and_body(await live.raw(data))[0] == 200


async def test_slow_head_and_slow_body(server: Server) -> None:
    async with listening(server, body_timeout=0.2) as live:
        for data in (b"GET /health HT", JSON_HEAD, request(COMPLETIONS, BASE[COMPLETIONS])[:-3]):
            status, headers, body = head_and_body(await live.raw(data))
            assert status == 408 and headers["connection"] == "close"
            check_error(body)
        assert await live.raw(b"") == b""
        assert not live.engine.seen


async def test_drop_by_drop_is_too_slow(server: Server) -> None:
    """A byte now and then must not keep a connection open for ever."""
    async with listening(server, body_timeout=0.2) as live:
        for data in (
            b"GET /health HTTP/1.1\r\nX: " + b"y" * 1000,
            JSON_HEAD + b"Content-Length: 1000\r\n\r\n" + b" " * 1000,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
            writer.write(data[:90])
            answer = asyncio.create_task(reader.readuntil(b"}}"))
            for byte in data[90:]:
                if answer.done():
                    break
                writer.write(bytes([byte]))
                await asyncio.sleep(0.01)
            assert answer.done() and head_and_body(await answer)[0] == 408
            writer.close()


async def test_large_bodies_stop_being_read(server: Server) -> None:
    async with listening(server, max_body_bytes=10_000) as live:
        announced = JSON_HEAD + b"Content-Length: 1000000000\r\n\r\n" + b" " * 50_000
        chunked = JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + (b"1000\r\n" + b" " * 4096 + b"\r\n") * 20
        for data in (announced, chunked):
            status, headers, body = head_and_body(await live.raw(data))
            assert status == 413 and headers["connection"] == "close"
            check_error(body)


async def test_expect_continue(live: Listening) -> None:
    data = request(COMPLETIONS, BASE[COMPLETIONS], extra=b"Expect: 100-continue\r\n")
    answer = await live.raw(data)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


async def test_pipelined_requests_are_answered_in_order(live: Listening) -> None:
    first = request(COMPLETIONS, {**BASE[COMPLETIONS], "prompt": "#say one#"}, close=False)
    second = request(COMPLETIONS, {**BASE[COMPLETIONS], "prompt": "#say two#"})
    answer = await live.raw(first + second)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.index(b'"one') < answer.index(b'"two')


async def test_head_and_options(live: Listening) -> None:
    async with httpx.AsyncClient(base_url=live.url) as http:
        response = await http.head("/v1/models")
        assert response.status_code == 200 and response.content == b"" and int(response.headers["content-length"]) > 50
        response = await http.options(CHAT)
        assert response.status_code == 204 and response.headers["allow"] == "OPTIONS, POST"
        assert "server" not in response.headers


async def test_keep_alive(live: Listening) -> None:
    """Good and refused requests on one connection; what was refused leaves nothing behind."""
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    for body, status in ((BASE[COMPLETIONS], b"200"), ({"model": 1}, b"400"), (BASE[COMPLETIONS], b"200")):
        writer.write(request(COMPLETIONS, body, close=False))
        line = await reader.readline()
        assert line.split()[1] == status
        length = 0
        while (header := await reader.readline()).strip():
            if header.lower().startswith(b"content-length"):
                length = int(header.split()[1])
        await reader.readexactly(length)
    writer.close()


async def test_root_path(server: Server) -> None:
    async with listening(server, root_path="/api") as live, httpx.AsyncClient(base_url=live.url) as http:
        assert (await http.get("/health")).status_code == 200
        assert "/api/v1/models" in (await http.get("/")).text


# --- one write per step ---


async def test_a_steps_tokens_of_a_stream_are_one_write(live: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    live.engine.tokens_per_step = 4
    live.engine.step_seconds = 0.02
    body = {**BASE[CHAT], "max_tokens": 12, "n": 3, "stream": True, "temperature": 1}
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    writer.write(request(CHAT, body))
    reads = []
    while data := await reader.read(1 << 16):
        reads.append(data)
    writer.close()
    with_text = [data for data in reads if b'"content"' in data]
    assert len(with_text) == 3, "12 tokens of 3 choices in steps of 4 are 3 writes"
    assert b'"role"' in with_text[0] and b'"content":"' in with_text[0]


async def test_a_queued_stream_begins_after_a_while(live: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals are statuses, but nobody waits for headers for as long as a queue may last; proxies see that it lives."""
    monkeypatch.setattr(sse, "HEADERS_AFTER", 0.03)
    monkeypatch.setattr(sse, "COMMENT_EVERY", 0.03)
    for prompt, release in (("#hold# #say yes#", True), ("#hold# #fail 0#", True), ("#hold#", False)):
        live.engine.held = True
        async with httpx.AsyncClient(base_url=live.url, timeout=10) as http:
            body = {**BASE[COMPLETIONS], "prompt": prompt, "stream": True}
            async with http.stream("POST", COMPLETIONS, json=body) as response:
                assert response.status_code == 200
                lines = response.aiter_lines()
                assert [await anext(lines), await anext(lines), await anext(lines)] == [": waiting", "", ": waiting"]
                if not release:
                    continue
                live.engine.release()
                rest = [line async for line in lines if line.startswith("data")]
                if "fail" in prompt:
                    check_error(rest[-1].removeprefix("data: ").encode())
                else:
                    assert rest[-1] == "data: [DONE]" and '"text":"y"' in rest[0]
    await live.until(lambda: not live.engine.running)
    assert len(live.engine.aborted) == 1


# --- clients that leave ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["#hold#", "go"])
async def test_a_client_that_leaves_is_forgotten(live: Listening, prompt: str, stream: bool) -> None:
    live.engine.step_seconds = 0.01
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    body = {**BASE[COMPLETIONS], "prompt": prompt, "max_tokens": 2000, "ignore_eos": True, "stream": stream}
    writer.write(request(COMPLETIONS, body))
    await live.until(lambda: bool(live.engine.running))
    if stream and prompt == "go":
        await reader.readuntil(b'"text"')
    step = live.engine.step
    writer.transport.abort()
    await live.until(lambda: not live.engine.running)
    assert live.engine.step - step <= 3
    assert len(live.engine.aborted) == 1
    samples = live.served.app.state.metrics.render().decode()
    assert 'vllm:request_success_total{finished_reason="abort",model_name="test-model"} 1.0' in samples
    assert 'status="499"' in samples
    assert not live.served.app.state.active


async def test_several_prompts_are_all_aborted(live: Listening) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", live.port)
    body = {**BASE[COMPLETIONS], "prompt": ["#hold# a", "#hold# b"], "n": 2, "temperature": 1, "stream": True}
    writer.write(request(COMPLETIONS, body))
    await live.until(lambda: len(live.engine.running) == 4)
    writer.close()
    await live.until(lambda: not live.engine.running)
    assert len(live.engine.aborted) == 4


async def test_a_client_that_does_not_read_holds_little(server: Server) -> None:
    """A stream that nobody reads stops where the buffers are full, and others go on."""
    async with listening(server, shutdown_timeout=0.1) as live:
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            await asyncio.get_running_loop().sock_connect(deaf, ("127.0.0.1", live.port))
            body = {
                **BASE[COMPLETIONS],
                "stream": True,
                "logprobs": 20,
                "ignore_eos": True,
                "max_tokens": 2000,
                "prompt": "go",
            }
            await asyncio.get_running_loop().sock_sendall(deaf, request(COMPLETIONS, body))
            await live.until(lambda: bool(live.engine.seen) and not live.engine.running)
            async with live.openai() as client:
                answer = await client.completions.create(model=MODEL, prompt="#say hello#", max_tokens=10)
                assert answer.choices[0].text == "hello"
            assert live.served.app.state.active, "the stream waits for its reader, though its last token is there"
        await live.until(lambda: not live.served.app.state.active)


# --- the openai package ---


async def test_openai_async(live: Listening) -> None:
    async with live.openai() as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        chat = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "#say Hello!#"}], logprobs=True, top_logprobs=2
        )
        assert chat.choices[0].message.content == "Hello!" and chat.choices[0].finish_reason == "stop"
        assert chat.choices[0].logprobs and chat.choices[0].logprobs.content
        assert chat.usage and chat.usage.prompt_tokens_details and chat.usage.prompt_tokens_details.cached_tokens == 16

        text = ""
        usage = None
        async for chunk in await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "#say Hello!#"}],
            stream=True,
            stream_options={"include_usage": True},
        ):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            usage = chunk.usage or usage
        assert text == "Hello!" and usage and usage.completion_tokens == 7

        completion = await client.completions.create(
            model=MODEL, prompt=["ab", "cd"], max_tokens=3, extra_body={"top_k": 5, "ignore_eos": True}
        )
        assert len(completion.choices) == 2


async def test_openai_sync(live: Listening) -> None:
    def use() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "#say Hi#"}])
            stream = client.completions.create(model=MODEL, prompt="#say yes#", stream=True, max_tokens=20)
            return whole.choices[0].message.content or "", "".join(chunk.choices[0].text for chunk in stream)

    assert await asyncio.to_thread(use) == ("Hi", "yes")


async def test_openai_errors(live: Listening) -> None:
    async with live.openai() as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="gpt-9", prompt="x")
        assert missing.value.code == "model_not_found" and missing.value.param == "model"
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.completions.create(model=MODEL, prompt="x", temperature=3)
        assert wrong.value.param == "temperature" and wrong.value.type == "invalid_request_error"
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model=MODEL, prompt="#full#")
        stream = await client.completions.create(model=MODEL, prompt="#fail 2#", stream=True)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass


async def test_openai_32_streams(live: Listening) -> None:
    live.engine.step_seconds = 0.001

    async def one(client: openai.AsyncOpenAI, i: int) -> tuple[str, int]:
        text, usage = "", 0
        stream = await client.completions.create(
            model=MODEL,
            prompt=f"#say {f'answer {i} ' * 4}#",
            max_tokens=100,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            text += chunk.choices[0].text if chunk.choices else ""
            usage = chunk.usage.completion_tokens if chunk.usage else usage
        return text, usage

    async with live.openai() as client:
        answers = await asyncio.gather(*[one(client, i) for i in range(32)])
    for i, (text, usage) in enumerate(answers):
        assert text == f"answer {i} " * 4 and usage == len(text) + 1


async def test_openai_cancellation(live: Listening) -> None:
    live.engine.step_seconds = 0.005
    async with live.openai() as client:
        stream = await client.completions.create(
            model=MODEL, prompt="go", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        count = 0
        async for _ in stream:
            count += 1
            if count == 3:
                break
        await stream.close()
        await live.until(lambda: not live.engine.running)
        waiting = asyncio.create_task(client.completions.create(model=MODEL, prompt="#hold#"))
        await live.until(lambda: bool(live.engine.running))
        waiting.cancel()
        await live.until(lambda: not live.engine.running)
    assert len(live.engine.aborted) == 2


async def test_openai_with_a_key(server: Server) -> None:
    async with listening(server, api_key=["sesame"]) as live:
        async with live.openai() as client:
            with pytest.raises(openai.AuthenticationError) as refused:
                await client.models.list()
            assert refused.value.code == "invalid_api_key"
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="sesame") as client:
            assert (await client.models.retrieve(MODEL)).id == MODEL


# --- the end ---


async def test_sigterm_drains(server: Server) -> None:
    served = await server(shutdown_timeout=10.0)
    listener = open_socket("127.0.0.1", 0)
    live = Listening(served, listener.getsockname()[1])
    task = asyncio.create_task(serve(served.app, served.app.state.server_args, listener=listener))
    async with httpx.AsyncClient(base_url=live.url, timeout=10) as http:
        running = asyncio.create_task(http.post(COMPLETIONS, json={**BASE[COMPLETIONS], "prompt": "#hold#"}))
        await live.until(lambda: bool(served.engine.running))
        os.kill(os.getpid(), signal.SIGTERM)
        await live.until(lambda: served.app.state.draining)
        refused = await http.post(COMPLETIONS, json=BASE[COMPLETIONS])
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert (await http.get("/ready")).status_code == 503
        served.engine.release()
        assert (await running).status_code == 200
    async with asyncio.timeout(10):
        await task
    with pytest.raises(OSError):
        await live.raw(b"x")


async def test_a_dead_engine_ends_the_server(server: Server) -> None:
    served = await server()
    listener = open_socket("127.0.0.1", 0)
    task = asyncio.create_task(serve(served.app, ServerArgs(), listener=listener))
    served.engine.kill()
    with pytest.raises(EngineDeadError):
        async with asyncio.timeout(10):
            await task


async def test_a_process_of_its_own() -> None:
    """`run_server` from the first line to the last, on the loop that it chooses."""
    command = [sys.executable, str(Path(played_engine.__file__))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = [await asyncio.to_thread(process.stdout.readline) for _ in range(2)]
        address = next(line for line in lines if "http" in line).split()[1]
        assert any(line.split() == ["ready", "2048"] for line in lines)
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            asks = [client.completions.create(model=MODEL, prompt=f"#say {i}#", max_tokens=9) for i in range(8)]
            answers = await asyncio.gather(*asks)
            assert [answer.choices[0].text for answer in answers] == [str(i) for i in range(8)]
            stream = await client.completions.create(model=MODEL, prompt="#say yes#", max_tokens=9, stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "yes"
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 20) == 0
        assert process.stdout.read() == "", "the server itself prints nothing"
    finally:
        process.kill()
        process.wait()


async def test_a_port_in_use_is_told() -> None:
    listener = open_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with pytest.raises(ConfigError, match=str(port)):
        open_socket("127.0.0.1", port)
    listener.close()
    with pytest.raises(ConfigError):
        open_socket("no.such.host.invalid", 0)
