"""Llama: pre-norm blocks of rotary attention and a gated MLP (Touvron et al. 2023). Llama 2 and 3, SmolLM2."""

# T = tokens of the batch, D = hidden size

from __future__ import annotations

from octavo import ops
from octavo.config import HFConfig
from octavo.layers import Attention, Decoder, GatedMLP, Module, Projections, RMSNorm, Rope
from octavo.ops.batch import Batch

ARCHITECTURES = ("LlamaForCausalLM",)


class Block(Module):
    def __init__(self, hf: HFConfig, name: str, index: int) -> None:
        width, eps = hf.size("hidden_size"), hf.read("rms_norm_eps", float, 1e-6)
        bias = hf.read("attention_bias", bool, False)
        self.attn_norm = RMSNorm(f"{name}.input_layernorm", width, eps)
        self.attn = Attention(f"{name}.self_attn", hf, rope=Rope.read(hf), stored=Projections(qkv_bias=bias, out_bias=bias))
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", width, eps)
        self.mlp = GatedMLP(f"{name}.mlp", hf, bias=hf.read("mlp_bias", bool, False))

    def forward(self, x_TD: ops.Value, batch: Batch) -> ops.Value:
        x_TD = ops.add(x_TD, self.attn(self.attn_norm(x_TD), batch))
        return ops.add(x_TD, self.mlp(self.mlp_norm(x_TD)))


def build(hf: HFConfig) -> Decoder:
    return Decoder(hf, Block)
