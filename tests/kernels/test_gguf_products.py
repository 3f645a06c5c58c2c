"""Needs the extension. Products with every GGUF type, against the numbers that the gguf package reads from the same blocks."""

from __future__ import annotations

import numpy as np
import pytest
from gguf_blocks import random_blocks, reference, stored
from linear_cases import ISAS, pack, rows

from octavo import _native
from octavo.ops.packed import PackedWeight, WeightKind, codes_of
from octavo.ops.reference import quantize_rows
from octavo.quantization.gguf import BLOCKS, pack_blocks

pytest.importorskip("gguf")

N, K = 37, 512


def magnitudes(w: PackedWeight) -> tuple[np.ndarray, np.ndarray]:
    """float64 [N, K]: |code * scale| + |min|, and |code|, with what codes count from: the two are added separately, so they may cancel."""
    part = w.parts[0]
    assert part.scales is not None
    codes = np.abs(codes_of(w.kind, part, w.table).astype(np.float64))
    if part.zeros is not None:
        codes += part.zeros.astype(np.float64)[..., None]
    elif w.kind is WeightKind.W4 and part.mins is None:
        codes += 8
    mins = 0 if part.mins is None else np.abs(part.mins.astype(np.float64))[..., None]
    return (codes * np.abs(part.scales.astype(np.float64))[..., None] + mins).reshape(w.n, -1), codes.reshape(w.n, -1)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("isa", ISAS)
def test_product_is_within_the_documented_bound(name: str, isa: str) -> None:
    """What remains when the rounding of activations to int8 is taken as given: that of scales to fp16 (at most one part in 2048 and half of
    the least subnormal, a code's times), and fp32's in the sum."""
    blocks = random_blocks(name, N, K, scale=0.1)
    w = pack_blocks(stored(name, blocks, K), N, K)
    x = rows(5, K)
    codes, scales = quantize_rows(x)
    x64 = (codes.astype(np.float64) * scales[..., None]).reshape(x.shape)
    sizes, whole = magnitudes(w)
    per_weight = sizes * (2**-11 + (K + 8) * 2**-24) + (whole + 1) * 2**-25
    error = np.abs(_native.linear(x, pack(w, isa), isa=isa) - x64 @ reference(name, blocks).astype(np.float64).T)
    assert (error <= np.abs(x64) @ per_weight.T + 1e-30).all()
