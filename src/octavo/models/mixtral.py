"""Mixtral: Mistral's blocks, their feed-forward layer a mixture of experts (Jiang et al. 2024)."""

# T = tokens of the batch, D = hidden size

from __future__ import annotations

from octavo import ops
from octavo.config import HFConfig
from octavo.layers import Attention, Decoder, Module, MoE, RMSNorm, Rope, Scores
from octavo.layers.layer_types import read_window
from octavo.ops.batch import Batch, MoeSpec

ARCHITECTURES = ("MixtralForCausalLM",)


class Block(Module):
    def __init__(self, hf: HFConfig, name: str, index: int) -> None:
        width, eps = hf.size("hidden_size"), hf.read("rms_norm_eps", float, 1e-5)
        self.attn_norm = RMSNorm(f"{name}.input_layernorm", width, eps)
        self.attn = Attention(f"{name}.self_attn", hf, rope=Rope.read(hf, theta=1e6), scores=Scores(read_window(hf)))
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", width, eps)
        spec = MoeSpec(hf.size("num_experts_per_tok", 2), renormalise=True)
        self.mlp = MoE(f"{name}.mlp", hf, num_experts=hf.size("num_local_experts", 8), spec=spec, inner=hf.size("intermediate_size"))

    def forward(self, x_TD: ops.Value, batch: Batch) -> ops.Value:
        x_TD = ops.add(x_TD, self.attn(self.attn_norm(x_TD), batch))
        return ops.add(x_TD, self.mlp(self.mlp_norm(x_TD)))


def build(hf: HFConfig) -> Decoder:
    return Decoder(hf, Block)
