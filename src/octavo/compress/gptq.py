"""GPTQ (Frantar et al. 2022): columns are rounded one after the other, and what is lost in each is made up for by those that follow.

Knows matrices and what their inputs looked like, nothing of models or files.

# N = output channels, K = inputs
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from octavo.compress.rounding import Grid, Quantised

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
BLOCK = 128  # columns between updates of all that follow
MOST_DAMPING = 10.0


class Order(str, Enum):
    """In which order columns are rounded, and which of them share a scale.

    STORED: as they are. IMPORTANT: those with the largest inputs first, groups as they are stored. GROUPED: the same, and groups of consecutive
    columns of that order.
    """

    STORED = "stored"
    IMPORTANT = "important"
    GROUPED = "grouped"


def gptq(w_NK: F32, hessian_KK: F64, grid: Grid, order: Order, damping: float) -> Quantised:
    """The matrix on the grid. hessian_KK: the inputs' products X^T X, times any positive number.

    Inputs that were always zero get a weight of zero. Raises ValueError if the Hessian is not finite.
    """
    if not np.isfinite(hessian_KK).all():
        raise ValueError("the calibration texts drive its inputs beyond float32")
    n, k = w_NK.shape
    w_KN = np.ascontiguousarray(w_NK.T, np.float32)
    importance_K = hessian_KK.diagonal().copy()
    w_KN[importance_K == 0] = 0
    weight_K = importance_K.astype(np.float32)
    static = grid.search(w_KN.T.reshape(n, -1, grid.width(k)), weight_K.reshape(-1, grid.width(k))) if order is Order.IMPORTANT else None
    turn_K = np.arange(k) if order is Order.STORED else np.argsort(-importance_K, kind="stable")
    upper_KK = inverse_root(hessian_KK[np.ix_(turn_K, turn_K)], damping).astype(np.float32)
    run = Columns(w_KN[turn_K], weight_K[turn_K], upper_KK, grid, static, turn_K // grid.width(k))
    codes_KN = np.empty((k, n), np.uint8)
    codes_KN[turn_K] = run.codes_KN
    group_of = None
    if order is Order.GROUPED:
        group_of = np.empty(k, np.int32)
        group_of[turn_K] = np.arange(k) // grid.width(k)
    return Quantised(grid, np.ascontiguousarray(codes_KN.T), run.scale_NG, run.zero_NG.astype(np.uint8), group_of)


class Columns:
    """The pass over the inputs, in the order in which they come. weight_K: the importance of each; static: scales and zeros [N, G] where they
    are settled before; group_K: the group of each input in those. Turned, so that what belongs to one input is contiguous."""

    def __init__(
        self, w_KN: F32, weight_K: F32, upper_KK: F32, grid: Grid, static: tuple[F32, F32] | None, group_K: NDArray[np.int64]
    ) -> None:
        self.w_KN, self.weight_K, self.upper_KK, self.grid, self.static = w_KN, weight_K, upper_KK, grid, static
        k, n = w_KN.shape
        self.width = grid.width(k)
        self.group_K = group_K if static else np.arange(k) // self.width
        shape = (n, k // self.width)
        self.scale_NG, self.zero_NG = static or (np.empty(shape, np.float32), np.empty(shape, np.float32))
        self.codes_KN = np.empty((k, n), np.uint8)
        for first in range(0, k, BLOCK):
            self._block(first, min(first + BLOCK, k))

    def _block(self, first: int, last: int) -> None:
        w_KN, upper_KK = self.w_KN, self.upper_KK
        errors = np.empty((last - first, w_KN.shape[1]), np.float32)
        for j in range(first, last):
            group = self.group_K[j]
            if self.static is None and j % self.width == 0:
                columns = slice(j, j + self.width)
                self.scale_NG[:, group], self.zero_NG[:, group] = self.grid.search(w_KN[columns].T, self.weight_K[columns])
            scale, zero = self.scale_NG[:, group], self.zero_NG[:, group]
            codes = self.grid.codes(w_KN[j], scale, zero)
            self.codes_KN[j] = codes.astype(np.uint8)
            errors[j - first] = (w_KN[j] - (codes - zero) * scale) / upper_KK[j, j]
            w_KN[j + 1 : last] -= upper_KK[j, j + 1 : last, None] * errors[j - first]
        w_KN[last:] -= upper_KK[first:last, last:].T @ errors


def inverse_root(hessian_KK: F64, damping: float) -> F64:
    """Upper triangular U with U^T U the inverse of the damped Hessian, whose diagonal is changed; more damping where it takes it."""
    diagonal = hessian_KK.diagonal().copy()
    mean = float(diagonal.mean()) or 1.0
    diagonal[diagonal == 0] = mean
    while damping <= MOST_DAMPING:
        hessian_KK[np.diag_indices_from(hessian_KK)] = diagonal + damping * mean
        try:
            # From the last column to the first, H = R R^T with R upper triangular, hence its inverse's factor is R's inverse.
            root = np.linalg.cholesky(hessian_KK[::-1, ::-1])[::-1, ::-1]
            return np.asarray(np.triu(np.linalg.inv(root)), np.float64)
        except np.linalg.LinAlgError:
            damping *= 10
    raise ValueError("the calibration texts give no usable picture of its inputs")
