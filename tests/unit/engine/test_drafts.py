"""Needs Python only. Drafts by prompt lookup: what is foretold, when a draft pays, and what the engine makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from engine_driver import EOS, Driver
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine import drafts
from octavo.engine.drafts import FIRST_CHANCE, LOOK_BACK, MARGIN, NGRAM, PromptLookup, worth
from octavo.protocol import FinishReason, ModelRunnerOutput, SampledTokens, SchedulerOutput


def lookup(token_ids: list[int]) -> PromptLookup:
    found = PromptLookup(token_ids)
    found.follow()
    return found


def test_nothing_repeats_nothing_is_foretold() -> None:
    assert not PromptLookup(list(range(50))).follow()
    assert lookup(list(range(50))).draft(4) == []


@pytest.mark.parametrize("tokens", [[], [5], [5, 5], [1, 2, 9, 1, 2]])
def test_fewer_tokens_than_must_agree(tokens: list[int]) -> None:
    assert not PromptLookup(tokens).follow()


def test_what_followed_is_foretold() -> None:
    assert lookup([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]).draft(3) == [4, 5, 6]


def test_the_latest_place_counts() -> None:
    assert lookup([1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 3]).draft(1) == [5]


def test_beyond_the_end_the_draft_repeats_itself() -> None:
    assert lookup([8, 1, 2, 3, 1, 2, 3]).draft(8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert lookup([7, 7, 7, 7]).draft(5) == [7] * 5


def test_a_match_goes_on_while_it_is_right_and_is_replaced_when_it_is_not() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 0, 2, 3, 7, 8, 0, 1, 2, 3]
    found = lookup(tokens)
    assert found.draft(2) == [4, 5]
    tokens += [4]
    assert found.follow() and found.draft(2) == [5, 6]
    tokens += [9]
    assert not found.follow() and found.draft(2) == []
    tokens += [0, 2, 3]
    assert found.follow() and found.draft(2) == [7, 8]


def test_tokens_whose_bytes_agree_across_their_borders_are_no_match() -> None:
    """Searched as bytes, [256, 0, 0, 0] begins anew one byte further on."""
    assert not PromptLookup([1, 256, 256, 256, 3, 1 << 24, 1 << 16, 1, 1, 1]).follow()
    tokens = [0, 0, 0x01000000, 0x01000000, 0x01000000, 5, 1, 1, 1]
    assert not PromptLookup(tokens).follow()


def test_only_so_far_back() -> None:
    near = [1, 2, 3, 4, *range(10, LOOK_BACK), 1, 2, 3]
    assert lookup(near).draft(1) == [4]
    far = [1, 2, 3, 4, *range(10, LOOK_BACK + 100), 1, 2, 3]
    assert not PromptLookup(far).follow()


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=20))
def test_against_the_definition(tokens: list[int], later: list[int]) -> None:
    """A match behind the latest earlier place of the last tokens, kept while it is right, whether tokens come one by one or at once."""
    found, at = PromptLookup(tokens), None
    whole = [*tokens, *later]

    def search(end: int) -> int | None:
        places = range(end - NGRAM - 1, -1, -1) if end > NGRAM else ()
        return next((i + NGRAM for i in places if whole[i : i + NGRAM] == whole[end - NGRAM : end]), None)

    found.follow()
    at = search(len(tokens))
    for i, token in enumerate(later, len(tokens)):
        assert found.draft(1) == ([] if at is None else [whole[at]])
        tokens.append(token)
        found.follow()
        at = at + 1 if at is not None and whole[at] == token else search(i + 1)
    assert found.draft(1) == ([] if at is None else [whole[at]])


def test_the_chance_follows_what_held() -> None:
    tokens = [1, 2, 3] * 2
    found = lookup(tokens)
    assert found.chance == FIRST_CHANCE
    for _ in range(20):
        tokens += [1, 2, 3]
        found.follow()
    assert found.chance > 0.99
    tokens += [9]
    found.follow()
    before = found.chance
    assert 0.5 < before < 0.9
    tokens += [4, 5, 6]
    found.follow()
    assert found.chance == before, "where nothing was foretold nothing is learnt"


@given(st.floats(0, 1), st.floats(0, 10), st.floats(0, 10), st.integers(0, 20))
def test_a_draft_is_as_long_as_each_of_its_tokens_pays(chance: float, row: float, token: float, most: int) -> None:
    count = worth(chance, row, token, most)
    assert 0 <= count <= most
    assert all(chance**i * token > MARGIN * row * (1 - 1e-9) for i in range(1, count + 1))
    assert count == most or chance ** (count + 1) * token <= MARGIN * row * (1 + 1e-9)


# --- in the engine ---


def drafting(**options: Any) -> Driver:
    return Driver(**{"num_speculative_tokens": 3, "max_num_batched_tokens": 16, **options})


def tokens_of(d: Driver) -> list[int]:
    d.run()
    return d.tokens("a")


def run_towards(d: Driver, whole: list[int]) -> list[SchedulerOutput]:
    """The one request goes on as `whole` does."""
    plans = []
    while d.core.requests:
        plan = d.plan()
        (s,) = plan.scheduled
        result = SampledTokens(s.request_id)
        first = s.num_computed_tokens + len(s.token_ids) - s.num_drafts
        for draft, token in zip([*s.draft_token_ids, None], whole[first:], strict=False):
            result.token_ids.append(token)
            if token != draft:
                break
        d.keep(d.core.update(plan, ModelRunnerOutput(plan.step, [result]), d.now, 0.1))
        plans.append(plan)
    return plans


def test_a_repetition_comes_several_tokens_at_a_time() -> None:
    d = drafting()
    d.add("a", 3, max_tokens=30)
    assert tokens_of(d) == [7] * 30
    stats = d.core.report(d.now).stats
    assert stats.step < 15 and stats.generation_tokens == 30
    assert stats.num_accepted_tokens == stats.num_draft_tokens >= 18
    assert stats.num_drafts == len([o for o in d.outputs["a"] if len(o.new_token_ids) > 1])


def test_none_are_made_unless_they_are_wanted() -> None:
    d = drafting(num_speculative_tokens=0)
    d.add("a", 3, max_tokens=30)
    assert len(d.run()) == 30


def test_what_does_not_hold_costs_nothing_but_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.scheduler.worth", lambda chance, row, token, most: most)
    d = drafting()
    prompt, output = [5, 6, 7, 8] * 2, [5, 6, 9, 9, 5, 6, 7, 1, 10, 3, 4, 11]
    d.add("a", prompt, max_tokens=12)
    plans = run_towards(d, prompt + output)
    assert d.tokens("a") == output and d.outputs["a"][-1].finish_reason is FinishReason.LENGTH
    stats = d.core.report(d.now).stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert [s.num_drafts for plan in plans for s in plan.scheduled][:2] == [0, 3]
    assert d.pool.num_used == 0


def test_a_stop_token_in_a_draft_ends_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.scheduler.worth", lambda chance, row, token, most: most)
    d = drafting()
    prompt = [5, 6, 7, EOS, 8, 5, 6]
    d.add("a", prompt, max_tokens=30)
    plans = run_towards(d, [*prompt, 7, EOS, 8, 5, 6])
    assert plans[-1].scheduled[0].token_ids == [7, EOS, 8, 5]
    assert d.tokens("a") == [7, EOS] and d.outputs["a"][-1].finish_reason is FinishReason.STOP
    assert d.pool.num_used == 0


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_never_beyond_max_tokens_or_the_context(max_tokens: int) -> None:
    d = drafting(max_model_len=12)
    d.add("a", 3, max_tokens=max_tokens)
    assert tokens_of(d) == [7] * min(max_tokens, 9)
    assert d.pool.num_used == 0


def test_the_budget_is_kept_and_prompts_come_first() -> None:
    d = drafting(num_speculative_tokens=8, max_num_batched_tokens=6)
    d.add("a", 3, max_tokens=20)
    d.steps(6)
    d.add("b", 40, max_tokens=2)
    for plan in d.run():
        assert plan.num_tokens <= 6
        if any(s.request_id == "b" and not s.samples for s in plan.scheduled):
            assert not any(s.num_drafts for s in plan.scheduled)
    assert tokens_of(d) == [7] * 20


def test_nobody_is_preempted_for_a_draft_and_it_takes_what_is_there() -> None:
    d = drafting(num_blocks=3, num_speculative_tokens=8)
    d.add("a", 3, max_tokens=8)
    assert tokens_of(d) == [7] * 8
    assert d.core.report(d.now).stats.num_preemptions == 0


def test_drafts_have_a_row_of_logits_each() -> None:
    """However few requests run at once there is room for some, and never for more than the device has."""
    d = drafting(max_num_seqs=1, num_speculative_tokens=64, max_num_batched_tokens=64, num_blocks=64, max_model_len=200)
    d.add("a", 3, max_tokens=150)
    plans = d.run()
    rows = [1 + s.num_drafts for plan in plans for s in plan.scheduled if s.samples]
    assert max(rows) == d.core.config.max_num_rows == 32


def test_an_answer_that_disagrees_with_its_drafts_ends_the_request() -> None:
    d = drafting()
    d.add("a", 3, max_tokens=30)
    while not (plan := d.plan()).scheduled[0].num_drafts:
        d.answer(plan)
    d.keep(d.core.update(plan, ModelRunnerOutput(plan.step, [SampledTokens("a", [8, 7])]), d.now, 0.1))
    error = d.outputs["a"][-1].error
    assert error is not None and "no answer to the drafts" in error.message
    assert d.pool.num_used == 0


def test_constants_make_sense() -> None:
    assert 0 < drafts.CHANCE_RATE < 1 and NGRAM >= 2
