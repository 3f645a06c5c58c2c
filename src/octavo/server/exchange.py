"""One HTTP request from its headers to its last byte: admission, body, route, answer, log line.

Invariant: an exchange ends in exactly one of: answered, failed in mid-stream (an error event, no normal finish), or abandoned by
its client (499 in the log, nothing sent). Whichever it is, the work behind it has been closed when `run` returns.

Knows nothing of what the routes do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from enum import Enum
from typing import Any

from octavo.server.asgi import (
    Answer,
    BodyTooLarge,
    BodyTooSlow,
    ClientGone,
    EventStream,
    Headers,
    Receive,
    Request,
    Response,
    Route,
    Router,
    Send,
    discard_body,
    read_body,
)
from octavo.server.auth import request_label
from octavo.server.errors import ApiError, encode_error, to_api_error, to_response, unavailable
from octavo.server.schema import ignored_header
from octavo.server.state import ServerState

logger = logging.getLogger("octavo.server")

EVENT_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
REQUEST_ID = b"x-request-id"
IGNORED_FIELDS = b"x-octavo-ignored-fields"
EXPOSED = b"x-request-id, x-octavo-ignored-fields, retry-after"

CLIENT_CLOSED_REQUEST = 499
STARTING_RETRY, DRAINING_RETRY = 1, 5  # seconds
LINGER = 1.0  # seconds in which a client that is still sending can see why it is refused
SMALL_BODY = 64 << 10  # a refused body of so many bytes is cheaper to read than a new connection


class Stop(Enum):
    """Why an exchange was cancelled from outside."""

    CLIENT_GONE = "client gone"
    SHUTDOWN = "shutdown"


class Exchange:
    """`run` handles one request."""

    def __init__(self, state: ServerState, router: Router, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        self._state = state
        self._router = router
        self._receive = receive
        self._send = send
        self._headers: Headers = scope["headers"]
        self._request = Request(
            method=scope["method"],
            path=scope["path"].removeprefix(scope.get("root_path", "")),
            request_id="",
            headers=self._headers,
            arrival=time.monotonic(),
        )
        self._request.request_id = request_label(self._request.header(REQUEST_ID))
        self._task: asyncio.Task[Any] | None = None
        self._stop: Stop | None = None
        self._status = 0  # of the answer that was begun; 0: none yet
        self._done = False
        self._body_read = False
        self._handler = "none"

    def stop(self, why: Stop) -> None:
        """Ends the exchange from outside: abandoned, or answered with an error. Does nothing to one that is over."""
        if not self._done and self._stop is None and self._task is not None:
            self._stop = why
            self._task.cancel()

    async def run(self) -> None:
        self._task = asyncio.current_task()
        try:
            await self._handle()
        except ClientGone:
            self._stop = Stop.CLIENT_GONE
        except asyncio.CancelledError:
            if self._stop is None or self._task is None:
                raise
            self._task.uncancel()
            if self._stop is Stop.SHUTDOWN:
                await self._fail(unavailable("the server is shutting down", DRAINING_RETRY))
        finally:
            self._done = True
            self._record()

    async def _handle(self) -> None:
        try:
            route = self._admit()
            if route is None:
                await self._write(Response(status=204, headers=[(b"allow", self._allowed()), *self._preflight()]))
                return
            await self._read_body(route)
        except (ApiError, BodyTooLarge, BodyTooSlow) as exc:
            await self._write(to_response(_body_error(exc, self._state)))
            return
        if not route.generates:
            await self._write(await self._answer(route))
            return

        self._state.active.add(self)
        watcher = asyncio.create_task(self._watch())
        try:
            await self._write(await self._answer(route))
        finally:
            self._done = True
            watcher.cancel()
            self._state.active.discard(self)

    async def _answer(self, route: Route) -> Answer:
        try:
            return await route.endpoint(self._state, self._request)
        except Exception as exc:
            return to_response(exc)

    async def _watch(self) -> None:
        """Waits for the client to leave; the body has been read, so nothing else can come."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.stop(Stop.CLIENT_GONE)

    # --- before the route ---

    def _admit(self) -> Route | None:
        """The route, or None for OPTIONS. Without a key nothing is told but the public routes."""
        request = self._request
        methods, request.path_param = self._router.match(request.path)
        route = methods.get("GET" if request.method == "HEAD" else request.method)
        if methods:
            self._handler = next(iter(methods.values())).path
        if methods and request.method == "OPTIONS":
            return None  # browsers ask without a key before they send one
        if route is None or not route.public:
            self._state.keys.check(request.header_values(b"authorization"))
        if not methods:
            raise ApiError(404, "there is no such route; GET / lists them")
        if route is None:
            raise ApiError(405, f"{request.method[:20]} is not allowed here", headers={b"allow": self._allowed()})
        if route.takes_json:
            _check_content_type(request.header(b"content-type"))
        if route.generates:
            self._check_open()
        return route

    def _check_open(self) -> None:
        state = self._state
        if state.draining:
            raise unavailable("the server is shutting down", DRAINING_RETRY)
        if state.client.engine_info is None and not state.client.errored:
            raise unavailable("the engine is starting", STARTING_RETRY)

    async def _read_body(self, route: Route) -> None:
        if not route.takes_json:
            return
        args = self._state.server_args
        announced = self._request.header(b"content-length")
        length = int(announced) if announced is not None and announced.isdigit() else None
        self._request.body = await read_body(self._receive, length, args.max_body_bytes, args.body_timeout)
        self._body_read = True

    def _allowed(self) -> bytes:
        methods, _ = self._router.match(self._request.path)
        names = {*methods, "OPTIONS", *(["HEAD"] if "GET" in methods else [])}
        return ", ".join(sorted(names)).encode()

    # --- the answer ---

    async def _write(self, answer: Answer) -> None:
        if isinstance(answer, EventStream):
            await self._write_stream(answer.chunks)
            return
        body = b"" if self._request.method == "HEAD" else answer.body
        closes = (b"connection", b"close") in answer.headers
        unread = not self._body_read and (closes or self._announces_large_body())
        headers = [*answer.headers, *self._common_headers()]
        if answer.status != 204:
            headers.append((b"content-length", str(len(answer.body)).encode()))
        if unread and not closes:
            headers.append((b"connection", b"close"))
        await self._start(answer.status, headers)
        if unread:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            await discard_body(self._receive, self._state.server_args.max_body_bytes, LINGER)
            body = b""
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self._done = True

    async def _write_stream(self, chunks: AsyncIterator[bytes]) -> None:
        try:
            async for chunk in chunks:
                if not self._status:
                    await self._start(200, [*EVENT_STREAM, *self._common_headers()])
                await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as exc:
            await self._fail(to_api_error(exc))
        else:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            self._done = True
        finally:
            await chunks.aclose()  # type: ignore[attr-defined]

    async def _fail(self, error: ApiError) -> None:
        """An error as a status if nothing was sent, else as the stream's last event."""
        if not self._status:
            await self._write(to_response(error))
            return
        event = b"data: " + encode_error(error) + b"\n\n"
        await self._send({"type": "http.response.body", "body": event, "more_body": False})
        self._status, self._done = error.status, True

    async def _start(self, status: int, headers: Headers) -> None:
        self._status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _announces_large_body(self) -> bool:
        length = self._request.header(b"content-length")
        if length is not None:
            return not (length.isdigit() and int(length) <= SMALL_BODY)
        return self._request.header(b"transfer-encoding") is not None

    def _common_headers(self) -> Headers:
        headers = [(REQUEST_ID, self._request.request_id.encode()), *self._cors()]
        if self._request.ignored_fields:
            headers.append((IGNORED_FIELDS, ignored_header(self._request.ignored_fields)))
        return headers

    def _cors(self) -> Headers:
        origin = self._request.header(b"origin")
        allowed = self._state.server_args.allowed_origins
        if origin is None:
            return []
        if "*" in allowed:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", EXPOSED)]
        vary = (b"vary", b"origin")
        if origin.decode("latin-1") not in allowed:
            return [vary]
        return [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", EXPOSED), vary]

    def _preflight(self) -> Headers:
        if self._request.header(b"access-control-request-method") is None:
            return []
        return [
            (b"access-control-allow-methods", self._allowed()),
            (b"access-control-allow-headers", b"authorization, content-type, x-request-id"),
            (b"access-control-max-age", b"600"),
        ]

    def _record(self) -> None:
        """The books: a counter always, a line in the log for failures of ours, for all when asked. Never what was said."""
        status = CLIENT_CLOSED_REQUEST if self._stop is Stop.CLIENT_GONE else self._status
        request = self._request
        method = request.method if request.method in ("GET", "POST", "HEAD", "OPTIONS") else "other"
        self._state.metrics.http.labels(self._handler, method, str(status)).inc()
        if status in (500, 0) or self._state.engine_args.enable_log_requests:
            level = logging.ERROR if status in (500, 0) else logging.INFO
            elapsed = 1000 * (time.monotonic() - request.arrival)
            logger.log(
                level, "%s %s %d %s %d tokens %.0f ms",
                method, self._handler, status, request.request_id, request.num_generated_tokens, elapsed,
            )  # fmt: skip


def _check_content_type(given: bytes | None) -> None:
    kind = (given or b"").split(b";")[0].strip().lower()
    if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        raise ApiError(415, "the body must be JSON: send 'Content-Type: application/json'")


def _body_error(exc: Exception, state: ServerState) -> Exception:
    close = {b"connection": b"close"}
    if isinstance(exc, BodyTooLarge):
        return ApiError(413, f"the body is larger than {state.server_args.max_body_bytes} bytes", headers=close)
    if isinstance(exc, BodyTooSlow):
        return ApiError(
            408, f"the body was not complete after {state.server_args.body_timeout:g} seconds", headers=close
        )
    return exc
