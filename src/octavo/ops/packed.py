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
    """f32, bf16, f16: plain numbers. w8, w4: integers with an fp16 scale, and perhaps an fp16 minimum, per group."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    W8 = "w8"
    W4 = "w4"


GROUP = 32  # of w4; w8 has 16 or 32


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Some consecutive output channels, as one stored tensor brought them. value = code * scale + min.

    codes: f32 float32 [N, K]; bf16 uint16 [N, K]; f16 float16 [N, K]; w8 int8 [N, G, 16 or 32];
           w4 uint8 [N, G, 16], byte j of a group holds element j (low nibble) and element j + 16 (high nibble), 0..15.
    scales, mins: float16 [N, G] (w8, w4), mins may be None. Any strides; K is a multiple of the group for w8 and w4.
    """

    codes: NDArray[Any]
    scales: NDArray[np.float16] | None = None
    mins: NDArray[np.float16] | None = None


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Weights of a linear layer or an embedding: N output channels (or rows) of K inputs, in parts along N."""

    kind: WeightKind
    n: int
    k: int
    parts: tuple[WeightPart, ...]

    def __post_init__(self) -> None:
        rows = 0
        for part in self.parts:
            codes = part.codes
            rows += codes.shape[0]
            if self.kind in (WeightKind.W4, WeightKind.W8):
                width = codes.shape[2] * (2 if self.kind is WeightKind.W4 else 1)
                groups = (codes.shape[0], codes.shape[1])
                ok = codes.ndim == 3 and codes.shape[1] * width == self.k and width in (16, 32)
                ok = ok and part.scales is not None and part.scales.shape == groups
                ok = ok and (part.mins is None or part.mins.shape == groups)
            else:
                ok = codes.ndim == 2 and codes.shape[1] == self.k and part.scales is None
            if not ok:
                raise ValueError(f"a {self.kind.value} part of shape {codes.shape} does not have k = {self.k}")
        if rows != self.n:
            raise ValueError(f"parts hold {rows} rows, not n = {self.n}")

    @property
    def group(self) -> int:
        """Inputs per scale: 16 or 32 (w8), 32 (w4), 0 (plain)."""
        return {WeightKind.W4: GROUP, WeightKind.W8: self.parts[0].codes.shape[-1]}.get(self.kind, 0)

    @property
    def has_mins(self) -> bool:
        return any(part.mins is not None for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and minimums."""
        arrays = [a for p in self.parts for a in (p.codes, p.scales, p.mins) if a is not None]
        return sum(a.size * a.itemsize for a in arrays)

    def can_join(self, other: PackedWeight) -> bool:
        return (self.kind, self.k, self.group) == (other.kind, other.k, other.group)

    def dequantize(self) -> NDArray[np.float32]:
        """float32 [N, K]: code * scale + min, each product and sum rounded to fp32."""
        return np.concatenate([_dequantize(self.kind, part) for part in self.parts]).reshape(self.n, self.k)


def merge(weights: Sequence[PackedWeight]) -> tuple[PackedWeight, ...]:
    """Concatenates neighbours along N where kind, K and group agree; packing is per output channel, so that is exact."""
    merged: list[PackedWeight] = []
    for weight in weights:
        if merged and merged[-1].can_join(weight):
            last = merged[-1]
            merged[-1] = PackedWeight(last.kind, last.n + weight.n, last.k, last.parts + weight.parts)
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
    """uint8 [..., 16] of packed nibbles -> uint8 [..., 32] in element order."""
    return np.concatenate([codes & 15, codes >> 4], axis=-1).astype(np.uint8)


def _dequantize(kind: WeightKind, part: WeightPart) -> NDArray[np.float32]:
    if kind is WeightKind.BF16:
        return bf16_to_f32(part.codes.astype(np.uint16))
    if kind in (WeightKind.F32, WeightKind.F16):
        return part.codes.astype(np.float32)
    assert part.scales is not None
    codes = unpack_nibbles(part.codes) if kind is WeightKind.W4 else part.codes
    values = codes.astype(np.float32) * part.scales.astype(np.float32)[..., None]
    if part.mins is not None:
        values = values + part.mins.astype(np.float32)[..., None]
    return values.reshape(values.shape[0], -1)
