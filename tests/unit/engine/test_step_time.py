"""The model of step times: what it learns, from what, and what it does not believe. Needs Python only."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.step_time import PRIOR, StepShape, StepTimeModel, reach_of

TRUTHS = {
    "compute-bound": (3.2e-3, 0.9e-3, 1.0e-3, 0.64e-3, 0.58e-3),
    "large, memory-bound": (210e-3, 1.5e-3, 4.0e-3, 1.2e-3, 1.0e-3),
    "free context": (1e-3, 0.2e-3, 0.0, 0.1e-3, 0.0),
}
PROBES = (
    StepShape(1, 256, 0, 0),
    StepShape(8, 8 * 400, 0, 0),
    StepShape(32, 32 * 256, 0, 0),
    StepShape(32, 32 * 256, 64, reach_of(64, 300)),
    StepShape(0, 0, 512, reach_of(512, 0)),
)


def true_seconds(truth: tuple[float, ...], shape: StepShape) -> float:
    return sum(a * b for a, b in zip(truth, shape.features(), strict=True))


def draw(rng: random.Random) -> StepShape:
    """A step as a busy server has them."""
    num_decodes, num_prompt_tokens = rng.choice((0, 1, rng.randint(1, 40), rng.randint(1, 40))), 0
    if num_decodes == 0 or rng.random() < 0.4:
        num_prompt_tokens = rng.choice((2, rng.randint(2, 100), rng.randint(2, 512)))
    reach = reach_of(num_prompt_tokens, rng.randint(0, 900))
    return StepShape(num_decodes, num_decodes * rng.randint(20, 900), num_prompt_tokens, reach)


def teach(model: StepTimeModel, rng: random.Random, truth: tuple[float, ...], num_steps: int) -> None:
    for _ in range(num_steps):
        shape = draw(rng)
        model.observe(shape, true_seconds(truth, shape))


def errors(model: StepTimeModel, truth: tuple[float, ...]) -> list[float]:
    return [model.predict(shape) / true_seconds(truth, shape) - 1 for shape in PROBES]


@pytest.mark.parametrize("truth", TRUTHS.values(), ids=TRUTHS.keys())
def test_it_finds_the_coefficients(truth: tuple[float, ...]) -> None:
    rng, model = random.Random(1), StepTimeModel()
    teach(model, rng, truth, 600)
    assert all(abs(error) < 0.05 for error in errors(model, truth)), errors(model, truth)
    for i in (0, 1, 3):
        assert model.coefficients[i] == pytest.approx(truth[i], rel=0.2)


@pytest.mark.parametrize("truth", TRUTHS.values(), ids=TRUTHS.keys())
def test_stalls_move_it_little(truth: tuple[float, ...]) -> None:
    """One of twelve steps takes 3 to 20 times as long, all are uncertain by a tenth: a plain mean would be off by 0.9."""
    rng, model = random.Random(2), StepTimeModel()
    for _ in range(800):
        shape = draw(rng)
        stall = rng.uniform(3, 20) if rng.random() < 1 / 12 else 1.0
        model.observe(shape, true_seconds(truth, shape) * rng.uniform(0.95, 1.05) * stall)
    assert all(abs(error) < 0.15 for error in errors(model, truth)), errors(model, truth)


def test_a_slower_machine_is_followed() -> None:
    truth = TRUTHS["compute-bound"]
    rng, model = random.Random(3), StepTimeModel()
    teach(model, rng, truth, 300)
    slower = tuple(2.5 * c for c in truth)
    teach(model, rng, slower, 1500)
    assert all(abs(error) < 0.1 for error in errors(model, slower)), errors(model, slower)


def test_a_long_time_of_one_kind_does_not_make_it_forget_the_others() -> None:
    truth = TRUTHS["large, memory-bound"]
    rng, model = random.Random(4), StepTimeModel()
    teach(model, rng, truth, 400)
    alone = StepShape(1, 256, 0, 0)
    for _ in range(5000):
        model.observe(alone, true_seconds(truth, alone))
    assert all(abs(error) < 0.08 for error in errors(model, truth)), errors(model, truth)


def test_one_step_gives_the_speed_and_the_prior_the_proportions() -> None:
    model = StepTimeModel()
    assert not model.is_measured
    shape = StepShape(0, 0, 100, 5000)
    model.observe(shape, 0.5)
    assert model.is_measured and model.predict(shape) == pytest.approx(0.5, rel=0.01)
    ratios = [c / p for c, p in zip(model.coefficients, PRIOR, strict=True)]
    assert max(ratios) == pytest.approx(min(ratios), rel=0.01)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, -math.inf, 1e300])
def test_what_is_no_time_is_ignored(seconds: float) -> None:
    model = StepTimeModel()
    model.observe(StepShape(1, 10, 0, 0), seconds)
    assert not model.is_measured and model.coefficients == list(PRIOR)


shapes = st.builds(
    StepShape, st.integers(0, 4096), st.integers(0, 10**8), st.integers(0, 10**5), st.integers(0, 10**10)
)


@settings(deadline=None)
@given(st.lists(st.tuples(shapes, st.floats(1e-9, 1e5)), max_size=60))
def test_whatever_it_sees_predictions_are_finite_and_never_fall_with_more_to_do(steps: list[tuple[StepShape, float]]) -> None:
    model = StepTimeModel()
    for shape, seconds in steps:
        model.observe(shape, seconds)
    assert all(math.isfinite(c) and c >= 0 for c in model.coefficients)
    base = model.predict(StepShape(3, 300, 0, 0))
    assert 0 <= base <= model.predict(StepShape(4, 400, 0, 0)) <= model.predict(StepShape(4, 400, 10, 1000)) < math.inf


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=5, max_size=5), st.floats(1e-6, 10), st.integers(0, 10**6)
)
def test_tokens_within_a_time_are_the_most_that_fit(coefficients: list[float], seconds: float, num_before: int) -> None:
    model = StepTimeModel()
    model.coefficients = coefficients
    most = model.prompt_tokens_within(seconds, num_before)
    assert most >= 0
    if most < 10**6:
        # Half a token of reach is lost to whole numbers.
        slack = coefficients[4] / 1024 + 1e-9
        assert model.prompt_seconds(most, num_before) <= seconds * (1 + 1e-9) + 1e-12
        assert model.prompt_seconds(most + 1, num_before) + slack >= seconds * (1 - 1e-9)


def test_reach_is_the_tokens_before_each() -> None:
    assert reach_of(0, 50) == 0
    for num_tokens, num_before in ((1, 0), (4, 10), (7, 3)):
        exact = sum(range(num_before, num_before + num_tokens)) + num_tokens / 2  # each sees itself by half
        assert abs(reach_of(num_tokens, num_before) - exact) <= 0.5
