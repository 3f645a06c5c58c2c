"""The list of merges that a ranked vocabulary implies, for byte-pair encoders that know pieces and ranks but no merges.

Such an encoder joins the two neighbours whose joint piece ranks best, whatever the two are. A list of merges does the same if it holds
every way to cut a piece in two, best pieces first: of the ways to make one piece only one can stand in a text when its turn comes, because
all that ranks before it has been joined already; the other entries are never used. Knows strings only.
"""

from __future__ import annotations

from collections.abc import Sequence


def all_merges(ranked: Sequence[str]) -> list[tuple[str, str]]:
    """Every way to make one of `ranked` (best first) out of two of them, best results first."""
    known = set(ranked)
    merges = []
    for piece in ranked:
        for cut in range(1, len(piece)):
            if (left := piece[:cut]) in known and (right := piece[cut:]) in known:
                merges.append((left, right))  # noqa: PERF401 - a comprehension that makes both slices is no faster
    return merges
