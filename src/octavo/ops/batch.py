"""Batch: the integers of one step, as arrays; and AttentionSpec: what distinguishes one attention layer from another.

Knows nothing of requests: a sequence is a run of rows and a row of the block table.

Layers that see the same positions form a group: a model with sliding windows in some of its layers has several, and each group has its own
block table, so that a window's layers hold no more blocks than the window is long.

# T = tokens, S = sequences, G = groups of layers, B = blocks of the longest block table
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

    input_ids_T, positions_T: token and its position in its sequence. slot_mapping_GT: block_id * block_size + offset, where its K and V go.
    query_start_S: [S + 1], sequence s owns rows query_start[s] .. query_start[s + 1]. seq_lens_S: tokens up to and with its last row.
    block_table_GSB: block ids in order, padded with 0; so are blocks that a window has left behind. kv: the caches by layer of a block.
    max_positions: of the rotary tables, the longest sequence that is served.
    """

    input_ids_T: Any
    positions_T: Any
    slot_mapping_GT: Any
    query_start_S: Any
    seq_lens_S: Any
    block_table_GSB: Any
    kv: Any = field(default=None)
    max_positions: int = 0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer. `window`: only the last so many positions, 0 for all; `soft_cap`: cap * tanh(score / cap), 0 for none.

    layer_id: the layer within a block of its group; group: whose block table it reads.
    """

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    group: int = 0


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """How a token's experts are chosen and weighted.

    The `top_k` largest router logits, ties to the lower expert; each weighs softmax(all logits) at its place, divided by the sum over the chosen
    ones if `renormalise`. gelu: the experts' gate is gelu (tanh form) in place of silu.
    """

    top_k: int
    renormalise: bool
    gelu: bool = False


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The KV cache that a model needs.

    A block holds `block_size` tokens of `num_layers` layers. windows: of each group of layers, how many positions it sees, 0 for all; a sequence
    takes blocks for each group, all from one pool.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...] = (0,)

    def bytes_per_token(self, kv_dtype: str) -> int:
        """K and V of one token in one block, over its layers."""
        return self.num_layers * self.num_kv_heads * self.head_dim * 2 * (4 if kv_dtype == "float32" else 2)
