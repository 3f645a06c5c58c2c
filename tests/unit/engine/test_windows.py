"""What a step holds where layers have windows: blocks go back in time, hits and forks take what they see, and nothing more is reserved.

Needs Python only. The pool is 16 blocks of 4 tokens unless told otherwise; `windows` says what each group sees.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_driver import Driver, shares

from octavo.engine.block_pool import InvariantError
from octavo.engine.scheduler import MAX_PREEMPTIONS
from octavo.protocol import ErrorKind, ScheduledRequest


def own_tokens(s: ScheduledRequest) -> int:
    return 1000 + sum(map(ord, s.request_id)) * 100 + s.num_computed_tokens


def freed(d: Driver, request_id: str) -> list[int]:
    return d.request(request_id).num_freed_blocks


# --- blocks go back ---


def test_a_request_longer_than_the_pool_runs_in_it() -> None:
    d = Driver(windows=(8,), num_blocks=7, max_model_len=500)
    d.add("a", 150, max_tokens=300)
    most = 0
    for plan in d.run(own_tokens):
        most = max(most, sum(1 for block in plan.scheduled[0].block_ids[0] if block))
    assert len(d.tokens("a")) == 300 and most <= 7
    assert d.core.totals.num_preemptions == 0


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 9, 100])
def test_what_a_coming_token_sees_is_held_and_what_none_sees_is_not(window: int) -> None:
    d = Driver(windows=(window, 0), num_blocks=64)
    d.add("a", 21, max_tokens=20)
    while d.core.has_work():
        plan = d.plan()
        [s] = plan.scheduled
        needed = {p // 4 for p in range(max(0, s.num_computed_tokens - window + 1), s.num_computed_tokens + len(s.token_ids))}
        request = d.request("a")
        assert freed(d, "a")[0] <= min(needed) and freed(d, "a")[1] == 0
        assert freed(d, "a")[0] >= max(0, s.num_computed_tokens - window) // 4
        assert all(d.pool._num_holders[request.block_tables[0][j]] == 1 for j in needed)
        assert s.block_ids == request.block_tables and len(s.block_ids[0]) == len(s.block_ids[1])
        d.answer(plan, own_tokens)
    assert d.pool.num_used == 0


def test_freed_entries_are_zero_and_the_runner_gets_a_copy() -> None:
    d = Driver(windows=(8,))
    d.add("takes block 0", 1, max_tokens=30)
    d.step(own_tokens)
    d.add("a", 16)
    d.step(own_tokens)
    d.step(own_tokens)
    plan = d.plan()
    [table] = plan.scheduled[1].block_ids
    assert table[:2] == [0, 0] and all(table[2:])
    table.clear()
    assert len(d.request("a").block_tables[0]) == 5


def test_freed_blocks_can_be_found_until_they_are_needed() -> None:
    d = Driver(windows=(4,), num_blocks=16)
    d.add("a", 16, max_tokens=2)
    d.step(own_tokens)
    assert d.pool.num_cached == 3 and d.pool.num_used == 1
    d.add("b", 9, max_tokens=1)
    assert shares(d.step(own_tokens))["b"] == (8, 1)


def test_the_figures_count_each_group_and_nothing_that_is_freed() -> None:
    d = Driver(windows=(0, 4))
    d.add("a", 14, max_tokens=3)
    d.step(own_tokens)
    assert d.last is not None
    stats = d.last.stats
    assert (stats.num_used_blocks, stats.num_cached_blocks, stats.num_kv_tokens) == (4 + 2, 2, 14 + 6)


# --- what fits ---


@pytest.mark.parametrize(("windows", "max_tokens", "fits"), [((0,), 56, False), ((8,), 900, True), ((0, 8), 16, True), ((0, 8), 17, False)])
def test_what_can_never_fit_is_refused(windows: tuple[int, ...], max_tokens: int, fits: bool) -> None:
    """With a budget of 16 the window takes 7 blocks at most, which leaves a group that sees all 9, so 36 tokens."""
    d = Driver(windows=windows, num_blocks=16, max_model_len=1000)
    d.add("a", 21, max_tokens=max_tokens)
    d.run(own_tokens)
    if fits:
        assert len(d.tokens("a")) == max_tokens
    else:
        [output] = d.outputs["a"]
        assert output.error is not None and output.error.kind is ErrorKind.CONTEXT_LENGTH
        assert "all of it holds" in output.error.message


def test_a_window_is_reserved_once_and_not_for_the_whole_length() -> None:
    """Four requests of 200 tokens in 16 blocks: each needs 3 of them when it decodes."""
    d = Driver(windows=(8,), num_blocks=16, max_model_len=400)
    d.scheduler.caution = 1.0
    for name in "abcd":
        d.add(name, [ord(name)] * 4, max_tokens=196)
    d.steps(10, own_tokens)
    assert d.running() == list("abcd")
    d.run(own_tokens)
    assert d.core.totals.num_preemptions == 0
    assert all(len(d.tokens(name)) == 196 for name in "abcd")


def test_preempted_requests_with_windows_end_right() -> None:
    d = Driver(windows=(0, 12, 5), num_blocks=30, max_num_batched_tokens=8, max_model_len=40)
    for name in "abcd":
        d.add(name, [ord(name)] * 11, max_tokens=25)
    d.run(own_tokens)
    assert d.core.totals.num_preemptions > 0
    assert all(len(d.tokens(name)) == 25 for name in "abcd")


@pytest.mark.parametrize(("num_blocks", "is_admitted"), [(12, False), (13, True)])
def test_a_guarded_request_does_not_count_on_shares_of_a_window(num_blocks: int, is_admitted: bool) -> None:
    """The leader and its sibling share a block now. When both have moved on they hold 3 each, and the third may need 7 in a step of 16."""
    d = Driver(windows=(8,), num_blocks=num_blocks, max_model_len=400)
    for i in range(2):
        d.add(f"s{i}", 12, parent_id="family", seed=i, max_tokens=300)
    d.steps(2, own_tokens)
    assert d.pool.num_sliding_shares == 1
    d.add("guarded", [5] * 20, max_tokens=300)
    d.request("guarded").num_preemptions = MAX_PREEMPTIONS
    d.step(own_tokens)
    assert ("guarded" in d.running()) == is_admitted


# --- hits ---


def test_a_hit_takes_only_what_the_next_token_sees() -> None:
    d = Driver(windows=(0, 6), num_blocks=32)
    d.add("a", 26, max_tokens=1)
    d.run(own_tokens)
    d.add("b", 26)
    plan = d.plan()
    assert shares(plan)["b"] == (24, 2)
    assert [sum(map(bool, table)) for table in plan.scheduled[0].block_ids][1] <= 3
    assert freed(d, "b") == [0, 4]
    assert d.pool.num_used == 6 + 2 + 2, "6 blocks of the first group, 2 of the window, and a new one for each"


def hold_all_but(d: Driver, group: int, places: list[int], hashes: list[bytes]) -> None:
    d.pool.forget_content(group, [hashes[i] for i in places])


@pytest.mark.parametrize(
    ("group", "places", "hit"),
    [(0, [], 24), (0, [3], 12), (1, [3], 24), (1, [4], 16), (1, [5], 20), (1, [4, 5], 16), (1, [2, 5], 20), (1, [3, 5], 12), (1, [0, 1, 2, 3, 4, 5], 0)],
)
def test_a_hit_ends_where_a_block_that_the_next_token_sees_is_gone(group: int, places: list[int], hit: int) -> None:
    """A window of 6 over blocks of 4: the first token of a block sees the two blocks before it."""
    d = Driver(windows=(0, 6), num_blocks=32)
    d.add("a", 26, max_tokens=1)
    hashes = d.request("a").hashes_of_full_blocks(6, 4)
    d.run(own_tokens)
    hold_all_but(d, group, places, hashes)
    d.add("b", 26)
    assert shares(d.step(own_tokens))["b"][0] == hit
    d.run(own_tokens)
    assert len(d.tokens("b")) == 8


def test_a_failure_lets_nobody_find_what_was_freed_before_it() -> None:
    d = Driver(windows=(4,), num_blocks=16)
    d.add("a", 16, max_tokens=4)
    d.step(own_tokens)
    assert d.pool.num_cached == 3
    d.keep(d.core.fail_step(d.plan(), "broken", d.now))
    assert (d.pool.num_cached, d.pool.num_used) == (0, 0)


# --- forks ---


def add_family(d: Driver, count: int, prompt: int, **fields: object) -> None:
    for i in range(count):
        d.add(f"s{i}", prompt, parent_id="family", seed=i, **fields)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 8, 9, 100])
@pytest.mark.parametrize("prompt", [8, 9, 10, 11, 12, 13])
def test_siblings_share_the_blocks_of_all_groups(caching: bool, window: int, prompt: int) -> None:
    d = Driver(windows=(0, window), num_blocks=64, enable_prefix_caching=caching)
    add_family(d, 3, prompt)
    d.step(own_tokens)
    plan = d.step(own_tokens)
    assert shares(plan) == {"s0": (prompt, 1), "s1": (prompt - 1, 1), "s2": (prompt - 1, 1)}
    last = (prompt - 1) // 4
    for group in range(2):
        tables = [s.block_ids[group] for s in plan.scheduled]
        first = max(0, prompt - 1 - window + 1) // 4 if group else 0
        assert len({tuple(table[first:last]) for table in tables}) == 1, "what is full is shared"
        assert len({table[last] for table in tables}) == 3, "what is written is not"
    d.run(own_tokens)
    assert all(len(d.tokens(f"s{i}")) == 8 for i in range(3))
    assert d.core.totals.prompt_tokens == prompt + 2


def moved_on(caching: bool) -> Driver:
    """A leader that has left its prompt behind before its sibling finds a seat."""
    d = Driver(windows=(4,), num_blocks=64, max_num_seqs=2, enable_prefix_caching=caching)
    d.add("other", 3, max_tokens=9)
    add_family(d, 2, 14, max_tokens=30)
    d.run(own_tokens)
    return d


@pytest.mark.parametrize(("caching", "computed"), [(True, 2), (False, 14)])
def test_a_sibling_of_a_leader_that_has_moved_on_asks_the_cache_or_computes(caching: bool, computed: int) -> None:
    d = moved_on(caching)
    assert all(len(d.tokens(f"s{i}")) == 30 for i in range(2))
    assert d.core.totals.prompt_tokens == 3 + 14 + computed


# --- the check of the books ---

CORRUPTIONS: dict[str, Callable[[Driver], object]] = {
    "freed too much": lambda d: d.request("a").num_freed_blocks.__setitem__(1, 4),
    "freed too little": lambda d: d.request("a").num_freed_blocks.__setitem__(1, 1),
    "freed where all is seen": lambda d: d.request("a").num_freed_blocks.__setitem__(0, 1),
    "an entry left": lambda d: d.request("a").block_tables[1].__setitem__(0, 9),
    "tables of two lengths": lambda d: d.request("a").block_tables[1].append(d.pool.allocate(1, 1)[0]),
    "tables exchanged": lambda d: d.request("a").block_tables.reverse(),
    "a block in two tables": lambda d: d.request("a").block_tables[1].__setitem__(-1, d.request("a").block_tables[0][-1]),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_check_notices(corruption: Callable[[Driver], object]) -> None:
    d = Driver(windows=(0, 4))
    d.add("a", 15)
    d.step(own_tokens)
    d.core.check()
    corruption(d)
    with pytest.raises(InvariantError):
        d.core.check()
