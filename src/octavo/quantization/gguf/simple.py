"""Blocks of 32 with one scale and perhaps a minimum: Q4_0 to Q8_0.

# N = output channels, B = blocks along K
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from octavo.ops.packed import WeightKind, WeightPart
from octavo.quantization.gguf.relay import HALF, LOW, Array, Packer, eights, relaid

BLOCKS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "Q4_0": np.dtype([("d", HALF), ("qs", "u1", 16)]),
        "Q4_1": np.dtype([("d", HALF), ("m", HALF), ("qs", "u1", 16)]),
        "Q5_0": np.dtype([("d", HALF), ("qh", "u1", 4), ("qs", "u1", 16)]),
        "Q5_1": np.dtype([("d", HALF), ("m", HALF), ("qh", "u1", 4), ("qs", "u1", 16)]),
        "Q8_0": np.dtype([("d", HALF), ("qs", "i1", 32)]),
    }
)


def pack_q4_0(blocks: Array) -> tuple[WeightKind, WeightPart]:
    """d * (q - 8) as d * q + (-8 d): a view but for the minimums, which fp16 holds exactly. OverflowError if it cannot."""
    scales = blocks["d"]
    with np.errstate(over="ignore"):
        mins = scales * np.float16(-8)
    if not np.array_equal(np.isfinite(mins), np.isfinite(scales)):
        raise OverflowError
    return WeightKind.W4, WeightPart(blocks["qs"], scales, mins)


def pack_q4_1(blocks: Array) -> tuple[WeightKind, WeightPart]:
    return WeightKind.W4, WeightPart(blocks["qs"], blocks["d"], blocks["m"])


def pack_q8_0(blocks: Array) -> tuple[WeightKind, WeightPart]:
    return WeightKind.W8, WeightPart(blocks["qs"], blocks["d"])


def pack_q5_0(blocks: Array) -> tuple[WeightKind, WeightPart]:
    codes = relaid(blocks, 32, five_bits)
    codes -= 16
    return WeightKind.W8, WeightPart(codes, blocks["d"])


def pack_q5_1(blocks: Array) -> tuple[WeightKind, WeightPart]:
    return WeightKind.W8, WeightPart(relaid(blocks, 32, five_bits), blocks["d"], blocks["m"])


def five_bits(blocks: Array, out: Array) -> None:
    """0..31: nibbles 0..15 low and 16..31 high, their fifth bits in order in `qh`."""
    nibbles, groups = eights(blocks["qs"], 2), out.reshape(-1, 4)
    fifth = np.unpackbits(np.ascontiguousarray(blocks["qh"]), bitorder="little").view(np.uint64).reshape(-1, 4) << 4
    for i in range(2):
        groups[:, i] = nibbles[:, i] & LOW | fifth[:, i]
        groups[:, 2 + i] = nibbles[:, i] >> 4 & LOW | fifth[:, 2 + i]


PACKERS: Mapping[str, Packer] = MappingProxyType(
    {"Q4_0": pack_q4_0, "Q4_1": pack_q4_1, "Q5_0": pack_q5_0, "Q5_1": pack_q5_1, "Q8_0": pack_q8_0}
)
