"""Plain matrices rounded while they are loaded. Round to nearest; nothing is calibrated.

The option `quantization` w4: groups of 64 with a scale and a minimum; w8: groups of 32 with a scale. Matrices outside the layers (the embedding, the
head), which few weights of a large model but many of a small one's quality depend on, are 8 bits in both, and so are those of checkpoints that
store the layers in 4 bits and them in 16: there they would be a third of all bytes of a step.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from octavo.ops.packed import GROUP, PackedWeight, WeightKind, WeightPart, pack_nibbles
from octavo.quantization import PLAIN, Format, StoredTensor, Tensors, plain_values

SCHEMES = ("w4", "w8")
W4_GROUP = 64
TOP = 15  # the largest code of w4
REFITS = 2
CHUNK_CODES = 1 << 16  # rounded at a time: their arrays should stay in a core's cache
F32 = NDArray[np.float32]


class OnLoad:
    """A format that rounds what a plain one would give."""

    is_four_bit = False  # nothing is left to round

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
        return quantized(stored, n, k, "w8" if is_outside_layers(name) else self.scheme)


class OnLoadOutside:
    """A format of 4-bit layers, that rounds plain matrices outside them to 8 bits."""

    is_four_bit = True

    def __init__(self, tensors: Tensors, inner: Format) -> None:
        self.tensors = tensors
        self.inner = inner
        self.outside = OnLoad(tensors, "w8")

    def uses(self, name: str) -> tuple[str, ...]:
        return self.inner.uses(name)

    def pack(self, name: str, n: int, k: int) -> PackedWeight:
        weight = f"{name}.weight"
        if not is_outside_layers(name) or self.inner.uses(name) != (weight,) or self.tensors.get(weight).dtype not in PLAIN:
            return self.inner.pack(name, n, k)
        return self.outside.pack(name, n, k)


def is_outside_layers(name: str) -> bool:
    """Modules of layers have the layer's number in their names, whatever families call them."""
    return not any(part.isdigit() for part in name.split("."))


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
        with np.errstate(all="ignore"):  # what is not finite shows in the scales
            if mins is None:
                codes[cut], scales[cut] = round_w8(values)
            else:
                codes[cut], scales[cut], mins[cut] = round_w4(values)
    if not np.isfinite(scales).all() or (mins is not None and not np.isfinite(mins).all()):
        raise stored.error("holds numbers that fp16 scales cannot reach, or that are not finite")
    return PackedWeight(WeightKind.W4 if scheme == "w4" else WeightKind.W8, n, k, (WeightPart(codes, scales, mins),))


def rows_of(stored: StoredTensor, cut: slice) -> StoredTensor:
    size = stored.data.size // stored.shape[0]
    shape = (cut.stop - cut.start, *stored.shape[1:])
    return StoredTensor(stored.file, stored.name, stored.dtype, shape, stored.data[cut.start * size : cut.stop * size])


def round_w8(values: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """float32 [N, G, group] -> codes and scales; the scale is rounded first, so that codes are nearest to what they will mean."""
    scales = (np.abs(values).max(axis=-1) / np.float32(127)).astype(np.float16)
    step = scales.astype(np.float32)[..., None]
    codes = np.where(step > 0, values / step, 0)
    return np.clip(np.rint(codes), -127, 127).astype(np.int8), scales


def round_w4(values: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]:
    """float32 [N, G, group] -> nibbles [N, G, group / 2], scales and minimums.

    From the group's extremes; then scale and minimum are fitted to the codes by least squares and the codes rounded anew, where that is nearer.
    """
    low, high = values.min(axis=-1), values.max(axis=-1)
    best = nearest(values, (high - low) / np.float32(TOP), low)
    error = squares(values, *best)
    for _ in range(REFITS):
        again = nearest(values, *fitted(values, best[0]))
        error_again = squares(values, *again)
        better = error_again < error
        error = np.where(better, error_again, error)
        best = (np.where(better[..., None], again[0], best[0]), np.where(better, again[1], best[1]), np.where(better, again[2], best[2]))
    codes, scales, mins = best
    return pack_nibbles(codes.astype(np.uint8)), scales.astype(np.float16), mins.astype(np.float16)


def nearest(values: F32, scales: F32, mins: F32) -> tuple[F32, F32, F32]:
    """The codes nearest to values [N, G, group] for scales and minimums [N, G], which are rounded to fp16 first."""
    step, low = (array.astype(np.float16).astype(np.float32) for array in (scales, mins))
    codes = np.rint((values - low[..., None]) * np.where(step > 0, 1 / step, 0).astype(np.float32)[..., None])
    return np.clip(codes, 0, TOP), step, low


def squares(values: F32, codes: F32, scales: F32, mins: F32) -> F32:
    off = codes * scales[..., None]
    off += mins[..., None]
    off -= values
    return np.asarray(np.einsum("ngi,ngi->ng", off, off))


def fitted(values: F32, codes: F32) -> tuple[F32, F32]:
    """Scales and minimums that make code * scale + min nearest to the values."""
    size = np.float32(values.shape[-1])
    sum_q, sum_v = codes.sum(axis=-1), values.sum(axis=-1)
    sum_qq, sum_qv = np.einsum("ngi,ngi->ng", codes, codes), np.einsum("ngi,ngi->ng", codes, values)
    spread = size * sum_qq - sum_q * sum_q
    scales = np.maximum((size * sum_qv - sum_q * sum_v) / np.where(spread > 0, spread, 1), 0)
    return scales, (sum_v - scales * sum_q) / size
