"""FP8 matrices (e4m3) with scales, as packed weights: what the fp8 formats share. They stay 8 bits in memory.

# N = output channels, K = inputs, G = groups along K
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.ops.packed import GROUP, PackedWeight, WeightKind, WeightPart
from octavo.quantization import StoredTensor

F8 = "F8_E4M3"
NAN = 0x7F  # without the sign; e4m3 has no infinities


def pack_f8(tensor: StoredTensor, n: int, k: int, scales: NDArray[np.float32], group: int) -> PackedWeight:
    """value = number * scale; scales float32 [N, G], one for each `group` inputs. ModelFileError for a shape that disagrees or a NaN."""
    tensor.check_shape(n, k)
    if group % GROUP or k % group:
        raise tensor.error(f"has a scale for each {group} of {k} inputs; only multiples of {GROUP} are supported")
    codes = tensor.data.reshape(n, k // group, group)
    for some in codes:  # row by row: no copy of the matrix
        if ((some & NAN) == NAN).any():
            raise tensor.error("holds a NaN")
    return PackedWeight(WeightKind.F8, n, k, (WeightPart(codes, np.ascontiguousarray(scales, np.float32)),))
