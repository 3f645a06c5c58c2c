"""Moving the bits of many blocks at once. Knows no block type.

Eight bytes at a time: numpy's loops over the few bytes of a group cost more than the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.ops.packed import WeightKind, WeightPart

Array = NDArray[Any]
# Blocks [N, blocks in a row] of one type -> what they are as a PackedWeight.
Packer = Callable[[Array], tuple[WeightKind, WeightPart]]

HALF = "<f2"
# Eight bytes' nibbles, lowest bits and lowest pairs of bits.
LOW, HIGH = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0xF0F0F0F0F0F0F0F0)
ONES, PAIR = np.uint64(0x0101010101010101), np.uint64(0x0303030303030303)
# Blocks re-laid at a time: their intermediate arrays should stay in a core's cache.
CHUNK_BYTES = 1 << 18


def eights(field: Array, *shape: int) -> NDArray[np.uint64]:
    """The bytes of all blocks' field, or of the equal parts that a field has, as uint64 [parts, *shape]."""
    return np.ascontiguousarray(field).view(np.uint64).reshape(-1, *shape)


def relaid(blocks: Array, width: int, fill: Callable[[Array, Array], None]) -> NDArray[np.int8]:
    """int8 [N, blocks, width]. `fill` writes some rows at a time, as uint64 [rows, blocks, width / 8]."""
    codes = np.empty((*blocks.shape, width), np.int8)
    for rows in chunks(blocks):
        fill(blocks[rows], codes[rows].view(np.uint64))
    return codes


def chunks(blocks: Array) -> Iterator[slice]:
    """Some rows at a time, as many as make a chunk."""
    step = max(1, CHUNK_BYTES // max(1, blocks.shape[1] * blocks.itemsize))
    return (slice(i, i + step) for i in range(0, blocks.shape[0], step))


def to_half(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """fp16 of products that fp32 holds exactly. OverflowError where a finite one would become infinite: a silent error otherwise."""
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    infinite = np.isinf(halves)
    if infinite.any() and np.isfinite(values[infinite]).any():
        raise OverflowError
    return halves


def repeated(scales: Array, times: int) -> Array:
    """[N, blocks] -> [N, blocks * times]: a block's scale for each of its groups."""
    return np.repeat(scales, times, axis=1)
