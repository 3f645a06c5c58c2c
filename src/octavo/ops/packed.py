"""PackedWeight: the few forms that a linear layer's weights take, whatever the file held.

Holds canonical (unpermuted, output-major) arrays, often views into a mapped file, so that building one copies nothing. A device
re-lays them for its kernels once, at load. Knows no file format and no kernel.

# N = output channels, K = inputs, G = groups along K
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class WeightKind(str, Enum):
    """f32, bf16, f16: plain numbers. w8, w4: integers with a scale per group, and perhaps a minimum or a zero point. f8: e4m3 with a scale.
    t4: indices of sixteen integers, with a scale."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    W8 = "w8"
    W4 = "w4"
    F8 = "f8"
    T4 = "t4"


GROUP = 32  # a group of w4, t4, w8 or f8 is a multiple of it; of w8 also half of it
MIDDLE = 8  # of the codes of w4: what they count from where nothing else is said
LEVELS = 16  # of a table
NIBBLES = (WeightKind.W4, WeightKind.T4)
INTEGERS = (*NIBBLES, WeightKind.W8)
GROUPED = (*INTEGERS, WeightKind.F8)
OFFSETS = (WeightKind.W4, WeightKind.W8)


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Some consecutive output channels, as one stored tensor brought them.

    value = code * scale + min, or (code - zero) * scale; with neither, code * scale (w8, f8) or (code - 8) * scale (w4);
    table[code] * scale (t4).

    codes: f32 float32 [N, K]; bf16 uint16 [N, K]; f16 float16 [N, K]; w8 int8 [N, G, group]; f8 uint8 [N, G, group], bits of e4m3 (no NaN);
           w4, t4 uint8 [N, G, group / 2], byte j of each 16 holds element j of its 32 (low nibble) and element j + 16 (high nibble), 0..15.
    scales [N, G]: float16 or float32 (f8: float32). mins, zeros: float16 [N, G] (w8, w4), one of them or none; zeros are integers.
    Any strides; K is a multiple of the group. Groups of 16 (w8 only) have float16 scales and no zeros.
    """

    codes: NDArray[Any]
    scales: NDArray[Any] | None = None
    mins: NDArray[np.float16] | None = None
    zeros: NDArray[np.float16] | None = None


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Weights of a linear layer or an embedding: N output channels (or rows) of K inputs, in parts along N.

    columns: int32 [K], w4, t4 and w8 only: code i of a channel multiplies input columns[i], a permutation. None: in order.
    table: int8 [16], t4 only.
    """

    kind: WeightKind
    n: int
    k: int
    parts: tuple[WeightPart, ...]
    columns: NDArray[np.int32] | None = None
    table: NDArray[np.int8] | None = None

    def __post_init__(self) -> None:
        rows = 0
        for part in self.parts:
            rows += part.codes.shape[0]
            if not (self._fits_groups(part) if self.kind in GROUPED else self._fits_plain(part)):
                raise ValueError(f"a {self.kind.value} part of shape {part.codes.shape} does not have k = {self.k}")
        if rows != self.n:
            raise ValueError(f"parts hold {rows} rows, not n = {self.n}")
        if (self.table is not None) != (self.kind is WeightKind.T4):
            raise ValueError("table: goes with t4, and only with it")
        if self.table is not None and (self.table.shape != (LEVELS,) or self.table.dtype != np.int8):
            raise ValueError("table: must be sixteen int8")
        if self.columns is not None:
            ordered = np.sort(self.columns)
            if self.kind not in INTEGERS or not np.array_equal(ordered, np.arange(self.k)):
                raise ValueError("columns: must be a permutation of the inputs, of w4, t4 or w8")

    def _fits_plain(self, part: WeightPart) -> bool:
        return part.codes.ndim == 2 and part.codes.shape[1] == self.k and part.scales is None and part.mins is None and part.zeros is None

    def _fits_groups(self, part: WeightPart) -> bool:
        if part.codes.ndim != 3 or part.scales is None:
            return False
        width = part.codes.shape[2] * (2 if self.kind in NIBBLES else 1)
        groups = part.codes.shape[:2]
        half = self.kind is WeightKind.W8 and width == GROUP // 2
        offsets = [array for array in (part.mins, part.zeros) if array is not None]
        return (
            groups[1] * width == self.k and width > 0 and (width % GROUP == 0 or half)
            and part.scales.shape == groups and all(array.shape == groups and array.dtype == np.float16 for array in offsets)
            and part.scales.dtype in ((np.float32,) if self.kind is WeightKind.F8 else (np.float16,) if half else (np.float16, np.float32))
            and len(offsets) <= (1 if self.kind in OFFSETS else 0) and not (half and part.zeros is not None)
        )  # fmt: skip

    def release(self) -> None:
        """Lets go of the arrays: for whoever has its own copy of them by now. Only kind and shape are left."""
        object.__setattr__(self, "parts", ())

    @property
    def group(self) -> int:
        """Inputs per scale; 0 for plain numbers."""
        width = int(self.parts[0].codes.shape[-1])
        return 2 * width if self.kind in NIBBLES else width if self.kind in GROUPED else 0

    @property
    def has_mins(self) -> bool:
        return any(part.mins is not None for part in self.parts)

    @property
    def has_zeros(self) -> bool:
        return any(part.zeros is not None for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, minimums, zero points and the order of columns."""
        arrays = [a for p in self.parts for a in (p.codes, p.scales, p.mins, p.zeros) if a is not None]
        return sum(a.size * a.itemsize for a in arrays) + (0 if self.columns is None else self.columns.nbytes)

    def can_join(self, other: PackedWeight) -> bool:
        """Whether one matrix may hold both: a w4 part without offsets counts from 8, so it does not stand beside one with minimums; t4
        has one table."""
        ours, theirs = (self.has_mins, self.has_zeros), (other.has_mins, other.has_zeros)
        mixed = self.kind is WeightKind.W8 and not (any(ours) and any(theirs))
        return (
            (self.kind, self.k, self.group, self._scale_dtype) == (other.kind, other.k, other.group, other._scale_dtype)
            and (ours == theirs or mixed)
            and _same(self.columns, other.columns)
            and _same(self.table, other.table)
        )

    @property
    def _scale_dtype(self) -> np.dtype[Any] | None:
        scales = self.parts[0].scales
        return None if scales is None else scales.dtype

    def dequantize(self) -> NDArray[np.float32]:
        """float32 [N, K], inputs in their own order: each difference, product and sum rounded to fp32."""
        values = np.concatenate([_dequantize(self.kind, part, self.table) for part in self.parts]).reshape(self.n, self.k)
        if self.columns is None:
            return values
        ordered = np.empty_like(values)
        ordered[:, self.columns] = values
        return ordered


def _same(a: NDArray[Any] | None, b: NDArray[Any] | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def merge(weights: Sequence[PackedWeight]) -> tuple[PackedWeight, ...]:
    """Concatenates neighbours along N where kind, K, group, order and table agree; packing is per output channel, so that is exact."""
    merged: list[PackedWeight] = []
    for weight in weights:
        if merged and merged[-1].can_join(weight):
            last = merged[-1]
            merged[-1] = PackedWeight(last.kind, last.n + weight.n, last.k, last.parts + weight.parts, last.columns, last.table)
        else:
            merged.append(weight)
    return tuple(merged)


def bf16_to_f32(codes: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (codes.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def unpack_nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """uint8 [..., 16 m] of packed nibbles -> uint8 [..., 32 m] in element order."""
    runs = codes.reshape(*codes.shape[:-1], -1, GROUP // 2)
    return np.concatenate([runs & 15, runs >> 4], axis=-1).astype(np.uint8).reshape(*codes.shape[:-1], -1)


def pack_nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The reverse: uint8 0..15 [..., 32 m] in element order -> uint8 [..., 16 m]."""
    runs = codes.reshape(*codes.shape[:-1], -1, 2, GROUP // 2)
    return np.asarray(runs[..., 0, :] | runs[..., 1, :] << 4, np.uint8).reshape(*codes.shape[:-1], -1)


def f8_to_f32(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """e4m3 without infinities: 1 sign, 4 exponent, 3 mantissa bits; bits 0x7f and 0xff (NaN) are not handled."""
    return _F8_VALUES[codes]


def _f8_values() -> NDArray[np.float32]:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    values = np.where(code >= 128, -magnitude, magnitude).astype(np.float32)
    values.flags.writeable = False
    return values


_F8_VALUES = _f8_values()


def _dequantize(kind: WeightKind, part: WeightPart, table: NDArray[np.int8] | None) -> NDArray[np.float32]:
    if kind is WeightKind.BF16:
        return bf16_to_f32(part.codes.astype(np.uint16))
    if kind in (WeightKind.F32, WeightKind.F16):
        return part.codes.astype(np.float32)
    assert part.scales is not None
    values = codes_of(kind, part, table)
    if part.zeros is not None:
        values = values - part.zeros.astype(np.float32)[..., None]
    elif kind is WeightKind.W4 and part.mins is None:
        values = values - np.float32(MIDDLE)
    values = values * part.scales.astype(np.float32)[..., None]
    if part.mins is not None:
        values = values + part.mins.astype(np.float32)[..., None]
    return values.reshape(values.shape[0], -1)


def codes_of(kind: WeightKind, part: WeightPart, table: NDArray[np.int8] | None) -> NDArray[np.float32]:
    """The codes of w4, w8 or f8 as numbers, or what those of t4 stand for: float32 [N, G, group]."""
    if kind is WeightKind.F8:
        return f8_to_f32(part.codes)
    codes = unpack_nibbles(part.codes) if kind in NIBBLES else part.codes
    return (codes if table is None else table[codes]).astype(np.float32)
