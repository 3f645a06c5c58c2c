"""Builds the arrays of one step from its plan. Pure: lists in, int32 arrays out.

# T = tokens, S = sequences, G = groups of layers, B = blocks of the longest block table
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.ops.batch import Batch
from octavo.protocol import ScheduledRequest


def build_batch(scheduled: Sequence[ScheduledRequest], block_size: int) -> Batch:
    """One row per token, requests one after the other in the plan's order."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[list[int]] = [[] for _ in scheduled[0].block_ids]
    query_start, seq_lens = [0], []
    table = np.zeros((len(slots), len(scheduled), max(len(s.block_ids[0]) for s in scheduled)), np.int32)
    for s, request in enumerate(scheduled):
        start = request.num_computed_tokens
        end = start + len(request.token_ids)
        ids += request.token_ids
        positions += range(start, end)
        for g, blocks in enumerate(request.block_ids):
            slots[g] += [blocks[p // block_size] * block_size + p % block_size for p in range(start, end)]
            table[g, s, : len(blocks)] = blocks
        query_start.append(len(ids))
        seq_lens.append(end)
    return Batch(
        input_ids_T=np.array(ids, np.int32),
        positions_T=np.array(positions, np.int32),
        slot_mapping_GT=np.array(slots, np.int32),
        query_start_S=np.array(query_start, np.int32),
        seq_lens_S=np.array(seq_lens, np.int32),
        block_table_GSB=table,
    )
