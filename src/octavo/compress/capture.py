"""Runs blocks of a model on calibration texts and notes what goes into each product.

The ops are those of `ops.reference` on float32 weights, with two differences: attention sees whole sequences, without a cache, and products note
their inputs. Knows models by their ops only.

# T = tokens of a sequence, K, N = widths, H = heads, P = positions
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.layers import Linear, Module
from octavo.ops.batch import AttentionSpec, Batch
from octavo.ops.packed import PackedWeight, WeightKind, WeightPart
from octavo.ops.reference import ReferenceBackend

F32 = NDArray[np.float32]
Note = Callable[[int, F32], None]  # which product (the id of its weights), and its input [T, K]
NORMS = ("rms_norm", "layer_norm")


def f32_weight(w_NK: F32) -> tuple[PackedWeight, ...]:
    n, k = w_NK.shape
    return (PackedWeight(WeightKind.F32, n, k, (WeightPart(w_NK),)),)


class CalibrationOps(ReferenceBackend):
    """On arrays of one whole sequence, with weights that `f32_weight` made. note: told of every product before it is computed."""

    def __init__(self, note: Note | None = None) -> None:
        self.note = note

    def linear(self, x_TK: F32, weights: Sequence[PackedWeight], bias_N: F32 | None) -> F32:
        if self.note is not None:
            self.note(id(weights), x_TK)
        # The definition's own product would copy the weights each time.
        y_TN: F32 = x_TK @ weights[0].parts[0].codes.T
        return y_TN if bias_N is None else y_TN + bias_N

    def attention(self, q_TN: F32, k_TM: F32, v_TM: F32, batch: Batch, spec: AttentionSpec) -> F32:
        length, sharing = q_TN.shape[0], spec.num_heads // spec.num_kv_heads
        q_HTD, k_HTD, v_HTD = (x.reshape(length, -1, spec.head_dim).swapaxes(0, 1) for x in (q_TN, k_TM, v_TM))
        out_HTD = np.empty(q_HTD.shape, np.float32)
        visible_TP = np.tri(length, dtype=bool)
        if spec.window:
            visible_TP &= ~np.tri(length, k=-spec.window, dtype=bool)
        for head in range(spec.num_heads):
            scores_TP = (q_HTD[head] @ k_HTD[head // sharing].T) * np.float32(spec.scale)
            if spec.soft_cap:
                scores_TP = np.float32(spec.soft_cap) * np.tanh(scores_TP / np.float32(spec.soft_cap))
            scores_TP[~visible_TP] = -np.inf
            scores_TP = np.exp(scores_TP - scores_TP.max(axis=1, keepdims=True))
            out_HTD[head] = (scores_TP @ v_HTD[head // sharing]) / scores_TP.sum(axis=1, keepdims=True)
        return out_HTD.swapaxes(0, 1).reshape(length, -1)


@dataclass(eq=False, slots=True)
class Value:
    """An array on its way through a block. norm: the weight of the norm that made it, if one did."""

    array: F32
    backend: ValueOps
    norm: F32 | None = None


@dataclass(eq=False, slots=True)
class Use:
    """Something that takes a norm's result. weights: the id of a product's weights, or None for anything else."""

    norm: F32
    weights: int | None


@dataclass(slots=True)
class ValueOps:
    """The ops on Values, each computed by `inner`; notes who uses the results of norms."""

    inner: CalibrationOps
    uses: list[Use] = field(default_factory=list)

    def __getattr__(self, op: str) -> Callable[..., Any]:
        compute = getattr(self.inner, op)

        def run(*args: Any) -> Any:
            for arg in args:
                if isinstance(arg, Value) and arg.norm is not None:
                    self.uses.append(Use(arg.norm, id(args[1]) if op == "linear" else None))
            result = compute(*(arg.array if isinstance(arg, Value) else arg for arg in args))
            if isinstance(result, list):
                return [Value(part, self) for part in result]
            return Value(result, self, args[1] if op in NORMS else None)

        return run


def one_sequence(length: int, longest: int) -> Batch:
    """A batch of one whole sequence; longest: of the rotary tables."""
    positions = np.arange(length, dtype=np.int32)
    none = np.zeros((0, 0), np.int32)
    lengths = np.array([length], np.int32)
    return Batch(positions, positions, none, np.array([0, length], np.int32), lengths, none, max_positions=longest)


def run_block(block: Module, hidden: Sequence[F32], longest: int, note: Note | None = None) -> list[F32]:
    """The block's results [T, D] for each sequence, with what each product takes told to `note`."""
    backend = ValueOps(CalibrationOps(note))
    results = []
    for x_TD in hidden:
        with np.errstate(over="ignore"):
            results.append(block(Value(x_TD, backend), one_sequence(len(x_TD), longest)).array)
        backend.uses.clear()
    return results


def uses_of_norms(block: Module, width: int) -> list[Use]:
    """Who takes the results of the block's norms, found by running it on one token."""
    backend = ValueOps(CalibrationOps())
    with np.errstate(all="ignore"):
        block(Value(np.ones((1, width), np.float32), backend), one_sequence(1, 1))
    return backend.uses


@dataclass(slots=True)
class Inputs:
    """What was seen of the inputs of one product. sums: of the numbers' sizes, over `count` tokens; most: the largest. rows: some of the tokens.
    products: X^T X over all tokens, only if wanted."""

    count: int
    sums_K: NDArray[np.float64]
    most_K: F32
    rows: list[F32] = field(default_factory=list)
    products_KK: NDArray[np.float64] | None = None


class Observer:
    """Gathers the inputs of a block's products over all sequences. per_sequence: rows kept of each; products: whether X^T X is wanted."""

    def __init__(self, linears: Sequence[Linear], per_sequence: int, products: bool) -> None:
        self.names = {id(linear.weights): linear for linear in linears}
        self.per_sequence, self.products = per_sequence, products
        self.seen: dict[Linear, Inputs] = {}

    def note(self, weights: int, x_TK: F32) -> None:
        linear = self.names.get(weights)
        if linear is None or not len(x_TK):
            return
        k = x_TK.shape[1]
        seen = self.seen.get(linear)
        if seen is None:
            products = np.zeros((k, k)) if self.products else None
            seen = self.seen[linear] = Inputs(0, np.zeros(k), np.zeros(k, np.float32), [], products)
        sizes_TK = np.abs(x_TK)
        seen.count += len(x_TK)
        seen.sums_K += sizes_TK.sum(axis=0, dtype=np.float64)
        seen.most_K = np.maximum(seen.most_K, sizes_TK.max(axis=0))
        if self.per_sequence:
            seen.rows.append(x_TK[np.linspace(0, len(x_TK) - 1, min(self.per_sequence, len(x_TK))).astype(int)])
        if seen.products_KK is not None:
            seen.products_KK += x_TK.T @ x_TK
