"""One caller's stream of outputs: filled by the one receive task, emptied at the caller's pace.

Bounded by merging: however slow the caller is, at most one output waits for it. Knows nothing of engines.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from octavo.client.intake import Family
from octavo.client.outputs import CompletionOutput, RequestOutput
from octavo.errors import OctavoError
from octavo.protocol import FinishReason
from octavo.sampling_params import RequestOutputKind


class OutputStream:
    """Holds what has come since the caller last looked. `put` never waits; `get` does."""

    __slots__ = ("_error", "_family", "_kind", "_last", "_loop", "_pending", "_waiter")

    def __init__(self, family: Family) -> None:
        self._family = family
        self._kind = family.params.output_kind
        self._pending: RequestOutput | None = None
        self._last: RequestOutput | None = None
        self._error: OctavoError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # kept: asking for it is a system call
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: RequestOutput | OctavoError) -> None:
        """Adds an output, or the error that ends the stream behind what is already there."""
        if isinstance(item, OctavoError):
            self._error = item
        elif self._pending is None:
            self._pending = item
        else:
            self._pending = merge(self._pending, item, self._kind)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def abort(self, unfinished: list[str]) -> None:
        """Ends the stream with what it had; the choices of these engine requests have finish_reason "abort"."""
        family = self._family
        base = self._pending or (self._last if self._kind is RequestOutputKind.CUMULATIVE else None)
        choices = {choice.index: replace(choice) for choice in base.outputs} if base is not None else {}
        for index, request in enumerate(family.requests):
            if request.request_id in unfinished:
                choices.setdefault(index, CompletionOutput(index, "", [])).finish_reason = FinishReason.ABORT.value
        prompt = family.requests[0].prompt_token_ids
        self._pending = None
        self.put(RequestOutput(family.id, family.text, prompt, None, [choices[index] for index in sorted(choices)], True))

    async def get(self) -> RequestOutput:
        """The next output; raises the error that ended the stream."""
        while self._pending is None:
            if self._error is not None:
                raise self._error
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            self._waiter = self._loop.create_future()
            await self._waiter
        output = self._last = self._pending
        self._pending = None
        return output


def merge(older: RequestOutput, newer: RequestOutput, kind: RequestOutputKind) -> RequestOutput:
    """Two outputs of one stream as one: deltas are joined choice by choice, a cumulative output replaces the one before."""
    choices = {choice.index: choice for choice in older.outputs}
    for choice in newer.outputs:
        before = choices.get(choice.index)
        if before is not None and kind is RequestOutputKind.DELTA:
            choice.text = before.text + choice.text
            choice.token_ids = [*before.token_ids, *choice.token_ids]
            if before.logprobs is not None:
                choice.logprobs = [*before.logprobs, *(choice.logprobs or ())]
        choices[choice.index] = choice
    newer.outputs = [choices[index] for index in sorted(choices)]
    if newer.prompt_logprobs is None:
        newer.prompt_logprobs = older.prompt_logprobs
    return newer
