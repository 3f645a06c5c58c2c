"""Keeps an engine alive: starts it, watches its pulse, starts another one when it dies, and knows when to give up.

Knows nothing of requests: what is resent to a fresh engine, the client decides (`octavo.client.recovery`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from enum import Enum

from octavo.client.transport import EngineEnded, Transport
from octavo.errors import EngineDeadError
from octavo.protocol import EngineCoreOutputs, EngineReady, ToEngine

RESTART_WINDOW_SECONDS = 600.0
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 5.0

# An idle engine speaks every half second, a working one after each step. Silence is judged against the longest step seen, as a long
# prompt on a large model takes its time.
READY_SECONDS = 3.0
READY_STEPS = 3
STALL_SECONDS = 120.0
STALL_STEPS = 20
WATCH_SECONDS = 1.0

logger = logging.getLogger(__name__)


class EngineState(Enum):
    """What a supervisor's engine is at."""

    NEW = "not started"
    STARTING = "starting"
    UP = "up"
    RESTARTING = "restarting"
    DEAD = "dead"
    CLOSED = "shut down"


class Supervisor:
    """One engine at a time, each behind a transport of its own.

    `stall_seconds`: an engine that says nothing for so long (or for STALL_STEPS of its longest steps) is killed.
    `max_restarts` within ten minutes; one more crash, and the engine is dead for good.
    """

    def __init__(
        self,
        new_transport: Callable[[], Transport],
        *,
        max_restarts: int = 16,
        stall_seconds: float = STALL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._new_transport = new_transport
        self._max_restarts = max_restarts
        self._stall_seconds = stall_seconds
        self._clock = clock
        self._transport = new_transport()
        self._restarts: deque[float] = deque()
        self._last_message = 0.0
        self._longest_step = 0.0
        self._watch: asyncio.Task[None] | None = None
        self.state = EngineState.NEW
        self.num_restarts = 0

    @property
    def fresh(self) -> bool:
        """Whether the engine is up and its last message is recent: it finished a step or was idle a moment ago."""
        age = self._clock() - self._last_message
        return self.state is EngineState.UP and age < max(READY_SECONDS, READY_STEPS * self._longest_step)

    def launch(self) -> None:
        """Begins the engine's start at once, before an event loop exists. Raises ConfigError or EngineDeadError."""
        try:
            self._transport.launch()
        except EngineEnded as ended:
            self.state = EngineState.DEAD
            raise ended.as_error() from None

    def kill(self) -> None:
        """Ends the engine at once; for a caller that has no event loop to close it on."""
        self.state = EngineState.CLOSED
        self._transport.kill()

    async def start(self) -> EngineReady:
        """Starts the first engine. Raises ConfigError for the user's mistakes, else EngineDeadError: a first start is not repeated."""
        self.state = EngineState.STARTING
        try:
            ready = await self._transport.start()
        except EngineEnded as ended:
            self.state = EngineState.DEAD
            raise ended.as_error() from None
        self._up()
        self._watch = asyncio.create_task(self._watch_pulse(), name="engine pulse")
        return ready

    def send(self, message: ToEngine) -> None:
        """Sends to the engine of this moment. What an engine does not live to answer is the client's to resend."""
        self._transport.send(message)

    async def receive(self) -> EngineCoreOutputs:
        """The engine's next message. Raises EngineEnded: then `restart`."""
        outputs = await self._transport.receive()
        self._last_message = self._clock()
        if outputs.stats.step_seconds > self._longest_step:
            self._longest_step = outputs.stats.step_seconds
        return outputs

    async def restart(self, ended: EngineEnded) -> EngineReady:
        """Starts engines until one is ready. Raises ConfigError or EngineDeadError when it gives up, with the last reason."""
        self.state = EngineState.RESTARTING
        pause = 0.0
        while True:
            self._count_restart(ended)
            logger.warning("%s; starting another one", ended)
            await asyncio.sleep(pause)
            pause = min(max(2 * pause, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
            self._transport = self._new_transport()
            began = self._clock()
            try:
                ready = await self._transport.start()
            except EngineEnded as again:
                ended = again
                continue
            self._up()
            self.num_restarts += 1
            logger.info("the engine is back after %.2f s (restart %d)", self._clock() - began, self.num_restarts)
            return ready

    async def close(self) -> None:
        """Ends the engine and waits until its process is gone. Idempotent."""
        self.state = EngineState.CLOSED
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None
        await self._transport.close()

    def _up(self) -> None:
        self._last_message = self._clock()
        self.state = EngineState.UP

    def _count_restart(self, ended: EngineEnded) -> None:
        """Allows one more start, or gives up."""
        now = self._clock()
        while self._restarts and now - self._restarts[0] > RESTART_WINDOW_SECONDS:
            self._restarts.popleft()
        user_error = ended.failed is not None and ended.failed.user_error
        if user_error or len(self._restarts) >= self._max_restarts:
            self.state = EngineState.DEAD
            if user_error:
                raise ended.as_error()
            raise EngineDeadError(f"{ended}; given up after {len(self._restarts)} restarts within ten minutes")
        self._restarts.append(now)

    async def _watch_pulse(self) -> None:
        """Kills an engine that has stopped speaking.

        It counts its own wakes, not the clock: when this whole process was stopped for a while, that was not the engine's silence.
        """
        silent_wakes = 0
        seen = self._last_message
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            silent_wakes = silent_wakes + 1 if self._last_message == seen and self.state is EngineState.UP else 0
            seen = self._last_message
            if silent_wakes * WATCH_SECONDS >= max(self._stall_seconds, STALL_STEPS * self._longest_step):
                logger.error("the engine has said nothing for %d s and is killed", silent_wakes)
                silent_wakes = 0
                self._transport.kill()
