"""The little of HTTP that the routes need: a request, an answer, a stream of bytes, and a table of routes.

Written on bare ASGI because importing FastAPI costs 0.25 s and Starlette 0.03 s (measured with `python -X importtime` and
without), which is most of what the API process may spend before it listens; and because a chunk of a stream then passes
through no layer at all. Bodies are validated by msgspec types (see `schema`), errors are ours (see `errors`).

Knows nothing of models, tokens or OpenAI.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON_TYPE = (b"content-type", b"application/json")


class ClientGone(Exception):
    """The client closed its connection before its request was complete."""


class BodyTooLarge(Exception):
    """More bytes than the limit were announced or sent."""


class BodyTooSlow(Exception):
    """The body was not complete in time."""


@dataclass(slots=True)
class Request:
    """One request, its body read. `ignored_fields` is filled by the route for the answer's header."""

    method: str
    path: str
    request_id: str
    headers: Headers
    arrival: float  # seconds of time.monotonic
    path_param: str = ""
    body: bytes = b""
    ignored_fields: list[str] = field(default_factory=list)
    num_generated_tokens: int = 0  # for the log line

    def header(self, name: bytes) -> bytes | None:
        """The first value of the header `name` (lower case), None if it is absent."""
        return next((value for key, value in self.headers if key == name), None)

    def header_values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]


@dataclass(slots=True)
class Response:
    """A whole answer."""

    body: bytes = b""
    status: int = 200
    headers: Headers = field(default_factory=lambda: [JSON_TYPE])


@dataclass(slots=True)
class EventStream:
    """A stream of server-sent events, status 200. Each item of `chunks` is one write; closing `chunks` ends the work behind it."""

    chunks: AsyncIterator[bytes]


Answer = Response | EventStream
Endpoint = Callable[[Any, Request], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Route:
    """`path` may end in `/{id}`, which matches the rest of the path. `public` routes need no key; `generates` ones refuse while draining."""

    method: str
    path: str
    endpoint: Endpoint
    public: bool = False
    generates: bool = False

    @property
    def takes_json(self) -> bool:
        return self.method == "POST" and not self.public


class Router:
    """Finds a route by its exact path. Lookups never interpret the path, so a route cannot be reached under a second spelling."""

    def __init__(self, routes: list[Route]) -> None:
        self.routes = routes
        self._exact: dict[str, dict[str, Route]] = {}
        self._prefixes: dict[str, dict[str, Route]] = {}
        for route in routes:
            if route.path.endswith("{id}"):
                self._prefixes.setdefault(route.path.removesuffix("{id}"), {})[route.method] = route
            else:
                self._exact.setdefault(route.path, {})[route.method] = route

    def match(self, path: str) -> tuple[dict[str, Route], str]:
        """The routes of `path` by method (empty: no such path), and what `{id}` stands for."""
        if methods := self._exact.get(path):
            return methods, ""
        for prefix, methods in self._prefixes.items():
            if path.startswith(prefix) and len(path) > len(prefix):
                return methods, path[len(prefix) :]
        return {}, ""


async def read_body(receive: Receive, announced: int | None, limit: int, seconds: float) -> bytes:
    """The whole body. Raises BodyTooLarge as soon as the limit is known to be passed, BodyTooSlow, or ClientGone."""
    if announced is not None and announced > limit:
        raise BodyTooLarge
    message = await _receive_until(receive, asyncio.get_running_loop().time() + seconds)
    if not message.get("more_body", False):
        body: bytes = message.get("body", b"")
        if len(body) > limit:
            raise BodyTooLarge
        return body
    return await _read_pieces(receive, message, limit, seconds)


async def _read_pieces(receive: Receive, first: Message, limit: int, seconds: float) -> bytes:
    deadline = asyncio.get_running_loop().time() + seconds
    body = bytearray(first.get("body", b""))
    message = first
    while message.get("more_body", False):
        if len(body) > limit:
            raise BodyTooLarge
        message = await _receive_until(receive, deadline)
        body += message.get("body", b"")
    if len(body) > limit:
        raise BodyTooLarge
    return bytes(body)


async def _receive_until(receive: Receive, deadline: float) -> Message:
    try:
        async with asyncio.timeout_at(deadline):
            message = await receive()
    except TimeoutError:
        raise BodyTooSlow from None
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message


async def discard_body(receive: Receive, limit: int, seconds: float) -> None:
    """Reads and drops what the client still sends, within limits: closing at once would reset the connection and lose our answer."""
    deadline = asyncio.get_running_loop().time() + seconds
    try:
        while limit > 0:
            message = await _receive_until(receive, deadline)
            limit -= len(message.get("body", b""))
            if not message.get("more_body", False):
                return
    except (BodyTooSlow, ClientGone):
        return
