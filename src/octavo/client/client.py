"""EngineClient: the asynchronous face of an engine that lives in another process and may die and come back.

`generate` checks a request, sends it, and streams its outputs; one receive task hands each step's outputs to their streams. When
the engine dies, the requests in flight are sent to the next one with the tokens that they already have, and their streams go on.

Knows no HTTP and imports nothing of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Self

from octavo.client.intake import Asked, Family, Intake, PromptType, family_of
from octavo.client.outputs import OutputProcessor, RequestOutput
from octavo.client.recovery import Recovery
from octavo.client.stats import StatsLog, continued
from octavo.client.stream import OutputStream
from octavo.client.supervisor import EngineState, Supervisor
from octavo.client.transport import ENGINE_COMMAND, EngineEnded, SocketTransport
from octavo.config import AsyncEngineArgs, EngineArgs
from octavo.errors import EngineDeadError, OctavoError, OverloadedError, RequestFailedError
from octavo.protocol import Abort, EngineCoreOutputs, EngineCoreRequest, EngineReady, ResetPrefixCache, Start, StepStats
from octavo.sampling_params import SamplingParams
from octavo.tokenizer.tokenizer import Tokenizer

# Longer texts are encoded beside the event loop, not on it.
LONG_TEXT = 16_384
DRAIN_POLL_SECONDS = 0.02

StatsListener = Callable[[StepStats], None]

logger = logging.getLogger(__name__)


class EngineClient:
    """An engine for many concurrent callers on one event loop.

    `args` are those the engine was started with; of them it reads the limits on requests.
    """

    def __init__(self, supervisor: Supervisor, tokenizer: Tokenizer, args: EngineArgs) -> None:
        self._supervisor = supervisor
        self._tokenizer = tokenizer
        self._args = args
        self._log_requests = isinstance(args, AsyncEngineArgs) and args.enable_log_requests
        self._processor = OutputProcessor(tokenizer)
        self._recovery: Recovery[EngineCoreRequest] = Recovery()
        self._streams: dict[str, OutputStream] = {}
        self._labels: dict[str, list[str]] = {}  # a user's request id -> the families under it
        self._listeners: list[StatsListener] = [] if args.disable_log_stats else [StatsLog()]
        self._starting: asyncio.Task[None] | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._intake: Intake | None = None
        self._ready: EngineReady | None = None
        self._stats: StepStats | None = None
        self._earlier: StepStats | None = None  # the books of the engines before this one
        self._dead: OctavoError | None = None
        self._draining = False

    @classmethod
    def for_model(cls, args: EngineArgs, model_path: Path, command: tuple[str, ...] = ENGINE_COMMAND) -> Self:
        """A client for the model at `model_path`, a folder or a .gguf file.

        Its engine process begins to start at once, while this one reads the tokenizer; `start` waits for it. Call it from the thread that
        will use it. Raises ConfigError, ModelFileError, EngineDeadError.
        """
        start = Start(args, str(model_path))
        supervisor = Supervisor(lambda: SocketTransport(start, command), max_restarts=args.max_engine_restarts)
        supervisor.launch()
        try:
            tokenizer = Tokenizer.load(model_path, args.tokenizer)
        except Exception:
            supervisor.kill()
            raise
        return cls(supervisor, tokenizer, args)

    # --- the engine's life ---

    async def start(self) -> EngineReady:
        """Waits until the engine can take requests; later calls return at once.

        Raises ConfigError for a mistake of the user's, as in a model's files, and EngineDeadError.
        """
        if self._ready is not None:
            return self._ready
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="engine start")
        await asyncio.shield(self._starting)
        assert self._ready is not None
        return self._ready

    async def shutdown(self) -> None:
        """Ends the engine process; streams that are still open get EngineDeadError. Idempotent."""
        for task in (self._starting, self._receiver):
            if task is not None and not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, OctavoError):
                    await task
        await self._supervisor.close()
        self._die(EngineDeadError("the engine was shut down"))

    async def drain(self, timeout: float) -> bool:
        """Refuses new requests from now on and waits until the running ones have ended; False if `timeout` seconds were too few."""
        self._draining = True
        deadline = time.monotonic() + timeout
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        return not self._streams

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine is gone for good. An engine that is being restarted is alive."""
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))

    def is_ready(self) -> bool:
        """Whether a request sent now would be worked on at once: the engine said a moment ago that it runs, and nobody drains it."""
        return self._supervisor.fresh and not self._draining

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def is_running(self) -> bool:
        return self._supervisor.state in (EngineState.UP, EngineState.RESTARTING)

    @property
    def errored(self) -> bool:
        return self._dead is not None

    @property
    def num_restarts(self) -> int:
        return self._supervisor.num_restarts

    # --- what is known of it ---

    @property
    def engine_info(self) -> EngineReady | None:
        """What the present engine said of itself when it was ready; None before the first was."""
        return self._ready

    @property
    def stats(self) -> StepStats | None:
        """The engine's books after its last step; counters go on over restarts."""
        return self._stats

    @property
    def max_model_len(self) -> int | None:
        return self._ready.max_model_len if self._ready else None

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    async def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def add_stats_listener(self, listener: StatsListener) -> None:
        """Has `listener` called with the books after each step and each idle heartbeat, on the event loop: it must be quick."""
        self._listeners.append(listener)

    # --- requests ---

    def validate(self, prompt_len: int, params: SamplingParams) -> SamplingParams:
        """The parameters as they will be used for a prompt of so many tokens; needs a started engine.

        Raises ContextLengthError, InvalidRequestError.
        """
        return self._started_intake().validate(prompt_len, params)

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_text: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Streams the outputs for a prompt. Closing or cancelling the iteration aborts the request at once.

        `request_id` is the caller's name for it, shown in outputs and known to `abort`; it need not be unique.
        `arrival_time`: seconds of time.monotonic. Raises InvalidRequestError, ContextLengthError, OverloadedError, RequestFailedError,
        EngineDeadError.
        """
        arrived = time.monotonic() if arrival_time is None else arrival_time
        await self.start()
        asked = await self._ask(prompt, sampling_params or SamplingParams())
        asked.arrival_time, asked.priority = arrived, priority
        asked.text = asked.text if prompt_text is None else prompt_text
        asked.cache_salt = cache_salt if asked.cache_salt is None else asked.cache_salt
        family = self._admit(asked)
        label = family.id if request_id is None else request_id
        stream = self._open(family, label)
        try:
            while True:
                output = await stream.get()
                output.request_id = label
                yield output
                if output.finished:
                    return
        finally:
            self._close(family.id, label)

    async def abort(self, request_id: str) -> None:
        """Ends all requests that the caller named so; their streams end with finish_reason "abort". Unknown names are no error."""
        for family in list(self._labels.get(request_id, ())):
            unfinished = self._abort(family)
            if unfinished and (stream := self._streams.get(family)):
                stream.abort(unfinished)

    async def reset_prefix_cache(self) -> None:
        """Has the engine forget all cached prefixes that no running request holds."""
        self._supervisor.send(ResetPrefixCache())

    # --- inside ---

    async def _start(self) -> None:
        try:
            self._ready = await self._supervisor.start()
        except OctavoError as error:
            self._dead = error
            raise
        self._intake = Intake(
            self._tokenizer,
            self._ready,
            max_logprobs=self._args.max_logprobs,
            allow_priority=self._args.scheduling_policy == "priority",
        )
        self._receiver = asyncio.create_task(self._receive(), name="engine outputs")

    def _started_intake(self) -> Intake:
        if self._intake is None:
            raise OverloadedError("the engine is starting")
        return self._intake

    async def _ask(self, prompt: PromptType, params: SamplingParams) -> Asked:
        intake = self._started_intake()
        ids, text, salt = intake.parse(prompt)
        if ids is None:
            assert text is not None
            ids = await asyncio.to_thread(intake.encode, text) if len(text) > LONG_TEXT else intake.encode(text)
        return Asked(ids, text, params, salt)

    def _admit(self, asked: Asked) -> Family:
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))
        if self._draining:
            raise OverloadedError("the server is shutting down")
        if self._recovery.num_held >= self._args.max_num_queued_requests:
            raise OverloadedError("the engine is restarting and the queue is full")
        return self._started_intake().admit(asked)

    def _open(self, family: Family, label: str) -> OutputStream:
        """Books a family's requests and sends them, or has them wait for the engine."""
        stream = self._streams[family.id] = OutputStream(family)
        self._labels.setdefault(label, []).append(family.id)
        for index, request in enumerate(family.requests):
            self._processor.add(
                request, family=family.id, index=index, n=family.params.n, prompt=family.text, params=family.params
            )
            if not self._recovery.hold(request.request_id, request):
                self._supervisor.send(request)
        if self._log_requests:
            prompt_len = len(family.requests[0].prompt_token_ids)
            logger.info("request %s (%s): %d prompt tokens, %s", label, family.id, prompt_len, family.params)
        return stream

    def _close(self, family: str, label: str) -> None:
        """Forgets a family whose caller is gone or served; what of it still runs is aborted."""
        self._abort(family)
        self._streams.pop(family, None)
        families = self._labels[label]
        families.remove(family)
        if not families:
            del self._labels[label]

    def _abort(self, family: str) -> list[str]:
        """Has the engine stop what of a family still runs; the ids of that."""
        request_ids = self._processor.abort(family)
        if request_ids:
            self._supervisor.send(Abort(request_ids))
            self._tell_recovery(request_ids)
        return request_ids

    async def _receive(self) -> None:
        """The one receive task: one pass per step. Ends when the engine is dead for good."""
        try:
            while True:
                try:
                    while True:
                        self._deliver(await self._supervisor.receive())
                except EngineEnded as ended:
                    await self._recover(ended)
        except OctavoError as error:
            logger.error("the engine is dead: %s", error)
            self._die(error)
        except Exception as error:
            logger.exception("the client failed")
            self._die(EngineDeadError(f"the client failed ({type(error).__name__})"))

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        step = self._processor.process(outputs)
        streams = self._streams
        for family, item in step.outputs:
            stream = streams.get(family)
            if stream is not None:
                stream.put(item)
        if step.aborts:
            self._supervisor.send(Abort(step.aborts))
        if self._recovery.active:
            self._tell_recovery([output.request_id for output in outputs.outputs] + step.aborts)
        self._stats = continued(outputs.stats, self._earlier)
        for listener in self._listeners:
            listener(self._stats)

    async def _recover(self, ended: EngineEnded) -> None:
        """Another engine, with all that the last one had not finished. Raises OctavoError when there will be none."""
        guilty = self._recovery.crashed({request.request_id: request for request in self._processor.resume_requests()})
        if guilty is not None:
            self._give_up(family_of(guilty))
        self._earlier = self._stats
        self._ready = await self._supervisor.restart(ended)
        self._send_all(self._recovery.restarted())

    def _give_up(self, family: str) -> None:
        logger.error("request %s is given up: the engine died time and again with it alone", family)
        self._tell_recovery(self._processor.abort(family))
        if stream := self._streams.get(family):
            stream.put(RequestFailedError("the engine died repeatedly while it worked on this request alone"))

    def _tell_recovery(self, request_ids: list[str]) -> None:
        """These requests had an output or are over; others may have waited for that."""
        if self._recovery.active:
            self._send_all(self._recovery.news(request_ids))

    def _send_all(self, requests: list[EngineCoreRequest]) -> None:
        for request in requests:
            self._supervisor.send(request)

    def _die(self, error: OctavoError) -> None:
        self._dead = self._dead or error
        for family, stream in self._streams.items():
            self._processor.abort(family)
            stream.put(EngineDeadError(str(error)))
