"""How long a step takes: a model with five coefficients, learnt from the steps that were computed.

    seconds = base                                 reading every weight once
            + per_decode         * decodes         requests that compute one token
            + per_decode_context * their context   tokens whose K and V they read
            + per_prompt_token   * prompt tokens   of requests that compute more than one
            + per_prompt_context * their reach     the sum over these tokens of the tokens before each

It is kept as a mean for each *kind* of step (how many decodes and how many prompt tokens, by powers of two) and fitted to these means,
so an hour of decodes does not make it forget what a chunk costs. A step that took unlike what was expected counts as if it had taken a
bounded part more or less: one stall moves little. If many do, the machine has become slower, for all kinds: so each step also moves a
common speed. Where nothing was measured yet the coefficients keep the proportions of `PRIOR`, at the speed that was seen.

Knows nothing of clocks, requests or plans: it is told sizes and seconds.
"""

from __future__ import annotations

import math
from typing import NamedTuple

CONTEXT_UNIT = 1024.0  # tokens of context, so that all features have like sizes
NUM_FEATURES = 5
PRIOR = (3.0, 1.0, 1.0, 0.7, 0.6)  # of the coefficients to each other, in any unit
PRIOR_WEIGHT = 0.001  # of one coefficient's deviation from the prior, where a well-known kind of step weighs 1
MEMORY = 24  # steps that a kind's mean goes back
MOST_DEVIATION = 0.3  # of a step from its kind
MOST_RATIO = 50.0  # of a kind's time to what the prior and the common speed make of it
FREE_STEPS = 3  # of each kind, whose deviation counts in full
SPEED_RATE = 0.05  # of a step's deviation, by which the common speed moves
DRAFT_CONTEXT_SHARE = 0.5  # of the time that a decode's context takes: a further row multiplies K and V that are in the caches
FIT_EVERY = 16  # steps, once the model is no longer young


class StepShape(NamedTuple):
    """What a step computes, as far as its time depends on it."""

    num_decodes: int
    decode_context: int  # tokens, over all decodes
    num_prompt_tokens: int
    prompt_reach: int  # tokens before each prompt token, summed

    def with_decode(self, num_before: int) -> StepShape:
        """One more request that computes one token behind so many."""
        return StepShape(self.num_decodes + 1, self.decode_context + num_before, self.num_prompt_tokens, self.prompt_reach)

    def with_drafts(self, num_tokens: int, num_before: int) -> StepShape:
        """So many rows more of a request that decodes behind so many tokens. K and V are read for it anyhow, but multiplied with each row."""
        context = self.decode_context + int(num_tokens * num_before * DRAFT_CONTEXT_SHARE)
        return self._replace(num_decodes=self.num_decodes + num_tokens, decode_context=context)

    def with_prompt(self, num_tokens: int, num_before: int) -> StepShape:
        """One more request that computes several tokens behind so many."""
        reach = self.prompt_reach + reach_of(num_tokens, num_before)
        return StepShape(self.num_decodes, self.decode_context, self.num_prompt_tokens + num_tokens, reach)

    def features(self) -> tuple[float, ...]:
        return (
            1.0,
            float(self.num_decodes),
            self.decode_context / CONTEXT_UNIT,
            float(self.num_prompt_tokens),
            self.prompt_reach / CONTEXT_UNIT,
        )


class StepTimeModel:
    """`observe` what steps took, `predict` what one will take. Costs O(kinds) in every sixteenth step, else O(1)."""

    def __init__(self) -> None:
        self.coefficients = list(PRIOR)  # in seconds once something was observed: see `is_measured`
        self.num_observed = 0
        self._kinds: dict[tuple[int, int], _Kind] = {}
        self._slowness = 1.0  # of all kinds, whose means are at 1

    @property
    def is_measured(self) -> bool:
        """Whether predictions are seconds; before that they are only in proportion."""
        return self.num_observed > 0

    def predict(self, shape: StepShape) -> float:
        """Seconds of such a step."""
        base, decode, decode_context, prompt, prompt_context = self.coefficients
        return (
            base
            + decode * shape.num_decodes
            + prompt * shape.num_prompt_tokens
            + (decode_context * shape.decode_context + prompt_context * shape.prompt_reach) / CONTEXT_UNIT
        )

    def draft_seconds(self, num_before: int) -> float:
        """What a row more of a request that decodes behind so many tokens adds to a step."""
        return self.coefficients[1] + self.coefficients[2] * DRAFT_CONTEXT_SHARE * num_before / CONTEXT_UNIT

    def prompt_tokens_within(self, seconds: float, num_before: int) -> int:
        """How many tokens of a prompt, the first of which has `num_before` before it, add at most `seconds` to a step."""
        if seconds <= 0:
            return 0
        square = self.coefficients[4] / CONTEXT_UNIT / 2
        linear = self.coefficients[3] + 2 * square * num_before
        # The stable form of the quadratic's root; with `square` 0 it is seconds / linear.
        rooted = linear + math.sqrt(linear * linear + 4 * square * seconds)
        return int(min(2 * seconds / rooted, 1e9)) if rooted > 0 else 10**9

    def prompt_seconds(self, num_tokens: int, num_before: int) -> float:
        """What such tokens add to a step."""
        return self.coefficients[3] * num_tokens + self.coefficients[4] / CONTEXT_UNIT * reach_of(num_tokens, num_before)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape has taken so long. What cannot be a time is ignored."""
        if not 0 < seconds < 1e6:
            return
        key = (shape.num_decodes.bit_length(), shape.num_prompt_tokens.bit_length())
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind()
        predicted = self.predict(shape)
        kind.take(shape.features(), predicted, seconds / self._slowness, self.coefficients)
        if self.num_observed >= FIT_EVERY and predicted > 0:
            change = 1.0 + SPEED_RATE * min(max(seconds / predicted - 1.0, -MOST_DEVIATION), MOST_DEVIATION)
            self._slowness *= change
            self.coefficients = [c * change for c in self.coefficients]
        self.num_observed += 1
        if self.num_observed % FIT_EVERY == 0 or self.num_observed < 2 * FIT_EVERY:
            self._fit()

    def _fit(self) -> None:
        """Least squares of the relative errors of all kinds, with no coefficient below 0, and each drawn a little to the prior."""
        kinds = list(self._kinds.values())
        ratios = [kind.seconds / _dot(PRIOR, kind.features) for kind in kinds]
        speed = sorted(ratios)[len(ratios) // 2]
        gram = [[0.0] * NUM_FEATURES for _ in range(NUM_FEATURES)]
        right = [0.0] * NUM_FEATURES
        for kind, ratio in zip(kinds, ratios, strict=True):
            weight = kind.count / (kind.count + 4.0)
            # Unknowns are coefficients as multiples of the prior's; what they should give is 1. The bounds keep the sums well-conditioned.
            scale = min(max(speed / ratio, 1 / MOST_RATIO), MOST_RATIO) / _dot(PRIOR, kind.features)
            row = [f * p * scale for f, p in zip(kind.features, PRIOR, strict=True)]
            for i, a in enumerate(row):
                right[i] += weight * a
                gram_row = gram[i]
                for j, b in enumerate(row):
                    gram_row[j] += weight * a * b
        for i in range(NUM_FEATURES):
            gram[i][i] += PRIOR_WEIGHT
            right[i] += PRIOR_WEIGHT
        multiples = _solve_non_negative(gram, right)
        self.coefficients = [m * p * speed * self._slowness for m, p in zip(multiples, PRIOR, strict=True)]


class _Kind:
    """The mean step of one kind."""

    __slots__ = ("count", "features", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.features = (0.0,) * NUM_FEATURES
        self.seconds = 0.0

    def take(self, features: tuple[float, ...], predicted: float, seconds: float, coefficients: list[float]) -> None:
        if self.count >= FREE_STEPS:
            # What this step should have taken: its kind's mean, carried over to its own sizes.
            mean = _dot(coefficients, self.features)
            expected = self.seconds * predicted / mean if mean > 0 and predicted > 0 else self.seconds
            seconds = min(max(seconds, expected * (1 - MOST_DEVIATION)), expected * (1 + MOST_DEVIATION))
        self.count = min(self.count + 1, MEMORY)
        share = 1.0 / self.count
        self.features = tuple(a + share * (b - a) for a, b in zip(self.features, features, strict=True))
        self.seconds += share * (seconds - self.seconds)


def reach_of(num_tokens: int, num_before: int) -> int:
    """Tokens before each of `num_tokens` consecutive ones, summed, if the first has `num_before` before it."""
    return num_tokens * num_before + num_tokens * num_tokens // 2


def _dot(a: list[float] | tuple[float, ...], b: tuple[float, ...]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _solve_non_negative(gram: list[list[float]], right: list[float]) -> list[float]:
    """Minimises x.gram.x / 2 - right.x over x >= 0: Gaussian elimination without the unknowns that come out negative."""
    free = list(range(len(right)))
    while True:
        solution = _solve([[gram[i][j] for j in free] for i in free], [right[i] for i in free])
        worst = min(range(len(free)), key=solution.__getitem__)
        if solution[worst] >= 0:
            result = [0.0] * len(right)
            for i, value in zip(free, solution, strict=True):
                result[i] = value
            return result
        del free[worst]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Of a symmetric positive definite matrix, so without pivots. Destroys its arguments."""
    n = len(right)
    for k in range(n):
        for i in range(k + 1, n):
            factor = matrix[i][k] / matrix[k][k]
            for j in range(k, n):
                matrix[i][j] -= factor * matrix[k][j]
            right[i] -= factor * right[k]
    for k in reversed(range(n)):
        right[k] = (right[k] - sum(matrix[k][j] * right[j] for j in range(k + 1, n))) / matrix[k][k]
    return right
