"""ggml's block types as packed weights: views where the block is laid out as ours, re-laid integers otherwise.

Every block's numbers are integers with a scale and perhaps a minimum, so nothing is quantised anew. Exact to the last bit (a zero's sign
apart): Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q3_K, IQ4_NL, TQ1_0, TQ2_0. The others keep a scale or minimum as a product of an fp16 number and a small
integer (Q2_K only the minimum), MXFP4 a power of two that may be below fp16's; ours is that product in fp16, so that a value differs from
ggml's by at most (|code * scale| + |min|) / 2048 + (|code| + 1) / 2**25.

In memory, bits a weight: 4.1 (w4 in groups of 256: TQ1_0, TQ2_0), 4.5 (w4: Q4_0; t4: IQ4_NL, IQ4_XS, MXFP4), 5 (w4 with
minimums: Q4_1, Q4_K), 8.1 (w8 in groups of 256: Q3_K), 8.5 (w8: Q5_0, Q8_0), 9 (Q5_1, Q5_K, Q6_K), 10 (Q2_K).
"""

from __future__ import annotations

import numpy as np

from octavo.config import HFConfig
from octavo.ops.packed import PackedWeight
from octavo.quantization import PLAIN, StoredTensor, Tensors, declared, pack_plain
from octavo.quantization.gguf import k_quants, simple, tables

BLOCKS = {**simple.BLOCKS, **k_quants.BLOCKS, **tables.BLOCKS}
PACKERS = {**simple.PACKERS, **k_quants.PACKERS, **tables.PACKERS}
# Elements of a block.
WIDTH = {name: 256 if name.endswith("_K") or name in ("IQ4_XS", "TQ1_0", "TQ2_0") else 32 for name in BLOCKS}


class GGML:
    is_four_bit = False

    def __init__(self, _hf: HFConfig, tensors: Tensors, dtype: str) -> None:
        self.tensors = tensors
        self.dtype = dtype

    @staticmethod
    def claims(hf: HFConfig, tensors: Tensors) -> bool:
        return tensors.kind == "gguf" and declared(hf) is None

    def uses(self, name: str) -> tuple[str, ...]:
        return (f"{name}.weight",)

    def pack(self, name: str, n: int, k: int) -> PackedWeight:
        tensor = self.tensors.get(f"{name}.weight")
        if tensor.dtype in PLAIN:
            return pack_plain(tensor, n, k, self.dtype)
        return pack_blocks(tensor, n, k)


FORMAT = GGML


def pack_blocks(tensor: StoredTensor, n: int, k: int) -> PackedWeight:
    """A block-quantised matrix [n, k]. Raises ModelFileError for a type that is not supported, or scales that are not finite in fp16."""
    tensor.check_shape(n, k)
    if tensor.dtype not in BLOCKS:
        raise tensor.error(f"type {tensor.dtype} is not supported; supported: {', '.join([*PLAIN, *BLOCKS])}")
    blocks = tensor.data.view(BLOCKS[tensor.dtype]).reshape(n, k // WIDTH[tensor.dtype])
    try:
        kind, part = PACKERS[tensor.dtype](blocks)
    except OverflowError:
        raise tensor.error("holds scales beyond float16's range") from None
    if not all(np.isfinite(array).all() for array in (part.scales, part.mins) if array is not None):
        raise tensor.error("holds a scale that is not a finite number")
    return PackedWeight(kind, n, k, (part,), table=tables.TABLES.get(tensor.dtype))
