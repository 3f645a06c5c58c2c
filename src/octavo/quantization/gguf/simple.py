"""Blocks of 32 with one scale and perhaps a minimum: Q4_0 to Q8_0.

# N = output channels, B = blocks along K
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    """d * (q - 8): a view."""
    return WeightKind.W4, WeightPart(blocks["qs"], blocks["d"])


def pack_q4_1(blocks: Array) -> tuple[WeightKind, WeightPart]:
    return WeightKind.W4, WeightPart(blocks["qs"], blocks["d"], blocks["m"])


def pack_q8_0(blocks: Array) -> tuple[WeightKind, WeightPart]:
    return WeightKind.W8, WeightPart(blocks["qs"], blocks["d"])


def pack_q5_0(blocks: Array) -> tuple[WeightKind, WeightPart]:
    return WeightKind.W8, WeightPart(relaid(blocks, 32, partial(five_bits, CENTRED)), blocks["d"])


def pack_q5_1(blocks: Array) -> tuple[WeightKind, WeightPart]:
    return WeightKind.W8, WeightPart(relaid(blocks, 32, partial(five_bits, PLAIN)), blocks["d"], blocks["m"])


def spread(clear: int, set_: int) -> NDArray[np.uint64]:
    """uint64 [256]: for each byte its eight bits, lowest first, as eight bytes."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, np.uint8(set_), np.uint8(clear)).view(np.uint64)[:, 0]


# What a fifth bit makes of four: 16 more; or, where 16 is taken away from all, the sign's bits where it is missing.
PLAIN = spread(0x00, 0x10)
CENTRED = spread(0xF0, 0x00)


def five_bits(fifth: NDArray[np.uint64], blocks: Array, out: Array) -> None:
    """Nibbles 0..15 low and 16..31 high, their fifth bits in order in `qh`."""
    nibbles, groups = eights(blocks["qs"], 2), out.reshape(-1, 4)
    np.take(fifth, blocks["qh"].reshape(-1, 4), out=groups, mode="clip")
    for i in range(2):
        groups[:, i] |= nibbles[:, i] & LOW
        groups[:, 2 + i] |= nibbles[:, i] >> 4 & LOW


PACKERS: Mapping[str, Packer] = MappingProxyType(
    {"Q4_0": pack_q4_0, "Q4_1": pack_q4_1, "Q5_0": pack_q5_0, "Q5_1": pack_q5_1, "Q8_0": pack_q8_0}
)
