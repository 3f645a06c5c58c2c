"""Integers as checkpoints pack them, re-laid into w4 and w8: what GPTQ, AWQ and compressed-tensors share. Knows none of them.

Codes are unsigned here, 0 .. 2^bits - 1, and value = (code - zero) * scale with a zero point of the same range; a w8 code and its zero point
are then both 128 less. Nothing is rounded: integers stay integers, and a scale that fp16 does not hold stays fp32.

# N = output channels, K = inputs, G = groups along K
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.ops.packed import GROUP, PackedWeight, WeightKind, WeightPart, pack_nibbles
from octavo.quantization import PLAIN, StoredTensor, plain_values

U8 = NDArray[np.uint8]
# Codes re-laid at a time: their intermediate arrays should stay in a core's cache.
CHUNK_CODES = 1 << 18

INTEGER_DTYPES: dict[str, np.dtype[Any]] = {"I8": np.dtype("i1"), "U8": np.dtype("u1"), "I32": np.dtype("<i4"), "I64": np.dtype("<i8")}


def integers_of(tensor: StoredTensor, *dtypes: str) -> NDArray[Any]:
    """Its numbers in its shape, a view. ModelFileError if its dtype is none of `dtypes`."""
    if tensor.dtype not in dtypes:
        raise tensor.error(f"has dtype {tensor.dtype}; it must be {' or '.join(dtypes)}")
    return tensor.data.view(INTEGER_DTYPES[tensor.dtype]).reshape(tensor.shape)


def scales_of(tensor: StoredTensor) -> NDArray[Any]:
    """Its numbers: float16 if they are stored so, else float32. ModelFileError if one is not finite."""
    scales = tensor.data.view("<f2").reshape(tensor.shape) if tensor.dtype == "F16" else plain_values(tensor)
    if tensor.dtype not in PLAIN or not np.isfinite(scales).all():
        raise tensor.error("holds a scale that is not finite")
    return scales


def narrowed(scales: NDArray[Any]) -> NDArray[Any]:
    """As float16 where that holds every one of them, else as float32."""
    if scales.dtype == np.float16:
        return scales
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    return halves if np.array_equal(halves.astype(np.float32), scales) else np.asarray(scales, np.float32)


def words(packed: NDArray[Any], bits: int) -> U8:
    """int32 [N, K * bits / 32], lowest bits first -> uint8 [N, K] of codes."""
    stored = np.ascontiguousarray(packed).view(np.uint8).reshape(packed.shape[0], -1)
    if bits == 8:
        return stored
    codes = np.empty((stored.shape[0], stored.shape[1] * 2), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = stored & 15, stored >> 4
    return codes


def require_middle(tensor: StoredTensor, zeros: U8, bits: int, said: str) -> None:
    """Zero points of a symmetric matrix, which may store them all the same. ModelFileError unless all are in the middle of the codes."""
    if not (zeros == 1 << (bits - 1)).all():
        raise tensor.error(f"holds zero points off the middle, though the configuration says {said}")


def column_order(tensor: StoredTensor, groups: NDArray[Any], k: int, group: int) -> NDArray[np.int32] | None:
    """From the group of each input, the order in which groups lie together; None if they do already.

    Raises ModelFileError if a group is out of range or has not the inputs that its size says.
    """
    count = -(-k // group)
    if groups.min() < 0 or groups.max() >= count:
        raise tensor.error(f"names group {int(groups.max() if groups.max() >= count else groups.min())}; there are {count} of {group} inputs")
    sizes = np.bincount(groups, minlength=count)
    if not np.array_equal(sizes, [min(group, k - g * group) for g in range(count)]):
        raise tensor.error(f"gives the groups {sizes.min()} to {sizes.max()} inputs; the configuration asks for {group}")
    order = np.argsort(groups, kind="stable").astype(np.int32)
    return None if np.array_equal(order, np.arange(k)) else order


@dataclass(frozen=True, slots=True)
class IntegerMatrix:
    """A matrix [n, k] as its stored tensors give it, before it is packed.

    codes(first, last): uint8 [last - first, K] of some channels. scales, zeros: [N, G], zeros unsigned. group: inputs of each group but perhaps
    the last. order: int32 [K], input i of the packed weight is order[i] of the stored one.
    """

    bits: int
    n: int
    k: int
    group: int
    codes: Callable[[int, int], U8]
    scales: NDArray[Any]
    zeros: NDArray[Any]
    order: NDArray[np.int32] | None = None

    def pack(self) -> PackedWeight:
        """The weight. ValueError, to be said about a tensor, if groups are no multiple of 32."""
        # Groups must be equal: where the last is shorter, each is cut into parts of a size that divides all.
        rest = self.k % self.group
        group = math.gcd(self.group, rest) if rest else self.group
        if group % GROUP:
            raise ValueError(f"has groups of {group} inputs; they must be multiples of {GROUP}")
        starts = np.arange(0, self.k, group) // self.group
        scales, zeros = (values[:, starts] if rest else values for values in (self.scales, self.zeros))
        middle = 1 << (self.bits - 1)
        kept = None
        if not (zeros == middle).all():
            kept = (zeros.astype(np.int16) - (0 if self.bits == 4 else middle)).astype(np.float16)
        codes = self._grouped_codes(group)
        part = WeightPart(codes if self.bits == 4 else codes.view(np.int8), narrowed(np.ascontiguousarray(scales)), None, kept)
        return PackedWeight(WeightKind.W4 if self.bits == 4 else WeightKind.W8, self.n, self.k, (part,), self.order)

    def _grouped_codes(self, group: int) -> U8:
        """[N, G, bytes], as WeightPart has them."""
        codes = np.empty((self.n, self.k // group, group * self.bits // 8), np.uint8)
        step = max(8, CHUNK_CODES // self.k // 8 * 8)
        for first in range(0, self.n, step):
            some = self.codes(first, min(self.n, first + step))
            some = some if self.order is None else some[:, self.order]
            cut = codes[first : first + step]
            cut[...] = (pack_nibbles(some) if self.bits == 4 else some ^ np.uint8(128)).reshape(cut.shape)
        return codes


def per_group(values: NDArray[Any], n: int) -> NDArray[Any]:
    """[1, 1] or [N, G] -> [N, G]."""
    return np.ascontiguousarray(np.broadcast_to(values, (n, values.shape[1])))


def spread(values: NDArray[Any], n: int, k: int, block: Sequence[int]) -> tuple[NDArray[np.float32], int]:
    """Scales of blocks [ceil(n / rows), ceil(k / columns)] -> float32 [N, G] of equal groups along K, and their size."""
    rows, columns = block
    group = math.gcd(columns, k % columns) if k % columns else columns
    starts = np.arange(0, k, group) // columns
    return np.asarray(np.repeat(values.astype(np.float32), rows, axis=0)[:n][:, starts], np.float32), group
