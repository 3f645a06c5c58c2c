"""The pool of KV blocks: who holds which block, which contents can be found again, and which block goes next.

KV memory is cut into `num_blocks` blocks of `block_size` tokens (PagedAttention). A request names its blocks in a block table,
so blocks need not be neighbours, and equal prefixes can share them. Each block is in exactly one of three states:

    state   holders   content                            found in
    used    >= 1      of the requests that hold it       block tables, `_num_holders`
    cached  0         published: can be found by hash    `_cached`, least recently used first
    free    0         none                               `_free`

        allocate: free (else the oldest cached, which is evicted) -> used        share: used or cached -> used, one holder more
        release:  one holder fewer; with the last one used -> cached if it is published, else -> free

A block is allocated for one group of layers (see kv_groups), and its content is that group's.

*Published* means: the block is full, its step has succeeded, and its hash is in its group's index. The hash covers the block's tokens,
all tokens before them and the salt, so within a group equal hashes mean equal K and V. A block may be written only by its one holder
and only while it is not published (`is_writable`); whoever wants to write another one takes a copy first.

Every operation costs O(blocks it is asked about), whatever the size of the pool. Knows nothing of requests, of the order of
service, or of where K and V lie.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

HASH_BYTES = 32  # no pair of prompts that somebody can find collides: a collision would show one user another's text


class InvariantError(AssertionError):
    """The engine's books are wrong. Always a bug of the engine, never a fault of a request."""


def hash_root(salt: str | None) -> bytes:
    """The parent of a sequence's first block. Sequences with different salts share nothing."""
    # Any string is a salt, a lone surrogate too. The prefix keeps "no salt" and "empty salt" apart.
    data = b"none" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=HASH_BYTES).digest()


def hash_block(parent: bytes, token_ids: list[int]) -> bytes:
    """Hash of a full block, given the hash of the one before it. Token ids are below 2**31."""
    return blake2b(parent + array("i", token_ids).tobytes(), digest_size=HASH_BYTES).digest()


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)


class BlockPool:
    """Blocks 0..num_blocks - 1. Without prefix caching nothing is ever published; all else is the same.

    `reaches`: of each group, how many blocks before its own the first token of a block sees, None for all of them.
    """

    def __init__(self, num_blocks: int, enable_prefix_caching: bool = True, reaches: Sequence[int | None] = (None,)) -> None:
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.num_sliding_shares = 0  # holders beyond the first of a block, over all blocks of groups that do not see all
        self._reaches = list(reaches)
        self._group_of = [0] * num_blocks
        self._num_holders = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block that was freed last is warm
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: list[dict[bytes, int]] = [{} for _ in reaches]  # the index: exactly the published blocks, used or cached

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could give out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    # --- holding ---

    def allocate(self, count: int, group: int = 0) -> list[int]:
        """`count` blocks for a group, with one holder and no content. Evicts cached blocks when no free ones are left.

        Raises InvariantError, and changes nothing, if fewer are available: ask `num_available` first.
        """
        if count > self.num_available:
            raise InvariantError(f"{count} blocks asked for, {self.num_available} available")
        return [self._allocate_one(group) for _ in range(count)]

    def _allocate_one(self, group: int) -> int:
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._cached.popitem(last=False)
            self._unpublish(block_id)
        self._num_holders[block_id] = 1
        self._group_of[block_id] = group
        return block_id

    def share(self, block_ids: Iterable[int]) -> None:
        """One holder more for each block; they must be used or cached."""
        for block_id in block_ids:
            if self._num_holders[block_id] == 0:
                del self._cached[block_id]
            elif self._slides(block_id):
                self.num_sliding_shares += 1
            self._num_holders[block_id] += 1

    def release(self, block_ids: list[int]) -> None:
        """One holder fewer for each of these blocks, which are in the order of positions.

        From the tail on: the tail becomes the older one and is evicted first, because without the blocks before it it is of
        no use to anybody.
        """
        for block_id in reversed(block_ids):
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id] == 0:
                if self._hash_of[block_id] is not None:
                    self._cached[block_id] = None
                else:
                    self._free.append(block_id)
            elif self._num_holders[block_id] < 0:
                self._num_holders[block_id] = 0
                raise InvariantError(f"block {block_id} released, but nobody holds it")
            elif self._slides(block_id):
                self.num_sliding_shares -= 1

    def _slides(self, block_id: int) -> bool:
        return self._reaches[self._group_of[block_id]] is not None

    def is_writable(self, block_id: int) -> bool:
        """Whether its holder may write into it: nobody else reads it, and nobody else can find it."""
        return self._num_holders[block_id] == 1 and self._hash_of[block_id] is None

    # --- finding again ---

    def match(self, hashes: Sequence[bytes]) -> list[list[int]]:
        """Of each group a table of the longest prefix of `hashes` behind which a sequence can go on. Does not hold its blocks: `share` does.

        Behind n blocks can go on who finds all n in each group that sees all, and in the others the last ones, as far as the group
        reaches; entries before those are 0. Looks up each hash at most once in each group, and twice if it is found.
        """
        count = len(hashes)
        for index, reach in zip(self._block_of, self._reaches, strict=True):
            if reach is None:
                count = next((i for i in range(count) if hashes[i] not in index), count)
        count = self._shorten(hashes, count)
        firsts = [0 if reach is None else max(0, count - reach) for reach in self._reaches]
        return [
            [0] * first + [index[block_hash] for block_hash in hashes[first:count]]
            for index, first in zip(self._block_of, firsts, strict=True)
        ]

    def _shorten(self, hashes: Sequence[bytes], count: int) -> int:
        """The longest prefix of at most `count` blocks whose last ones all groups find that do not see all."""
        sliding = [(index, reach) for index, reach in zip(self._block_of, self._reaches, strict=True) if reach is not None]
        lowest = [count] * len(sliding)  # of each group: from here up to `count` all blocks are found
        is_right = not sliding
        while not is_right:
            is_right = True
            for k, (index, reach) in enumerate(sliding):
                i = min(lowest[k], count)
                while i > max(0, count - reach):
                    i -= 1
                    if hashes[i] not in index:
                        count, is_right = i, False  # the prefix must end before it; whoever was asked before is asked again
                lowest[k] = i
        return count

    def count_cached(self, block_ids: Iterable[int]) -> int:
        """How many of them nobody holds: sharing those makes fewer blocks available."""
        return sum(self._num_holders[block_id] == 0 for block_id in block_ids)

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Let a used block be found. Only for full blocks whose step has succeeded.

        Where equal content is published already, that block stays the one to be found and this one stays private.
        """
        index = self._block_of[self._group_of[block_id]]
        if not self.enable_prefix_caching or block_hash in index or self._hash_of[block_id] is not None:
            return
        self._hash_of[block_id] = block_hash
        index[block_hash] = block_id

    def forget(self, block_ids: Iterable[int]) -> None:
        """Let nobody find these used blocks any more: their content is in doubt."""
        for block_id in block_ids:
            self._unpublish(block_id)

    def forget_content(self, group: int, hashes: Iterable[bytes]) -> None:
        """The same for whatever blocks of the group have this content."""
        for block_hash in hashes:
            block_id = self._block_of[group].get(block_hash)
            if block_id is not None:
                self._unpublish(block_id)
                if self._num_holders[block_id] == 0:
                    del self._cached[block_id]
                    self._free.append(block_id)

    def reset_cache(self) -> None:
        """Forget all content that nobody holds. Costs O(cached blocks)."""
        while self._cached:
            block_id, _ = self._cached.popitem()
            self._unpublish(block_id)
            self._free.append(block_id)

    def _unpublish(self, block_id: int) -> None:
        block_hash = self._hash_of[block_id]
        if block_hash is not None:
            self._hash_of[block_id] = None
            del self._block_of[self._group_of[block_id]][block_hash]

    # --- the books ---

    def check_group(self, group: int, block_ids: Iterable[int]) -> None:
        """Raises InvariantError if one of these blocks was allocated for another group."""
        for block_id in block_ids:
            if self._group_of[block_id] != group:
                raise InvariantError(f"block {block_id} of group {self._group_of[block_id]} is in a table of group {group}")

    def check(self, tables: Sequence[list[int]]) -> None:
        """Compare the books with what each holder holds, of all groups. Raises InvariantError. Costs O(pool)."""
        holders = Counter(block_id for table in tables for block_id in table)
        if any(len(set(table)) != len(table) for table in tables):
            raise InvariantError("a block table names a block twice")
        if sum(count - 1 for block_id, count in holders.items() if self._slides(block_id)) != self.num_sliding_shares:
            raise InvariantError(f"the books say {self.num_sliding_shares} shares of groups with a window")
        for block_id, count in holders.items():
            if self._num_holders[block_id] != count:
                raise InvariantError(
                    f"block {block_id} has {count} holders, the books say {self._num_holders[block_id]}"
                )
        if self.num_blocks - self._num_holders.count(0) != len(holders):
            leaked = [b for b, count in enumerate(self._num_holders) if count and b not in holders]
            raise InvariantError(f"blocks {leaked[:8]} are in use, but in no table")

        free = set(self._free)
        if len(free) != len(self._free) or not free.isdisjoint(self._cached) or not holders.keys().isdisjoint(free):
            raise InvariantError("a block is free twice, free and cached, or free and in use")
        if (
            not holders.keys().isdisjoint(self._cached)
            or len(free) + len(self._cached) + len(holders) != self.num_blocks
        ):
            raise InvariantError(
                f"{len(free)} free + {len(self._cached)} cached + {len(holders)} used != {self.num_blocks}"
            )

        for group, index in enumerate(self._block_of):
            if any(self._hash_of[b] != block_hash or self._group_of[b] != group for block_hash, b in index.items()):
                raise InvariantError("the index names a block that has another content")
        if self.num_blocks - self._hash_of.count(None) != sum(map(len, self._block_of)):
            raise InvariantError("a published block is not in the index")
        if any(self._hash_of[b] is None for b in self._cached) or any(self._hash_of[b] is not None for b in free):
            raise InvariantError("a cached block is not published, or a free one is")
