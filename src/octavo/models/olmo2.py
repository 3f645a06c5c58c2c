"""OLMo 2: norms after attention and MLP in place of before them, and over all of q and k (OLMo team 2024)."""

# T = tokens of the batch, D = hidden size

from __future__ import annotations

from octavo import ops
from octavo.config import HFConfig
from octavo.layers import Attention, Decoder, GatedMLP, Module, Projections, RMSNorm, Rope
from octavo.ops.batch import Batch

ARCHITECTURES = ("Olmo2ForCausalLM",)


class Block(Module):
    def __init__(self, hf: HFConfig, name: str, index: int) -> None:
        width, eps = hf.size("hidden_size"), hf.read("rms_norm_eps", float, 1e-5)
        bias = hf.read("attention_bias", bool, False)
        self.attn = Attention(
            f"{name}.self_attn", hf, rope=Rope.read(hf), stored=Projections(qkv_bias=bias, out_bias=bias),
            full_norm=lambda part, size: RMSNorm(part, size, eps),
        )  # fmt: skip
        self.attn_norm = RMSNorm(f"{name}.post_attention_layernorm", width, eps)
        self.mlp = GatedMLP(f"{name}.mlp", hf)
        self.mlp_norm = RMSNorm(f"{name}.post_feedforward_layernorm", width, eps)

    def forward(self, x_TD: ops.Value, batch: Batch) -> ops.Value:
        x_TD = ops.add(x_TD, self.attn_norm(self.attn(x_TD, batch)))
        return ops.add(x_TD, self.mlp_norm(self.mlp(x_TD)))


def build(hf: HFConfig) -> Decoder:
    return Decoder(hf, Block)
