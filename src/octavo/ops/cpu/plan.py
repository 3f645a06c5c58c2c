"""From traced nodes to instructions over buffers: fusion, in-place results, lifetimes and offsets. Pure; knows no kernel.

Fused: norm + quantisation of its result; product + residual; gate and up product + activation; rope of neighbouring heads. What a fusion
computes is bit for bit what its parts compute, so fusing changes speed only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.ops.cpu.trace import Kind, Node, Rows, Traced
from octavo.ops.packed import INTEGERS, PackedWeight

ALIGN = 64
I32 = NDArray[np.int32]


@dataclass(eq=False, slots=True)
class Buffer:
    """`row_bytes` for each row; alive from the instruction that first writes it to the last that reads it."""

    rows: Rows
    row_bytes: int
    first: int = -1
    last: int = -1
    offset: int = -1


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


@dataclass(frozen=True, slots=True)
class QuantPlace:
    """Quantised rows: int8 codes, and a scale and a sum for each 32 of them."""

    q: Buffer
    scale: Buffer
    sum: Buffer

    @property
    def ref(self) -> tuple[int, int, int]:
        return self.q.offset, self.scale.offset, self.sum.offset


@dataclass(eq=False, slots=True)
class Step:
    """One instruction to be. `epilogue`: 0 none, 1 add `b`, 2 silu_mul, 3 gelu_mul; columns: the outputs that one of several weights makes.

    order: of a quantisation, the weight's order of inputs.
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
    store: bool = True
    heads: int = 0
    order: I32 | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    steps: list[Step]
    arena_bytes: int
    logits: Place


class Planner:
    """Walks the nodes once; `places` says where each traced value lives."""

    def __init__(self, nodes: list[Node], logits: Traced) -> None:
        self.nodes = nodes
        self.steps: list[Step] = []
        self.places: dict[tuple[Node, int], Place] = {}
        self.quantised: dict[tuple[Node, int], QuantPlace] = {}
        self.done: set[Node] = set()
        self.logits = logits
        self.uses: Counter[tuple[Node, int]] = Counter()
        self.users: dict[tuple[Node, int], list[Node]] = {}
        self.order = {node: i for i, node in enumerate(nodes)}
        for node in nodes:
            for value in node.inputs:
                self.uses[_key(value)] += 1
                self.users.setdefault(_key(value), []).append(node)

    def plan(self, max_tokens: int, max_rows: int) -> Plan:
        for node in self.nodes:
            if node not in self.done:
                getattr(self, f"_{node.kind.name.lower()}")(node)
        logits = self.places[_key(self.logits)]
        arena = self._assign({Rows.TOKENS: max_tokens, Rows.PICKED: max_rows}, keep=logits.buffer)
        return Plan(self.steps, arena, logits)

    # --- one method per kind of node ---

    def _embed(self, node: Node) -> None:
        self._emit(Step(node, "embed", 0, y=self._new(node, Rows.TOKENS, node.weights[0].k), weight=node.weights[0]))

    def _split(self, node: Node) -> None:
        whole = self.places[_key(node.inputs[0])]
        # Children are told apart by their first column; they live inside the whole.
        for (maker, column), users in list(self.users.items()):
            if maker is node:
                width = next(v.width for u in users for v in u.inputs if _key(v) == (node, column))
                self.places[node, column] = Place(whole.buffer, whole.column + column, width)

    def _norm(self, node: Node) -> None:
        (x,) = node.inputs
        users = self.users.get((node, 0), [])
        fits = bool(users) and all(u.kind is Kind.LINEAR and all(w.kind in INTEGERS and w.columns is None for w in u.weights) for u in users)
        # A norm whose result only feeds quantised products never writes floats at all.
        xq = self._new_quant(x, (node, 0)) if fits else None
        y = None if fits else self._new(node, x.rows, x.width)
        self._emit(Step(node, "norm", _stage(x), x=self._at(x), y=y, xq=xq, store=not fits))

    def _layer_norm(self, node: Node) -> None:
        self._norm(node)

    def _head_norm(self, node: Node) -> None:
        x = node.inputs[0]
        self._emit(Step(node, "norm", _stage(x), x=self._at(x), y=self._in_place(node, x)))

    def _linear(self, node: Node) -> None:
        (x,) = node.inputs
        result, epilogue, b, y = self._epilogue(node)
        if y is None:
            y = self._new(result, x.rows, _width(node) // (2 if epilogue > 1 else 1))
        start = 0
        for weight in node.weights:
            xq = self._quantise(x, weight.columns) if weight.kind in INTEGERS else None
            columns = (start, start + weight.n)
            part = Place(y.buffer, y.column + start, weight.n) if len(node.weights) > 1 else y
            residual = Place(b.buffer, b.column + start, weight.n) if b and len(node.weights) > 1 else b
            floats = None if xq else self._at(x)
            self._emit(Step(node, "linear", _stage(x), floats, part, residual, xq, weight, columns, epilogue))
            start += weight.n

    def _epilogue(self, node: Node) -> tuple[Node, int, Place | None, Place | None]:
        """What follows the product and can be done in it: the node whose result it becomes, its code, the residual, and where it goes."""
        users = self.users.get((node, 0), [])
        if len(users) != 1:
            return node, 0, None, None
        user = users[0]
        if user.kind in (Kind.SILU_MUL, Kind.GELU_MUL) and len(node.weights) == 1:
            self.done.add(user)
            return user, 2 if user.kind is Kind.SILU_MUL else 3, None, None
        if user.kind is Kind.ADD:
            other = user.inputs[0] if user.inputs[1].node is node else user.inputs[1]
            if other.node is not node and _key(other) in self.places:
                self.done.add(user)
                b = self._at(other)
                # The sum takes the residual's place if nothing reads the residual after it.
                last = max(self.order[u] for u in self.users[_key(other)]) == self.order[user]
                y = b if last and other.column == 0 and b.column == 0 and b.buffer.row_bytes == 4 * b.width else None
                if y is not None:
                    self.places[user, 0] = y
                return user, 1, b, y
        return node, 0, None, None

    def _rope(self, node: Node) -> None:
        x = node.inputs[0]
        source, y = self._at(x), self._in_place(node, x)
        table, head_dim = node.arrays[0], int(node.numbers[0])
        last = self.steps[-1] if self.steps else None
        if (
            last is not None and last.op == "rope" and last.node.arrays[0] is table and last.node.numbers == node.numbers
            and last.x is not None and source == y and last.x == last.y
            and last.x.buffer is source.buffer and last.x.column + last.x.width == source.column
        ):  # fmt: skip
            joined = Place(source.buffer, last.x.column, last.x.width + source.width)
            last.x = last.y = joined
            last.heads += source.width // head_dim
            return
        self._emit(Step(node, "rope", 0, x=source, y=y, heads=source.width // head_dim))

    def _attention(self, node: Node) -> None:
        q, k, v = (self._at(value) for value in node.inputs)
        self._emit(Step(node, "kv_write", 0, x=k, b=v))
        self._emit(Step(node, "attention", 0, x=q, y=self._new(node, Rows.TOKENS, q.width)))

    def _silu_mul(self, node: Node) -> None:
        x = node.inputs[0]
        self._emit(Step(node, "act", _stage(x), x=self._at(x), y=self._new(node, x.rows, x.width // 2)))

    def _gelu_mul(self, node: Node) -> None:
        self._silu_mul(node)

    def _add(self, node: Node) -> None:
        a, b = node.inputs
        self._emit(Step(node, "add", _stage(a), x=self._at(a), b=self._at(b), y=self._new(node, a.rows, a.width)))

    def _gather(self, node: Node) -> None:
        x = node.inputs[0]
        self._emit(Step(node, "gather", 1, x=self._at(x), y=self._new(node, Rows.PICKED, x.width)))

    # --- places ---

    def _at(self, value: Traced) -> Place:
        return self.places[_key(value)]

    def _new(self, node: Node, rows: Rows, width: int) -> Place:
        place = Place(Buffer(rows, 4 * width), 0, width)
        self.places[node, 0] = place
        return place

    def _in_place(self, node: Node, x: Traced) -> Place:
        """The result over its operand, if nobody else reads that; else a new buffer."""
        if self.uses[_key(x)] != 1:
            return self._new(node, x.rows, x.width)
        self.places[node, 0] = self._at(x)
        return self._at(x)

    def _new_quant(self, x: Traced, key: tuple[Node, int] | None) -> QuantPlace:
        """Room for a value's codes; with a key, whoever asks for that value's codes gets these."""
        groups = -(-x.width // 32)
        made = QuantPlace(Buffer(x.rows, 32 * groups), Buffer(x.rows, 4 * groups), Buffer(x.rows, 4 * groups))
        if key is not None:
            self.quantised[key] = made
        return made

    def _quantise(self, x: Traced, order: I32 | None) -> QuantPlace:
        """The value's codes, made when first asked for; those in a weight's own order are made for each."""
        made = self.quantised.get(_key(x)) if order is None else None
        if made is None:
            made = self._new_quant(x, None if order is not None else _key(x))
            self._emit(Step(x.node, "quantize", _stage(x), x=self._at(x), xq=made, order=order))
        return made

    def _emit(self, step: Step) -> None:
        self.steps.append(step)

    def _assign(self, most: dict[Rows, int], keep: Buffer) -> int:
        """First-fit offsets: buffers whose lifetimes overlap do not. Returns the arena's size in bytes."""
        buffers: dict[Buffer, None] = {}
        for i, step in enumerate(self.steps):
            for buffer in _touched(step):
                buffers.setdefault(buffer)
                buffer.first = i if buffer.first < 0 else buffer.first
                # The head may run several times over one batch: what it reads of the batch stays to the end.
                shared = step.stage == 1 and buffer.rows is Rows.TOKENS
                buffer.last = len(self.steps) if shared else i
        keep.last = len(self.steps)
        size = {b: -(-b.row_bytes * most[b.rows] // ALIGN) * ALIGN for b in buffers}
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


def _touched(step: Step) -> Iterable[Buffer]:
    for place in (step.x, step.y, step.b):
        if place is not None:
            yield place.buffer
    if step.xq is not None:
        yield from (step.xq.q, step.xq.scale, step.xq.sum)


def _key(value: Traced) -> tuple[Node, int]:
    return value.node, value.column


def _stage(value: Traced) -> int:
    return 0 if value.rows is Rows.TOKENS else 1


def _width(node: Node) -> int:
    return sum(w.n for w in node.weights)
