"""SmoothQuant (Xiao et al. 2022): channels whose activations are large become smaller, and the weights that read them larger.

# K = inputs of a product
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
STRENGTH = 0.5
LEAST = 1e-5


def smoothing_factors(most_x_K: F32, most_w_K: F32, strength: float = STRENGTH) -> F32:
    """What activations are divided by: max|x|^strength / max|w|^(1 - strength), per channel; 1 where either is zero."""
    x, w = most_x_K.astype(np.float64), most_w_K.astype(np.float64)
    factors = np.maximum(x, LEAST) ** strength / np.maximum(w, LEAST) ** (1 - strength)
    return np.where((x > 0) & (w > 0), np.maximum(factors, LEAST), 1.0).astype(np.float32)
