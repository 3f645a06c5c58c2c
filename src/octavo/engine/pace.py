"""How much of prompts a step may hold so that the streams beside them go on in time, and how prompts share that.

A prompt's chunk delays every stream of its step. So while streams decode, a step is to take no longer than a target:
`itl_target_ms`, or, where none is set, ITL_MULTIPLE times what a step of decodes alone would take if all requests that run or wait for
a seat decoded. By all of them, since when many come at once a few decode first: their gaps will be those of the full batch soon,
and measured by the few all prompts would take several times as long.

Decodes are never held back, and prompts never quite: together they get at least LEAST_SHARE of the time of the step's decodes, and at
least one token. So, if the model is exact, a step in which streams decode ends at the latest with the later of its target and
1 + LEAST_SHARE times its decodes' own time, or with the one token more.

Of what there is for prompts the earliest running one may have FIRST_SHARE. The rest goes to the shortest first, among the others and
those that are to be admitted, as most of what it costs to wait is borne by prompts that need little. Nobody starves: whatever comes,
the earliest goes on at no less than FIRST_SHARE of the pace, and when it is done another is the earliest.

Knows sizes and the model of step times; nothing of requests, blocks or clocks.
"""

from __future__ import annotations

import math

from octavo.config import ITL_MULTIPLE
from octavo.engine.step_time import StepShape, StepTimeModel

LEAST_SHARE = 0.25
FIRST_SHARE = 0.75


class Allowance:
    """What the prompts of one step may still take: tokens, and seconds (math.inf: only tokens are limited). The first token is always allowed."""

    def __init__(self, model: StepTimeModel, tokens: int, seconds: float) -> None:
        self._model = model
        self.tokens = tokens
        self.seconds = seconds
        self._is_untouched = True

    @property
    def has_room(self) -> bool:
        """Whether one more token can be taken."""
        if self.tokens <= 0:
            return False
        return self._is_untouched or self.seconds >= self._model.prompt_seconds(1, 0)

    def part(self, share: float) -> Allowance:
        """A share of it, for its own count: what is taken from that is not yet taken from this."""
        return Allowance(self._model, min(self.tokens, max(1, int(self.tokens * share))), self.seconds * share)

    def offer(self, most: int, num_before: int) -> int:
        """Tokens for a prompt that can use up to `most` and has so many computed. At least one if there is room."""
        num_tokens = min(most, self.tokens)
        if self.seconds < math.inf and num_tokens > 0:
            within = self._model.prompt_tokens_within(self.seconds, num_before)
            num_tokens = min(num_tokens, max(within, 1 if self.has_room else 0))
        return num_tokens

    def take(self, most: int, num_before: int) -> int:
        """What is offered is also used."""
        num_tokens = self.offer(most, num_before)
        self.use(num_tokens, num_before)
        return num_tokens

    def use(self, num_tokens: int, num_before: int) -> None:
        """Take so many, whether they are allowed or not."""
        if num_tokens > 0:
            self.tokens -= num_tokens
            self.seconds -= self._model.prompt_seconds(num_tokens, num_before)
            self._is_untouched = False


class Pace:
    """The target, and what follows from it for a step. `itl_target_ms`: None for the multiple, 0 for no target and prompts strictly in order."""

    def __init__(self, itl_target_ms: float | None, max_num_tokens: int) -> None:
        self.itl_target_ms = itl_target_ms
        self.max_num_tokens = max_num_tokens
        self.model = StepTimeModel()
        self.target: float | None = None  # seconds, of the last step in which streams decoded

    @property
    def is_strict(self) -> bool:
        return self.itl_target_ms == 0

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step has taken so long."""
        if not self.is_strict:
            self.model.observe(shape, seconds)

    def figures(self) -> tuple[float, list[float]]:
        """For operators: the target in seconds or 0, and the model's coefficients once something was measured."""
        return self.target or 0.0, list(self.model.coefficients) if self.model.is_measured else []

    def allowance(self, decodes: StepShape, num_streams: int) -> Allowance:
        """For the prompts of a step with these decodes, while `num_streams` requests run or wait for a seat."""
        tokens = self.max_num_tokens - decodes.num_decodes
        if self.is_strict or decodes.num_decodes == 0:
            return Allowance(self.model, tokens, math.inf)
        self.target = self._target(decodes, num_streams)
        if self.target is None:
            return Allowance(self.model, tokens, math.inf)
        alone = self.model.predict(decodes)
        return Allowance(self.model, tokens, max(self.target - alone, LEAST_SHARE * alone))

    def num_drafts_within(self, shape: StepShape, num_before: int) -> int:
        """How many rows more of a request that decodes behind so many tokens leave a step of this shape within its target."""
        if self.target is None or self.is_strict:
            return self.max_num_tokens
        spare, row = self.target - self.model.predict(shape), self.model.draft_seconds(num_before)
        if spare <= 0:
            return 0
        return int(min(spare / row, self.max_num_tokens)) if row > 0 else self.max_num_tokens

    def _target(self, decodes: StepShape, num_streams: int) -> float | None:
        """None: not known yet."""
        if self.itl_target_ms is not None:
            return self.itl_target_ms / 1e3 if self.model.is_measured else None
        context = decodes.decode_context * num_streams // decodes.num_decodes
        return ITL_MULTIPLE * self.model.predict(StepShape(num_streams, context, 0, 0))

    def share_out(self, allowance: Allowance, prompts: list[tuple[int, int]], newcomers: list[int]) -> list[int]:
        """Tokens for each running prompt, given how many it could use and has computed, earliest first; the first gets at least one.

        What newcomers of these lengths can use is left in the allowance, where they are shorter than a running prompt.
        """
        if self.is_strict:
            return [allowance.take(pending, computed) for pending, computed in prompts]
        shares = [0] * len(prompts)
        pending, computed = prompts[0]
        shares[0] = allowance.part(FIRST_SHARE).take(pending, computed)
        allowance.use(shares[0], computed)
        kept_tokens, kept_seconds = 0, 0.0
        newcomers = sorted(newcomers, reverse=True)
        for i in sorted(range(len(prompts)), key=lambda i: prompts[i][0]):
            pending, computed = prompts[i]
            while newcomers and newcomers[-1] < pending:
                num_tokens = allowance.take(newcomers.pop(), 0)
                kept_tokens += num_tokens
                kept_seconds += self.model.prompt_seconds(num_tokens, 0)
            shares[i] += allowance.take(pending - shares[i], computed + shares[i])
        allowance.tokens += kept_tokens
        allowance.seconds += kept_seconds
        return shares
