"""What the client makes of the engine's books: counters that go on over restarts, and a line of figures for operators.

Knows nothing of requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from octavo.protocol import StepStats

PERIOD_SECONDS = 10.0
COUNTERS = (
    "step", "prefix_queries", "prefix_hits", "num_preemptions", "prompt_tokens", "generation_tokens",
    "num_drafts", "num_draft_tokens", "num_accepted_tokens",
)  # fmt: skip

logger = logging.getLogger(__name__)


def continued(stats: StepStats, earlier: StepStats | None) -> StepStats:
    """The books of an engine with what its predecessors had counted: for a reader, counters never fall."""
    if earlier is None:
        return stats
    return msgspec.structs.replace(stats, **{name: getattr(stats, name) + getattr(earlier, name) for name in COUNTERS})


class StatsLog:
    """A line every ten seconds while there is work, as operators know it from vLLM: a listener for `add_stats_listener`.

    Rates are over the time since the line before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before: StepStats | None = None
        self._written = clock()

    def __call__(self, stats: StepStats) -> None:
        now = self._clock()
        seconds = now - self._written
        if self._before is None:
            self._before, self._written = stats, now
        elif seconds >= PERIOD_SECONDS:
            if stats.step != self._before.step or stats.num_waiting:
                logger.info("%s", _line(self._before, stats, seconds))
            self._before, self._written = stats, now


def _line(before: StepStats, stats: StepStats, seconds: float) -> str:
    prompt = (stats.prompt_tokens - before.prompt_tokens) / seconds
    generation = (stats.generation_tokens - before.generation_tokens) / seconds
    queries = stats.prefix_queries - before.prefix_queries
    hits = (stats.prefix_hits - before.prefix_hits) / queries if queries else 0.0
    drafted = stats.num_draft_tokens - before.num_draft_tokens
    held = stats.num_accepted_tokens - before.num_accepted_tokens
    return (
        f"prompt {prompt:.1f} tok/s, generation {generation:.1f} tok/s, running {stats.num_running}, waiting {stats.num_waiting}, "
        f"KV cache {stats.num_used_blocks / stats.num_blocks:.1%}, prefix hits {hits:.1%}"
        + (f", drafts held {held / drafted:.1%}" if drafted else "")
    )
