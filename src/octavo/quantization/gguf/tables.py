"""Codes that stand for numbers of a table (IQ4_NL, IQ4_XS, MXFP4), and digits in base 3 (TQ1_0, TQ2_0).

# N = output channels, B = blocks along K
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.ops.packed import WeightKind, WeightPart
from octavo.quantization.gguf.relay import HALF, PAIR, Array, Packer, eights, relaid, to_half

BLOCKS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "IQ4_NL": np.dtype([("d", HALF), ("qs", "u1", 16)]),
        "IQ4_XS": np.dtype([("d", HALF), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)]),
        "MXFP4": np.dtype([("e", "u1"), ("qs", "u1", 16)]),
        "TQ1_0": np.dtype([("qs", "u1", 48), ("qh", "u1", 4), ("d", HALF)]),
        "TQ2_0": np.dtype([("qs", "u1", 64), ("d", HALF)]),
    }
)


def levels(*numbers: int) -> NDArray[np.int8]:
    table = np.array(numbers, np.int8)
    table.flags.writeable = False
    return table


# Sixteen levels, denser around zero as weights are. MXFP4 is sign, two bits of exponent and one of mantissa: twice 0 0.5 1 1.5 2 3 4 6.
NON_LINEAR = levels(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = levels(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
TABLES: Mapping[str, NDArray[np.int8]] = MappingProxyType({"IQ4_NL": NON_LINEAR, "IQ4_XS": NON_LINEAR, "MXFP4": E2M1})


def pack_iq4_nl(blocks: Array) -> tuple[WeightKind, WeightPart]:
    return WeightKind.T4, WeightPart(blocks["qs"], blocks["d"])


def pack_iq4_xs(blocks: Array) -> tuple[WeightKind, WeightPart]:
    """Eight groups of 32; their scales are `d` times 6-bit integers less 32: four bits in a nibble, two in a bit pair of the halfword."""
    pairs = (blocks["scales_h"][..., None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8)
    low = blocks["scales_l"]
    nibbles = np.stack([low & 15, low >> 4], axis=-1).reshape(pairs.shape)
    factors = (nibbles | pairs << 4).view(np.int8) - np.int8(32)
    scales = to_half(blocks["d"].astype(np.float32)[..., None] * factors)
    rows = blocks.shape[0]
    return WeightKind.T4, WeightPart(blocks["qs"].reshape(rows, -1, 16), scales.reshape(rows, -1))


def pack_mxfp4(blocks: Array) -> tuple[WeightKind, WeightPart]:
    """The scale is a power of two, halved because the table holds doubles."""
    scales = to_half(np.ldexp(np.float32(1), blocks["e"].astype(np.int32) - 128))
    return WeightKind.T4, WeightPart(blocks["qs"], scales)


# d * (q - 1) with q = 0, 1 or 2 (TQ2_0 has room for a 3): four bits, and exact.


def ternary(codes: NDArray[np.int8], scales: Array) -> tuple[WeightKind, WeightPart]:
    return WeightKind.W4, WeightPart(codes.view(np.uint8), scales, zeros=np.ones(scales.shape, np.float16))


def pack_tq1_0(blocks: Array) -> tuple[WeightKind, WeightPart]:
    return ternary(relaid(blocks, 128, tq1_0_codes), blocks["d"])


def tq1_0_codes(blocks: Array, out: Array) -> None:
    """A byte is a fraction of 256 whose first five digits in base 3 are numbers (four in `qh`). Digit i of 32 bytes, then of 16, then of 4."""
    qs, qh = np.ascontiguousarray(blocks["qs"]).reshape(-1, 48), np.ascontiguousarray(blocks["qh"]).reshape(-1, 4)
    numbers = np.concatenate([digits(qs[:, :32], 5), digits(qs[:, 32:], 5), digits(qh, 4)], axis=1).reshape(-1, 8, 2, 2, 8)
    pairs = numbers.view(np.uint64)[..., 0]
    out.reshape(-1, 8, 2)[:] = pairs[:, :, 0] | pairs[:, :, 1] << 4


def digits(part: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """uint8 [rows, count * bytes]: the first digits of all bytes, then the second ones ..."""
    powers = np.array([3**i for i in range(count)], np.uint8)
    rest = part[:, None, :] * powers[:, None]  # what is left of the fraction, modulo 1
    return (rest.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(part.shape[0], -1)


def pack_tq2_0(blocks: Array) -> tuple[WeightKind, WeightPart]:
    return ternary(relaid(blocks, 128, tq2_0_codes), blocks["d"])


def tq2_0_codes(blocks: Array, out: Array) -> None:
    """Each half of a block: 32 bytes of four pairs of bits make 4 groups of 32."""
    groups, pairs = out.reshape(-1, 2, 4, 2), eights(blocks["qs"], 2, 2, 2)
    for i in range(4):
        numbers = pairs >> 2 * i & PAIR
        groups[:, :, i] = numbers[:, :, 0] | numbers[:, :, 1] << 4


PACKERS: Mapping[str, Packer] = MappingProxyType(
    {"IQ4_NL": pack_iq4_nl, "IQ4_XS": pack_iq4_xs, "MXFP4": pack_mxfp4, "TQ1_0": pack_tq1_0, "TQ2_0": pack_tq2_0}
)
