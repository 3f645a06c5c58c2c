"""How much of prompts a step may hold, who gets it, and that streams are in time where the model is exact. Needs Python only."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from engine_driver import Driver, make_request, shares
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import ITL_MULTIPLE
from octavo.engine.pace import FIRST_SHARE, LEAST_SHARE, Allowance, Pace
from octavo.engine.step_time import StepShape
from octavo.protocol import ModelRunnerOutput, SampledTokens, SchedulerOutput

TRUTH = [3e-3, 1e-3, 1e-3, 0.7e-3, 0.6e-3]


def pace(itl_target_ms: float | None, budget: int = 512) -> Pace:
    """A pace that knows the truth."""
    made = Pace(itl_target_ms, budget)
    made.model.coefficients = list(TRUTH)
    made.model.num_observed = 1
    return made


def test_without_streams_only_the_budget_counts() -> None:
    for target in (None, 0.0, 20.0):
        allowance = pace(target).allowance(StepShape(0, 0, 0, 0), 5)
        assert (allowance.tokens, allowance.seconds) == (512, math.inf)


def test_the_default_target_is_a_multiple_of_all_decoding() -> None:
    p = pace(None)
    decodes = StepShape(2, 2 * 512, 0, 0)
    allowance = p.allowance(decodes, 8)
    whole = 3e-3 + 8 * 1e-3 + 8 * 0.5e-3
    assert p.target == pytest.approx(ITL_MULTIPLE * whole)
    assert allowance.seconds == pytest.approx(ITL_MULTIPLE * whole - (3e-3 + 2e-3 + 1e-3))


def test_a_target_in_milliseconds() -> None:
    p = pace(40.0)
    assert p.allowance(StepShape(4, 0, 0, 0), 4).seconds == pytest.approx(0.040 - 0.007)
    assert p.figures()[0] == 0.040


def test_a_target_that_decodes_alone_miss_leaves_prompts_a_share() -> None:
    allowance = pace(1.0).allowance(StepShape(20, 0, 0, 0), 20)
    assert allowance.seconds == pytest.approx(LEAST_SHARE * 23e-3)


def test_before_anything_was_measured_milliseconds_mean_nothing() -> None:
    assert Pace(40.0, 512).allowance(StepShape(4, 0, 0, 0), 4).seconds == math.inf
    assert Pace(None, 512).allowance(StepShape(4, 0, 0, 0), 4).seconds < math.inf


def test_the_first_token_is_always_allowed_and_no_second_without_time() -> None:
    allowance = Allowance(pace(None).model, 10, 1e-9)
    assert allowance.has_room and allowance.take(5, 100) == 1
    assert not allowance.has_room and allowance.take(5, 0) == 0
    assert Allowance(pace(None).model, 0, 1.0).take(5, 0) == 0


def test_the_earliest_prompt_has_its_share_and_the_rest_goes_to_the_shortest() -> None:
    p = pace(None)
    allowance = Allowance(p.model, 100, math.inf)
    assert p.share_out(allowance, [(500, 0), (300, 0), (10, 0)], []) == [75, 15, 10]
    assert allowance.tokens == 0


def test_newcomers_that_are_shorter_are_left_something() -> None:
    p = pace(None)
    allowance = Allowance(p.model, 100, math.inf)
    assert p.share_out(allowance, [(500, 0)], [600, 4, 7]) == [89]
    assert allowance.tokens == 11


def test_strictly_in_order() -> None:
    p = pace(0.0)
    assert p.share_out(Allowance(p.model, 100, math.inf), [(60, 0), (300, 0), (10, 0)], [1]) == [60, 40, 0]


sizes = st.lists(st.tuples(st.integers(2, 3000), st.integers(0, 3000)), min_size=1, max_size=12)


@settings(deadline=None)
@given(sizes, st.lists(st.integers(1, 3000), max_size=12), st.integers(1, 600), st.one_of(st.just(math.inf), st.floats(0, 0.5)))
def test_shares(prompts: list[tuple[int, int]], newcomers: list[int], tokens: int, seconds: float) -> None:
    """Nobody gets more than it can use, all together no more than there is but for one token, and the first never starves."""
    p = pace(None)
    allowance = Allowance(p.model, tokens, seconds)
    got = p.share_out(allowance, prompts, newcomers)
    assert all(0 <= share <= pending for share, (pending, _) in zip(got, prompts, strict=True))
    assert sum(got) <= tokens and sum(got) + allowance.tokens == tokens
    assert got[0] >= 1
    first = Allowance(p.model, max(1, int(tokens * FIRST_SHARE)), seconds * FIRST_SHARE).take(*prompts[0])
    assert got[0] >= first
    used = sum(p.model.prompt_seconds(share, computed) for share, (_, computed) in zip(got, prompts, strict=True))
    one = max(p.model.prompt_seconds(1, computed) for _, computed in prompts)
    assert used <= max(seconds, 0) + one + 1e-5


# --- the whole engine, in modelled time ---


@dataclass
class Timed:
    """An engine whose steps take exactly what a model says, and which knows that model."""

    itl_target_ms: float | None
    now: float = 0.0
    tokens: dict[str, list[float]] = field(default_factory=dict)
    gaps: list[tuple[float, float, float]] = field(default_factory=list)  # of steps with streams: seconds, target, decodes' own

    def __post_init__(self) -> None:
        self.d = Driver(
            num_blocks=4000, block_size=16, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=4096,
            itl_target_ms=self.itl_target_ms, enable_prefix_caching=False,
        )  # fmt: skip
        self.pace = self.d.scheduler.pace
        self.pace.model.coefficients = list(TRUTH)

    def add(self, name: str, prompt: int, output: int) -> None:
        self.d.core.add(make_request(name, prompt, max_tokens=output, min_tokens=output, arrival_time=self.now), self.now)

    def step(self) -> SchedulerOutput | None:
        core, running = self.d.core, {r.request_id: r.num_pending_tokens for r in self.d.scheduler.running}
        plan = core.schedule(self.now)
        if plan is None:
            return None
        model, shape = self.pace.model, self.d.scheduler.shape
        seconds = model.predict(shape)
        decodes = StepShape(0, 0, 0, 0)
        for s in plan.scheduled:
            if running.get(s.request_id) == 1:
                decodes = decodes.with_decode(s.num_computed_tokens)
        if decodes.num_decodes and self.pace.target is not None:
            self.gaps.append((seconds, self.pace.target, model.predict(decodes)))
        self.now += seconds
        sampled = [SampledTokens(s.request_id, [7] if s.samples else []) for s in plan.scheduled]
        for output in core.update(plan, ModelRunnerOutput(plan.step, sampled), self.now, seconds).outputs:
            self.tokens.setdefault(output.request_id, []).append(self.now)
        return plan


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([None, 1.0, 15.0, 60.0, 400.0]))
def test_with_an_exact_model_no_stream_waits_longer_than_the_target(seed: int, target: float | None) -> None:
    rng, timed = random.Random(seed), Timed(target)
    for i in range(rng.randint(2, 30)):
        timed.add(f"r{i}", rng.choice((1, 20, rng.randint(1, 1500))), rng.randint(1, 30))
        for _ in range(rng.choice((0, 0, 1, 10))):
            timed.step()
    while timed.step() is not None:
        pass
    assert all(len(times) >= 1 for times in timed.tokens.values()) and timed.gaps
    one = TRUTH[3] + TRUTH[4] * 2 + TRUTH[1]
    for seconds, goal, alone in timed.gaps:
        assert seconds <= max(goal, (1 + LEAST_SHARE) * alone) * (1 + 1e-6) + one


def test_without_a_target_streams_wait_for_whole_chunks() -> None:
    """What all this is for: the same load with and without."""
    longest = {}
    for target in (0.0, None):
        timed = Timed(target)
        timed.add("stream", 10, 60)
        for _ in range(5):
            timed.step()
        timed.add("long", 2000, 2)
        while timed.step() is not None:
            pass
        times = timed.tokens["stream"]
        longest[target] = max(b - a for a, b in pairwise(times))
    assert longest[0.0] > 0.3 and longest[None] < 0.02


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    first = {}
    for target in (0.0, None):
        timed = Timed(target)
        timed.add("long", 3000, 2)
        timed.step()
        timed.add("longer", 3500, 2)
        timed.add("short", 20, 2)
        while timed.step() is not None:
            pass
        first[target] = timed.tokens["short"][0]
    assert first[None] < 0.3 * first[0.0]


def test_what_passes_a_request_is_no_longer_in_all_than_itself() -> None:
    """Short ones come for ever; the long one begins all the same."""
    d = Driver(num_blocks=400, block_size=16, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=1000, itl_target_ms=None)
    d.add("stream", 8, max_tokens=900)
    d.add("other", 8, max_tokens=1)
    d.step()
    d.add("long", [1] * 100, max_tokens=3)
    passed = 0
    for i in range(60):
        d.add(f"short{i}", [2] * 9, max_tokens=1)
        plan = d.step()
        if "long" in shares(plan):
            break
        passed += sum(name.startswith("short") for name in shares(plan))
    assert "long" in shares(plan)
    assert passed == 100 // 9


def test_nobody_is_passed_for_want_of_blocks() -> None:
    """ "small" would fit, but "big" came first and does not."""
    d = Driver(num_blocks=8, max_num_batched_tokens=32, itl_target_ms=None)
    d.add("a", 20, max_tokens=5)
    d.step()
    d.add("big", [5] * 16, max_tokens=5)
    d.add("small", [3] * 2, max_tokens=1)
    first = {name: next(i for i, plan in enumerate(plans) if name in shares(plan)) for plans in [d.run()] for name in ("big", "small")}
    assert first["big"] > 0 and first["small"] >= first["big"]


def test_the_front_is_admitted_if_a_shorter_one_does_not_fit() -> None:
    d = Driver(num_blocks=8, max_num_batched_tokens=32, itl_target_ms=None)
    d.add("a", 8, max_tokens=10)
    d.step()
    d.scheduler.caution = 1.0
    d.scheduler.used_share = 1.0
    d.add("front", [3] * 9, max_tokens=2)
    d.add("shorter, but wants more", [4] * 4, max_tokens=25)
    assert "front" in shares(d.step())


def test_explicit_budget_is_a_hard_bound() -> None:
    d = Driver(num_blocks=400, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=900, itl_target_ms=1e6)
    for i in range(4):
        d.add(f"r{i}", [i] * 50, max_tokens=20)
    plans = d.run()
    assert max(p.num_tokens for p in plans) == 8
