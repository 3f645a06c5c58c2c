"""Picks rows as early as can be: what only leads to wanted logits is computed on the rows that are wanted, not on all tokens of the batch.

A model computes hidden states of all tokens and then gathers some. Of its last layer only the keys and values are read for the other tokens, so
the gather is moved from the end towards the inputs, up to what is not done row by row. Rows being independent, no bit of them changes. Pure; knows
no buffers and no kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from octavo.ops.cpu.trace import Kind, Node, Rows, Traced

# Row i of the result is made of row i of the operands and of nothing else: no position, no cache, no routing of the batch.
ROW_WISE = frozenset({
    Kind.LINEAR, Kind.NORM, Kind.LAYER_NORM, Kind.HEAD_NORM, Kind.SILU_MUL, Kind.GELU_MUL, Kind.GELU, Kind.SCALE, Kind.SOFT_CAP, Kind.SIGMOID_ROWS,
    Kind.ADD, Kind.SPLIT,
})  # fmt: skip
Users = dict[Node, list[Node]]


def pick_early(nodes: Sequence[Node], logits: Traced) -> tuple[list[Node], Traced]:
    """The same model with its gathers moved: nodes in order of execution, all of the tokens before all of the picked rows, and the logits."""
    moved = moved_nodes(nodes)
    picked = {node for node in nodes if node in moved or _rows(node) is Rows.PICKED}
    rewrite = _Rewrite(moved)
    for node in nodes:
        if node in picked:
            rewrite.add(node)
    stay = [node for node in nodes if node not in picked and node.kind is not Kind.GATHER]
    return [*stay, *rewrite.gathers, *rewrite.nodes], rewrite.value(logits)


def moved_nodes(nodes: Sequence[Node]) -> set[Node]:
    """What is computed on all tokens in the trace and can be on picked rows: nobody else reads it.

    Of several operands each would have to be gathered in place of the one result, which an addition is not worth: such a node moves only if
    one of its operands comes out of a product that moves with it.
    """
    users: Users = {}
    for node in nodes:
        for value in node.inputs:
            users.setdefault(value.node, []).append(node)
    movable = _read_by_gathers(nodes, users, lambda node: True)
    products: set[Node] = set()
    for node in nodes:
        if node in movable and (node.kind is Kind.LINEAR or any(value.node in products for value in node.inputs)):
            products.add(node)
    return _read_by_gathers(nodes, users, lambda node: node in products or len(node.inputs) == 1)


def _read_by_gathers(nodes: Sequence[Node], users: Users, may_move: Callable[[Node], bool]) -> set[Node]:
    """Row-wise nodes on all tokens that are read by gathers only, directly or through such nodes."""
    found: set[Node] = set()
    for node in reversed(nodes):
        row_wise = node.kind in ROW_WISE and _rows(node) is Rows.TOKENS and may_move(node)
        readers = users.get(node, [])
        if row_wise and readers and all(reader.kind is Kind.GATHER or reader in found for reader in readers):
            found.add(node)
    return found


class _Rewrite:
    """Nodes on picked rows, made anew: `gathers` of what they read of all tokens, each value once, then `nodes`."""

    def __init__(self, moved: set[Node]) -> None:
        self._moved = moved
        self._made: dict[Node, Node] = {}
        self._gathered: dict[tuple[Node, int], Traced] = {}
        self.gathers: list[Node] = []
        self.nodes: list[Node] = []

    def add(self, node: Node) -> None:
        self._made[node] = replace(node, inputs=tuple(self.value(value) for value in node.inputs))
        self.nodes.append(self._made[node])

    def value(self, value: Traced) -> Traced:
        """What stands for it on picked rows."""
        if value.node.kind is Kind.GATHER:
            return self.value(value.node.inputs[0])
        if value.node in self._made:
            return Traced(self._made[value.node], Rows.PICKED, value.width, value.column, value.backend)
        return self._gather(value)

    def _gather(self, value: Traced) -> Traced:
        key = value.node, value.column
        if key not in self._gathered:
            self.gathers.append(Node(Kind.GATHER, (value,)))
            self._gathered[key] = Traced(self.gathers[-1], Rows.PICKED, value.width, 0, value.backend)
        return self._gathered[key]


def _rows(node: Node) -> Rows:
    """Of its operands; all have the same."""
    return node.inputs[0].rows if node.inputs else Rows.TOKENS
