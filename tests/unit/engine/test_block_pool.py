"""BlockPool: holders, the order of eviction, what can be found. Needs Python only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from octavo.engine.block_pool import BlockPool, InvariantError, hash_block, hash_root, num_blocks_for


def chain(tokens: list[int], size: int, salt: str | None = None) -> list[bytes]:
    hashes = [hash_root(salt)]
    for start in range(0, len(tokens), size):
        hashes.append(hash_block(hashes[-1], tokens[start : start + size]))
    return hashes[1:]


def published(pool: BlockPool, names: str) -> dict[str, int]:
    """One used and published block for each letter."""
    blocks = dict(zip(names, pool.allocate(len(names)), strict=True))
    for name, block_id in blocks.items():
        pool.publish(block_id, name.encode())
    return blocks


# --- hashes ---


def test_hash_covers_tokens_parents_and_salt() -> None:
    first, second = chain([1, 2, 3, 4], 2)
    assert [first, second] == chain([1, 2, 3, 4], 2)
    assert first == chain([1, 2], 2)[0]
    assert second != chain([0, 2, 3, 4], 2)[1], "an earlier token is part of it"
    assert second != chain([3, 4], 2)[0], "so is the position"
    assert first != chain([1, 2], 2, salt="x")[0]
    assert len({first, second}) == 2 and all(len(h) >= 16 for h in (first, second))


def test_no_salt_is_not_the_empty_salt() -> None:
    roots = {hash_root(salt) for salt in (None, "", "none", "salt", "\0")}
    assert len(roots) == 5


@pytest.mark.parametrize("salt", ["\ud800", "\0" * 1000, "ключ", "🔑" * 300])
def test_any_string_is_a_salt(salt: str) -> None:
    assert hash_root(salt) == hash_root(salt) != hash_root(salt + "x")


def test_tokens_do_not_run_into_each_other() -> None:
    root = hash_root(None)
    assert hash_block(root, [1, 0x0203]) != hash_block(root, [0x0102, 3])
    assert hash_block(root, [256]) != hash_block(root, [1])
    assert hash_block(root, [2**31 - 1]) != hash_block(root, [0])


@pytest.mark.parametrize(("tokens", "size", "blocks"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (7, 1, 7)])
def test_num_blocks_for(tokens: int, size: int, blocks: int) -> None:
    assert num_blocks_for(tokens, size) == blocks


# --- holders ---


def test_allocate_gives_each_block_once() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(3) + pool.allocate(2)
    assert sorted(blocks) == [0, 1, 2, 3, 4]
    assert (pool.num_available, pool.num_used, pool.num_cached) == (0, 5, 0)
    pool.check([blocks])


def test_too_many_changes_nothing() -> None:
    pool = BlockPool(3)
    held = pool.allocate(1)
    with pytest.raises(InvariantError, match="3 blocks asked for, 2 available"):
        pool.allocate(3)
    assert pool.num_available == 2
    pool.check([held])


def test_a_shared_block_is_free_when_its_last_holder_leaves() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.share([block])
    assert not pool.is_writable(block)
    pool.release([block])
    assert pool.num_available == 1 and pool.is_writable(block)
    pool.release([block])
    assert pool.num_available == 2


def test_release_of_what_nobody_holds_raises() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.release([block])
    with pytest.raises(InvariantError, match="nobody holds it"):
        pool.release([block])


def test_only_a_private_block_is_writable() -> None:
    pool = BlockPool(4)
    blocks = published(pool, "x")
    assert not pool.is_writable(blocks["x"]), "it can be found"
    [private] = pool.allocate(1)
    assert pool.is_writable(private)
    pool.share([private])
    assert not pool.is_writable(private), "somebody else reads it"


# --- the prefix cache ---


def test_match_is_the_longest_run_from_the_start() -> None:
    pool = BlockPool(8)
    blocks = published(pool, "abd")
    assert pool.match([b"a", b"b", b"c", b"d"])[0] == [blocks["a"], blocks["b"]]
    assert pool.match([b"b"])[0] == [blocks["b"]]
    assert pool.match([b"x", b"a"])[0] == []
    assert pool.match([])[0] == []


def test_content_outlives_its_holder_until_the_block_is_needed() -> None:
    pool = BlockPool(2)
    blocks = published(pool, "ab")
    pool.release(list(blocks.values()))
    assert (pool.num_cached, pool.num_used, pool.num_available) == (2, 0, 2)
    assert pool.match([b"a", b"b"])[0] == [blocks["a"], blocks["b"]]
    pool.allocate(1)
    assert pool.match([b"a", b"b"])[0] == [blocks["a"]], "the tail went first"


def test_free_blocks_are_used_before_cached_ones() -> None:
    pool = BlockPool(4)
    blocks = published(pool, "ab")
    pool.release(list(blocks.values()))
    assert not set(pool.allocate(2)) & set(blocks.values())
    assert pool.num_cached == 2


def test_eviction_takes_the_least_recently_used() -> None:
    pool = BlockPool(3)
    blocks = published(pool, "abc")
    for name in "bca":
        pool.release([blocks[name]])
    pool.share([blocks["b"]])  # a hit
    pool.release([blocks["b"]])
    order = []
    for _ in range(3):
        before = {name for name in "abc" if pool.match([name.encode()])[0]}
        pool.allocate(1)
        order += before - {name for name in "abc" if pool.match([name.encode()])[0]}
    assert order == ["c", "a", "b"]


def test_a_block_in_use_is_never_evicted() -> None:
    pool = BlockPool(3)
    blocks = published(pool, "abc")
    pool.release([blocks["a"]])
    assert pool.allocate(1) == [blocks["a"]]
    with pytest.raises(InvariantError):
        pool.allocate(1)
    assert pool.match([b"b"])[0] == [blocks["b"]] and pool.match([b"a"])[0] == []


def test_sharing_a_cached_block_takes_it_out_of_the_available_ones() -> None:
    pool = BlockPool(2)
    blocks = published(pool, "ab")
    pool.release([blocks["a"]])
    assert pool.count_cached(blocks.values()) == 1 and pool.num_available == 1
    pool.share([blocks["a"]])
    assert pool.count_cached(blocks.values()) == 0 and pool.num_available == 0


def test_of_equal_contents_the_first_stays() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, b"same")
    pool.publish(second, b"same")
    assert pool.match([b"same"])[0] == [first]
    pool.release([second])
    assert (pool.num_cached, pool.num_available) == (0, 1), "the second was never published: it is free"
    pool.release([first])
    assert pool.num_cached == 1


def test_a_block_is_published_under_one_hash() -> None:
    pool = BlockPool(1)
    [block] = pool.allocate(1)
    pool.publish(block, b"one")
    pool.publish(block, b"two")
    assert pool.match([b"two"])[0] == [] and pool.match([b"one"])[0] == [block]
    pool.check([[block]])


def test_forgotten_content_is_not_found_and_its_block_is_free_later() -> None:
    pool = BlockPool(2)
    blocks = published(pool, "ab")
    pool.share([blocks["a"]])
    pool.forget([blocks["a"]])
    assert pool.match([b"a"])[0] == []
    pool.release([blocks["a"]])
    pool.release(list(blocks.values()))
    assert (pool.num_cached, pool.num_available) == (1, 2)
    pool.check([])


def test_reset_forgets_what_nobody_holds_and_nothing_else() -> None:
    pool = BlockPool(4)
    blocks = published(pool, "abc")
    pool.release([blocks["a"], blocks["b"]])
    pool.reset_cache()
    assert pool.match([b"a"])[0] == [] and pool.match([b"c"])[0] == [blocks["c"]]
    assert (pool.num_cached, pool.num_available) == (0, 3)
    pool.check([[blocks["c"]]])


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(2, enable_prefix_caching=False)
    blocks = published(pool, "ab")
    assert pool.match([b"a"])[0] == []
    pool.release(list(blocks.values()))
    assert pool.num_cached == 0 and pool.num_available == 2


# --- the check of the books ---

CORRUPTIONS: dict[str, Callable[[BlockPool, dict[str, int]], object]] = {
    "a holder too many": lambda pool, b: pool._num_holders.__setitem__(b["a"], 2),
    "a block that is used and free": lambda pool, b: pool._free.append(b["a"]),
    "a block that is used and cached": lambda pool, b: pool._cached.__setitem__(b["a"], None),
    "a block twice in the free list": lambda pool, b: pool._free.append(pool._free[0]),
    "a block lost": lambda pool, b: pool._free.pop(),
    "used by nobody": lambda pool, b: pool._num_holders.__setitem__(pool._free.pop(), 1),
    "the index names another block": lambda pool, b: pool._block_of[0].__setitem__(b"a", b["c"]),
    "published, but not in the index": lambda pool, b: pool._block_of[0].pop(b"a"),
    "cached, but not published": lambda pool, b: (pool._block_of[0].pop(b"b"), pool._hash_of.__setitem__(b["b"], None)),
    "free, but published": lambda pool, b: (
        pool._block_of[0].__setitem__(b"x", pool._free[0]),
        pool._hash_of.__setitem__(pool._free[0], b"x"),
    ),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_check_notices(corruption: Callable[[BlockPool, dict[str, int]], object]) -> None:
    pool = BlockPool(8)
    blocks = published(pool, "abc")
    pool.release([blocks["b"]])
    held = [blocks["a"], blocks["c"]]
    pool.check([held])
    corruption(pool, blocks)
    with pytest.raises(InvariantError):
        pool.check([held])


@pytest.mark.parametrize("tables", [[[0]], [[0, 1], [0, 1]], [[0, 1, 1]], [[0, 1], [2]], []])
def test_check_compares_with_the_tables(tables: list[list[int]]) -> None:
    pool = BlockPool(4)
    assert sorted(pool.allocate(2)) == [0, 1]
    pool.check([[0, 1]])
    with pytest.raises(InvariantError):
        pool.check(tables)


# --- against a model that is too simple to be wrong ---


class PoolMachine(RuleBasedStateMachine):
    """Random operations beside a model: a list of holders for each block, and all cached contents in the order of their release."""

    SIZE = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.SIZE)
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # published
        self.cached: list[int] = []  # oldest first

    def holders(self, block_id: int) -> int:
        return sum(block_id in table for table in self.tables)

    @rule(count=st.integers(0, SIZE))
    def allocate(self, count: int) -> None:
        free = [b for b in range(self.SIZE) if not self.holders(b) and b not in self.cached]
        if count > len(free) + len(self.cached):
            with pytest.raises(InvariantError):
                self.pool.allocate(count)
            return
        evicted, self.cached = self.cached[: max(0, count - len(free))], self.cached[max(0, count - len(free)) :]
        for block_id in evicted:
            del self.content[block_id]
        table = self.pool.allocate(count)
        assert len(set(table)) == count and not any(self.holders(b) for b in table)
        assert set(evicted) <= set(table) and not set(table) & set(self.cached)
        self.tables.append(table)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.tables:
            table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
            self.pool.release(table)
            self.cached += [b for b in reversed(table) if not self.holders(b) and b in self.content]

    @rule(data=st.data(), name=st.sampled_from([b"p", b"q", b"r", b"s"]))
    def publish(self, data: st.DataObject, name: bytes) -> None:
        used = sorted({b for table in self.tables for b in table})
        if used:
            block_id = data.draw(st.sampled_from(used))
            self.pool.publish(block_id, name)
            if block_id not in self.content and name not in self.content.values():
                self.content[block_id] = name

    @rule(names=st.lists(st.sampled_from([b"p", b"q", b"r", b"s"]), unique=True))
    def hit(self, names: list[bytes]) -> None:
        block_of = {name: block_id for block_id, name in self.content.items()}
        found = []
        for name in names:
            if name not in block_of:
                break
            found.append(block_of[name])
        assert self.pool.match(names) == [found]
        assert self.pool.count_cached(found) == len(set(found) & set(self.cached))
        self.pool.share(found)
        self.cached = [b for b in self.cached if b not in found]
        self.tables.append(found)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        if self.tables:
            table = data.draw(st.sampled_from(self.tables))
            self.pool.forget(table)
            for block_id in table:
                self.content.pop(block_id, None)

    @rule()
    def reset(self) -> None:
        self.pool.reset_cache()
        for block_id in self.cached:
            del self.content[block_id]
        self.cached.clear()

    @invariant()
    def books_are_right(self) -> None:
        self.pool.check(self.tables)
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_used == len({b for table in self.tables for b in table})
        for block_id in range(self.SIZE):
            alone = self.holders(block_id) == 1 and block_id not in self.content
            assert self.pool.is_writable(block_id) == alone


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
