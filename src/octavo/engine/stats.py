"""The engine's figures: totals since the start, and the StepStats that goes out with every message.

Gauges are read from the books at the moment of asking, so they cannot drift from the truth. Costs O(running). Knows nothing of
metric names or of who reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.block_pool import BlockPool
from octavo.engine.request import Request
from octavo.protocol import StepStats


@dataclass(slots=True)
class Totals:
    """What only ever grows."""

    num_steps: int = 0  # begun
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache, at a request's first admission
    prefix_hits: int = 0  # of them, found
    num_preemptions: int = 0
    prompt_tokens: int = 0  # computed; once more each time they are recomputed
    generation_tokens: int = 0  # sampled
    num_drafts: int = 0  # of a request in a step
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # draft tokens that held


def num_kv_tokens(running: list[Request], pool: BlockPool, block_size: int) -> int:
    """Tokens in used blocks, once for each group of layers, each shared block counted once.

    All slots of used blocks, less the empty ones: only the last block of a table has any, and that is never a shared one.
    """
    num_empty = sum(
        len(r.block_tables) * (len(r.block_tables[0]) * block_size - r.num_computed_tokens) for r in running
    )
    return pool.num_used * block_size - num_empty


def step_stats(
    totals: Totals,
    running: list[Request],
    num_waiting: int,
    pool: BlockPool,
    block_size: int,
    batch_tokens: int = 0,
    step_seconds: float = 0.0,
) -> StepStats:
    """The books now; `batch_tokens` and `step_seconds` are of the step that has just been computed, if one has."""
    return StepStats(
        step=totals.num_steps,
        num_running=len(running),
        num_waiting=num_waiting,
        num_blocks=pool.num_blocks,
        num_used_blocks=pool.num_used,
        num_cached_blocks=pool.num_cached,
        num_kv_tokens=num_kv_tokens(running, pool, block_size),
        prefix_queries=totals.prefix_queries,
        prefix_hits=totals.prefix_hits,
        num_preemptions=totals.num_preemptions,
        prompt_tokens=totals.prompt_tokens,
        generation_tokens=totals.generation_tokens,
        batch_tokens=batch_tokens,
        step_seconds=step_seconds,
        num_drafts=totals.num_drafts,
        num_draft_tokens=totals.num_draft_tokens,
        num_accepted_tokens=totals.num_accepted_tokens,
    )
