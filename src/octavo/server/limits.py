"""HTTP/1.1 on uvicorn's httptools protocol, with bounds on what a client may send before the app sees it.

Headers: 64 KiB and 100 lines (431). Time to send them: `head_timeout` (408). Malformed requests: 400. All of these are answered in
the same envelope as every other error, and the connection is closed. Bounds on bodies are the app's.

Knows nothing of routes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from octavo.server.auth import request_label
from octavo.server.errors import ApiError, ErrorType, encode_error

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 100
MAX_CONNECTIONS = 4096
LINGER = 1.0  # seconds in which a refused client may go on sending, unheard


class HeadRefused(Exception):
    """Raised inside the parser to make it stop."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection. `head_timeout` in seconds is set on a subclass by `protocol`."""

    head_timeout = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True  # between requests too: the next bytes are a head
        self._num_head_bytes = 0  # received for a head that is not complete
        self._head_size = 0  # parsed
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            error = ApiError(
                503, "too many connections", type=ErrorType.SERVER, code="overloaded", headers={b"retry-after": b"1"}
            )
            self._refuse(error)
            return
        self._timer = self.loop.call_later(self.head_timeout, self._head_too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_head and self._timer is None:
            self._timer = self.loop.call_later(self.head_timeout, self._head_too_slow)
        super().data_received(data)
        if self._in_head and not self._refused:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(_head_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._num_head_bytes = self._head_size = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count_head(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._num_head_bytes = 0
        self._stop_timer()
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            raise HeadRefused
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True

    def send_400_response(self, msg: str) -> None:  # the base class chooses the name
        """What the base class calls when the parser gives up, for its own reasons or for ours."""
        self._refuse(self._refusal or ApiError(400, "malformed HTTP request"))

    def _count_head(self, num_bytes: int) -> None:
        self._head_size += num_bytes
        if self._head_size > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._refusal = _head_too_large()
            raise HeadRefused

    def _head_too_slow(self) -> None:
        self._timer = None
        if self._num_head_bytes == 0:
            self.transport.close()  # nothing was asked
        else:
            self._refuse(ApiError(408, f"the request's head was not complete after {self.head_timeout:g} seconds"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, error: ApiError) -> None:
        """Answers and closes, unless an earlier request of this connection is still being answered: then only closes.

        The answer ends our side only: to close while the client still sends would reset the connection, and it would not see why.
        """
        self._refused = True
        self._stop_timer()
        if self._may_answer() and not self.transport.is_closing():
            body = encode_error(error)
            head = [STATUS_LINE[error.status], b"content-type: application/json\r\nconnection: close\r\n"]
            head.append(b"x-request-id: %s\r\ncontent-length: %d\r\n" % (request_label(None).encode(), len(body)))
            head.extend(b"%s: %s\r\n" % item for item in error.headers.items())
            self.transport.write(b"".join([*head, b"\r\n", body]))
            self.transport.write_eof()
            self._timer = self.loop.call_later(LINGER, self.transport.close)
        else:
            self.transport.close()

    def _may_answer(self) -> bool:
        """Whether no answer is under way or waits its turn. A request whose body went wrong is told here, and its app that it is gone."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return True
        if self._in_head or self.pipeline or cycle.response_started:
            return False
        cycle.disconnected = True
        cycle.message_event.set()
        return True


def protocol(head_timeout: float) -> type[LimitedProtocol]:
    """The protocol class for uvicorn, which takes a class and gives it no options of ours."""
    return type("Protocol", (LimitedProtocol,), {"head_timeout": head_timeout})


def _head_too_large() -> ApiError:
    return ApiError(431, f"the request's headers exceed {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} lines")
