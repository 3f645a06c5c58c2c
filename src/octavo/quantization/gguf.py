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
LARGEST_HALF = 65504.0
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
    codes = relaid(blocks, 32, lambda some, out: np.subtract(five_bits(some), 16, out=out, casting="unsafe"))
    return WeightKind.W8, WeightPart(codes, blocks["d"])


def pack_q5_1(blocks: Array) -> tuple[WeightKind, WeightPart]:
    codes = relaid(blocks, 32, lambda some, out: np.copyto(out, five_bits(some), casting="unsafe"))
    return WeightKind.W8, WeightPart(codes, blocks["d"], blocks["m"])


def five_bits(blocks: Array) -> NDArray[np.uint8]:
    """uint8 [..., 32], 0..31: nibbles 0..15 low and 16..31 high, their fifth bits in order in `qh`."""
    nibbles: NDArray[np.uint8] = np.concatenate([blocks["qs"] & 15, blocks["qs"] >> 4], axis=-1)
    fifth: NDArray[np.uint8] = np.unpackbits(blocks["qh"], axis=-1, bitorder="little")
    return np.bitwise_or(nibbles, fifth << 4, dtype=np.uint8)


# Blocks of 256: eight groups of 32 with 6-bit scales and minimums (Q4_K, Q5_K), or sixteen of 16 with 8-bit scales (Q6_K)


def pack_q4_k(blocks: Array) -> tuple[WeightKind, WeightPart]:
    scales, mins = group_scales(blocks)
    n, num_blocks = blocks.shape
    codes = np.empty((n, num_blocks, 4, 2, 16), np.uint8)
    for rows in chunks(blocks):
        # 32 bytes hold two groups, one in the low and one in the high nibbles; ours holds a group's two halves in a byte's two nibbles.
        first, second = np.moveaxis(blocks["qs"][rows].reshape(-1, num_blocks, 4, 2, 16), 3, 0)
        codes[rows, ..., 0, :] = (first & 15) | (second << 4)
        codes[rows, ..., 1, :] = (first >> 4) | (second & 0xF0)
    return WeightKind.W4, WeightPart(codes.reshape(n, num_blocks * 8, 16), scales, mins)


def pack_q5_k(blocks: Array) -> tuple[WeightKind, WeightPart]:
    scales, mins = group_scales(blocks)
    codes = relaid(blocks, 256, q5_k_codes)
    return WeightKind.W8, WeightPart(codes.reshape(codes.shape[0], -1, 32), scales, mins)


def q5_k_codes(blocks: Array, out: NDArray[np.int8]) -> None:
    groups = out.reshape(*blocks.shape, 4, 2, 32)
    nibbles = blocks["qs"].reshape(*blocks.shape, 4, 32)
    for i in range(4):
        for half, four in enumerate((nibbles[..., i, :] & 15, nibbles[..., i, :] >> 4)):
            groups[..., i, half, :] = four | (((blocks["qh"] >> (2 * i + half)) & 1) << 4)


def pack_q6_k(blocks: Array) -> tuple[WeightKind, WeightPart]:
    n = blocks.shape[0]
    codes = relaid(blocks, 256, q6_k_codes)
    scales = halves(blocks["d"].astype(np.float32)[..., None] * blocks["scales"]).reshape(n, -1)
    return WeightKind.W8, WeightPart(codes.reshape(n, -1, 16), scales)


def q6_k_codes(blocks: Array, out: NDArray[np.int8]) -> None:
    """Each half of a block: 64 bytes of nibbles and 32 bytes of bit pairs make 4 runs of 32 numbers."""
    runs = out.reshape(*blocks.shape, 2, 4, 32)
    nibbles = blocks["ql"].reshape(*blocks.shape, 2, 2, 32)
    pairs = blocks["qh"].reshape(*blocks.shape, 2, 32)
    for i in range(4):
        four = nibbles[..., i % 2, :] >> 4 if i >= 2 else nibbles[..., i % 2, :] & 15
        codes = four | (((pairs >> (2 * i)) & 3) << 4)
        np.subtract(codes, 32, out=runs[..., i, :], casting="unsafe")


def group_scales(blocks: Array) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """float16 [N, 8 B] scales and minimums: `d` and `-dmin` times eight 6-bit integers each, packed in 12 bytes."""
    packed = blocks["scales"].reshape(*blocks.shape, 3, 4)
    low, high, rest = packed[..., 0, :], packed[..., 1, :], packed[..., 2, :]
    scales = np.concatenate([low & 63, (rest & 15) | ((low >> 6) << 4)], axis=-1)
    mins = np.concatenate([high & 63, (rest >> 4) | ((high >> 6) << 4)], axis=-1)
    n = blocks.shape[0]
    return (
        halves(blocks["d"].astype(np.float32)[..., None] * scales).reshape(n, -1),
        halves(-blocks["dmin"].astype(np.float32)[..., None] * mins).reshape(n, -1),
    )


def halves(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """fp16 of products that fp32 holds exactly. OverflowError where a finite one would become infinite: a silent error otherwise."""
    finite = np.isfinite(values)
    if bool(np.any(np.abs(values, where=finite, out=np.zeros_like(values)) > LARGEST_HALF)):
        raise OverflowError
    return values.astype(np.float16)


def relaid(blocks: Array, width: int, fill: Callable[[Array, NDArray[np.int8]], object]) -> NDArray[np.int8]:
    """int8 [N, blocks, width], filled some rows at a time."""
    codes = np.empty((*blocks.shape, width), np.int8)
    for rows in chunks(blocks):
        fill(blocks[rows], codes[rows])
    return codes


def chunks(blocks: Array) -> list[slice]:
    step = max(1, CHUNK_BYTES // max(1, blocks.shape[1] * blocks.itemsize))
    return [slice(i, i + step) for i in range(0, blocks.shape[0], step)]


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
