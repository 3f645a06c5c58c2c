"""What the unit tests share: a server that says exactly the bytes it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Self

import pytest


class ByteServer:
    """Answers every connection with the same pieces of bytes, each after `pause` seconds; keeps what it was sent."""

    def __init__(self, pieces: Sequence[bytes], pause: float = 0.0) -> None:
        self.pieces = pieces
        self.pause = pause
        self.requests: list[bytes] = []
        self.open = self.most_open = 0
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        while self.open:
            await asyncio.sleep(0.001)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
        self.requests.append(head + await reader.readexactly(length))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            for piece in self.pieces:
                await asyncio.sleep(self.pause)
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            self.open -= 1
            writer.close()


@pytest.fixture
def serve_bytes() -> Callable[..., Any]:
    """`async with serve_bytes([b"HTTP/1.1 ..."]) as server:`"""
    return ByteServer
