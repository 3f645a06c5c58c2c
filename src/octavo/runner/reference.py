"""A model run on the numpy definition of its ops, behind the same face as the native program. For comparison, not for speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.ops.batch import Batch, KvLayout
from octavo.ops.reference import ReferenceKv


class ReferenceProgram:
    """See octavo.ops.cpu.program.CpuProgram: same calls, same meaning."""

    def __init__(self, model: Any, *, num_blocks: int, block_size: int, kv_dtype: str, max_rows: int, max_positions: int) -> None:
        layout: KvLayout = model.kv_layout
        shape = (num_blocks * block_size, layout.num_kv_heads, layout.head_dim)
        bf16 = kv_dtype != "float32"
        self._kv = [
            ReferenceKv(np.zeros(shape, np.float32), np.zeros(shape, np.float32), block_size, bf16) for _ in range(layout.num_layers)
        ]
        self._model = model
        self._max_positions = max_positions
        self._hidden: NDArray[np.float32] | None = None
        self.max_rows = max_rows

    def forward(self, batch: Batch) -> None:
        batch.kv, batch.max_positions = self._kv, self._max_positions
        self._hidden = self._model.forward(batch)

    def logits(self, rows_R: NDArray[np.int32]) -> NDArray[np.float32]:
        return np.ascontiguousarray(self._model.logits(self._hidden, rows_R), np.float32)

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        for kv in self._kv:
            size = kv.block_size
            for array in (kv.k, kv.v):
                blocks = array.reshape(-1, size, *array.shape[1:])
                blocks[list(target)] = blocks[list(source)]
