"""Tracing: the model's forward is run once on symbols, and every op records a node. Knows no buffers and no kernels.

# T = tokens of the batch, R = picked rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.ops.batch import AttentionSpec, Batch, MoeSpec
from octavo.ops.packed import PackedWeight

F32 = NDArray[np.float32]
Experts = Sequence[Sequence[PackedWeight]]


class Rows(Enum):
    """Which rows a value has: one per token of the batch, or one per picked row, or a single one."""

    TOKENS = auto()
    PICKED = auto()
    ONE = auto()


class Kind(Enum):
    EMBED = auto()
    LINEAR = auto()
    NORM = auto()
    LAYER_NORM = auto()
    HEAD_NORM = auto()
    ROPE = auto()
    ATTENTION = auto()
    SILU_MUL = auto()
    GELU_MUL = auto()
    GELU = auto()
    SCALE = auto()
    SOFT_CAP = auto()
    SIGMOID_ROWS = auto()
    MOE = auto()
    ADD = auto()
    SPLIT = auto()
    GATHER = auto()


@dataclass(eq=False, slots=True)
class Symbol:
    """An integer input of a step, by the name of its field in Batch."""

    name: str
    backend: Tracer = field(repr=False)


@dataclass(eq=False, slots=True)
class Traced:
    """A float32 matrix that will exist in every step: `rows` x `width`. `node` makes it; of a split, `column` is where it begins."""

    node: Node = field(repr=False)
    rows: Rows
    width: int
    column: int
    backend: Tracer = field(repr=False)


@dataclass(eq=False, slots=True)
class Node:
    """One recorded op: operands, and what is fixed at trace time. `experts`: gate_up and down of each expert."""

    kind: Kind
    inputs: tuple[Traced, ...]
    weights: tuple[PackedWeight, ...] = ()
    arrays: tuple[F32 | None, ...] = ()
    numbers: tuple[float, ...] = ()
    spec: AttentionSpec | None = None
    moe: MoeSpec | None = None
    experts: tuple[tuple[tuple[PackedWeight, ...], tuple[PackedWeight, ...]], ...] = ()


class Tracer:
    """octavo.ops.Backend on symbols: `nodes` in order of execution."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def batch(self, max_positions: int) -> Batch:
        names = ("input_ids_T", "positions_T", "slot_mapping_GT", "query_start_S", "seq_lens_S", "block_table_GSB")
        symbols: dict[str, Any] = {name: Symbol(name, self) for name in names}
        return Batch(**symbols, max_positions=max_positions)

    def picked(self) -> Symbol:
        return Symbol("rows_R", self)

    def embed(self, ids_T: Symbol, weight: PackedWeight, scale: float) -> Traced:
        if weight.columns is not None:
            raise ValueError("a table whose columns are in another order")
        by_position = ids_T.name == "positions_T"
        return self._record(Node(Kind.EMBED, (), (weight,), numbers=(scale, float(by_position))), Rows.TOKENS, weight.k)

    def linear(self, x_TK: Traced, weights: Sequence[PackedWeight], bias_N: F32 | None) -> Traced:
        for weight in weights:
            if weight.k != x_TK.width:
                raise ValueError(f"a weight of {weight.k} inputs over a value of width {x_TK.width}")
        return self._record(Node(Kind.LINEAR, (x_TK,), tuple(weights), (bias_N,)), x_TK.rows, sum(w.n for w in weights))

    def rms_norm(self, x_TD: Traced, weight_D: F32, eps: float) -> Traced:
        return self._record(Node(Kind.NORM, (x_TD,), arrays=(weight_D, None), numbers=(eps,)), x_TD.rows, x_TD.width)

    def layer_norm(self, x_TD: Traced, weight_D: F32, bias_D: F32 | None, eps: float) -> Traced:
        return self._record(Node(Kind.LAYER_NORM, (x_TD,), arrays=(weight_D, bias_D), numbers=(eps,)), x_TD.rows, x_TD.width)

    def head_norm(self, x_TN: Traced, weight_H: F32, eps: float) -> Traced:
        return self._record(Node(Kind.HEAD_NORM, (x_TN,), arrays=(weight_H, None), numbers=(eps,)), x_TN.rows, x_TN.width)

    def rope(self, x_TN: Traced, positions_T: Symbol, cos_sin: F32, head_dim: int, pairs: bool) -> Traced:
        node = Node(Kind.ROPE, (x_TN,), arrays=(cos_sin,), numbers=(head_dim, float(pairs)))
        return self._record(node, x_TN.rows, x_TN.width)

    def attention(self, q_TN: Traced, k_TM: Traced, v_TM: Traced, batch: Batch, spec: AttentionSpec) -> Traced:
        return self._record(Node(Kind.ATTENTION, (q_TN, k_TM, v_TM), spec=spec), q_TN.rows, q_TN.width)

    def silu_mul(self, x_T2F: Traced) -> Traced:
        return self._record(Node(Kind.SILU_MUL, (x_T2F,)), x_T2F.rows, x_T2F.width // 2)

    def gelu_mul(self, x_T2F: Traced) -> Traced:
        return self._record(Node(Kind.GELU_MUL, (x_T2F,)), x_T2F.rows, x_T2F.width // 2)

    def gelu(self, x_TF: Traced) -> Traced:
        return self._record(Node(Kind.GELU, (x_TF,)), x_TF.rows, x_TF.width)

    def scale(self, x_TD: Traced, factor: float) -> Traced:
        return self._record(Node(Kind.SCALE, (x_TD,), numbers=(factor,)), x_TD.rows, x_TD.width)

    def soft_cap(self, x_TD: Traced, cap: float) -> Traced:
        return self._record(Node(Kind.SOFT_CAP, (x_TD,), numbers=(cap,)), x_TD.rows, x_TD.width)

    def sigmoid_rows(self, x_TD: Traced, gate_T1: Traced) -> Traced:
        return self._record(Node(Kind.SIGMOID_ROWS, (x_TD, gate_T1)), x_TD.rows, x_TD.width)

    def moe(self, x_TD: Traced, router_TE: Traced, gate_up: Experts, down: Experts, spec: MoeSpec) -> Traced:
        experts = tuple((tuple(g), tuple(d)) for g, d in zip(gate_up, down, strict=True))
        if any(w.columns is not None for one in experts for side in one for w in side):
            raise ConfigError("experts whose inputs are in another order (GPTQ's desc_act) are not supported")
        if len(experts) != router_TE.width:
            raise ValueError(f"{len(experts)} experts for a router of width {router_TE.width}")
        return self._record(Node(Kind.MOE, (x_TD, router_TE), moe=spec, experts=experts), x_TD.rows, x_TD.width)

    def add(self, a_TD: Traced, b_TD: Traced) -> Traced:
        if (a_TD.width, a_TD.rows) != (b_TD.width, b_TD.rows):
            raise ValueError(f"cannot add widths {a_TD.width} and {b_TD.width}")
        return self._record(Node(Kind.ADD, (a_TD, b_TD)), a_TD.rows, a_TD.width)

    def split(self, x_TN: Traced, widths: Sequence[int]) -> list[Traced]:
        if sum(widths) != x_TN.width:
            raise ValueError(f"widths {list(widths)} do not add up to {x_TN.width}")
        node = Node(Kind.SPLIT, (x_TN,))
        self.nodes.append(node)
        starts = np.cumsum([0, *widths])
        return [Traced(node, x_TN.rows, width, int(start), self) for start, width in zip(starts, widths, strict=False)]

    def gather_rows(self, x_TD: Traced, rows_R: Symbol) -> Traced:
        return self._record(Node(Kind.GATHER, (x_TD,)), Rows.PICKED, x_TD.width)

    def _record(self, node: Node, rows: Rows, width: int) -> Traced:
        self.nodes.append(node)
        return Traced(node, rows, width, 0, self)


def trace(model: Any, max_positions: int) -> tuple[list[Node], Traced, Traced]:
    """Runs `model.forward` and `model.logits` on symbols: the nodes, the hidden states and the logits."""
    tracer = Tracer()
    hidden = model.forward(tracer.batch(max_positions))
    logits = model.logits(hidden, tracer.picked())
    return tracer.nodes, hidden, logits
