"""Decoder: embedding, a stack of blocks, norm, output head. What every decoder-only model shares.

# T = tokens, R = rows whose logits are wanted, D = hidden size, V = vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo import ops
from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.layers.attention import Attention
from octavo.layers.module import Embedding, Linear, Module, RMSNorm
from octavo.ops.batch import Batch, KvLayout
from octavo.ops.packed import bf16_to_f32, f32_to_bf16


@dataclass(frozen=True, slots=True)
class Names:
    """Where a checkpoint keeps the parts: embedding, prefix of the layers, last norm, head; positions: a learned table of them, if any."""

    embed: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    positions: str = ""


@dataclass(frozen=True, slots=True)
class Scales:
    """What embedded tokens and logits are multiplied by; logit_cap: then cap * tanh(logits / cap), 0 for none."""

    embed: float = 1.0
    logits: float = 1.0
    logit_cap: float = 0.0


class Decoder(Module):
    """`block(hf, name, index)` builds one layer from its checkpoint prefix. A tied head reads the embedding's table.

    norm: the last norm, RMSNorm unless given. tied: where the configuration does not say. left_out: prefixes of checkpoint names that belong to
    parts which this model does without.
    """

    def __init__(
        self,
        hf: HFConfig,
        block: Callable[[HFConfig, str, int], Module],
        *,
        names: Names = Names(),
        norm: Callable[[str, int], Module] | None = None,
        scales: Scales = Scales(),
        tied: bool = False,
        left_out: tuple[str, ...] = (),
    ) -> None:
        width, self.vocab_size = hf.size("hidden_size"), hf.size("vocab_size")
        self.context_length = hf.size("max_position_embeddings", 2048)
        self.embed = Embedding(names.embed, self.vocab_size, width, scales.embed)
        self.positions = Embedding(names.positions, self.context_length, width) if names.positions else None
        self.blocks = [block(hf, f"{names.layers}.{i}", i) for i in range(hf.size("num_hidden_layers", high=1024))]
        self.norm = norm(names.norm, width) if norm else RMSNorm(names.norm, width, hf.read("rms_norm_eps", float, 1e-6))
        tied = hf.read("tie_word_embeddings", bool, tied)
        self.head = Linear(names.embed if tied else names.head, width, self.vocab_size)
        self.scales = scales
        self.left_out = left_out
        attentions = [m for m in self.walk() if isinstance(m, Attention)]
        if len({(a.num_kv_heads, a.head_dim) for a in attentions}) != 1:
            raise ConfigError(f"{hf.source}: layers whose KV heads differ in number or width are not supported")
        self.context_length = max([self.context_length, *(a.rope.scaling.context(self.context_length) for a in attentions if a.rope)])
        self.kv_layout = share_out(attentions)

    def forward(self, batch: Batch) -> ops.Value:
        """Hidden states [T, D], before the last norm."""
        x_TD = self.embed(batch.input_ids_T)
        if self.positions:
            x_TD = ops.add(x_TD, self.positions(batch.positions_T))
        for block in self.blocks:
            x_TD = block(x_TD, batch)
        return x_TD

    def logits(self, x_TD: ops.Value, rows_R: ops.Value) -> ops.Value:
        """float32 [R, V] of the given rows; the head is the widest product, so only rows that sample pay for it."""
        logits_RV = self.head(self.norm(ops.gather_rows(x_TD, rows_R)))
        if self.scales.logits != 1.0:
            logits_RV = ops.scale(logits_RV, self.scales.logits)
        return ops.soft_cap(logits_RV, self.scales.logit_cap) if self.scales.logit_cap else logits_RV


def as_stored(value: float, hf: HFConfig) -> float:
    """A factor rounded to the precision of the checkpoint's weights, as implementations hold it that compute in that precision."""
    dtype, rounded = hf.read("torch_dtype", str, "float32"), np.array([value], np.float32)
    if dtype == "bfloat16":
        rounded = bf16_to_f32(f32_to_bf16(rounded))
    elif dtype == "float16":
        rounded = rounded.astype(np.float16).astype(np.float32)
    return float(rounded[0])


def share_out(attentions: Sequence[Attention]) -> KvLayout:
    """Sets every layer's place in the cache: its group, and its index within the group's blocks.

    All groups take blocks of one size from one pool, so a block has room for as many layers as the rarest window has: five layers of six with a
    window become five groups beside that of the sixth. Groups that are not full leave their room in a block unused.
    """
    by_window: dict[int, list[Attention]] = {}
    for attention in attentions:
        by_window.setdefault(attention.scores.window, []).append(attention)
    size = min(len(layers) for layers in by_window.values())
    windows: list[int] = []
    for window, layers in by_window.items():
        for i, attention in enumerate(layers):
            attention.group, attention.layer_id = len(windows) + i // size, i % size
        windows += [window] * -(-len(layers) // size)
    return KvLayout(size, attentions[0].num_kv_heads, attentions[0].head_dim, tuple(windows))
