"""One HTTP request's work in the engine: a request of the client's for each prompt, their outputs merged, tokens counted.

Knows nothing of JSON or of what the route makes of an output.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from octavo.errors import EngineDeadError, InvalidRequestError, OctavoError, RequestFailedError
from octavo.sampling_params import SamplingParams
from octavo.server.answers import PromptTokensDetails, Usage
from octavo.server.asgi import Request
from octavo.server.metrics import RequestTimer
from octavo.server.render import Prompt, renamed
from octavo.server.schema import SamplingFields
from octavo.server.state import ServerState

if TYPE_CHECKING:
    from octavo.client.outputs import RequestOutput

# Outputs that arrived together: the prompt's index, and the news of its sequences.
Batch = list[tuple[int, "RequestOutput"]]


class Generation:
    """`params` are complete, one per prompt. Iterate `outputs()` once; closing it, or cancelling, aborts what still runs.

    `scores_only`: the prompt is wanted and not what follows; the token that the engine makes is not counted.
    """

    def __init__(
        self, state: ServerState, request: Request, body: SamplingFields, prompts: list[Prompt], params: list[SamplingParams],
        scores_only: bool = False,
    ) -> None:  # fmt: skip
        self.prompts = prompts
        self.params = params
        self._state = state
        self._request = request
        self._body = body
        self._counts = not scores_only
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._num_completion_tokens = 0
        self._num_cached = [0] * len(prompts)
        self._timers = [
            RequestTimer(state.metrics, request.arrival, len(p.token_ids), own)
            for p, own in zip(prompts, params, strict=True)
        ]

    def usage(self) -> Usage:
        """Of all prompts, as far as generated."""
        prompt, completion = self._num_prompt_tokens, self._num_completion_tokens
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(sum(self._num_cached)))

    async def outputs(self) -> AsyncGenerator[Batch, None]:
        """Batches of outputs until every sequence has ended. Raises what the client raises, refusals before the first batch."""
        outcome: str | None = "abort"
        try:
            async with aclosing(self._one(0) if len(self.prompts) == 1 else self._merged()) as batches:
                async for batch in batches:
                    for index, output in batch:
                        self._count(index, output)
                    yield batch
        except InvalidRequestError as exc:
            outcome = None
            raise renamed(exc, self._body) from None
        except OctavoError as exc:
            outcome = "error" if isinstance(exc, (RequestFailedError, EngineDeadError)) else None
            raise
        finally:
            for timer in self._timers:
                timer.finish(outcome)

    def _count(self, index: int, output: RequestOutput) -> None:
        num_new = 0
        for choice in output.outputs:
            num_new += len(choice.token_ids)
        if self._counts:
            self._num_completion_tokens += num_new
            self._request.num_generated_tokens += num_new
        if output.num_cached_tokens:
            self._num_cached[index] = output.num_cached_tokens
        self._timers[index].observe(output, num_new)

    def _start(self, index: int) -> AsyncGenerator[RequestOutput, None]:
        prompt, body = self.prompts[index], self._body
        return self._state.client.generate(
            prompt.token_ids,
            self.params[index],
            request_id=self._request.request_id,
            prompt_text=prompt.text,
            cache_salt=body.cache_salt,
            priority=body.priority or 0,
            arrival_time=self._request.arrival,
        )

    async def _one(self, index: int) -> AsyncGenerator[Batch, None]:
        async with aclosing(self._start(index)) as outputs:
            async for output in outputs:
                yield [(index, output)]

    async def _merged(self) -> AsyncGenerator[Batch, None]:
        """All prompts at once. Bounded: a slow reader lets outputs wait in the client, which merges them."""
        queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue(len(self.prompts))
        pumps = [asyncio.create_task(self._pump(index, queue)) for index in range(len(self.prompts))]
        num_open = len(pumps)
        try:
            while num_open:
                batch: Batch = []
                item = await queue.get()
                while True:
                    if isinstance(item, BaseException):
                        raise item
                    if item is None:
                        num_open -= 1
                    else:
                        batch.append(item)
                    if queue.empty():
                        break
                    item = queue.get_nowait()
                if batch:
                    yield batch
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, index: int, queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None]) -> None:
        try:
            async with aclosing(self._start(index)) as outputs:
                async for output in outputs:
                    await queue.put((index, output))
        except Exception as exc:
            await queue.put(exc)
        else:
            await queue.put(None)
