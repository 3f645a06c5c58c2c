"""Needs Python only. The terminal conversation: history, commands, errors, and a server at its other end."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from octavo.bench.http import Target
from octavo.cli.chat import Message, ServerPartner, converse
from octavo.errors import ContextLengthError, OctavoError


class Echo:
    """Answers with the last message in capitals, word by word, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[Message]] = []

    async def answer(self, messages: list[Message], sampling: dict[str, Any]) -> AsyncIterator[str]:
        self.asked.append([dict(message) for message in messages])
        if messages[-1]["content"] == "too long":
            raise ContextLengthError("no room")
        for word in messages[-1]["content"].split():
            yield word.upper()


def talk(text: str, partner: Any, monkeypatch: pytest.MonkeyPatch, system: str | None = None) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    history = [{"role": "system", "content": system}] if system else []
    asyncio.run(converse(partner, history, {}))


def test_a_conversation_remembers(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    echo = Echo()
    talk("hello there\n\nagain\n", echo, monkeypatch, system="be brief")
    assert capsys.readouterr().out == "HELLOTHERE\nAGAIN\n"
    assert [message["role"] for message in echo.asked[1]] == ["system", "user", "assistant", "user"]
    assert echo.asked[1][2]["content"] == "HELLOTHERE"


def test_reset_forgets_all_but_the_system_message(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = Echo()
    talk("one\n/reset\ntwo\n", echo, monkeypatch, system="be brief")
    assert [message["content"] for message in echo.asked[1]] == ["be brief", "two"]


def test_exit_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = Echo()
    talk("one\n/exit\ntwo\n", echo, monkeypatch)
    assert len(echo.asked) == 1


def test_a_conversation_that_grew_too_long_can_be_reset(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    echo = Echo()
    talk("too long\n/reset\nshort\n", echo, monkeypatch)
    out, err = capsys.readouterr()
    assert err == "octavo: error: no room\n"
    assert out == "\nSHORT\n"


async def test_a_server_as_partner(serve_bytes: Any) -> None:
    def event(text: str | None) -> bytes:
        return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"

    body = event(None) + event("Hel") + event("lo") + b'data: {"choices": []}\n\ndata: [DONE]\n\n'
    async with serve_bytes([b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + body]) as server:
        partner = ServerPartner(Target("127.0.0.1", server.port), "m")
        parts = [part async for part in partner.answer([{"role": "user", "content": "hi"}], {"max_tokens": 3})]
    assert "".join(parts) == "Hello"
    sent = json.loads(server.requests[0].partition(b"\r\n\r\n")[2])
    assert sent == {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 3}


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b'HTTP/1.1 400 Bad Request\r\nContent-Length: 9\r\n\r\n{"no": 1}', "status 400"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"message": "the engine failed"}}\n\n', "the engine failed"),
    ],
)
async def test_a_server_that_refuses(serve_bytes: Any, reply: bytes, said: str) -> None:
    async with serve_bytes([reply]) as server:
        partner = ServerPartner(Target("127.0.0.1", server.port), "m")
        with pytest.raises(OctavoError, match=said):
            [part async for part in partner.answer([], {})]
