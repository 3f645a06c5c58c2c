"""The engine's end of the wire: messages in, messages out, over a socket or within one process.

Blocking and without threads: the loop asks for what has come, or waits for it while it is idle. Knows the protocol's frames; knows
nothing of engines.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections import deque
from typing import Protocol

import msgspec

from octavo.protocol import FrameError, FrameSplitter, ToClient, ToEngine, encode_frame

RECEIVE_BYTES = 1 << 16


class ChannelClosed(Exception):
    """The other end is gone, or what it sends are not frames."""


class Undecodable(msgspec.Struct, array_like=True):
    """A frame whose body is not a message of the protocol. `request_id` is the one that it carries, if it does."""

    reason: str
    request_id: str | None = None


class Channel(Protocol):
    """What the loop needs of a wire."""

    def receive(self, timeout: float | None) -> list[ToEngine | Undecodable]:
        """Messages that have come, in order; waits up to `timeout` seconds for the first (None: for ever, 0: not at all).

        Raises ChannelClosed when no more can come.
        """

    def send(self, message: ToClient) -> None:
        """Sends a message. Raises ChannelClosed when nobody can receive it."""


class SocketChannel:
    """A channel over a connected stream socket, which it owns."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._splitter = FrameSplitter()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN)

    def receive(self, timeout: float | None) -> list[ToEngine | Undecodable]:
        if timeout != 0 and not self._poll.poll(None if timeout is None else timeout * 1000):
            return []
        messages: list[ToEngine | Undecodable] = []
        more = True
        while more:
            data = self._read()
            messages += [self._decode(body) for body in self._feed(data)]
            more = len(data) == RECEIVE_BYTES
        return messages

    def send(self, message: ToClient) -> None:
        try:
            self._socket.sendall(encode_frame(self._encoder, message))
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def _read(self) -> bytes:
        """What lies in the socket, at most RECEIVE_BYTES; empty if nothing does."""
        try:
            data = self._socket.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        if not data:
            raise ChannelClosed("end of stream")
        return data

    def _feed(self, data: bytes) -> list[bytes]:
        try:
            return self._splitter.feed(data)
        except FrameError as error:
            raise ChannelClosed(str(error)) from None

    def _decode(self, body: bytes) -> ToEngine | Undecodable:
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            return Undecodable(str(error), _request_id(body))


class InlineChannel:
    """A channel within one process: two queues. `receive` never waits, as nobody could fill the queue meanwhile."""

    def __init__(self) -> None:
        self.inbox: deque[ToEngine] = deque()
        self.outbox: deque[ToClient] = deque()

    def receive(self, timeout: float | None) -> list[ToEngine | Undecodable]:
        messages: list[ToEngine | Undecodable] = list(self.inbox)
        self.inbox.clear()
        return messages

    def send(self, message: ToClient) -> None:
        self.outbox.append(message)


def _request_id(body: bytes) -> str | None:
    """The id in a request that is not valid otherwise: with it the refusal reaches the one who asked."""
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        fields = msgspec.msgpack.decode(body)
        if isinstance(fields, list) and len(fields) > 1 and fields[0] == "EngineCoreRequest" and isinstance(fields[1], str):
            return fields[1]
    return None
