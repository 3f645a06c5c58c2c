"""AWQ (Lin et al. 2023): channels with large activations get a finer grid, by a factor searched for each; then the ends of each group's range
are clipped where that makes the product better.

Knows matrices and some of their inputs, nothing of models or files.

# T = tokens, N = output channels, K = inputs, G = groups along K
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.compress.rounding import Grid, to_nearest

F32 = NDArray[np.float32]
STEPS = 20  # of the exponent
LEAST = 1e-4
CLIPS = tuple(1 - 0.05 * step for step in range(11))  # of each group's range
ROWS_AT_ONCE = 256  # output channels of a clipping search: bounds its memory


def scaling_factors(x_TK: F32, mean_K: F32, matrices: list[F32], grid: Grid) -> F32:
    """What activations are divided by and weights multiplied, float32 [K]: the best for the products' squared error on the tokens x_TK.

    mean_K: each channel's mean size over all tokens. matrices: float32 [N, K] of all products that read the channels. All ones if nothing is better.
    """
    w_NK = np.concatenate(matrices)
    largest = np.abs(w_NK.reshape(len(w_NK), -1, grid.width(w_NK.shape[1]))).max(axis=2, keepdims=True)
    sizes = np.abs(w_NK.reshape(*largest.shape[:2], -1)) / np.where(largest > 0, largest, 1)
    w_mean_K = sizes.reshape(w_NK.shape).mean(axis=0)
    best = np.ones(w_NK.shape[1], np.float32)
    best_error = error_of(x_TK, w_NK, to_nearest(w_NK, grid).dequantize())
    for step in range(1, STEPS + 1):
        ratio = step / STEPS
        for weighted in (False, True):
            below_K = w_mean_K ** (1 - ratio) + LEAST if weighted else 1.0
            factors = np.maximum(np.maximum(mean_K, LEAST) ** ratio / below_K, LEAST)
            factors = (factors / np.sqrt(factors.max() * factors.min())).astype(np.float32)
            error = error_of(x_TK, w_NK, to_nearest(w_NK * factors, grid).dequantize() / factors)
            if error < best_error:
                best, best_error = factors, error
    return best


def error_of(x_TK: F32, w_NK: F32, other_NK: F32) -> float:
    """Sum of squares of what the two matrices make of x differently."""
    return float(np.square(x_TK @ (w_NK - other_NK).T).sum(dtype=np.float64))


def clipping(x_TK: F32, w_NK: F32, grid: Grid) -> F32:
    """The share of its range that each group keeps, float32 [N, G]: what is best for the group's own part of the product."""
    n, k = w_NK.shape
    width = grid.width(k)
    keep_NG = np.ones((n, k // width), np.float32)
    for first in range(0, n, ROWS_AT_ONCE):
        for group in range(k // width):
            columns = slice(group * width, (group + 1) * width)
            rows = slice(first, first + ROWS_AT_ONCE)
            keep_NG[rows, group] = clip_group(x_TK[:, columns], w_NK[rows, columns], grid)
    return keep_NG


def clip_group(x_TK: F32, w_NK: F32, grid: Grid) -> F32:
    errors = []
    for clip in CLIPS:
        scale, zero = grid.fit(w_NK, clip)
        difference = w_NK - grid.nearest(w_NK, scale[:, None], zero[:, None])
        errors.append(np.square(x_TK @ difference.T).sum(axis=0))
    return np.array(CLIPS, np.float32)[np.argmin(errors, axis=0)]
