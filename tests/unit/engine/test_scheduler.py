"""What a step holds: budget, order, blocks, preemption, families, prefix hits. Needs Python only.

All through EngineCore, because a plan is what the runner sees; the pool of `Driver` is 16 blocks of 4 tokens unless told otherwise.
"""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
from engine_driver import Driver, shares

from octavo.engine.block_pool import InvariantError
from octavo.engine.request import RequestStatus
from octavo.engine.scheduler import MAX_PREEMPTIONS
from octavo.protocol import FinishReason, ScheduledRequest


def own_tokens(s: ScheduledRequest) -> int:
    """A token that depends on the request and the position: no two requests have equal output."""
    return 1000 + sum(map(ord, s.request_id)) * 100 + s.num_computed_tokens


# --- the budget ---


def test_a_prompt_is_computed_and_sampled_in_one_step_if_it_fits() -> None:
    d = Driver()
    d.add("a", 5)
    plan = d.step()
    assert shares(plan) == {"a": (0, 5)}
    assert plan.scheduled[0].samples and plan.num_tokens == 5
    assert [n.request_id for n in plan.new_requests] == ["a"]
    assert d.tokens("a") == [7]


def test_then_one_token_a_step() -> None:
    d = Driver()
    d.add("a", 5)
    plans = d.steps(3, own_tokens)
    assert [shares(p)["a"] for p in plans] == [(0, 5), (5, 1), (6, 1)]
    assert [p.scheduled[0].token_ids for p in plans[1:]] == [[d.tokens("a")[0]], [d.tokens("a")[1]]]
    assert plans[1].new_requests == []
    assert [p.step for p in plans] == [1, 2, 3]


def test_a_long_prompt_is_cut_into_chunks_and_only_the_last_samples() -> None:
    d = Driver()
    d.add("a", 37)
    plans = d.steps(3)
    assert [shares(p)["a"] for p in plans] == [(0, 16), (16, 16), (32, 5)]
    assert [p.scheduled[0].samples for p in plans] == [False, False, True]
    assert [len(p.scheduled[0].block_ids[0]) for p in plans] == [4, 8, 10]
    assert len(d.outputs["a"]) == 1


def test_prompts_share_the_budget_in_order_of_arrival() -> None:
    d = Driver(num_blocks=40)
    for name, length in (("a", 20), ("b", 20), ("c", 3)):
        d.add(name, [ord(name)] * length)
    assert [shares(d.step()) for _ in range(3)] == [
        {"a": (0, 16)},
        {"a": (16, 4), "b": (0, 12)},
        {"a": (20, 1), "b": (12, 8), "c": (0, 3)},
    ]


def test_a_prompt_does_not_stop_decodes_and_decodes_do_not_stop_a_prompt() -> None:
    d = Driver(num_blocks=60, max_num_batched_tokens=4, max_num_seqs=4, block_size=4)
    for name in "abc":
        d.add(name, 1, max_tokens=40)
    d.step()
    d.add("long", 30)
    for _ in range(30):
        plan = d.step()
        assert {s.request_id for s in plan.scheduled} == {"a", "b", "c", "long"}
        assert plan.num_tokens == 4
    assert len(d.tokens("long")) == 1


def test_the_budget_is_never_exceeded_and_used_up_while_prompts_wait() -> None:
    d = Driver(num_blocks=400, max_num_seqs=8, max_num_batched_tokens=10)
    for i in range(8):
        d.add(f"r{i}", [i] * 13, max_tokens=3)
    plans = d.run()
    assert all(p.num_tokens <= 10 for p in plans)
    assert all(p.num_tokens == 10 for p in plans[:10])


def test_more_seats_than_budget_are_not_used() -> None:
    """Each decode must have its token."""
    d = Driver(num_blocks=60, max_num_seqs=9, max_num_batched_tokens=3)
    for i in range(9):
        d.add(f"r{i}", 1, max_tokens=5)
    plans = d.run()
    assert max(len(p.scheduled) for p in plans) == 3


def test_a_budget_of_one_works() -> None:
    d = Driver(max_num_batched_tokens=1)
    d.add("a", 6, max_tokens=3)
    d.add("b", 2, max_tokens=3)
    plans = d.run()
    assert [p.num_tokens for p in plans] == [1] * len(plans)
    assert len(d.tokens("a")) == len(d.tokens("b")) == 3


# --- admission ---


def test_seats_are_given_in_order_and_again_when_one_leaves() -> None:
    d = Driver(max_num_seqs=2, num_blocks=40)
    for name, max_tokens in (("a", 2), ("b", 5), ("c", 5)):
        d.add(name, 2, max_tokens=max_tokens)
    d.steps(2)
    assert d.running() == ["b"]
    assert set(shares(d.step())) == {"b", "c"}


def test_the_front_of_the_queue_is_never_bypassed() -> None:
    """ "small" would fit, but "big" came first."""
    d = Driver(num_blocks=8, max_num_batched_tokens=32)
    d.add("a", 20, max_tokens=5)
    d.step()
    d.add("big", 16, max_tokens=5)
    d.add("small", 2, max_tokens=1)
    order = [s for plan in d.run() for s in shares(plan)]
    assert order.index("big") < order.index("small")


def test_priority_decides_among_the_waiting() -> None:
    d = Driver(max_num_seqs=1, policy="priority")
    d.add("a", 3, max_tokens=2)
    d.step()
    d.add("late", 3, max_tokens=1, priority=5)
    d.add("soon", 3, max_tokens=1, priority=-5)
    order = [next(iter(shares(plan))) for plan in d.run()]
    assert order == ["a", "soon", "late"]


def test_a_newcomer_must_leave_room_for_the_next_tokens_of_all() -> None:
    """Without that, it would be admitted and at once preempted."""
    d = Driver(num_blocks=4, max_num_batched_tokens=32)
    d.add("a", 8, max_tokens=6)
    d.add("b", 4, max_tokens=6)
    plan = d.step()
    assert list(shares(plan)) == ["a"], "3 blocks for a and 2 for b are soon needed"
    d.run()
    assert d.core.totals.num_preemptions == 0


def test_blocks_are_taken_when_a_token_needs_them() -> None:
    d = Driver()
    d.add("a", 3, max_tokens=8)
    held = [len(p.scheduled[0].block_ids[0]) for p in d.run()]
    assert held == [1, 1, 2, 2, 2, 2, 3, 3]


# --- preemption ---


def overrun(**options: object) -> Driver:
    """Two requests of 8 + 24 tokens in a pool for one of them and a half."""
    d = Driver(num_blocks=12, max_num_batched_tokens=32, **options)
    d.add("old", [1] * 8, max_tokens=24)
    d.add("young", [2] * 8, max_tokens=24)
    return d


def test_the_younger_one_is_preempted_and_both_end_right() -> None:
    d = overrun()
    plans = d.run(own_tokens)
    assert d.core.totals.num_preemptions >= 1
    for name in ("old", "young"):
        assert len(d.tokens(name)) == 24 and d.outputs[name][-1].finish_reason is FinishReason.LENGTH
    last_of_old = max(i for i, p in enumerate(plans) if "old" in shares(p))
    steps_of_old = [p for p in plans if "old" in shares(p)]
    assert len(steps_of_old) == last_of_old + 1, "the older one was in every step until it ended"


def test_the_runner_hears_of_a_preemption_and_is_told_all_again() -> None:
    d = overrun()
    while not d.core.totals.num_preemptions:
        plan = d.step(own_tokens)
    assert plan.released_request_ids == ["young"] and "young" not in shares(plan)
    young = d.request("young")
    assert young.status is RequestStatus.PREEMPTED and young.block_tables == [[]]
    known = young.num_output_tokens
    while "young" not in shares(plan):
        plan = d.step(own_tokens)
    [new] = plan.new_requests
    assert new.request_id == "young" and len(new.output_token_ids) == known
    assert new.output_token_ids == d.tokens("young")[:known]


def test_what_was_computed_is_found_again_if_nobody_needed_the_blocks() -> None:
    d = overrun()
    while not d.core.totals.num_preemptions:
        d.step(own_tokens)
    d.core.abort(["old"])
    computed = d.request("young").num_tokens - 1
    plan = d.step(own_tokens)
    start, count = shares(plan)["young"]
    assert start >= computed - 8, "all but what the older one has taken"
    assert start % 4 == 0 and start + count == d.request("young").num_tokens - 1


def test_a_preempted_one_is_before_all_that_came_later() -> None:
    d = overrun()
    while not d.core.totals.num_preemptions:
        d.step(own_tokens)
    d.add("later", [3] * 8, max_tokens=1)
    admitted = [n.request_id for plan in d.run(own_tokens) for n in plan.new_requests]
    assert admitted == ["young", "later"]


def test_nobody_later_is_left_so_it_waits_and_keeps_what_it_has() -> None:
    """The youngest does not preempt itself: its blocks are worth keeping until an older one needs them."""
    d = Driver(num_blocks=5, max_num_batched_tokens=32)
    d.add("old", [1] * 7, max_tokens=3)
    d.add("young", [2] * 4, max_tokens=12)
    d.scheduler.caution = 0.0
    waited = 0
    while d.core.has_work():
        plan = d.plan()
        if "young" in d.running() and "young" not in shares(plan):
            waited += 1
            assert d.request("young").block_tables[0]
        d.answer(plan, own_tokens)
    assert d.core.totals.num_preemptions == 0 and waited >= 0
    assert len(d.tokens("young")) == 12


def test_preemption_takes_the_latest_first_and_only_as_many_as_needed() -> None:
    d = Driver(num_blocks=6, max_num_batched_tokens=32)
    for name in ("a", "b", "c"):
        d.add(name, [ord(name)] * 5, max_tokens=12)
    with mock.patch("octavo.engine.scheduler.CAUTION_RISE", 0.0):
        while not d.core.totals.num_preemptions:
            plan = d.step(own_tokens)
    assert plan.released_request_ids == ["c"] and d.running() == ["a", "b"]


def test_by_priority_the_least_urgent_is_preempted_even_if_it_is_the_oldest() -> None:
    d = Driver(num_blocks=12, max_num_batched_tokens=32, policy="priority")
    d.add("first", [1] * 8, max_tokens=24, priority=1)
    d.add("urgent", [2] * 8, max_tokens=24, priority=0)
    while not d.core.totals.num_preemptions:
        d.step(own_tokens)
    assert d.running() == ["urgent"]
    d.run(own_tokens)
    assert len(d.tokens("first")) == len(d.tokens("urgent")) == 24


def test_two_giants_that_hold_half_the_pool_each_do_not_block_each_other() -> None:
    d = Driver(num_blocks=16, max_num_batched_tokens=64, max_model_len=64)
    d.add("a", [1] * 30, max_tokens=33)
    d.add("b", [2] * 30, max_tokens=33)
    d.run(own_tokens, most=100)
    assert len(d.tokens("a")) == len(d.tokens("b")) == 33


def test_one_request_may_have_the_whole_pool() -> None:
    d = Driver(num_blocks=4, max_num_batched_tokens=32)
    d.add("a", 8, max_tokens=9)
    plans = d.run()
    assert len(plans[-1].scheduled[0].block_ids[0]) == 4 and len(d.tokens("a")) == 9


@pytest.mark.parametrize(
    ("factor", "prompt", "output", "caching"),
    [
        (1.2, 20, 180, True),
        (1.2, 100, 100, False),
        (1.2, 180, 20, True),
        (4.0, 20, 180, False),
        (4.0, 100, 100, True),
        (4.0, 180, 20, False),
    ],
)
def test_a_storm_of_requests_settles_down(factor: float, prompt: int, output: int, caching: bool) -> None:
    """64 requests in a pool of little more than one: all end, few preemptions each, little is computed twice."""
    d = Driver(
        max_num_seqs=64,
        max_num_batched_tokens=256,
        max_model_len=200,
        block_size=16,
        num_blocks=int(200 * factor) // 16 + 1,
        enable_prefix_caching=caching,
    )
    for i in range(64):
        d.add(f"r{i}", [i] * prompt, max_tokens=output)
    num_computed, preemptions = 0, Counter[str]()
    while d.core.has_work():
        plan = d.core.schedule(1.0)
        assert plan is not None
        num_computed += plan.num_tokens
        preemptions.update(set(plan.released_request_ids) & d.core.requests.keys())
        d.answer(plan, own_tokens)
    assert all(len(d.tokens(f"r{i}")) == output for i in range(64))
    assert max(preemptions.values(), default=0) <= 3
    useful = 64 * (prompt + output - 1)
    assert num_computed - useful <= (0.25 if caching else 0.35) * useful


def test_a_generous_max_tokens_keeps_nobody_out_once_it_is_seen_not_to_be_used() -> None:
    def most_running(count: int, used: int) -> int:
        d = Driver(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=100, num_blocks=30)
        d.scheduler.caution = 1.0
        for i in range(count):
            d.add(f"r{i}", [i] * 4, max_tokens=90)
        most = 0
        while d.core.has_work():
            d.step(lambda s: 2 if d.request(s.request_id).num_output_tokens + 1 >= used else own_tokens(s))
            most = max(most, len(d.running()))
        return most

    assert most_running(20, used=90) <= 3
    assert most_running(100, used=6) >= 8


def test_a_guarded_request_is_not_preempted_any_more() -> None:
    d = overrun()
    with mock.patch("octavo.engine.scheduler.CAUTION_RISE", 0.0):
        while not d.core.totals.num_preemptions:
            d.step(own_tokens)
        d.request("young").num_preemptions = MAX_PREEMPTIONS
        while "young" not in d.running():
            d.step(own_tokens)
        assert "old" not in d.running(), "both could not grow to their end beside each other"
        d.add("newcomer", [3] * 8, max_tokens=24)
        plans = d.run(own_tokens)
    assert not any("young" in p.released_request_ids for p in plans if "newcomer" not in d.outputs)
    first = next(i for i, p in enumerate(plans) if "newcomer" in shares(p))
    last = max(i for i, p in enumerate(plans) if "young" in shares(p))
    assert first > last, "while it runs, nobody is admitted who might need its blocks"


def test_by_priority_a_guarded_request_is_safe_from_the_urgent_ones_too() -> None:
    d = Driver(num_blocks=8, max_num_batched_tokens=32, policy="priority")
    d.add("plain", [1] * 4, max_tokens=20, priority=9)
    d.request("plain").num_preemptions = MAX_PREEMPTIONS
    d.step(own_tokens)
    for i in range(5):
        d.add(f"urgent{i}", [i + 2] * 4, max_tokens=8, priority=0)
    while d.core.has_work():
        assert "plain" not in d.step(own_tokens).released_request_ids or "plain" not in d.core.requests
    assert len(d.tokens("plain")) == 20


# --- prefix hits ---


def test_a_known_prefix_is_not_computed_again() -> None:
    d = Driver()
    d.add("a", [*range(10), 50, 51], max_tokens=2)
    d.run()
    d.add("b", [*range(10), 60, 61, 62])
    plan = d.step()
    assert shares(plan)["b"] == (8, 5), "two full blocks of four"
    assert d.outputs["b"][0].num_cached_tokens == 8
    assert d.outputs["a"][0].num_cached_tokens == 0


def test_the_last_token_is_computed_even_if_all_is_known() -> None:
    d = Driver()
    d.add("a", 8, max_tokens=2)
    d.run()
    d.add("b", 8)
    plan = d.step()
    assert shares(plan)["b"] == (4, 4) and plan.scheduled[0].samples
    assert d.outputs["b"][0].num_cached_tokens == 4


def test_output_is_found_as_the_prompt_of_the_next_turn() -> None:
    d = Driver()
    d.add("a", 6, max_tokens=8)
    d.run(own_tokens)
    d.add("b", [100 + i for i in range(6)] + d.tokens("a") + [9, 9])
    assert shares(d.step())["b"] == (12, 4)


def test_blocks_are_shared_while_both_run() -> None:
    d = Driver()
    d.add("a", 9)
    d.step()
    d.add("b", 9)
    plan = d.step()
    tables = {s.request_id: s.block_ids[0] for s in plan.scheduled}
    assert tables["a"][:2] == tables["b"][:2] and tables["a"][2] != tables["b"][2]
    assert d.pool.num_used == 4


def test_nothing_is_found_before_its_step_has_succeeded() -> None:
    d = Driver()
    d.add("a", 9)
    d.add("b", 9)
    plan = d.plan()
    assert shares(plan) == {"a": (0, 9), "b": (0, 7)}
    assert not set(plan.scheduled[0].block_ids[0]) & set(plan.scheduled[1].block_ids[0])


@pytest.mark.parametrize(
    ("salts", "hit"), [((None, None), 8), (("x", "x"), 8), ((None, "x"), 0), (("x", "y"), 0), ((None, ""), 0)]
)
def test_salts_keep_tenants_apart(salts: tuple[str | None, str | None], hit: int) -> None:
    d = Driver()
    d.add("a", 10, max_tokens=1, cache_salt=salts[0])
    d.step()
    d.add("b", 10, cache_salt=salts[1])
    assert shares(d.step())["b"][0] == hit


def test_without_prefix_caching_all_is_computed() -> None:
    d = Driver(enable_prefix_caching=False)
    for name in "ab":
        d.add(name, 10, max_tokens=1)
        assert shares(d.step())[name] == (0, 10)
    assert d.core.totals.prefix_queries == 0


def test_scores_of_the_prompt_need_every_row() -> None:
    d = Driver()
    d.add("a", 10, max_tokens=1)
    d.step()
    d.add("b", 10, prompt_logprobs=1)
    plan = d.step()
    assert shares(plan)["b"] == (0, 10) and plan.scheduled[0].prompt_logprobs == 1
    assert d.core.totals.prefix_queries == 10, "b did not ask the cache"


# --- families ---


def add_family(d: Driver, count: int, prompt: int | list[int] = 10, **fields: object) -> list[str]:
    names = [f"s{i}" for i in range(count)]
    for i, name in enumerate(names):
        d.add(name, prompt, parent_id="family", seed=i, **fields)
    return names


@pytest.mark.parametrize("caching", [True, False])
def test_siblings_wait_for_the_prompt_and_then_share_it(caching: bool) -> None:
    d = Driver(enable_prefix_caching=caching)
    names = add_family(d, 3)
    assert shares(d.step(own_tokens)) == {"s0": (0, 10)}
    plan = d.step(own_tokens)
    assert shares(plan) == {"s0": (10, 1), "s1": (9, 1), "s2": (9, 1)}
    tables = [s.block_ids[0] for s in plan.scheduled]
    assert len({tuple(t[:2]) for t in tables}) == 1, "the full blocks are shared"
    assert len({t[2] for t in tables}) == 3, "the part-filled one is copied"
    assert [c.source for c in plan.block_copies] == [tables[0][2]] * 2
    assert [c.target for c in plan.block_copies] == [t[2] for t in tables[1:]]
    d.run(own_tokens)
    assert [len(d.tokens(n)) for n in names] == [8, 8, 8]


def test_a_prompt_that_ends_with_a_block_is_copied_too() -> None:
    """The last prompt token is written once more by each sibling, and that block may be found by others already."""
    d = Driver()
    add_family(d, 2, prompt=8)
    d.step(own_tokens)
    plan = d.step(own_tokens)
    tables = {s.request_id: s.block_ids[0] for s in plan.scheduled}
    assert shares(plan)["s1"] == (7, 1)
    assert [(c.source, c.target) for c in plan.block_copies] == [(tables["s0"][1], tables["s1"][1])]
    assert tables["s0"][0] == tables["s1"][0]


def test_nothing_to_copy_where_the_last_token_begins_a_block() -> None:
    d = Driver()
    add_family(d, 2, prompt=9)
    d.step(own_tokens)
    plan = d.step(own_tokens)
    assert plan.block_copies == [] and shares(plan)["s1"] == (8, 1)
    assert plan.scheduled[0].block_ids[0][:2] == plan.scheduled[1].block_ids[0][:2]


def test_a_prompt_of_one_token_is_computed_by_each() -> None:
    d = Driver()
    add_family(d, 3, prompt=1)
    assert shares(d.step(own_tokens)) == {"s0": (0, 1), "s1": (0, 1), "s2": (0, 1)}


def test_the_prompt_is_computed_once() -> None:
    d = Driver(num_blocks=64, max_num_seqs=8)
    names = add_family(d, 8, prompt=30, max_tokens=4)
    d.run(own_tokens)
    assert d.core.totals.prompt_tokens == 30 + 7
    assert all(d.outputs[n][0].num_cached_tokens == 0 for n in names)


def test_siblings_share_until_they_write() -> None:
    d = Driver(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64)
    add_family(d, 8, prompt=42, max_tokens=2)
    d.step(own_tokens)
    d.plan()
    assert d.pool.num_used == 10 + 8


def test_siblings_wait_through_all_chunks_and_hold_up_only_those_behind() -> None:
    d = Driver(num_blocks=64)
    d.add("before", 3, max_tokens=20)
    add_family(d, 2, prompt=40)
    d.add("behind", 3)
    plans = d.steps(4, own_tokens)
    assert [set(shares(p)) for p in plans[:3]] == [{"before", "s0"}] * 3
    assert set(shares(plans[3])) == {"before", "s0", "s1", "behind"}


def leader_aborted(d: Driver) -> None:
    d.core.abort(["s0"])


def leader_failed(d: Driver) -> None:
    d.keep(d.core.fail_step(d.plan(), "broken", d.now))


@pytest.mark.parametrize("go", [leader_aborted, leader_failed])
def test_without_its_leader_the_next_sibling_computes_the_prompt(go) -> None:  # type: ignore[no-untyped-def]
    d = Driver(num_blocks=64)
    add_family(d, 3, prompt=20)
    d.step(own_tokens)
    go(d)
    plan = d.step(own_tokens)
    assert list(shares(plan)) == ["s1"] and shares(plan)["s1"][0] in (0, 16)
    d.run(own_tokens)
    assert len(d.tokens("s1")) == len(d.tokens("s2")) == 8


def test_when_the_leader_has_finished_the_others_use_the_next_one() -> None:
    d = Driver(num_blocks=64, max_num_seqs=2)
    add_family(d, 4, max_tokens=3)
    d.run(own_tokens)
    assert d.core.totals.prompt_tokens <= 10 + 3 * 2, "one token by fork, or two by prefix hit"
    assert all(len(d.tokens(f"s{i}")) == 3 for i in range(4))


@pytest.mark.parametrize("other", [{"prompt": [9] * 10}, {"cache_salt": "x"}])
def test_who_only_claims_the_family_computes_on_its_own(other: dict[str, object]) -> None:
    d = Driver(num_blocks=64, max_num_batched_tokens=32)
    d.add("a", 10, parent_id="family")
    d.add("b", **{"prompt": 10, "parent_id": "family", **other})
    assert shares(d.step(own_tokens)) == {"a": (0, 10), "b": (0, 10)}


def test_resumed_siblings_go_on_where_they_were() -> None:
    d = Driver(num_blocks=64, max_num_batched_tokens=64)
    for i in range(3):
        d.add(f"s{i}", 10, parent_id="family", output_token_ids=[20 + i, 30 + i])
    plan = d.step(own_tokens)
    assert [count for _, count in shares(plan).values()] == [12, 12, 12]
    assert plan.block_copies == []
    d.run(own_tokens)
    assert all(len(d.tokens(f"s{i}")) == 6 for i in range(3))


def test_siblings_with_scores_compute_their_own_prompt() -> None:
    d = Driver(num_blocks=64, max_num_batched_tokens=32)
    add_family(d, 2, prompt_logprobs=0)
    assert shares(d.step(own_tokens)) == {"s0": (0, 10), "s1": (0, 10)}


def test_a_fork_that_finds_no_room_waits() -> None:
    d = Driver(num_blocks=4)
    add_family(d, 2, prompt=10, max_tokens=6)
    d.run(own_tokens)
    assert len(d.tokens("s0")) == len(d.tokens("s1")) == 6


def test_a_family_is_forgotten_with_its_last_member() -> None:
    d = Driver()
    add_family(d, 3, max_tokens=2)
    d.run(own_tokens)
    assert d.scheduler.families == {}


# --- copy on write, whoever writes ---


def test_a_running_request_never_writes_what_others_read_or_find() -> None:
    """Should its last block ever become shared or published, it takes a copy first."""
    d = Driver()
    d.add("a", 6)
    d.step(own_tokens)
    last = d.request("a").block_tables[0][-1]
    d.pool.share([last])
    plan = d.core.schedule(d.now)
    assert plan is not None
    [copy] = plan.block_copies
    assert copy.source == last and plan.scheduled[0].block_ids[0][-1] == copy.target != last


# --- one step at a time ---


def test_a_second_plan_before_the_first_result_is_a_fault_of_the_caller() -> None:
    d = Driver()
    d.add("a")
    plan = d.plan()
    with pytest.raises(InvariantError, match="in flight"):
        d.core.schedule(d.now)
    d.answer(plan)
    d.run()


def test_nothing_to_do_is_no_plan() -> None:
    d = Driver()
    assert d.core.schedule(0.0) is None and not d.core.has_work()


# --- what one request costs the others ---


def test_a_short_request_behind_a_long_prompt_starts_when_that_is_computed() -> None:
    d = Driver(num_blocks=400, max_num_batched_tokens=16, max_model_len=1000)
    d.add("long", 160, max_tokens=50)
    d.add("short", 4, max_tokens=2)
    d.steps(11, own_tokens)
    assert len(d.tokens("short")) == 1


def test_decodes_have_a_token_in_every_step_while_a_prompt_is_computed() -> None:
    d = Driver(num_blocks=400, max_num_batched_tokens=16, max_model_len=1000)
    d.add("chat", 4, max_tokens=100)
    d.step(own_tokens)
    d.add("long", 300, max_tokens=2)
    for _ in range(25):
        d.step(own_tokens)
    assert len(d.tokens("chat")) == 26
    assert d.tokens("long")
