"""GLM-4 of 2025 (GLM-4-0414): as `glm`, with norms after attention and MLP as well as before them."""

# T = tokens of the batch, D = hidden size

from __future__ import annotations

from octavo import ops
from octavo.config import HFConfig
from octavo.layers import Attention, Decoder, GatedMLP, Module, Projections, RMSNorm, Rope
from octavo.ops.batch import Batch

ARCHITECTURES = ("Glm4ForCausalLM",)


class Block(Module):
    def __init__(self, hf: HFConfig, name: str, index: int) -> None:
        width, eps = hf.size("hidden_size"), hf.read("rms_norm_eps", float, 1.5625e-07)
        self.attn_norm = RMSNorm(f"{name}.input_layernorm", width, eps)
        self.attn = Attention(
            f"{name}.self_attn", hf, rope=Rope.read(hf, part=0.5, pairs=True),
            stored=Projections(qkv_bias=hf.read("attention_bias", bool, True)),
        )  # fmt: skip
        self.after_attn = RMSNorm(f"{name}.post_self_attn_layernorm", width, eps)
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", width, eps)
        self.mlp = GatedMLP(f"{name}.mlp", hf, names=("gate_up_proj", "down_proj"))
        self.after_mlp = RMSNorm(f"{name}.post_mlp_layernorm", width, eps)

    def forward(self, x_TD: ops.Value, batch: Batch) -> ops.Value:
        x_TD = ops.add(x_TD, self.after_attn(self.attn(self.attn_norm(x_TD), batch)))
        return ops.add(x_TD, self.after_mlp(self.mlp(self.mlp_norm(x_TD))))


def build(hf: HFConfig) -> Decoder:
    return Decoder(hf, Block)
