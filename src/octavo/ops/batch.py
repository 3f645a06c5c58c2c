"""Batch: the integers of one step, as arrays; and AttentionSpec: what distinguishes one attention layer from another.

Knows nothing of requests: a sequence is a run of rows and a row of the block table.

# T = tokens, S = sequences, B = blocks of the longest block table
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]


@dataclass(slots=True)
class Batch:
    """One step's rows. All arrays int32. Traced, each field is a symbol of the same name.

    input_ids_T, positions_T: token and its position in its sequence. slot_mapping_T: block_id * block_size + offset, where its K and V go.
    query_start_S: [S + 1], sequence s owns rows query_start[s] .. query_start[s + 1]. seq_lens_S: tokens up to and with its last row.
    block_table_SB: block ids in order, rows padded with 0. kv: the layers' caches. max_positions: of the rotary tables.
    """

    input_ids_T: Any
    positions_T: Any
    slot_mapping_T: Any
    query_start_S: Any
    seq_lens_S: Any
    block_table_SB: Any
    kv: Any = field(default=None)
    max_positions: int = 0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer. `window`: only the last so many positions, 0 for all; `soft_cap`: cap * tanh(score / cap), 0 for none."""

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The KV cache that a model needs: per layer, heads and width of a head."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def bytes_per_token(self, kv_dtype: str) -> int:
        """K and V of one token over all layers."""
        return self.num_layers * self.num_kv_heads * self.head_dim * 2 * (4 if kv_dtype == "float32" else 2)
