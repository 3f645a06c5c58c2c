"""What a plan consists of: instructions over buffers, and the buffers' offsets in one arena. Knows no node's meaning and no kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.ops.cpu.trace import Node, Rows
from octavo.ops.packed import PackedWeight

ALIGN = 64
I32 = NDArray[np.int32]


@dataclass(eq=False, slots=True)
class Buffer:
    """`times` rows of `row_bytes` for each of `rows`; alive from the instruction that first writes it to the last that reads it."""

    rows: Rows
    row_bytes: int
    times: int = 1
    first: int = -1
    last: int = -1
    offset: int = -1

    def nbytes(self, most: Mapping[Rows, int]) -> int:
        """Its size where `most` says how many rows of each sort there may be."""
        return self.row_bytes * self.times * most[self.rows]


@dataclass(frozen=True, slots=True)
class Place:
    """Columns of a float32 buffer, from `column` on."""

    buffer: Buffer
    column: int
    width: int

    @property
    def ref(self) -> tuple[int, int]:
        """Byte offset in the arena, and floats from row to row."""
        return self.buffer.offset + 4 * self.column, self.buffer.row_bytes // 4

    def part(self, column: int, width: int) -> Place:
        """Some of its columns."""
        return Place(self.buffer, self.column + column, width)


@dataclass(frozen=True, slots=True)
class QuantPlace:
    """Quantised rows: int8 codes, and a scale and a sum for each 32 of them."""

    q: Buffer
    scale: Buffer
    sum: Buffer

    @staticmethod
    def of(rows: Rows, width: int, times: int = 1) -> QuantPlace:
        groups = -(-width // 32)
        return QuantPlace(Buffer(rows, 32 * groups, times), Buffer(rows, 4 * groups, times), Buffer(rows, 4 * groups, times))

    @property
    def ref(self) -> tuple[int, int, int]:
        return self.q.offset, self.scale.offset, self.sum.offset


@dataclass(frozen=True, slots=True)
class Routing:
    """Where rows go in a mixture: int32 experts and float32 weights [T, top_k], places [T, top_k], and offsets [experts + 1]."""

    chosen: Buffer
    weights: Buffer
    place: Buffer
    offsets: Buffer

    @staticmethod
    def of(num_experts: int, top_k: int) -> Routing:
        chosen, weights, place = (Buffer(Rows.TOKENS, 4 * top_k) for _ in range(3))
        return Routing(chosen, weights, place, Buffer(Rows.ONE, 4 * (num_experts + 1)))

    @property
    def ref(self) -> tuple[int, int, int, int]:
        return self.chosen.offset, self.weights.offset, self.place.offset, self.offsets.offset


@dataclass(eq=False, slots=True)
class Step:
    """One instruction to be.

    epilogue: 0 none, 1 add `b`, 2 silu_mul, 3 gelu_mul, 4 gelu; scale: of a product, before its epilogue. columns: the outputs that one of several
    weights makes. times: rows for each token. experts: of each, the weights of one product. order: of inputs, in which a weight wants codes.
    """

    node: Node
    op: str
    stage: int
    x: Place | None = None
    y: Place | None = None
    b: Place | None = None
    xq: QuantPlace | None = None
    weight: PackedWeight | None = None
    columns: tuple[int, int] = (0, 0)
    epilogue: int = 0
    scale: float = 1.0
    store: bool = True
    heads: int = 0
    times: int = 1
    yq: QuantPlace | None = None
    routing: Routing | None = None
    experts: tuple[tuple[PackedWeight, ...], ...] = ()
    order: I32 | None = None

    @property
    def matrices(self) -> tuple[PackedWeight, ...]:
        """Its weight, or of a mixture those of the first expert."""
        if self.experts:
            return self.experts[0]
        return () if self.weight is None else (self.weight,)

    def buffers(self) -> Iterable[Buffer]:
        """All that it reads or writes."""
        yield from (place.buffer for place in (self.x, self.y, self.b) if place is not None)
        for quantised in (self.xq, self.yq):
            if quantised is not None:
                yield from (quantised.q, quantised.scale, quantised.sum)
        if self.routing is not None:
            yield from (self.routing.chosen, self.routing.weights, self.routing.place, self.routing.offsets)


@dataclass(frozen=True, slots=True)
class Plan:
    steps: list[Step]
    arena_bytes: int
    logits: Place


def lay_out(steps: Sequence[Step], most: Mapping[Rows, int], keep: Buffer) -> int:
    """First-fit offsets: buffers whose lifetimes overlap do not. `keep` lives to the end. Returns the arena's size in bytes."""
    buffers: dict[Buffer, None] = {}
    for i, step in enumerate(steps):
        for buffer in step.buffers():
            buffers.setdefault(buffer)
            buffer.first = i if buffer.first < 0 else buffer.first
            # The head may run several times over one batch: what it reads of the batch stays to the end.
            shared = step.stage == 1 and buffer.rows is Rows.TOKENS
            buffer.last = len(steps) if shared else i
    keep.last = len(steps)
    size = {b: -(-b.nbytes(most) // ALIGN) * ALIGN for b in buffers}
    placed: list[Buffer] = []
    for buffer in buffers:
        taken = sorted((b.offset, b.offset + size[b]) for b in placed if b.first <= buffer.last and buffer.first <= b.last)
        offset = 0
        for start, end in taken:
            if offset + size[buffer] <= start:
                break
            offset = max(offset, end)
        buffer.offset = offset
        placed.append(buffer)
    return max(b.offset + size[b] for b in buffers)
