"""From traced nodes to instructions over buffers: fusion, in-place results and what is quantised. Pure; knows no kernel.

Fused: norm + quantisation of its result; product + scale, and residual or activation; rope of neighbouring heads. What a fusion computes is
bit for bit what its parts compute, so fusing changes speed only.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.ops.cpu.steps import I32, Buffer, Place, Plan, QuantPlace, Routing, Step, lay_out
from octavo.ops.cpu.trace import Kind, Node, Rows, Traced
from octavo.ops.packed import INTEGERS, PackedWeight, WeightKind

FOLLOWED_BY = {Kind.SILU_MUL: 2, Kind.GELU_MUL: 3, Kind.GELU: 4}  # activations that a product can do itself: their epilogue's code
Weights = tuple[tuple[PackedWeight, ...], ...]


@dataclass(frozen=True, slots=True)
class Ending:
    """What a product does to its sums: times `scale`, then the epilogue (see Step) with residual `b`.

    node: the one whose result that is. y: where it goes, if that is settled.
    """

    node: Node
    epilogue: int
    scale: float
    b: Place | None = None
    y: Place | None = None


class Planner:
    """Walks the nodes once; `places` says where each traced value lives."""

    def __init__(self, nodes: list[Node], logits: Traced) -> None:
        self.nodes = nodes
        self.steps: list[Step] = []
        self.places: dict[tuple[Node, int], Place] = {}
        self.quantised: dict[tuple[Node, int], QuantPlace] = {}
        self.done: set[Node] = set()
        self.logits = logits
        self.users: dict[tuple[Node, int], list[Node]] = {}
        self.order = {node: i for i, node in enumerate(nodes)}
        for node in nodes:
            for value in node.inputs:
                self.users.setdefault(_key(value), []).append(node)

    def plan(self, max_tokens: int, max_rows: int) -> Plan:
        for node in self.nodes:
            if node not in self.done:
                getattr(self, f"_{node.kind.name.lower()}")(node)
        logits = self.places[_key(self.logits)]
        arena = lay_out(self.steps, {Rows.TOKENS: max_tokens, Rows.PICKED: max_rows, Rows.ONE: 1}, keep=logits.buffer)
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
                self.places[node, column] = whole.part(column, width)

    def _norm(self, node: Node) -> None:
        (x,) = node.inputs
        source = self._at(x)
        # What only quantised products read is never written as floats at all.
        kinds = [kind for user in self.users.get((node, 0), []) for kind in _kinds_over(user, node)]
        store = not kinds or any(kind not in INTEGERS for kind in kinds)
        xq = self._new_quant(x, (node, 0)) if any(kind in INTEGERS for kind in kinds) else None
        y = self._in_place(node, x) if store else None
        self._emit(Step(node, "norm", _stage(x), x=source, y=y, xq=xq, store=store))

    def _layer_norm(self, node: Node) -> None:
        self._norm(node)

    def _head_norm(self, node: Node) -> None:
        x = node.inputs[0]
        source = self._at(x)
        self._emit(Step(node, "norm", _stage(x), x=source, y=self._in_place(node, x)))

    def _linear(self, node: Node) -> None:
        (x,) = node.inputs
        end = self._ending(node)
        y, b = end.y, end.b
        if y is None:
            y = self._new(end.node, x.rows, _width(node.weights) // (2 if end.epilogue in (2, 3) else 1))
        start, several = 0, len(node.weights) > 1
        for weight in node.weights:
            xq = self._quantise(x, weight.columns) if weight.kind in INTEGERS else None
            part = y.part(start, weight.n) if several else y
            residual = b.part(start, weight.n) if b and several else b
            floats = None if xq else self._at(x)
            columns = (start, start + weight.n)
            self._emit(Step(node, "linear", _stage(x), floats, part, residual, xq, weight, columns, end.epilogue, end.scale))
            start += weight.n

    def _ending(self, node: Node) -> Ending:
        """What follows the product and can be done in it."""
        last, scale, user = node, 1.0, self._only_user(node)
        if user is not None and user.kind is Kind.SCALE:
            self.done.add(user)
            last, scale, user = user, user.numbers[0], self._only_user(user)
        gated = user is not None and user.kind in (Kind.SILU_MUL, Kind.GELU_MUL)
        if user is not None and user.kind in FOLLOWED_BY and not (gated and (len(node.weights) > 1 or last is not node)):
            self.done.add(user)
            return Ending(user, FOLLOWED_BY[user.kind], scale)
        result, b, y = self._residual(last, node)
        return Ending(result, 1 if b else 0, scale, b, y)

    def _residual(self, node: Node, now: Node) -> tuple[Node, Place | None, Place | None]:
        """If the result is only added to what is there already: that sum's node, the other operand, and its place if the sum may take it.

        now: the node whose instruction does it.
        """
        user = self._only_user(node)
        if user is None or user.kind is not Kind.ADD:
            return node, None, None
        other = user.inputs[0] if user.inputs[1].node is node else user.inputs[1]
        if _key(other) not in self.places:
            return node, None, None
        self.done.add(user)
        b = self._at(other)
        if not self._is_free(other, now, user):
            return user, b, None
        self.places[user, 0] = b
        return user, b, b

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

    def _gelu(self, node: Node) -> None:
        x = node.inputs[0]
        source = self._at(x)
        self._emit(Step(node, "unary", _stage(x), x=source, y=self._in_place(node, x)))

    def _scale(self, node: Node) -> None:
        self._gelu(node)

    def _soft_cap(self, node: Node) -> None:
        self._gelu(node)

    def _sigmoid_rows(self, node: Node) -> None:
        x, gate = node.inputs
        source, gates = self._at(x), self._at(gate)
        self._emit(Step(node, "gate_rows", _stage(x), x=source, b=gates, y=self._in_place(node, x)))

    def _add(self, node: Node) -> None:
        a, b = node.inputs
        left, right = self._at(a), self._at(b)
        y = self._in_place(node, a if self._is_free(a, node, node) else b)
        self._emit(Step(node, "add", _stage(a), x=left, b=right, y=y))

    def _gather(self, node: Node) -> None:
        x = node.inputs[0]
        self._emit(Step(node, "gather", 1, x=self._at(x), y=self._new(node, Rows.PICKED, x.width)))

    def _moe(self, node: Node) -> None:
        x, router = node.inputs
        assert node.moe is not None
        if x.rows is not Rows.TOKENS:
            raise ValueError("a mixture of experts is run on the tokens of a batch, not on picked rows")
        top_k = node.moe.top_k
        gate_up, down = tuple(g for g, _ in node.experts), tuple(d for _, d in node.experts)
        routing = Routing.of(len(node.experts), top_k)
        self._emit(Step(node, "route", 0, x=self._at(router), routing=routing))
        codes, floats = _reads(gate_up)
        rows = Place(Buffer(Rows.TOKENS, 4 * x.width, top_k), 0, x.width) if floats else None
        rows_q = QuantPlace.of(Rows.TOKENS, x.width, top_k) if codes else None
        xq = self._quantise(x) if codes else None
        self._emit(Step(node, "dispatch", 0, x=self._at(x) if floats else None, y=rows, xq=xq, yq=rows_q, routing=routing))
        inner = self._gated_experts(node, gate_up, rows, rows_q, routing)
        codes, floats = _reads(down)
        inner_q = QuantPlace.of(Rows.TOKENS, inner.width, top_k) if codes else None
        if inner_q is not None:
            self._emit(Step(node, "quantize", 0, x=inner, xq=inner_q, times=top_k))
        parts = Place(Buffer(Rows.TOKENS, 4 * x.width, top_k), 0, x.width)
        self._emit(Step(node, "experts", 0, x=inner if floats else None, xq=inner_q, y=parts, times=top_k, routing=routing, experts=down))
        result, b, y = self._residual(node, node)
        self._emit(Step(node, "combine", 0, x=parts, b=b, y=y or self._new(result, Rows.TOKENS, x.width), routing=routing))

    def _gated_experts(self, node: Node, gate_up: Weights, x: Place | None, xq: QuantPlace | None, routing: Routing) -> Place:
        """act(gate) * up of the sorted rows. Where a gate and its up are stored in different kinds, the activation is a step of its own."""
        assert node.moe is not None
        top_k, gelu, width = node.moe.top_k, node.moe.gelu, _width(gate_up[0])
        fused = all(len(weights) == 1 for weights in gate_up)
        wide = width // 2 if fused else width
        y = Place(Buffer(Rows.TOKENS, 4 * wide, top_k), 0, wide)
        epilogue = (3 if gelu else 2) if fused else 0
        self._emit(Step(node, "experts", 0, x, y, None, xq, epilogue=epilogue, times=top_k, routing=routing, experts=gate_up))
        if fused:
            return y
        inner = y.part(0, width // 2)
        self._emit(Step(node, "act", 0, x=y, y=inner, times=top_k))
        return inner

    # --- places ---

    def _at(self, value: Traced) -> Place:
        return self.places[_key(value)]

    def _new(self, node: Node, rows: Rows, width: int) -> Place:
        place = Place(Buffer(rows, 4 * width), 0, width)
        self.places[node, 0] = place
        return place

    def _only_user(self, node: Node) -> Node | None:
        users = self.users.get((node, 0), [])
        return users[0] if len(users) == 1 else None

    def _is_free(self, x: Traced, now: Node, reader: Node) -> bool:
        """Whether nobody but `reader` reads x's memory in the instruction of `now` or later, so that this one may write over it."""
        while True:
            for user in self.users[_key(x)]:
                if user is not reader and (self.order[user] >= self.order[now] or user.kind is Kind.SPLIT):
                    return False
            if x.node.kind is not Kind.SPLIT:
                return True
            reader, x = x.node, x.node.inputs[0]  # other columns are others' memory; the whole is not

    def _in_place(self, node: Node, x: Traced) -> Place:
        """The result over its operand, if nobody else reads that; else a new buffer."""
        if not self._is_free(x, node, node):
            return self._new(node, x.rows, x.width)
        self.places[node, 0] = self._at(x)
        return self._at(x)

    def _new_quant(self, x: Traced, key: tuple[Node, int]) -> QuantPlace:
        """Room for a value's codes; `key`: whose they are."""
        made = QuantPlace.of(x.rows, x.width)
        self.quantised[key] = made
        return made

    def _quantise(self, x: Traced, order: I32 | None = None) -> QuantPlace:
        """The value's codes, made when first asked for; those in a weight's own order are made for each."""
        if order is not None:
            made = QuantPlace.of(x.rows, x.width)
            self._emit(Step(x.node, "quantize", _stage(x), x=self._at(x), xq=made, order=order))
            return made
        known = self.quantised.get(_key(x))
        if known is None:
            known = self._new_quant(x, _key(x))
            self._emit(Step(x.node, "quantize", _stage(x), x=self._at(x), xq=known))
        return known

    def _emit(self, step: Step) -> None:
        self.steps.append(step)


def _key(value: Traced) -> tuple[Node, int]:
    return value.node, value.column


def _stage(value: Traced) -> int:
    return 0 if value.rows is Rows.TOKENS else 1


def _width(weights: tuple[PackedWeight, ...]) -> int:
    return sum(w.n for w in weights)


def _reads(experts: Weights) -> tuple[bool, bool]:
    """Whether any of the products takes codes, and whether any takes floats."""
    kinds = {weight.kind for weights in experts for weight in weights}
    return any(kind in INTEGERS for kind in kinds), any(kind not in INTEGERS for kind in kinds)


def _kinds_over(user: Node, node: Node) -> list[WeightKind]:
    """The kinds of what multiplies the node's result in `user`; F32 where it is read as floats, be it to be quantised in a weight's order."""
    if user.kind is Kind.LINEAR:
        return [weight.kind if weight.columns is None else WeightKind.F32 for weight in user.weights]
    if user.kind is Kind.MOE and user.inputs[1].node is not node:
        return [weight.kind for gate_up, _ in user.experts for weight in gate_up]
    return [WeightKind.F32]
