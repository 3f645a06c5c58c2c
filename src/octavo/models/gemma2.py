"""Gemma 2 (Gemma Team 2024): norms before and after each part, soft caps on scores and logits, windows in every other layer."""

# T = tokens of the batch, D = hidden size

from __future__ import annotations

import math
from functools import partial

import numpy as np

from octavo import ops
from octavo.config import HFConfig
from octavo.layers import Attention, Decoder, GatedMLP, Module, Projections, RMSNorm, Rope, Scales, Scores
from octavo.layers.layer_types import FULL, SLIDING, layer_type, read_window
from octavo.ops.batch import Batch
from octavo.ops.packed import bf16_to_f32, f32_to_bf16

ARCHITECTURES = ("Gemma2ForCausalLM",)
EVERY = 2  # layers of which the last sees all positions


def norm(hf: HFConfig, name: str, width: int) -> RMSNorm:
    """Checkpoints hold what is added to 1, GGUF files the sum."""
    return RMSNorm(name, width, hf.read("rms_norm_eps", float, 1e-6), hf.read("norm_offset", float, 1.0))


def kind_of(hf: HFConfig, index: int, every: int) -> str:
    return layer_type(hf, index, SLIDING if (index + 1) % every else FULL)


def scores(hf: HFConfig, kind: str) -> Scores:
    window = read_window(hf) if kind == SLIDING else 0
    scale = hf.read("query_pre_attn_scalar", float, float(hf.head_dim)) ** -0.5
    return Scores(window, scale, hf.read("attn_logit_softcapping", float, 0.0))


def scales(hf: HFConfig) -> Scales:
    """Embeddings are multiplied by sqrt(D), in the weights' own precision unless the file (GGUF) says how much."""
    root = np.float32(math.sqrt(hf.size("hidden_size")))
    stored = hf.read("torch_dtype", str, "float32")
    if stored == "bfloat16":
        root = bf16_to_f32(f32_to_bf16(root.reshape(1)))[0]
    elif stored == "float16":
        root = np.float32(np.float16(root))
    return Scales(hf.read("embedding_scale", float, float(root)), logit_cap=hf.read("final_logit_softcapping", float, 0.0))


class Block(Module):
    """What Gemma 2 and 3 share; they differ in attention."""

    def __init__(self, hf: HFConfig, name: str, attention: Attention) -> None:
        width = hf.size("hidden_size")
        self.attn_norm = norm(hf, f"{name}.input_layernorm", width)
        self.attn = attention
        self.after_attn = norm(hf, f"{name}.post_attention_layernorm", width)
        self.mlp_norm = norm(hf, f"{name}.pre_feedforward_layernorm", width)
        self.mlp = GatedMLP(f"{name}.mlp", hf, act=hf.read("hidden_activation", str, "gelu_pytorch_tanh"))
        self.after_mlp = norm(hf, f"{name}.post_feedforward_layernorm", width)

    def forward(self, x_TD: ops.Value, batch: Batch) -> ops.Value:
        x_TD = ops.add(x_TD, self.after_attn(self.attn(self.attn_norm(x_TD), batch)))
        return ops.add(x_TD, self.after_mlp(self.mlp(self.mlp_norm(x_TD))))


def block(hf: HFConfig, name: str, index: int) -> Block:
    bias = hf.read("attention_bias", bool, False)
    attention = Attention(
        f"{name}.self_attn", hf, rope=Rope.read(hf), stored=Projections(qkv_bias=bias, out_bias=bias), scores=scores(hf, kind_of(hf, index, EVERY))
    )
    return Block(hf, name, attention)


def build(hf: HFConfig) -> Decoder:
    return Decoder(hf, block, norm=partial(norm, hf), scales=scales(hf), tied=True)
