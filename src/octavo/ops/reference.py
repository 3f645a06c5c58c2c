"""The definition of every op, in plain numpy. Slow; the kernels are compared with it, and `--backend reference` runs whole models on it.

# T = tokens, S = sequences, D, K, N = widths, G = groups, H = heads, P = positions
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.ops.batch import AttentionSpec, Batch, MoeSpec
from octavo.ops.packed import INTEGERS, MIDDLE, PackedWeight, WeightKind, WeightPart, bf16_to_f32, codes_of, f32_to_bf16

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
Weights = Sequence[Sequence[PackedWeight]]
ROW_GROUP = 32  # inputs that share one scale when a row is quantised


@dataclass(slots=True)
class ReferenceKv:
    """One layer's cache, by slot: k, v float32 [num_blocks * block_size, H, D]; rounded to bf16 on writing if `bf16`."""

    k: F32
    v: F32
    block_size: int
    bf16: bool


def quantize_rows(x_TK: F32) -> tuple[F32, F32]:
    """Rows to int8 by groups of 32: codes (integers in float32) [T, G, 32] and scales [T, G]; K is padded with zeros to the group."""
    rows, width = x_TK.shape
    padded = np.zeros((rows, -(-width // ROW_GROUP) * ROW_GROUP), np.float32)
    padded[:, :width] = x_TK
    groups = padded.reshape(rows, -1, ROW_GROUP)
    scales = np.abs(groups).max(axis=-1) / np.float32(127)
    safe = np.where(scales > 0, scales, np.float32(1))[..., None]
    return np.rint(groups / safe).astype(np.float32), scales


class ReferenceBackend:
    """octavo.ops.Backend on numpy arrays; see octavo.ops for what each function means."""

    def embed(self, ids_T: I32, weight: PackedWeight, scale: float) -> F32:
        # Row by row: a whole vocabulary in fp32 would be several times the file.
        rows = [_row(weight, int(i)).dequantize()[0] for i in ids_T]
        return (np.stack(rows) * np.float32(scale)).astype(np.float32)

    def linear(self, x_TK: F32, weights: Sequence[PackedWeight], bias_N: F32 | None) -> F32:
        y = np.concatenate([_product(_ordered(x_TK, w), w, part) for w in weights for part in w.parts], axis=1)
        return y if bias_N is None else y + bias_N

    def rms_norm(self, x_TD: F32, weight_D: F32, eps: float) -> F32:
        mean = np.mean(x_TD * x_TD, axis=-1, keepdims=True, dtype=np.float32)
        return np.asarray(x_TD / np.sqrt(mean + np.float32(eps)) * weight_D, np.float32)

    def layer_norm(self, x_TD: F32, weight_D: F32, bias_D: F32 | None, eps: float) -> F32:
        centred = x_TD - np.mean(x_TD, axis=-1, keepdims=True, dtype=np.float32)
        var = np.mean(centred * centred, axis=-1, keepdims=True, dtype=np.float32)
        y = np.asarray(centred / np.sqrt(var + np.float32(eps)) * weight_D, np.float32)
        return y if bias_D is None else y + bias_D

    def head_norm(self, x_TN: F32, weight_H: F32, eps: float) -> F32:
        heads = x_TN.reshape(x_TN.shape[0], -1, weight_H.shape[0])
        return self.rms_norm(heads, weight_H, eps).reshape(x_TN.shape)

    def rope(self, x_TN: F32, positions_T: I32, cos_sin: F32, head_dim: int, pairs: bool) -> F32:
        rot = cos_sin.shape[1]
        table = cos_sin[positions_T][:, None]
        cos, sin = table[..., : rot // 2], table[..., rot // 2 :]
        heads = x_TN.reshape(x_TN.shape[0], -1, head_dim).copy()
        one, other = (slice(0, rot, 2), slice(1, rot, 2)) if pairs else (slice(rot // 2), slice(rot // 2, rot))
        first, second = heads[..., one].copy(), heads[..., other].copy()
        heads[..., one] = first * cos - second * sin
        heads[..., other] = second * cos + first * sin
        return heads.reshape(x_TN.shape)

    def attention(self, q_TN: F32, k_TM: F32, v_TM: F32, batch: Batch, spec: AttentionSpec) -> F32:
        kv: ReferenceKv = batch.kv[spec.layer_id]
        shape = (-1, spec.num_kv_heads, spec.head_dim)
        slot_mapping_T, block_table_SB = batch.slot_mapping_GT[spec.group], batch.block_table_GSB[spec.group]
        written = slot_mapping_T >= 0
        slots = slot_mapping_T[written]
        kv.k[slots] = _cache_round(k_TM.reshape(shape)[written], kv.bf16)
        kv.v[slots] = _cache_round(v_TM.reshape(shape)[written], kv.bf16)
        out = np.empty_like(q_TN)
        for s, length in enumerate(batch.seq_lens_S):
            rows = slice(batch.query_start_S[s], batch.query_start_S[s + 1])
            positions = np.arange(length)
            slots = block_table_SB[s][positions // kv.block_size] * kv.block_size + positions % kv.block_size
            out[rows] = _attend(q_TN[rows], kv.k[slots], kv.v[slots], batch.positions_T[rows], spec)
        return out

    def silu_mul(self, x_T2F: F32) -> F32:
        gate, up = np.split(x_T2F, 2, axis=1)
        with np.errstate(over="ignore"):
            return gate / (1 + np.exp(-gate)) * up

    def gelu_mul(self, x_T2F: F32) -> F32:
        gate, up = np.split(x_T2F, 2, axis=1)
        return self.gelu(gate) * up

    def gelu(self, x_TF: F32) -> F32:
        inner = np.float32(np.sqrt(2 / np.pi)) * (x_TF + np.float32(0.044715) * x_TF**3)
        return np.float32(0.5) * x_TF * (1 + np.tanh(inner))

    def scale(self, x_TD: F32, factor: float) -> F32:
        return x_TD * np.float32(factor)

    def soft_cap(self, x_TD: F32, cap: float) -> F32:
        return np.float32(cap) * np.tanh(x_TD / np.float32(cap))

    def sigmoid_rows(self, x_TD: F32, gate_T1: F32) -> F32:
        with np.errstate(over="ignore"):
            return x_TD / (1 + np.exp(-gate_T1))

    def moe(self, x_TD: F32, router_TE: F32, gate_up: Weights, down: Weights, spec: MoeSpec) -> F32:
        chosen_TK, weights_TK = route(router_TE, spec)
        parts_TKD = np.zeros((*chosen_TK.shape, x_TD.shape[1]), np.float32)
        for expert in np.unique(chosen_TK):
            rows, places = np.nonzero(chosen_TK == expert)
            both = self.linear(x_TD[rows], gate_up[expert], None)
            inner = self.gelu_mul(both) if spec.gelu else self.silu_mul(both)
            parts_TKD[rows, places] = self.linear(inner, down[expert], None)
        y_TD = np.zeros_like(x_TD)
        for place in range(spec.top_k):
            y_TD = y_TD + weights_TK[:, place, None] * parts_TKD[:, place]
        return y_TD

    def add(self, a_TD: F32, b_TD: F32) -> F32:
        return a_TD + b_TD

    def split(self, x_TN: F32, widths: Sequence[int]) -> Sequence[F32]:
        return np.split(x_TN, np.cumsum(widths)[:-1], axis=1)

    def gather_rows(self, x_TD: F32, rows_R: I32) -> F32:
        return x_TD[rows_R]


BACKEND = ReferenceBackend()


def route(router_TE: F32, spec: MoeSpec) -> tuple[I32, F32]:
    """Experts [T, top_k] of each row, largest logit first, ties to the lower id; and their weights, float32 [T, top_k]."""
    chosen_TK = np.argsort(-router_TE, axis=1, kind="stable")[:, : spec.top_k].astype(np.int32)
    exps_TE = np.exp(router_TE - router_TE.max(axis=1, keepdims=True))
    weights_TK = np.take_along_axis(exps_TE, chosen_TK, axis=1)
    total = weights_TK if spec.renormalise else exps_TE
    return chosen_TK, (weights_TK / total.sum(axis=1, keepdims=True)).astype(np.float32)


def _row(weight: PackedWeight, index: int) -> PackedWeight:
    for part in weight.parts:
        size = part.codes.shape[0]
        if index < size:
            cut = slice(index, index + 1)
            scales = None if part.scales is None else part.scales[cut]
            mins = None if part.mins is None else part.mins[cut]
            zeros = None if part.zeros is None else part.zeros[cut]
            return PackedWeight(weight.kind, 1, weight.k, (WeightPart(part.codes[cut], scales, mins, zeros),), weight.columns, weight.table)
        index -= size
    raise IndexError(f"row {index} beyond a table of {weight.n}")


def _ordered(x_TK: F32, weight: PackedWeight) -> F32:
    return x_TK if weight.columns is None else np.ascontiguousarray(x_TK[:, weight.columns])


def _product(x_TK: F32, weight: PackedWeight, part: WeightPart) -> F32:
    kind = weight.kind
    if kind in INTEGERS:
        return _quantised_product(x_TK, weight, part)
    if kind in (WeightKind.BF16, WeightKind.F8):
        return bf16_to_f32(f32_to_bf16(x_TK)) @ PackedWeight(kind, part.codes.shape[0], x_TK.shape[1], (part,)).dequantize().T
    return x_TK @ part.codes.astype(np.float32).T


def _quantised_product(x_TK: F32, weight: PackedWeight, part: WeightPart) -> F32:
    """Group after group of the weights, ascending. An integer product of 32 inputs is below 2^24, hence exact in fp32.

    Within a group: s, the sum of scale * sum(q) over each 32 inputs, and t, the sum of scale * product. Then scale * t and min * s are added.
    """
    assert part.scales is not None
    q_TGX, scales_TG = quantize_rows(x_TK)
    codes_NGX = codes_of(weight.kind, part, weight.table)
    rows, group = x_TK.shape[0], codes_NGX.shape[2]
    step = min(group, ROW_GROUP)
    q_TS = q_TGX.reshape(rows, -1)
    acc = np.zeros((rows, codes_NGX.shape[0]), np.float32)
    for g in range(codes_NGX.shape[1]):
        starts = range(0, group, step)
        sums, products = np.zeros((rows, 1), np.float32), np.zeros_like(acc)
        for start in starts:
            at = g * group + start
            sums = sums + scales_TG[:, at // ROW_GROUP, None] * q_TS[:, at : at + step].sum(axis=1, keepdims=True)
        if weight.kind is WeightKind.W4 and part.mins is None and part.zeros is None:
            products = products - np.float32(MIDDLE) * sums
        for start in starts:
            at = g * group + start
            exact = q_TS[:, at : at + step] @ codes_NGX[:, g, start : start + step].T
            products = products + scales_TG[:, at // ROW_GROUP, None] * exact
        scale_N = part.scales[:, g].astype(np.float32)
        acc += scale_N * products
        if part.mins is not None:
            acc += part.mins[:, g].astype(np.float32) * sums
        elif part.zeros is not None:
            acc += -(part.zeros[:, g].astype(np.float32) * scale_N) * sums
    return acc


def _cache_round(x: F32, bf16: bool) -> F32:
    return bf16_to_f32(f32_to_bf16(x)) if bf16 else x


def _attend(q_TN: F32, k_PHD: F32, v_PHD: F32, positions_T: I32, spec: AttentionSpec) -> F32:
    group = spec.num_heads // spec.num_kv_heads
    q = q_TN.reshape(q_TN.shape[0], spec.num_kv_heads, group, spec.head_dim)
    scores = np.einsum("thgd,phd->thgp", q, k_PHD, dtype=np.float32) * np.float32(spec.scale)
    if spec.soft_cap:
        scores = np.float32(spec.soft_cap) * np.tanh(scores / np.float32(spec.soft_cap))
    at, of = positions_T[:, None], np.arange(k_PHD.shape[0])[None]
    visible = (of <= at) & ((of > at - spec.window) if spec.window else True)
    scores = np.where(visible[:, None, None, :], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    # What no row sees may lie in a block that the window has left behind, and be anything: nothing times NaN is NaN.
    values = np.where(np.any(visible, axis=0)[:, None, None], v_PHD, np.float32(0))
    return np.einsum("thgp,phd->thgd", weights, values, dtype=np.float32).reshape(q_TN.shape)
