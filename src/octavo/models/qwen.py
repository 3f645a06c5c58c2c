"""Qwen of 2023 (`QWenLMHeadModel`, Bai et al. 2023): Llama's blocks with one biased product for q, k and v, and two ways to see further.

Beyond the length in training theta grows in steps with the sequence (dynamic NTK), and queries grow by its logarithm. Position p turns as in a
sequence of p + 1 tokens, whatever the prompt's length was: so neither chunks nor a shared prefix show in the result.
"""

# T = tokens of the batch, D = hidden size

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo import ops
from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.layers import Attention, Decoder, GatedMLP, Module, Names, Projections, RMSNorm, Rope
from octavo.layers.rope_scaling import Plain
from octavo.ops.batch import Batch

ARCHITECTURES = ("QWenLMHeadModel",)
NAMES = Names(embed="transformer.wte", layers="transformer.h", norm="transformer.ln_f", head="lm_head")


@dataclass(frozen=True, slots=True)
class Stepped(Plain):
    """theta grows by 2^ceil(log2(length / trained) + 1) - 1, to the power rot / (rot - 2): at twice the length by 3, at four times by 7."""

    trained: int = 2048

    def frequencies(self, theta: float, rot: int, positions: int) -> NDArray[np.float32]:
        lengths_P = np.arange(1, positions + 1)
        growth_P = np.maximum(2.0 ** np.ceil(np.log2(lengths_P / self.trained) + 1) - 1, 1.0)
        theta_P = theta * growth_P ** (rot / (rot - 2))
        return (theta_P[:, None] ** (-np.arange(0, rot, 2) / rot)).astype(np.float32)


def rope(hf: HFConfig) -> Rope:
    trained = hf.size("seq_length", hf.size("max_position_embeddings"))
    scaling = Stepped(trained=trained) if hf.read("use_dynamic_ntk", bool, False) else Plain()
    log_n = trained if hf.read("use_logn_attn", bool, False) else 0
    plain = Rope.read(hf, theta=hf.read("rotary_emb_base", float, 1e4), part=hf.read("rotary_pct", float, 1.0))
    if log_n and plain.rot != hf.head_dim:
        raise ConfigError(f"{hf.source}: use_logn_attn with rotary_pct below 1 is not supported")
    return Rope(plain.theta, plain.rot, scaling, log_n=log_n)


class Block(Module):
    def __init__(self, hf: HFConfig, name: str, index: int) -> None:
        width, eps = hf.size("hidden_size"), hf.read("layer_norm_epsilon", float, 1e-6)
        bias, inner = not hf.read("no_bias", bool, True), hf.size("intermediate_size") // 2
        self.attn_norm = RMSNorm(f"{name}.ln_1", width, eps)
        stored = Projections(("c_attn",), "c_proj", qkv_bias=True, out_bias=bias)
        self.attn = Attention(f"{name}.attn", hf, rope=rope(hf), stored=stored)
        self.mlp_norm = RMSNorm(f"{name}.ln_2", width, eps)
        self.mlp = GatedMLP(f"{name}.mlp", hf, names=("w2", "w1", "c_proj"), inner=inner, bias=bias, act="silu")

    def forward(self, x_TD: ops.Value, batch: Batch) -> ops.Value:
        x_TD = ops.add(x_TD, self.attn(self.attn_norm(x_TD), batch))
        return ops.add(x_TD, self.mlp(self.mlp_norm(x_TD)))


def build(hf: HFConfig) -> Decoder:
    raw = {**hf.raw, "head_dim": hf.raw.get("head_dim") or hf.raw.get("kv_channels"), "num_key_value_heads": None}
    hf = HFConfig(raw, hf.source)
    eps = hf.read("layer_norm_epsilon", float, 1e-6)
    return Decoder(hf, Block, names=NAMES, norm=lambda name, width: RMSNorm(name, width, eps))
