"""Gemma 2 (Gemma Team 2024): norms before and after each part, soft caps on scores and logits, windows in every other layer."""

# T = tokens of the batch, D = hidden size

from __future__ import annotations

import math
from functools import partial

from octavo import ops
from octavo.config import HFConfig
from octavo.layers import Attention, Decoder, GatedMLP, Module, Projections, RMSNorm, Rope, Scales, Scores, as_stored
from octavo.layers.layer_types import FULL, SLIDING, layer_type, read_window
from octavo.ops.batch import Batch

ARCHITECTURES = ("Gemma2ForCausalLM",)


def norm(hf: HFConfig, name: str, width: int) -> RMSNorm:
    """Checkpoints hold what is added to 1, GGUF files the sum."""
    return RMSNorm(name, width, hf.read("rms_norm_eps", float, 1e-6), hf.read("norm_offset", float, 1.0))


class Block(Module):
    def __init__(self, hf: HFConfig, name: str, index: int) -> None:
        width, bias = hf.size("hidden_size"), hf.read("attention_bias", bool, False)
        kind = layer_type(hf, index, otherwise=FULL if index % 2 else SLIDING)
        scale = hf.read("query_pre_attn_scalar", float, float(hf.head_dim)) ** -0.5
        scores = Scores(read_window(hf) if kind == SLIDING else 0, scale, hf.read("attn_logit_softcapping", float, 0.0))
        self.attn_norm = norm(hf, f"{name}.input_layernorm", width)
        self.attn = Attention(f"{name}.self_attn", hf, rope=Rope.read(hf), stored=Projections(qkv_bias=bias, out_bias=bias), scores=scores)
        self.after_attn = norm(hf, f"{name}.post_attention_layernorm", width)
        self.mlp_norm = norm(hf, f"{name}.pre_feedforward_layernorm", width)
        self.mlp = GatedMLP(f"{name}.mlp", hf, act=hf.read("hidden_activation", str, "gelu_pytorch_tanh"))
        self.after_mlp = norm(hf, f"{name}.post_feedforward_layernorm", width)

    def forward(self, x_TD: ops.Value, batch: Batch) -> ops.Value:
        x_TD = ops.add(x_TD, self.after_attn(self.attn(self.attn_norm(x_TD), batch)))
        return ops.add(x_TD, self.after_mlp(self.mlp(self.mlp_norm(x_TD))))


def build(hf: HFConfig) -> Decoder:
    embed = hf.read("embedding_scale", float, as_stored(math.sqrt(hf.size("hidden_size")), hf))
    scales = Scales(embed, logit_cap=hf.read("final_logit_softcapping", float, 0.0))
    return Decoder(hf, Block, norm=partial(norm, hf), scales=scales, tied=True)
