"""Plain checkpoints rounded while they are loaded: the option `quantization` w4 or w8. Round to nearest, nothing is calibrated.

w4: groups of 64 with a scale and a minimum. w8: groups of 32 with a scale. Matrices outside the layers (the embedding, the head), which few weights
of a large model but many of a small one's quality depend on, are 8 bits in both.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from octavo.ops.packed import GROUP, PackedWeight, WeightKind, WeightPart, pack_nibbles
from octavo.quantization import StoredTensor, Tensors, plain_values

SCHEMES = ("w4", "w8")
W4_GROUP = 64
CHUNK_CODES = 1 << 18


class OnLoad:
    """A format that rounds what a plain one would give."""

    def __init__(self, tensors: Tensors, scheme: str) -> None:
        self.tensors = tensors
        self.scheme = scheme

    def uses(self, name: str) -> tuple[str, ...]:
        return (f"{name}.weight",)

    def pack(self, name: str, n: int, k: int) -> PackedWeight:
        return self.rounded(self.tensors.get(f"{name}.weight"), name, n, k)

    def rounded(self, stored: StoredTensor, name: str, n: int, k: int) -> PackedWeight:
        """A plain tensor [n, k] of the module `name`."""
        stored.check_shape(n, k)
        return quantized(stored, n, k, self.scheme if ".layers." in f".{name}" else "w8")


def quantized(stored: StoredTensor, n: int, k: int, scheme: str) -> PackedWeight:
    """A plain tensor [n, k], rounded some rows at a time; as it is if its rows are no multiples of 32."""
    if k % GROUP:
        return PackedWeight(WeightKind.F32, n, k, (WeightPart(plain_values(stored)),))
    group = math.gcd(W4_GROUP, k) if scheme == "w4" else GROUP
    groups = k // group
    codes = np.empty((n, groups, group // 2 if scheme == "w4" else group), np.uint8 if scheme == "w4" else np.int8)
    scales = np.empty((n, groups), np.float16)
    mins = np.empty((n, groups), np.float16) if scheme == "w4" else None
    step = max(1, CHUNK_CODES // k)
    for first in range(0, n, step):
        cut = slice(first, min(n, first + step))
        values = plain_values(rows_of(stored, cut)).reshape(-1, groups, group)
        if mins is None:
            codes[cut], scales[cut] = round_w8(values)
        else:
            codes[cut], scales[cut], mins[cut] = round_w4(values)
    if not np.isfinite(scales).all():
        raise stored.error("holds numbers that fp16 scales cannot reach, or that are not finite")
    return PackedWeight(WeightKind.W4 if scheme == "w4" else WeightKind.W8, n, k, (WeightPart(codes, scales, mins),))


def rows_of(stored: StoredTensor, cut: slice) -> StoredTensor:
    size = stored.data.size // stored.shape[0]
    shape = (cut.stop - cut.start, *stored.shape[1:])
    return StoredTensor(stored.file, stored.name, stored.dtype, shape, stored.data[cut.start * size : cut.stop * size])


def round_w8(values: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """float32 [N, G, group] -> codes and scales; the scale is rounded first, so that codes are nearest to what they will mean."""
    with np.errstate(over="ignore"):
        scales = (np.abs(values).max(axis=-1) / np.float32(127)).astype(np.float16)
    step = scales.astype(np.float32)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(step > 0, values / step, 0)
        return np.clip(np.rint(codes), -127, 127).astype(np.int8), scales


def round_w4(values: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]:
    """float32 [N, G, group] -> nibbles [N, G, group / 2], scales and minimums."""
    with np.errstate(over="ignore"):
        mins = values.min(axis=-1).astype(np.float16)
        low = mins.astype(np.float32)
        scales = ((values.max(axis=-1) - low) / np.float32(15)).astype(np.float16)
    step = scales.astype(np.float32)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(step > 0, (values - low[..., None]) / step, 0)
        return pack_nibbles(np.clip(np.rint(codes), 0, 15).astype(np.uint8)), scales, mins
