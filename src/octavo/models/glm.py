"""GLM-4 of 2024: Llama's blocks, where neighbouring columns of half of each head turn, and gate and up are one matrix (GLM team 2024)."""

# T = tokens of the batch, D = hidden size

from __future__ import annotations

from octavo import ops
from octavo.config import HFConfig
from octavo.layers import Attention, Decoder, GatedMLP, Module, Projections, RMSNorm, Rope
from octavo.ops.batch import Batch

ARCHITECTURES = ("GlmForCausalLM",)


class Block(Module):
    def __init__(self, hf: HFConfig, name: str, index: int) -> None:
        width, eps = hf.size("hidden_size"), hf.read("rms_norm_eps", float, 1.5625e-07)
        self.attn_norm = RMSNorm(f"{name}.input_layernorm", width, eps)
        self.attn = Attention(
            f"{name}.self_attn", hf, rope=Rope.read(hf, part=0.5, pairs=True),
            stored=Projections(qkv_bias=hf.read("attention_bias", bool, True)),
        )  # fmt: skip
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", width, eps)
        self.mlp = GatedMLP(f"{name}.mlp", hf, names=("gate_up_proj", "down_proj"))

    def forward(self, x_TD: ops.Value, batch: Batch) -> ops.Value:
        x_TD = ops.add(x_TD, self.attn(self.attn_norm(x_TD), batch))
        return ops.add(x_TD, self.mlp(self.mlp_norm(x_TD)))


def build(hf: HFConfig) -> Decoder:
    return Decoder(hf, Block)
