"""ggml's block types as packed weights: views where the block is laid out as ours, re-laid integers otherwise.

Every block's numbers are integers with a scale and perhaps a minimum, so nothing is quantised anew. Exact to the last bit (a zero's sign
apart): Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. Q4_K, Q5_K and Q6_K keep a scale as a product of an fp16 number and a small integer; ours is that
product in fp16, so that a value differs from ggml's by at most (code * |scale| + |min|) / 2048 + (code + 1) / 2**25.

# N = output channels, K = inputs, G = groups of 32 along K, B = blocks of 256 along K
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.config import HFConfig
from octavo.ops.packed import PackedWeight, WeightKind, WeightPart
from octavo.quantization import PLAIN, StoredTensor, Tensors, declared, pack_plain

Array = NDArray[Any]

HALF = "<f2"
# Eight bytes' nibbles, lowest bits and lowest pairs of bits.
LOW, HIGH = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0xF0F0F0F0F0F0F0F0)
ONES, PAIR = np.uint64(0x0101010101010101), np.uint64(0x0303030303030303)
# Blocks re-laid at a time: their intermediate arrays should stay in a core's cache.
CHUNK_BYTES = 1 << 18

BLOCKS: dict[str, np.dtype[Any]] = {
    "Q4_0": np.dtype([("d", HALF), ("qs", "u1", 16)]),
    "Q4_1": np.dtype([("d", HALF), ("m", HALF), ("qs", "u1", 16)]),
    "Q5_0": np.dtype([("d", HALF), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "Q5_1": np.dtype([("d", HALF), ("m", HALF), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "Q8_0": np.dtype([("d", HALF), ("qs", "i1", 32)]),
    "Q4_K": np.dtype([("d", HALF), ("dmin", HALF), ("scales", "u1", 12), ("qs", "u1", 128)]),
    "Q5_K": np.dtype([("d", HALF), ("dmin", HALF), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)]),
    "Q6_K": np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", HALF)]),
}
WIDTH = {name: 256 if name.endswith("_K") else 32 for name in BLOCKS}


class GGML:
    def __init__(self, _hf: HFConfig, tensors: Tensors, dtype: str) -> None:
        self.tensors = tensors
        self.dtype = dtype

    @staticmethod
    def claims(hf: HFConfig, tensors: Tensors) -> bool:
        return tensors.kind == "gguf" and declared(hf) is None

    def uses(self, name: str) -> tuple[str, ...]:
        return (f"{name}.weight",)

    def pack(self, name: str, n: int, k: int) -> PackedWeight:
        tensor = self.tensors.get(f"{name}.weight")
        if tensor.dtype in PLAIN:
            return pack_plain(tensor, n, k, self.dtype)
        return pack_blocks(tensor, n, k)


FORMAT = GGML


def pack_blocks(tensor: StoredTensor, n: int, k: int) -> PackedWeight:
    """A block-quantised matrix [n, k]. Raises ModelFileError for a type that is not supported, or scales that fp16 cannot hold."""
    tensor.check_shape(n, k)
    if tensor.dtype not in BLOCKS:
        raise tensor.error(f"type {tensor.dtype} is not supported; supported: {', '.join([*PLAIN, *BLOCKS])}")
    blocks = tensor.data.view(BLOCKS[tensor.dtype]).reshape(n, k // WIDTH[tensor.dtype])
    try:
        kind, part = PACKERS[tensor.dtype](blocks)
    except OverflowError:
        raise tensor.error("holds scales beyond float16's range") from None
    return PackedWeight(kind, n, k, (part,))


# Blocks of 32


def pack_q4_0(blocks: Array) -> tuple[WeightKind, WeightPart]:
    """d * (q - 8): a view."""
    return WeightKind.W4, WeightPart(blocks["qs"], blocks["d"])


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


# Blocks of 256: eight groups of 32 with 6-bit scales and minimums (Q4_K, Q5_K), or sixteen of 16 with 8-bit scales (Q6_K)


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


def to_half(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """fp16 of products that fp32 holds exactly. OverflowError where a finite one would become infinite: a silent error otherwise."""
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    infinite = np.isinf(halves)
    if infinite.any() and np.isfinite(values[infinite]).any():
        raise OverflowError
    return halves


# Eight bytes at a time: numpy's loops over the few bytes of a group cost more than the bytes.


def eights(field: Array, *shape: int) -> NDArray[np.uint64]:
    """The bytes of all blocks' field, or of the equal parts that a field has, as uint64 [parts, *shape]."""
    return np.ascontiguousarray(field).view(np.uint64).reshape(-1, *shape)


def relaid(blocks: Array, width: int, fill: Callable[[Array, Array], None]) -> NDArray[np.int8]:
    """int8 [N, blocks, width]. `fill` writes some rows at a time, as uint64 [rows, blocks, width / 8]."""
    codes = np.empty((*blocks.shape, width), np.int8)
    step = max(1, CHUNK_BYTES // max(1, blocks.shape[1] * blocks.itemsize))
    for i in range(0, blocks.shape[0], step):
        fill(blocks[i : i + step], codes[i : i + step].view(np.uint64))
    return codes


PACKERS: dict[str, Callable[[Array], tuple[WeightKind, WeightPart]]] = {
    "Q4_0": pack_q4_0,
    "Q4_1": pack_q4_1,
    "Q5_0": pack_q5_0,
    "Q5_1": pack_q5_1,
    "Q8_0": pack_q8_0,
    "Q4_K": pack_q4_k,
    "Q5_K": pack_q5_k,
    "Q6_K": pack_q6_k,
}
