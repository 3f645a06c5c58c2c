"""All that models know of a device: some functions on rows, and the contract that holds for each of them.

A function looks at its operands: numpy arrays are computed at once by `reference` (the definition), traced values are recorded into a
program that the CPU kernels replay. There is no current backend to ask or set.

Contract: rows are independent. Row i of every result depends, bit for bit, only on row i of the inputs and on that row's own KV blocks.
No tile shape, thread count, chunk boundary or neighbour changes a bit.

Activations are float32 everywhere; a linear layer rounds its inputs to what its weights are multiplied with (see `linear`).

# T = tokens of the batch, R = rows picked from them, S = sequences, D, K, N, F = widths, H = heads, E = experts
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.ops import reference
from octavo.ops.batch import AttentionSpec, Batch, MoeSpec
from octavo.ops.packed import PackedWeight

Value = Any  # a numpy array, or a traced value that stands for one
F32 = NDArray[np.float32]
Experts = Sequence[Sequence[PackedWeight]]  # of each expert, the weights that one `linear` takes


class Backend(Protocol):
    """What a device implements: the functions below, under the same names."""

    def embed(self, ids_T: Value, weight: PackedWeight, scale: float) -> Value: ...
    def linear(self, x_TK: Value, weights: Sequence[PackedWeight], bias_N: F32 | None) -> Value: ...
    def rms_norm(self, x_TD: Value, weight_D: F32, eps: float) -> Value: ...
    def layer_norm(self, x_TD: Value, weight_D: F32, bias_D: F32 | None, eps: float) -> Value: ...
    def head_norm(self, x_TN: Value, weight_H: F32, eps: float) -> Value: ...
    def rope(self, x_TN: Value, positions_T: Value, cos_sin: F32, head_dim: int, pairs: bool) -> Value: ...
    def attention(self, q_TN: Value, k_TM: Value, v_TM: Value, batch: Batch, spec: AttentionSpec) -> Value: ...
    def silu_mul(self, x_T2F: Value) -> Value: ...
    def gelu_mul(self, x_T2F: Value) -> Value: ...
    def gelu(self, x_TF: Value) -> Value: ...
    def scale(self, x_TD: Value, factor: float) -> Value: ...
    def soft_cap(self, x_TD: Value, cap: float) -> Value: ...
    def sigmoid_rows(self, x_TD: Value, gate_T1: Value) -> Value: ...
    def moe(self, x_TD: Value, router_TE: Value, gate_up: Experts, down: Experts, spec: MoeSpec) -> Value: ...
    def add(self, a_TD: Value, b_TD: Value) -> Value: ...
    def split(self, x_TN: Value, widths: Sequence[int]) -> Sequence[Value]: ...
    def gather_rows(self, x_TD: Value, rows_R: Value) -> Value: ...


def _backend(operand: Value) -> Backend:
    return reference.BACKEND if isinstance(operand, np.ndarray) else operand.backend


def embed(ids_T: Value, weight: PackedWeight, scale: float = 1.0) -> Value:
    """Rows of an embedding table [V, D], dequantised, times `scale` -> float32 [T, D]. Ids (or positions) are in 0..V-1."""
    return _backend(ids_T).embed(ids_T, weight, scale)


def linear(x_TK: Value, weights: Sequence[PackedWeight], bias_N: F32 | None = None) -> Value:
    """x times each weight's transpose, side by side, plus bias -> float32 [T, N], N the sum over weights.

    Rounding of x is part of the definition. w4, t4, w8: per row and 32 inputs (in the weight's order, if it has one) to int8, scale =
    max|x| / 127, ties to even; integer products are exact, and added in fp32: within a weight's group scaled by x's scale, then the groups scaled by theirs,
    both in ascending order. bf16, f8: to bfloat16, products added in fp32. f16, f32: none.
    """
    return _backend(x_TK).linear(x_TK, weights, bias_N)


def rms_norm(x_TD: Value, weight_D: F32, eps: float) -> Value:
    """x / sqrt(mean(x^2) + eps) * weight over each row -> [T, D] (Zhang and Sennrich 2019)."""
    return _backend(x_TD).rms_norm(x_TD, weight_D, eps)


def layer_norm(x_TD: Value, weight_D: F32, bias_D: F32 | None, eps: float) -> Value:
    """(x - mean) / sqrt(var + eps) * weight + bias over each row -> [T, D]."""
    return _backend(x_TD).layer_norm(x_TD, weight_D, bias_D, eps)


def head_norm(x_TN: Value, weight_H: F32, eps: float) -> Value:
    """rms_norm over each head's slice of len(weight) columns -> [T, N] (QK norm)."""
    return _backend(x_TN).head_norm(x_TN, weight_H, eps)


def rope(x_TN: Value, positions_T: Value, cos_sin: F32, head_dim: int, pairs: bool = False) -> Value:
    """Rotary embedding of each head's first `rot` columns -> [T, N]: x[i] turns with x[i + rot/2], or x[2i] with x[2i + 1] if `pairs`.

    cos_sin [positions, rot]: cosines, then sines, of rot/2 frequencies (Su et al. 2021). Columns beyond `rot` stay.
    """
    return _backend(x_TN).rope(x_TN, positions_T, cos_sin, head_dim, pairs)


def attention(q_TN: Value, k_TM: Value, v_TM: Value, batch: Batch, spec: AttentionSpec) -> Value:
    """Writes this batch's K and V into their slots of the paged cache, then causal attention of each row over its own blocks -> [T, N].

    Prefill, chunked prefill and decode in one: a row at position p sees positions 0..p of its sequence. Grouped queries: head h reads KV head
    h // (num_heads / num_kv_heads). K and V are rounded to the cache's dtype, for this batch's own rows as well.
    """
    return _backend(q_TN).attention(q_TN, k_TM, v_TM, batch, spec)


def silu_mul(x_T2F: Value) -> Value:
    """silu(gate) * up of [gate, up] side by side -> [T, F]."""
    return _backend(x_T2F).silu_mul(x_T2F)


def gelu_mul(x_T2F: Value) -> Value:
    """gelu(gate) * up, tanh form -> [T, F]."""
    return _backend(x_T2F).gelu_mul(x_T2F)


def gelu(x_TF: Value) -> Value:
    """gelu(x), tanh form -> [T, F] (Hendrycks and Gimpel 2016)."""
    return _backend(x_TF).gelu(x_TF)


def scale(x_TD: Value, factor: float) -> Value:
    """x * factor -> [T, D]."""
    return _backend(x_TD).scale(x_TD, factor)


def soft_cap(x_TD: Value, cap: float) -> Value:
    """cap * tanh(x / cap) -> [T, D] (Gemma 2)."""
    return _backend(x_TD).soft_cap(x_TD, cap)


def sigmoid_rows(x_TD: Value, gate_T1: Value) -> Value:
    """Each row of x times sigmoid(gate) of its one number -> [T, D] (the shared expert of Qwen2-MoE)."""
    return _backend(x_TD).sigmoid_rows(x_TD, gate_T1)


def moe(x_TD: Value, router_TE: Value, gate_up: Experts, down: Experts, spec: MoeSpec) -> Value:
    """Mixture of gated MLPs -> [T, D] (Shazeer et al. 2017, Jiang et al. 2024).

    Each row's `top_k` experts, largest router logit first: y = sum of weight * down(act(gate) * up), added in that order in fp32, each product
    as `linear` defines it. gate_up[e]: N = 2F, gate channels then up; down[e]: N = D, K = F. See MoeSpec for choice and weights.
    """
    return _backend(x_TD).moe(x_TD, router_TE, gate_up, down, spec)


def add(a_TD: Value, b_TD: Value) -> Value:
    """a + b -> [T, D]."""
    return _backend(a_TD).add(a_TD, b_TD)


def split(x_TN: Value, widths: Sequence[int]) -> Sequence[Value]:
    """Columns of x cut into pieces of the given widths; views, nothing is copied."""
    return _backend(x_TN).split(x_TN, widths)


def gather_rows(x_TD: Value, rows_R: Value) -> Value:
    """x[rows] -> [R, D]."""
    return _backend(x_TD).gather_rows(x_TD, rows_R)
