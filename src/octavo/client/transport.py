"""How messages reach an engine: a child process behind a socket, or an engine in this process.

Knows the protocol's frames and how a process is started and ended; knows nothing of requests or of why an engine is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

import msgspec

from octavo.errors import ConfigError, EngineDeadError, OctavoError
from octavo.protocol import (
    EngineCoreOutputs,
    EngineFailed,
    EngineReady,
    FrameError,
    FrameSplitter,
    Shutdown,
    Start,
    ToClient,
    ToEngine,
    encode_frame,
)

ENGINE_COMMAND = (sys.executable, "-m", "octavo.host")

# An engine that was told to end has nothing to save: after so many seconds it is killed.
SHUTDOWN_SECONDS = 1.0


class EngineEnded(Exception):
    """The engine is gone. `failed` holds its last words, if it had any."""

    def __init__(self, reason: str, failed: EngineFailed | None = None) -> None:
        super().__init__(reason)
        self.failed = failed

    def as_error(self) -> OctavoError:
        """What the user is told: his own mistake as such."""
        if self.failed is not None and self.failed.user_error:
            return ConfigError(self.failed.message)
        return EngineDeadError(str(self))


class Transport(Protocol):
    """One life of one engine, as the asynchronous client sees it."""

    def launch(self) -> None:
        """Lets the engine begin its start, without waiting. Optional: `start` does it otherwise. Needs no event loop."""

    async def start(self) -> EngineReady:
        """Waits until the engine takes requests. Raises EngineEnded."""

    def send(self, message: ToEngine) -> None:
        """Sends, without waiting; a message to an engine that is gone is lost."""

    async def receive(self) -> EngineCoreOutputs:
        """The next message, in order. Raises EngineEnded. One caller at a time."""

    def kill(self) -> None:
        """Ends the engine at once; `receive` then raises."""

    async def close(self) -> None:
        """Ends the engine, if it has not ended, and waits until it is gone."""


class SocketTransport:
    """An engine in a child process: started by a command, joined by a socket pair that nobody else can reach."""

    def __init__(self, start: Start, command: tuple[str, ...] = ENGINE_COMMAND) -> None:
        self._start = start
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._stream: _MessageStream | None = None
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return self._process.pid if self._process else None

    def launch(self) -> None:
        if self._process is not None:
            return
        try:
            self._socket, theirs = socket.socketpair()
            with theirs:
                # The child asks the kernel to be killed when the thread that started it ends: call this from a thread that stays.
                command = [*self._command, str(theirs.fileno()), str(os.getpid())]
                self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            self._socket.sendall(encode_frame(self._encoder, self._start))
        except OSError as error:
            self.kill()
            if self._socket is not None:
                self._socket.close()
            raise EngineEnded(f"the engine process cannot be started: {error}") from None

    async def start(self) -> EngineReady:
        self.launch()
        loop = asyncio.get_running_loop()
        _, self._stream = await loop.create_unix_connection(_MessageStream, sock=self._socket)
        first = await self._checked(await self._stream.receive())
        if not isinstance(first, EngineReady):
            raise await self._ended("it sent outputs before it was ready")
        return first

    def send(self, message: ToEngine) -> None:
        if self._stream is not None:
            self._stream.write(encode_frame(self._encoder, message))

    async def receive(self) -> EngineCoreOutputs:
        assert self._stream is not None, "start() comes first"
        message = await self._stream.receive()
        if type(message) is EngineCoreOutputs:
            return message
        await self._checked(message)
        raise await self._ended("it said twice that it was ready")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.send(Shutdown())
            await self._wait(SHUTDOWN_SECONDS)
        await self._ended("closed")

    async def _checked(self, message: ToClient | None) -> EngineReady | EngineCoreOutputs:
        """The message, if it is none that ends the engine's life. Raises EngineEnded."""
        if message is None:
            raise await self._ended(self._stream.fault if self._stream is not None else None)
        if isinstance(message, EngineFailed):
            await self._wait(SHUTDOWN_SECONDS)
            await self._ended(None)
            raise EngineEnded(message.message, message)
        return message

    async def _ended(self, fault: str | None) -> EngineEnded:
        """Leaves no process and no socket behind; says how the process ended, or what was wrong with what it sent."""
        if self._stream is not None:
            self._stream.close()
        elif self._socket is not None:
            self._socket.close()
        if self._process is None:
            return EngineEnded("the engine process was not started")
        if fault is None:  # an end of stream: the process is ending by itself, and its exit code tells why
            await self._wait(SHUTDOWN_SECONDS)
        if self._process.poll() is None:
            self._process.kill()
            await self._wait(None)
        return EngineEnded(f"the engine process ended: {fault or _describe(self._process.returncode)}")

    async def _wait(self, seconds: float | None) -> None:
        """Waits for the child's end. It is polled: there is no other way on every event loop that leaves SIGCHLD alone."""
        assert self._process is not None
        deadline = None if seconds is None else time.monotonic() + seconds
        pause = 0.001
        while self._process.poll() is None and (deadline is None or time.monotonic() < deadline):
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.02)


class _MessageStream(asyncio.Protocol):
    """The client's end of the socket: bytes to messages, in order, for one receiver."""

    def __init__(self) -> None:
        self.fault: str | None = None  # what was wrong with the bytes, if that ended the stream
        self._messages: deque[ToClient] = deque()
        self._splitter = FrameSplitter()
        self._decoder = msgspec.msgpack.Decoder(ToClient)
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()  # kept: asking for it is a system call
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    async def receive(self) -> ToClient | None:
        """The next message; None at the end of the stream."""
        while not self._messages:
            if self._closed:
                return None
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._messages.popleft()

    def write(self, frame: bytes) -> None:
        if self._transport is not None and not self._closed:
            self._transport.write(frame)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._splitter.feed(data):
                self._messages.append(self._decoder.decode(body))
        except (FrameError, msgspec.DecodeError) as error:
            self.fault = f"what it sends cannot be read: {error}"
            self._closed = True
            self.close()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class InlineQueues(Protocol):
    """The two queues between this process's client and its engine."""

    inbox: deque[ToEngine]
    outbox: deque[ToClient]


class InlineTransport:
    """An engine in this process, driven by whoever wants its outputs. Synchronous.

    `turn` works off the inbox, runs one step and fills the outbox.
    """

    def __init__(self, queues: InlineQueues, turn: Callable[[], None], ready: EngineReady) -> None:
        self._queues = queues
        self._turn = turn
        self.ready = ready

    def send(self, message: ToEngine) -> None:
        self._queues.inbox.append(message)

    def step(self) -> list[EngineCoreOutputs]:
        """Runs one turn of the engine and returns what it says."""
        self._turn()
        messages = [message for message in self._queues.outbox if isinstance(message, EngineCoreOutputs)]
        self._queues.outbox.clear()
        return messages


def _describe(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    if -returncode == signal.SIGKILL:
        return "killed by SIGKILL, as the system does when memory runs out"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-returncode).name}"
    return f"killed by signal {-returncode}"
