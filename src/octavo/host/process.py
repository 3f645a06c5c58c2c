"""The engine process, `python -m octavo.host FD PARENT_PID`, as the client's supervisor starts it.

FD is a connected socket that this process inherits; its first frame says what to build, and the caller of `main` knows how (so that
tests bring an engine of their own). The process ends when it is told to, when the
socket ends, or when its parent does. SIGINT and SIGTERM are left to the parent: a service manager sends them to both processes at
once, and the parent then still needs its engine to finish what is running.

Exit codes: 0 told to end, or the parent is gone; 1 the engine failed; 2 the user's files or options cannot work.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Protocol

from octavo.config import EngineArgs
from octavo.engine.core import EngineCore
from octavo.errors import ConfigError, ModelFileError, OctavoError
from octavo.host.channel import ChannelClosed, SocketChannel, Undecodable
from octavo.host.loop import EngineBroken, Loop, Runner
from octavo.protocol import EngineFailed, EngineReady, Start, ToEngine

PR_SET_PDEATHSIG = 1

# A collection looks at what was allocated since the last one, never at the model (gc.freeze): well below a millisecond at this many.
GC_THRESHOLDS = (20_000, 20, 20)


class Engine(Protocol):
    """What a builder returns: the two halves of an engine, and what the client needs to know of them."""

    @property
    def core(self) -> EngineCore: ...

    @property
    def runner(self) -> Runner: ...

    @property
    def ready(self) -> EngineReady: ...


Builder = Callable[[EngineArgs, str], Engine]


def main(argv: list[str], build: Builder) -> int:
    """Runs an engine over the inherited socket; returns the exit code."""
    fd, parent = int(argv[0]), int(argv[1])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s engine: %(message)s", datefmt="%H:%M:%S")
    channel = SocketChannel(socket.socket(fileno=fd))
    try:
        return serve(channel, build)
    except ChannelClosed as closed:
        logging.getLogger(__name__).debug("the connection ended: %s", closed)
        return 0


def serve(channel: SocketChannel, build: Builder) -> int:
    """Builds what the first frame asks for and runs it. The reason of a failure is sent as the last frame."""
    try:
        start = first_frame(channel)
        engine = build(start.args, start.model_path)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        channel.send(engine.ready)
        Loop(engine.core, engine.runner, channel).run()
    except (ConfigError, ModelFileError) as error:
        channel.send(EngineFailed(str(error), user_error=True))
        return 2
    except (EngineBroken, OctavoError, OSError, MemoryError) as error:
        channel.send(EngineFailed(f"{type(error).__name__}: {error}", user_error=False))
        return 1
    except ChannelClosed:
        raise
    except Exception as error:
        logging.getLogger(__name__).exception("the engine failed")
        channel.send(EngineFailed(f"{type(error).__name__}: {error}", user_error=False))
        return 1
    return 0


def first_frame(channel: SocketChannel) -> Start:
    """The frame that says what to build. Raises ChannelClosed if another comes first."""
    messages: list[ToEngine | Undecodable] = []
    while not messages:
        messages = channel.receive(None)
    if len(messages) > 1 or not isinstance(messages[0], Start):
        raise ChannelClosed("the first frame does not say what to build")
    return messages[0]


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends, even by SIGKILL; elsewhere than on Linux the socket's end does."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel was asked
        sys.exit(0)
