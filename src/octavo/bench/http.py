"""A bare HTTP/1.1 client: one connection per request, bodies read as they come.

It takes little of the cores that the measured server needs too, and notes the time of each line. Knows nothing of OpenAI's bodies.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from octavo.errors import ConfigError

MAX_LINE = 1 << 24


class HttpError(Exception):
    """The server could not be reached, or what it sent is no HTTP."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server is. `path` is a prefix, without a slash at its end; `key` its API key or None."""

    host: str
    port: int
    tls: bool = False
    path: str = ""
    key: str | None = None

    @staticmethod
    def parse(url: str, key: str | None = None) -> Target:
        """Raises ConfigError for anything but http://HOST[:PORT][/PATH] or https."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"url = {url!r}: must be http://HOST:PORT")
        tls = parts.scheme == "https"
        return Target(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"), key)


class Response:
    """A response whose head has been read. `lines()` yields the body's lines as they arrive."""

    def __init__(self, status: int, headers: dict[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader

    async def lines(self) -> AsyncIterator[bytes]:
        """The body's lines without their ends; the last one may lack its end."""
        rest = b""
        async for part in self._parts():
            *whole, rest = (rest + part).split(b"\n")
            for line in whole:
                yield line.rstrip(b"\r")
        if rest:
            yield rest

    async def read(self) -> bytes:
        return b"".join([part async for part in self._parts()])

    async def _parts(self) -> AsyncIterator[bytes]:
        if "chunked" in self.headers.get("transfer-encoding", ""):
            while size := int((await self._reader.readline()).split(b";")[0], 16):
                yield await self._reader.readexactly(size)
                await self._reader.readline()
        elif "content-length" in self.headers:
            yield await self._reader.readexactly(int(self.headers["content-length"]))
        else:
            while part := await self._reader.read(1 << 16):
                yield part


class Exchange:
    """One request and its response, as an async context manager that closes the connection: leaving early cancels the request."""

    def __init__(self, target: Target, method: str, path: str, body: bytes | None = None) -> None:
        self._target = target
        lines = [f"{method} {target.path}{path} HTTP/1.1", f"Host: {target.host}:{target.port}", "Connection: close"]
        if target.key:
            lines.append(f"Authorization: Bearer {target.key}")
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        self._request = "\r\n".join([*lines, "", ""]).encode() + (body or b"")
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Response:
        """Raises HttpError."""
        tls = ssl.create_default_context() if self._target.tls else None
        try:
            reader, self._writer = await asyncio.open_connection(self._target.host, self._target.port, ssl=tls, limit=MAX_LINE)
            self._writer.write(self._request)
            status = int((await reader.readline()).split(maxsplit=2)[1])
            headers = {}
            while line := (await reader.readline()).strip():
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.strip().lower()] = value.strip().lower()
        except (OSError, ValueError, IndexError) as error:
            if self._writer is not None:
                self._writer.close()
            where = f"{self._target.host}:{self._target.port}"
            raise HttpError(f"no answer from {where}: {error or type(error).__name__}") from None
        return Response(status, headers, reader)

    async def __aexit__(self, *_: object) -> None:
        assert self._writer is not None
        self._writer.close()


async def get(target: Target, path: str, timeout: float = 5.0) -> tuple[int, bytes]:
    """Status and body of a GET. Raises HttpError."""
    try:
        async with asyncio.timeout(timeout), Exchange(target, "GET", path) as response:
            return response.status, await response.read()
    except (TimeoutError, asyncio.IncompleteReadError) as error:
        raise HttpError(f"no answer to {path}: {type(error).__name__}") from None
