"""Groups of layers: which of a sequence's blocks each of them still needs, and how many more it may come to need.

Layers that see the same positions form a group, and a request has one block table for each group. From position p a group with a
*window* of W sees the positions p - W + 1 .. p; one without, all up to p. Blocks that no coming token sees are given back while the
request runs, and 0 takes their places in the table:

    positions        0 ............... p - W + 1 ..... p
    without window   [ b4 | b9 | b2 | b7 | b1 | b6 ]
    with window      [  0 |  0 |  0 | b3 | b5 | b8 ]        3 blocks freed

So all tables of a request have one length, entry j is for the positions j * block_size .. in each, and however long the request, a
group with a window holds few blocks of it (`window_blocks`). Knows nothing of which blocks these are, nor of who else holds them.
"""

from __future__ import annotations

from typing import Protocol

from octavo.config import CacheConfig, window_blocks
from octavo.engine.request import Request

Tables = list[list[int]]


class HasTables(Protocol):
    """How far a sequence is computed and where: a Request as it is, or as it would begin."""

    @property
    def block_tables(self) -> Tables: ...

    @property
    def num_freed_blocks(self) -> list[int]: ...

    @property
    def num_computed_tokens(self) -> int: ...


class KvGroups:
    """The groups of one model. `chunk`: tokens of one request in a step, at most."""

    def __init__(self, cache: CacheConfig, chunk: int) -> None:
        self.block_size = cache.block_size
        self.chunk = chunk
        self.windows = cache.windows
        self.num_full = cache.windows.count(0)
        self.sliding = [(group, window) for group, window in enumerate(cache.windows) if window]
        # Of each group: the blocks before its own that the first token of a block sees; None: all.
        self.reaches = [-(-(window - 1) // cache.block_size) if window else None for window in cache.windows]

    def __len__(self) -> int:
        return len(self.windows)

    def behind(self, position: int) -> list[int]:
        """Of each group, how many leading blocks neither the token at `position` nor a later one sees."""
        return [max(0, position - window + 1) // self.block_size if window else 0 for window in self.windows]

    def owed(self, request: Request, state: HasTables) -> tuple[int, int]:
        """Blocks that a request in such a state surely needs up to its next token, beyond those that it holds; and that it may need after it.

        Together with what it holds they are an upper bound of what it will ever hold at once, and the bound never rises while it runs.
        """
        block_size, num_tokens, num_blocks = self.block_size, len(request.token_ids), len(state.block_tables[0])
        most_tokens = request.max_num_computed_tokens
        soon = -(-(num_tokens + 1 if num_tokens < most_tokens else most_tokens) // block_size)
        most = -(-most_tokens // block_size)
        sure = self.num_full * (soon - num_blocks)
        possible = self.num_full * (most - soon)
        if self.sliding:
            chunk = min(num_tokens - state.num_computed_tokens, self.chunk)
            for group, window in self.sliding:
                freed = state.num_freed_blocks[group]
                cap = freed + window_blocks(window, chunk, block_size)
                soon_here = soon if soon < cap else cap
                sure += soon_here - num_blocks
                possible += (most if most < cap else cap) - soon_here
        return sure, possible


def held_blocks(tables: Tables, num_freed: list[int]) -> list[int]:
    """The blocks of all tables that are not freed, by position: what is before them is of use without them, but not the reverse."""
    if len(tables) == 1:
        return tables[0][num_freed[0] :] if num_freed[0] else tables[0]
    places = range(min(num_freed), len(tables[0]))
    return [table[i] for i in places for table, freed in zip(tables, num_freed, strict=True) if i >= freed]
