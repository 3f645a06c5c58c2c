"""Groups of layers: what a window leaves behind, what it may hold at most, and how far a prefix can be found. Needs Python only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import CacheConfig, window_blocks
from octavo.engine.block_pool import BlockPool, InvariantError
from octavo.engine.kv_groups import KvGroups, held_blocks


def cache(windows: tuple[int, ...], block_size: int = 4, num_blocks: int = 64) -> CacheConfig:
    return CacheConfig(block_size=block_size, num_blocks=num_blocks, windows=windows)


def seen(position: int, window: int) -> range:
    """What the token at this position sees."""
    return range(max(0, position - window + 1) if window else 0, position + 1)


# --- what is left behind ---


@given(st.integers(0, 20), st.integers(1, 6), st.integers(0, 60))
def test_behind_are_the_blocks_that_neither_this_token_nor_a_later_one_sees(window: int, size: int, position: int) -> None:
    [behind] = KvGroups(cache((window,), size), chunk=8).behind(position)
    needed = {p // size for later in range(position, position + 2 * size) for p in seen(later, window)}
    assert behind == min(needed), "all before it can go, and it cannot"


@given(st.integers(1, 20), st.integers(1, 6), st.integers(0, 12))
def test_reaches_say_what_the_first_token_of_a_block_sees_before_it(window: int, size: int, block: int) -> None:
    [reach] = KvGroups(cache((window,), size), chunk=8).reaches
    assert reach is not None
    needed = {p // size for p in seen(block * size, window) if p < block * size}
    assert min(block, reach) == len(needed)


@given(st.integers(1, 30), st.integers(1, 20), st.integers(1, 8))
def test_window_blocks_is_reached_and_never_exceeded(window: int, chunk: int, size: int) -> None:
    """Between steps the token computed last may still be computed again; in a step there are `chunk` tokens more."""
    held = [
        -(-(computed + chunk) // size) - max(0, computed - window) // size for computed in range(window + 2 * size + 1)
    ]
    assert max(held) == window_blocks(window, chunk, size)


def test_held_blocks_are_by_position_and_without_the_freed_ones() -> None:
    assert held_blocks([[5, 6, 7]], [0]) == [5, 6, 7]
    assert held_blocks([[0, 0, 7]], [2]) == [7]
    assert held_blocks([[5, 6, 7], [0, 8, 9], [0, 0, 4]], [0, 1, 2]) == [5, 6, 8, 7, 9, 4]
    assert held_blocks([[], []], [0, 0]) == []


# --- sizes ---


def test_without_windows_a_sequence_takes_a_block_in_each_group() -> None:
    assert cache((0,)).most_blocks(9, chunk=512) == 3
    assert cache((0, 0)).most_blocks(9, chunk=512) == 6


def test_with_a_window_it_takes_few_however_long_it_is() -> None:
    assert cache((8,)).most_blocks(1000, chunk=1) == cache((8,)).most_blocks(10**6, chunk=1) == 3
    assert cache((0, 8, 8)).most_blocks(1000, chunk=1) == 250 + 2 * 3
    assert cache((8,)).most_blocks(1000, chunk=16) == 7
    assert cache((8,)).most_blocks(5, chunk=16) == 2, "never more than it has"
    assert cache((1000,)).most_blocks(40, chunk=16) == 10


@given(st.lists(st.integers(0, 12), min_size=1, max_size=3), st.integers(1, 5), st.integers(0, 30), st.integers(1, 20))
def test_the_longest_sequence_fits_and_one_token_more_does_not(
    windows: list[int], size: int, num_blocks: int, chunk: int
) -> None:
    config = cache(tuple(windows), size, num_blocks)
    fits = [n for n in range(1, 101) if config.most_blocks(n, chunk) <= num_blocks]
    assert config.longest_sequence(chunk, 100) == max(fits, default=0)


def test_the_capacity_in_tokens() -> None:
    assert cache((0,), num_blocks=100).num_kv_tokens(64, chunk=16) == 400
    assert cache((0,), num_blocks=100).num_kv_tokens(63, chunk=16) == 400
    assert cache((0, 0), num_blocks=100).num_kv_tokens(64, chunk=16) == 200
    assert cache((8,), num_blocks=100).num_kv_tokens(700, chunk=16) == 10_000, "of 175 blocks a request holds 7"


# --- prefixes ---


def longest_by_trying(found: list[list[bool]], reaches: list[int | None]) -> int:
    """The definition: the greatest n behind which all that the next token sees is there, in each group."""
    most = len(found[0])
    return max(
        n
        for n in range(most + 1)
        if all(all(group[max(0, n - reach) if reach is not None else 0 : n]) for group, reach in zip(found, reaches, strict=True))
    )


prefix_cases = st.lists(st.one_of(st.none(), st.integers(0, 4)), min_size=1, max_size=3).flatmap(
    lambda reaches: st.tuples(
        st.just(reaches),
        st.lists(st.lists(st.integers(0, 3).map(bool), min_size=len(reaches), max_size=len(reaches)), max_size=14),
    )
)


@given(prefix_cases)
def test_match_finds_the_longest_prefix_that_all_groups_can_go_on_behind(case: tuple[list[int | None], list[list[bool]]]) -> None:
    reaches, places = case
    hashes = [bytes([i]) for i in range(len(places))]
    pool = BlockPool(64, reaches=reaches)
    blocks: dict[tuple[int, int], int] = {}
    for i, is_there in enumerate(places):
        for group in range(len(reaches)):
            if is_there[group]:
                [blocks[group, i]] = pool.allocate(1, group)
                pool.publish(blocks[group, i], hashes[i])
    found = [[place[group] for place in places] for group in range(len(reaches))]
    count = longest_by_trying(found, reaches)
    firsts = [0 if reach is None else max(0, count - reach) for reach in reaches]
    wanted = [[0] * first + [blocks[g, i] for i in range(first, count)] for g, first in enumerate(firsts)]
    assert pool.match(hashes) == wanted


class CountingIndex(dict[bytes, int]):
    """An index that counts how often it is asked."""

    asked = 0

    def __contains__(self, key: object) -> bool:
        self.asked += 1
        return super().__contains__(key)


@pytest.mark.parametrize("missing", ["none", "all", "every 7th of one group", "every 31st of each, shifted", "the last"])
def test_match_asks_each_group_once_for_each_block(missing: str) -> None:
    """Windows of 30 blocks over 1,000: looking at a whole window for each length would be 30,000 questions."""
    is_there = {
        "none": lambda group, i: True,
        "all": lambda group, i: False,
        "every 7th of one group": lambda group, i: group != 1 or i % 7 > 0,
        "every 31st of each, shifted": lambda group, i: i % 31 != group * 10,
        "the last": lambda group, i: i < 999,
    }[missing]
    pool = BlockPool(4000, reaches=[30, 30, 29])
    hashes = [i.to_bytes(2, "little") for i in range(1000)]
    for group in range(3):
        for i in range(1000):
            if is_there(group, i):
                pool.publish(pool.allocate(1, group)[0], hashes[i])
    counters = [CountingIndex(index) for index in pool._block_of]
    pool._block_of = list(counters)
    pool.match(hashes)
    assert all(counter.asked <= 1000 for counter in counters)


def test_groups_do_not_find_each_others_blocks() -> None:
    pool = BlockPool(4, reaches=[None, None])
    first, second = pool.allocate(1, 0) + pool.allocate(1, 1)
    pool.publish(first, b"a")
    assert pool.match([b"a"]) == [[], []]
    pool.publish(second, b"a")
    assert pool.match([b"a"]) == [[first], [second]]
    pool.check([[first, second]])
    pool.check_group(0, [first])
    with pytest.raises(InvariantError, match="of group 1 is in a table of group 0"):
        pool.check_group(0, [second])


def test_a_block_may_go_to_another_group_when_it_is_free_again() -> None:
    pool = BlockPool(1, reaches=[None, 2])
    [block] = pool.allocate(1, 0)
    pool.publish(block, b"a")
    pool.release([block])
    assert pool.allocate(1, 1) == [block], "evicted"
    pool.publish(block, b"a")
    pool.check([[block]])
    pool.release([block])
    pool.reset_cache()
    pool.check([])


def test_content_is_forgotten_whoever_holds_it() -> None:
    pool = BlockPool(4, reaches=[3])
    used, cached, other = pool.allocate(3)
    for block_id, content in ((used, b"u"), (cached, b"c"), (other, b"o")):
        pool.publish(block_id, content)
    pool.release([cached, other])
    pool.forget_content(0, [b"u", b"c", b"nobody has this"])
    assert pool.match([b"u"]) == pool.match([b"c"]) == [[]]
    assert pool.match([b"o"]) == [[other]]
    assert (pool.num_used, pool.num_cached, pool.num_available) == (1, 1, 3)
    pool.check([[used]])


def test_shares_of_windows_are_counted() -> None:
    pool = BlockPool(6, reaches=[None, 2])
    full, window = pool.allocate(2, 0), pool.allocate(2, 1)
    pool.share(full + window)
    pool.share(window)
    assert pool.num_sliding_shares == 4
    pool.check([full + window, full + window, window])
    pool.release(window)
    assert pool.num_sliding_shares == 2
    for _ in range(2):
        pool.release(window)
    assert pool.num_sliding_shares == 0
    pool.num_sliding_shares = 1
    with pytest.raises(InvariantError, match="shares"):
        pool.check([full, full])
