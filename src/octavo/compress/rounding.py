"""Rounding to integers with a scale for each group of inputs: the grids that quantised numbers lie on. Knows no method and no file format.

# N = output channels, K = inputs, G = groups along K
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from octavo.ops.packed import bf16_to_f32, f32_to_bf16

F32 = NDArray[np.float32]
# Of a group's range, what a search tries; more than all of it, as a symmetric grid has one step less above zero than below.
SHARES = (15 / 14, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79, 0.76, 0.73, 0.7)


def as_f16(values: F32) -> F32:
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)


def as_bf16(values: F32) -> F32:
    return bf16_to_f32(f32_to_bf16(values))


def as_f32(values: F32) -> F32:
    return values.astype(np.float32)


# What a file's word for a dtype does to numbers.
STORED_AS: MappingProxyType[str, Callable[[F32], F32]] = MappingProxyType({"F16": as_f16, "BF16": as_bf16, "F32": as_f32})


@dataclass(frozen=True, slots=True)
class Grid:
    """How numbers are rounded. value = (code - zero) * scale, codes 0 .. 2^bits - 1.

    group: inputs per scale, -1 for all of a row. symmetric: zero is in the middle. lowest_zero: the least zero that the format can hold.
    scales: the dtype in which scales are stored; they are rounded to it before codes are chosen, so that nothing is lost in writing.
    """

    bits: int
    group: int
    symmetric: bool
    scales: str = "F16"
    lowest_zero: int = 0

    @property
    def top(self) -> int:
        return (1 << self.bits) - 1

    def width(self, k: int) -> int:
        return k if self.group < 0 else self.group

    def fit(self, w: F32, shrink: float = 1.0) -> tuple[F32, F32]:
        """Scales and zeros [...] for groups of numbers [..., size]. shrink: of the range, less than 1 clips its ends."""
        if self.symmetric:
            scale = np.abs(w).max(axis=-1) * np.float32(2 * shrink / self.top)
            scale = self._stored(scale)
            return scale, np.full_like(scale, 1 << (self.bits - 1))
        low, high = np.minimum(w.min(axis=-1), 0) * np.float32(shrink), np.maximum(w.max(axis=-1), 0) * np.float32(shrink)
        scale = self._stored((high - low) / np.float32(self.top))
        return scale, np.clip(np.rint(-low / scale), self.lowest_zero, self.top).astype(np.float32)

    def search(self, w: F32, importance: F32) -> tuple[F32, F32]:
        """As fit, with the range of each group by which its numbers' squared errors, each times its importance, sum to the least."""
        scale, zero = self.fit(w)
        least = self._error(w, importance, scale, zero)
        for share in SHARES:
            other_scale, other_zero = self.fit(w, share)
            error = self._error(w, importance, other_scale, other_zero)
            better = error < least
            least = np.where(better, error, least)
            scale, zero = np.where(better, other_scale, scale), np.where(better, other_zero, zero)
        return scale, zero

    def _error(self, w: F32, importance: F32, scale: F32, zero: F32) -> F32:
        off = w - self.nearest(w, scale[..., None], zero[..., None])
        error: F32 = (off * off * importance).sum(axis=-1)
        return error

    def _stored(self, scale: F32) -> F32:
        """As the file will hold it, and never 0: a group of zeros gets scale 1."""
        rounded = STORED_AS[self.scales](scale.astype(np.float32))
        return np.where(rounded > 0, rounded, np.float32(1))

    def codes(self, w: F32, scale: F32, zero: F32) -> F32:
        """Nearest codes, as whole float32 numbers; the operands broadcast."""
        return np.clip(np.rint(w / scale) + zero, 0, self.top)

    def nearest(self, w: F32, scale: F32, zero: F32) -> F32:
        """The numbers of the grid that are nearest to w."""
        return (self.codes(w, scale, zero) - zero) * scale


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix on a grid. codes, zeros uint8 [N, K], [N, G]; scales float32 [N, G], exact in the dtype they are stored in; group_of int32 [K]: the
    group of each input where groups are not consecutive, else None."""

    grid: Grid
    codes: NDArray[np.uint8]
    scales: F32
    zeros: NDArray[np.uint8]
    group_of: NDArray[np.int32] | None = None

    @property
    def groups(self) -> NDArray[np.int32]:
        """int32 [K]: the group of each input."""
        if self.group_of is not None:
            return self.group_of
        k = self.codes.shape[1]
        return (np.arange(k) // self.grid.width(k)).astype(np.int32)

    def dequantize(self) -> F32:
        """float32 [N, K]."""
        groups = self.groups
        centred = self.codes.astype(np.float32) - self.zeros.astype(np.float32)[:, groups]
        return centred * self.scales[:, groups]

    def rows(self, first: int, last: int) -> Quantised:
        """Some output channels."""
        return Quantised(self.grid, self.codes[first:last], self.scales[first:last], self.zeros[first:last], self.group_of)


def to_nearest(w_NK: F32, grid: Grid, shrink_NG: F32 | None = None) -> Quantised:
    """Each number to the nearest one of its group's grid. shrink_NG: of each group's range."""
    n, k = w_NK.shape
    groups = w_NK.reshape(n, -1, grid.width(k))
    scale, zero = grid.fit(groups)
    if shrink_NG is not None:
        for shrink in np.unique(shrink_NG):
            clipped_scale, clipped_zero = grid.fit(groups, float(shrink))
            scale, zero = np.where(shrink_NG == shrink, clipped_scale, scale), np.where(shrink_NG == shrink, clipped_zero, zero)
    codes = grid.codes(groups, scale[..., None], zero[..., None]).astype(np.uint8)
    return Quantised(grid, codes.reshape(n, k), scale, zero.astype(np.uint8))
