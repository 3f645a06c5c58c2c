"""Blocks of 256 with a scale of scales: eight groups of 32 with 6-bit scales and minimums (Q4_K, Q5_K), sixteen of 16 with 8-bit scales
(Q6_K), 6-bit scales (Q3_K), or 4-bit scales and minimums (Q2_K).

# N = output channels, B = blocks along K
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.ops.packed import WeightKind, WeightPart
from octavo.quantization.gguf.relay import HALF, HIGH, LOW, ONES, PAIR, Array, Packer, eights, relaid, repeated, to_half

BLOCKS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "Q2_K": np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", HALF), ("dmin", HALF)]),
        "Q3_K": np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", HALF)]),
        "Q4_K": np.dtype([("d", HALF), ("dmin", HALF), ("scales", "u1", 12), ("qs", "u1", 128)]),
        "Q5_K": np.dtype([("d", HALF), ("dmin", HALF), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)]),
        "Q6_K": np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", HALF)]),
    }
)


# A code of two or three bits times its group's small scale is an integer of eight bits: then the scale is the block's own, and exact.


def pack_q2_k(blocks: Array) -> tuple[WeightKind, WeightPart]:
    """Codes 0..45. Groups stay 16 wide for their minimums' sake."""
    n = blocks.shape[0]
    codes = relaid(blocks, 256, q2_k_codes)
    mins = to_half(-blocks["dmin"].astype(np.float32)[..., None] * (blocks["scales"] >> 4)).reshape(n, -1)
    return WeightKind.W8, WeightPart(codes.reshape(n, -1, 16), repeated(blocks["d"], 16), mins)


def q2_k_codes(blocks: Array, out: Array) -> None:
    """Each half of a block: 32 bytes of four pairs of bits make 4 runs of 32 numbers, or 8 groups."""
    runs = out.reshape(-1, 2, 4, 4)
    pairs = eights(blocks["qs"], 2, 4)
    for i in range(4):
        runs[..., i, :] = pairs >> 2 * i & PAIR
    groups = out.reshape(-1, 16, 2)
    groups *= (blocks["scales"] & 15).astype(np.uint64).reshape(-1, 16, 1)  # no byte carries into the next: 3 * 15 is small


def pack_q3_k(blocks: Array) -> tuple[WeightKind, WeightPart]:
    """Codes -128..124, with the scale's sign turned: (q - 4) * (s - 32) may be +128, which eight bits lack, but not -129."""
    return WeightKind.W8, WeightPart(relaid(blocks, 256, q3_k_codes), -blocks["d"])


def q3_k_codes(blocks: Array, out: Array) -> None:
    """(4 - q) * (s - 32). Pairs of bits as in Q2_K; bit i of `hmask` is the third bit of the block's run i of 32."""
    runs = out.reshape(-1, 2, 4, 4)
    pairs, third = eights(blocks["qs"], 2, 4), eights(blocks["hmask"], 4)
    for run in range(8):
        half, i = divmod(run, 4)
        runs[:, half, i] = pairs[:, half] >> 2 * i & PAIR | (third >> run & ONES) << 2
    codes = out.view(np.int8).reshape(-1, 16, 16)
    np.subtract(4, codes, out=codes)
    codes *= q3_k_scales(blocks)[..., None]


def q3_k_scales(blocks: Array) -> NDArray[np.int8]:
    """int8 [N B, 16], -32..31: low nibbles of 8 bytes, then their high nibbles; two more bits in the 4 bytes that follow."""
    raw = np.ascontiguousarray(blocks["scales"]).reshape(-1, 12)
    low, rest = raw[:, :8], raw[:, 8:]
    scales = np.concatenate([low & 15, low >> 4], axis=1)
    scales |= np.concatenate([(rest >> 2 * i & 3) << 4 for i in range(4)], axis=1)
    return scales.view(np.int8) - np.int8(32)


def pack_q4_k(blocks: Array) -> tuple[WeightKind, WeightPart]:
    scales, mins = group_scales(blocks)
    codes = relaid(blocks, 128, q4_k_codes).view(np.uint8)
    return WeightKind.W4, WeightPart(codes.reshape(codes.shape[0], -1, 16), scales, mins)


def q4_k_codes(blocks: Array, out: Array) -> None:
    """32 bytes hold two groups, one in the low and one in the high nibbles; ours holds a group's two halves in a byte's two nibbles."""
    runs, groups = eights(blocks["qs"], 2, 2), out.reshape(-1, 2, 2)
    for i in range(2):
        first, second = runs[:, 0, i], runs[:, 1, i]
        groups[:, 0, i] = first & LOW | (second & LOW) << 4
        groups[:, 1, i] = first >> 4 & LOW | second & HIGH


def pack_q5_k(blocks: Array) -> tuple[WeightKind, WeightPart]:
    scales, mins = group_scales(blocks)
    codes = relaid(blocks, 256, q5_k_codes)
    return WeightKind.W8, WeightPart(codes.reshape(codes.shape[0], -1, 32), scales, mins)


def q5_k_codes(blocks: Array, out: Array) -> None:
    """Bit i of `qh` is the fifth bit of group i; nibbles as in Q4_K."""
    groups = out.reshape(-1, 8, 4)
    nibbles, fifth = eights(blocks["qs"], 4, 4), eights(blocks["qh"], 4)
    for i in range(8):
        four = nibbles[..., i // 2, :] >> 4 * (i % 2) & LOW
        groups[..., i, :] = four | (fifth >> i & ONES) << 4


def pack_q6_k(blocks: Array) -> tuple[WeightKind, WeightPart]:
    n = blocks.shape[0]
    codes = relaid(blocks, 256, q6_k_codes)
    codes -= 32
    scales = to_half(blocks["d"].astype(np.float32)[..., None] * blocks["scales"]).reshape(n, -1)
    return WeightKind.W8, WeightPart(codes.reshape(n, -1, 16), scales)


def q6_k_codes(blocks: Array, out: Array) -> None:
    """0..63. Each half of a block: 64 bytes of nibbles and 32 bytes of bit pairs make 4 runs of 32 numbers."""
    runs = out.reshape(-1, 2, 4, 4)
    nibbles, pairs = eights(blocks["ql"], 2, 2, 4), eights(blocks["qh"], 2, 4)
    for i in range(4):
        four = nibbles[..., i % 2, :] >> 4 * (i // 2) & LOW
        runs[..., i, :] = four | (pairs >> 2 * i & PAIR) << 4


def group_scales(blocks: Array) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """float16 [N, 8 B] scales and minimums: `d` and `-dmin` times eight 6-bit integers each, packed in 12 bytes."""
    low, high, rest = np.ascontiguousarray(blocks["scales"]).view(np.uint32).reshape(-1, 3).T
    scales = np.stack([low & 0x3F3F3F3F, rest & 0x0F0F0F0F | (low & 0xC0C0C0C0) >> 2], axis=-1).view(np.uint8)
    mins = np.stack([high & 0x3F3F3F3F, rest >> 4 & 0x0F0F0F0F | (high & 0xC0C0C0C0) >> 2], axis=-1).view(np.uint8)
    n = blocks.shape[0]
    d, dmin = blocks["d"].astype(np.float32).reshape(-1, 1), blocks["dmin"].astype(np.float32).reshape(-1, 1)
    return to_half(d * scales).reshape(n, -1), to_half(-dmin * mins).reshape(n, -1)


PACKERS: Mapping[str, Packer] = MappingProxyType(
    {"Q2_K": pack_q2_k, "Q3_K": pack_q3_k, "Q4_K": pack_q4_k, "Q5_K": pack_q5_k, "Q6_K": pack_q6_k}
)
