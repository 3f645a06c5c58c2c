"""Runs an app on a socket until it is told to stop: uvicorn, with our bounds and our way of draining.

Prints nothing; whoever starts it hears of it by a callback. Knows nothing of models.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from octavo.config import ServerArgs
from octavo.errors import ConfigError, EngineDeadError
from octavo.server.app import App
from octavo.server.limits import protocol

KEEP_ALIVE = 75  # seconds; longer than the usual client keeps an idle connection, so that it is the one to close
BACKLOG = 2048
WATCH = 0.5  # seconds between looks at whether the engine is gone for good

OnListening = Callable[[str, int], None]


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one. Raises ConfigError, naming what is wrong."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        raise ConfigError(f"host = {host!r}, port = {port}: {exc.strerror or exc}") from None
    listener.setblocking(False)
    return listener


async def serve(
    app: App, args: ServerArgs, *, listener: socket.socket | None = None, on_listening: OnListening | None = None
) -> None:
    """Serves until SIGTERM or SIGINT, drains, and returns. A second signal ends at once.

    `listener`: from `open_socket`, else one is opened. `on_listening(host, port)` is called once when connections are accepted.
    Raises EngineDeadError after the engine has died for good.
    """
    listener = listener or open_socket(args.host, args.port)
    server = _Server(app, args)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not task.done():
        await asyncio.sleep(0.001)
    if on_listening is not None and server.started:
        host, port = listener.getsockname()[:2]
        on_listening(host, port)
    try:
        await task
    except asyncio.CancelledError:
        server.should_exit = True
        raise
    if app.state.client.errored:
        raise EngineDeadError("the engine has stopped")


class _Server(uvicorn.Server):
    """uvicorn's server, which drains while it still listens: new requests get a 503 instead of a refused connection."""

    def __init__(self, app: App, args: ServerArgs) -> None:
        config = uvicorn.Config(
            app,
            http=protocol(args.body_timeout),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            root_path=args.root_path,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)
        self._app = app
        self._shutdown_timeout = args.shutdown_timeout
        self._draining: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._watching = asyncio.create_task(self._watch_engine())
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in (self._draining, self._watching):
            if task is not None:
                task.cancel()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handlers of the loop, not of the process, and the signals are not raised again: a drained end is a normal one."""
        loop = asyncio.get_running_loop()
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._on_signal)
        except (ValueError, RuntimeError):  # not the main thread: its owner stops us otherwise
            yield
            return
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def begin_drain(self) -> None:
        """What a first signal does; for owners that have no signals."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())

    def _on_signal(self) -> None:
        if self._draining is None:
            self.begin_drain()
        else:
            self.force_exit = self.should_exit = True

    async def _drain(self) -> None:
        await self._app.drain(self._shutdown_timeout)
        self.should_exit = True

    async def _watch_engine(self) -> None:
        while not self._app.state.client.errored:
            await asyncio.sleep(WATCH)
        self.should_exit = True
