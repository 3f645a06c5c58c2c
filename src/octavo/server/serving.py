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
import uvloop

from octavo.config import ServerArgs
from octavo.errors import ConfigError, EngineDeadError
from octavo.protocol import EngineReady
from octavo.server.app import App
from octavo.server.limits import protocol

KEEP_ALIVE = 75  # seconds; longer than the usual client keeps an idle connection, so that it is the one to close
BACKLOG = 2048
WATCH = 0.5  # seconds between looks at whether the engine is gone for good

OnListening = Callable[[str, int], None]
OnReady = Callable[[EngineReady], None]


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
    app: App,
    args: ServerArgs,
    *,
    listener: socket.socket | None = None,
    on_listening: OnListening | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serves until SIGTERM, SIGINT or `stop`, drains, and returns. A second signal ends at once.

    `listener`: from `open_socket`, else one is opened. `on_listening(host, port)` is called once when connections are accepted.
    Raises EngineDeadError after the engine has died for good.
    """
    listener = listener or open_socket(args.host, args.port)
    server = _Server(app, args, on_listening or _nobody_listens, stop or asyncio.Event())
    try:
        await server.serve(sockets=[listener])
    finally:
        server.abandon()
        listener.close()
    if app.state.client.errored:
        raise EngineDeadError("the engine has stopped")


def run_server(
    app: App,
    args: ServerArgs,
    *,
    listener: socket.socket | None = None,
    on_listening: OnListening | None = None,
    on_ready: OnReady | None = None,
) -> None:
    """The whole life of a server process: starts the client's engine, serves meanwhile and until a signal, ends the engine.

    `on_ready` is called once, when the first request could be answered; what it may print is its owner's business. Raises what
    `client.start()` raises (ConfigError, EngineDeadError), and EngineDeadError when the engine dies for good later.
    """
    uvloop.run(_run(app, args, listener, on_listening, on_ready))


async def _run(
    app: App,
    args: ServerArgs,
    listener: socket.socket | None,
    on_listening: OnListening | None,
    on_ready: OnReady | None,
) -> None:
    client = app.state.client
    stop = asyncio.Event()

    async def start() -> None:
        try:
            ready = await client.start()
        except BaseException:
            stop.set()
            raise
        if on_ready is not None:
            on_ready(ready)

    starting = asyncio.create_task(start())
    try:
        await serve(app, args, listener=listener, on_listening=on_listening, stop=stop)
    finally:
        if starting.done() and not starting.cancelled() and (failure := starting.exception()) is not None:
            await client.shutdown()
            raise failure
        starting.cancel()
        await client.shutdown()


def _nobody_listens(host: str, port: int) -> None:
    """For owners that need not know."""


class _Server(uvicorn.Server):
    """uvicorn's server, which drains while it still listens: new requests get a 503 instead of a refused connection."""

    def __init__(self, app: App, args: ServerArgs, on_listening: OnListening, stop: asyncio.Event) -> None:
        config = uvicorn.Config(
            app,
            http=protocol(args.body_timeout),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            root_path=args.root_path,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)
        self._app = app
        self._shutdown_timeout = args.shutdown_timeout
        self._on_listening = on_listening
        self._stop = stop
        self._watches: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._watches = [asyncio.create_task(self._watch_engine()), asyncio.create_task(self._watch_stop())]
        for listener in sockets or ():
            self._on_listening(*listener.getsockname()[:2])

    def abandon(self) -> None:
        """Leaves nothing behind, whether the server ended by itself or was cancelled."""
        for task in self._watches:
            task.cancel()
        for listening in getattr(self, "servers", ()):
            listening.close()
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.close()

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

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self.force_exit = self.should_exit = True
        self._stop.set()

    async def _watch_stop(self) -> None:
        await self._stop.wait()
        await self._app.drain(self._shutdown_timeout)
        self.should_exit = True

    async def _watch_engine(self) -> None:
        await self._app.warm()
        while not self._app.state.client.errored:
            await asyncio.sleep(WATCH)
        self.should_exit = True
