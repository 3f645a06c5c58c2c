"""Decoder: embedding, a stack of blocks, norm, output head. What every decoder-only model shares.

# T = tokens, R = rows whose logits are wanted, D = hidden size, V = vocabulary
"""

from __future__ import annotations

from collections.abc import Callable

from octavo import ops
from octavo.config import HFConfig
from octavo.layers.attention import Attention
from octavo.layers.module import Embedding, Linear, Module, RMSNorm
from octavo.ops.batch import Batch, KvLayout


class Decoder(Module):
    """`block(hf, name)` builds one layer from its checkpoint prefix. A tied head reads the embedding's table."""

    def __init__(self, hf: HFConfig, block: Callable[[HFConfig, str], Module]) -> None:
        width, self.vocab_size = hf.size("hidden_size"), hf.size("vocab_size")
        self.context_length = hf.size("max_position_embeddings", 2048)
        self.embed = Embedding("model.embed_tokens", self.vocab_size, width)
        self.blocks = [block(hf, f"model.layers.{i}") for i in range(hf.size("num_hidden_layers", high=1024))]
        self.norm = RMSNorm("model.norm", width, hf.read("rms_norm_eps", float, 1e-6))
        tied = hf.read("tie_word_embeddings", bool, False)
        self.head = Linear("model.embed_tokens" if tied else "lm_head", width, self.vocab_size)
        attentions = [m for m in self.walk() if isinstance(m, Attention)]
        for layer_id, attention in enumerate(attentions):
            attention.layer_id = layer_id
        self.kv_layout = KvLayout(len(attentions), attentions[0].num_kv_heads, attentions[0].head_dim)

    def forward(self, batch: Batch) -> ops.Value:
        """Hidden states [T, D], before the last norm."""
        x_TD = self.embed(batch.input_ids_T)
        for block in self.blocks:
            x_TD = block(x_TD, batch)
        return x_TD

    def logits(self, x_TD: ops.Value, rows_R: ops.Value) -> ops.Value:
        """float32 [R, V] of the given rows; the head is the widest product, so only rows that sample pay for it."""
        return self.head(self.norm(ops.gather_rows(x_TD, rows_R)))
