"""What an instruction must move and compute, and how fast a machine could do it at best. Pure; measures nothing.

Bytes of memory are weights and the KV cache: a step reads each once, far more than caches keep from step to step. Bytes of cache are
activations, which one instruction leaves for the next. An operation is an addition or a multiplication; of attention only those of its two
products count, as is usual; an exponential counts as so many as its polynomial has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from octavo.ops.cpu.peaks import Peaks
from octavo.ops.cpu.shapes import Shape
from octavo.ops.packed import WeightKind

EXPONENTIAL = 16
# Per element of the result.
OPERATIONS = {
    "norm": 4.0,  # square, sum, scale, weight
    "quantize": 3.0,  # maximum, scale, sum
    "rope": 3.0,  # two products and a sum
    "act": EXPONENTIAL + 4.0,
    "unary": EXPONENTIAL + 4.0,
    "gate_rows": EXPONENTIAL + 3.0,
    "add": 1.0,
    "route": EXPONENTIAL + 1.0,
    "combine": 2.0,  # for each of a row's experts
}


class Bound(str, Enum):
    """What keeps an instruction from being faster."""

    MEMORY = "memory"
    CACHE = "cache"
    ARITHMETIC = "arithmetic"


@dataclass(frozen=True, slots=True)
class Cut:
    """A sequence of `length` tokens, of which the last `rows` are computed."""

    rows: int
    length: int

    def visible(self, window: int) -> int:
        """Positions that any of the rows sees; window 0: all before it."""
        return min(self.length, self.rows + window - 1) if window else self.length

    def pairs(self, window: int) -> int:
        """Rows times the positions that each sees."""
        most = window or self.length
        seen = range(self.length - self.rows + 1, self.length + 1)
        below = range(seen.start, min(seen.stop, most + 1))
        return (below.start + below.stop - 1) * len(below) // 2 + most * (len(seen) - len(below))


@dataclass(frozen=True, slots=True)
class Work:
    """A step: its sequences, and the number of rows whose logits are wanted."""

    cuts: tuple[Cut, ...]
    picked: int

    @property
    def tokens(self) -> int:
        return sum(cut.rows for cut in self.cuts)


@dataclass(frozen=True, slots=True)
class Cost:
    """operations: counted as `kind` makes them, see Peaks.products."""

    operations: float = 0.0
    memory_bytes: float = 0.0
    cache_bytes: float = 0.0
    kind: WeightKind | None = None

    def __add__(self, other: Cost) -> Cost:
        if other.kind is not self.kind:
            raise ValueError("costs of different kinds have no common limit")
        return Cost(
            self.operations + other.operations, self.memory_bytes + other.memory_bytes, self.cache_bytes + other.cache_bytes, self.kind
        )

    @property
    def bytes(self) -> float:
        return self.memory_bytes + self.cache_bytes


@dataclass(frozen=True, slots=True)
class Limit:
    """The least time that the machine needs, and why."""

    seconds: float
    bound: Bound


def cost_of(shape: Shape, work: Work) -> Cost:
    """Of one instruction in one step."""
    rows = work.picked if shape.picked else work.tokens
    if rows == 0:
        return Cost(kind=shape.kind)
    moved = float(rows * (shape.reads + shape.writes))
    if shape.op == "attention":
        wide = shape.kv_heads * shape.head_dim * shape.kv_bytes
        memory = 2 * wide * sum(cut.visible(shape.window) for cut in work.cuts)
        return Cost(4.0 * shape.heads * shape.head_dim * sum(cut.pairs(shape.window) for cut in work.cuts), memory, moved)
    if shape.op == "kv_write":
        return Cost(0.0, 2.0 * rows * shape.kv_heads * shape.head_dim * shape.kv_bytes, moved)
    if shape.op == "embed":
        return Cost(float(rows * shape.k), rows * shape.weight_bytes / shape.n, moved)
    if shape.op == "experts":
        # Which experts a batch meets is up to the router: as many as there are choices, at most all.
        met = min(shape.experts, rows * shape.top_k)
        return Cost(2.0 * rows * shape.top_k * shape.n * shape.k, met * shape.weight_bytes, moved, shape.kind)
    if shape.op == "linear":
        return product_cost(shape, rows, moved)
    ranks = shape.top_k if shape.op == "combine" else 1
    each = ranks * OPERATIONS.get(shape.op, 0.0) + (OPERATIONS["quantize"] if shape.quantises and shape.op == "norm" else 0.0)
    return Cost(each * rows * shape.elements, 0.0, moved)


def product_cost(shape: Shape, rows: int, moved: float) -> Cost:
    """Of a product of `rows` with a weight, moving so many bytes of activations."""
    return Cost(2.0 * rows * shape.n * shape.k, float(shape.weight_bytes), moved, shape.kind)


def sampling_cost(rows: int, vocab: int) -> Cost:
    """Of looking at each logit once: a comparison."""
    return Cost(float(rows * vocab), 0.0, 4.0 * rows * vocab)


def limit_of(cost: Cost, peaks: Peaks, step_bytes: float) -> Limit:
    """step_bytes: of memory that the whole step reads; where caches hold it all, it is read from there.

    Reading memory, moving activations and computing go on side by side: the longest of them is the limit.
    """
    cache = peaks.cache or peaks.memory
    memory = cache if step_bytes <= peaks.cache_bytes / 2 else peaks.memory
    # Activations beyond the cache come from memory, too.
    near = cache if cost.cache_bytes <= peaks.cache_bytes else peaks.memory
    candidates = (
        Limit(cost.memory_bytes / memory, Bound.MEMORY),
        Limit(cost.operations / peaks.products(cost.kind), Bound.ARITHMETIC),
        Limit(cost.cache_bytes / near, Bound.CACHE),
    )
    return max(candidates, key=lambda limit: limit.seconds)


def memory_bytes(shapes: Sequence[Shape], work: Work) -> float:
    """What a whole step reads of weights and KV cache."""
    return sum(cost_of(shape, work).memory_bytes for shape in shapes)
