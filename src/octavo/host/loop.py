"""The engine's loop: messages in, plan, step, outputs out. The only place where the pure core and the runner meet.

Time enters the engine here: the core is told what the clock says. Knows nothing of sockets (a Channel), models or kernels (a Runner).

What can fail, and what it costs:
    a request that cannot be read or added    that request: it is answered with an error
    a step of the runner                      the requests of that step, by `EngineCore.fail_step`
    MAX_FAILED_STEPS steps in a row           this engine: EngineBroken, and whoever started it starts another
    the core itself                           this engine, as its books can no longer be trusted
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from octavo.engine.core import EngineCore
from octavo.host.channel import Channel, ChannelClosed, Undecodable
from octavo.protocol import (
    Abort,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorKind,
    FinishReason,
    ModelRunnerOutput,
    OutputError,
    ResetPrefixCache,
    SchedulerOutput,
    Shutdown,
    ToEngine,
)

HEARTBEAT_SECONDS = 0.5
MAX_FAILED_STEPS = 3

logger = logging.getLogger(__name__)


class EngineBroken(Exception):
    """The runner fails at every step: the device or the process is in a state that only a new process can leave."""


class Runner(Protocol):
    """What the loop needs of a device."""

    def launch(self, plan: SchedulerOutput) -> Any:
        """Starts the step; returns what `sample` needs to finish it."""

    def sample(self, running: Any) -> ModelRunnerOutput:
        """Ends the step that was launched."""


class Loop:
    """Runs one core and one runner over one channel."""

    def __init__(self, core: EngineCore, runner: Runner, channel: Channel, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._runner = runner
        self._channel = channel
        self._clock = clock
        self._refused: list[EngineCoreOutput] = []
        self._failed_steps = 0
        self._stepped = False
        self._ended = False

    def run(self) -> None:
        """Turns until a Shutdown comes. Raises ChannelClosed when the other end is gone, EngineBroken as said above."""
        while not self._ended:
            self.turn()

    def turn(self) -> None:
        """Takes the messages that have come, then runs one step, or reports that there was none to run.

        Waits for messages only when the turn before found nothing to do, and then for at most a heartbeat.
        """
        self._receive(0 if self._stepped else HEARTBEAT_SECONDS)
        outputs = self._step()
        self._stepped = outputs is not None
        self._send(outputs if outputs is not None else self._core.report(self._clock()))

    def _step(self) -> EngineCoreOutputs | None:
        """One step of the engine; None if nothing can be scheduled."""
        started = self._clock()
        plan = self._core.schedule(started)
        if plan is None:
            return None
        try:
            running = self._runner.launch(plan)
            self._receive(0)  # the device works meanwhile
            result = self._runner.sample(running)
        except ChannelClosed:
            raise
        except Exception as error:
            return self._fail(plan, error)
        self._failed_steps = 0
        now = self._clock()
        return self._core.update(plan, result, now, now - started)

    def _fail(self, plan: SchedulerOutput, error: Exception) -> EngineCoreOutputs:
        logger.exception("step %d failed", plan.step)
        self._failed_steps += 1
        outputs = self._core.fail_step(plan, f"the engine failed in this request's step ({type(error).__name__})", self._clock())
        if self._failed_steps >= MAX_FAILED_STEPS:
            self._send(outputs)
            raise EngineBroken(f"{MAX_FAILED_STEPS} steps in a row failed, the last with {type(error).__name__}: {error}") from error
        return outputs

    def _receive(self, timeout: float) -> None:
        for message in self._channel.receive(timeout):
            self._handle(message)

    def _handle(self, message: ToEngine | Undecodable) -> None:
        match message:
            case EngineCoreRequest():
                self._add(message)
            case Abort():
                self._core.abort(message.request_ids)
            case ResetPrefixCache():
                self._core.reset_prefix_cache()
            case Shutdown():
                self._ended = True
            case Undecodable(reason=reason, request_id=str(request_id)):
                self._refuse(request_id, ErrorKind.INVALID, f"the engine cannot read this request: {reason}")
            case _:
                raise ChannelClosed(f"a message that the protocol does not allow here: {type(message).__name__}")

    def _add(self, request: EngineCoreRequest) -> None:
        try:
            self._core.add(request, self._clock())
        except Exception as error:
            logger.exception("request %s cannot be added", request.request_id)
            self._core.abort([request.request_id])  # whatever part of it was added
            self._refuse(request.request_id, ErrorKind.INTERNAL, f"the engine cannot take this request ({type(error).__name__})")

    def _refuse(self, request_id: str, kind: ErrorKind, message: str) -> None:
        error = OutputError(kind, message)
        self._refused.append(EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, error=error))

    def _send(self, outputs: EngineCoreOutputs) -> None:
        if self._refused:
            outputs.outputs.extend(self._refused)
            self._refused.clear()
        self._channel.send(outputs)
