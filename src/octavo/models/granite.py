"""Granite: Llama's blocks with four multipliers, of embeddings, scores, residuals and logits (Granite team 2024)."""

# T = tokens of the batch, D = hidden size

from __future__ import annotations

from octavo import ops
from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.layers import Attention, Decoder, GatedMLP, Module, Projections, RMSNorm, Rope, Scales, Scores
from octavo.ops.batch import Batch

ARCHITECTURES = ("GraniteForCausalLM",)


class Block(Module):
    def __init__(self, hf: HFConfig, name: str, index: int) -> None:
        width, eps = hf.size("hidden_size"), hf.read("rms_norm_eps", float, 1e-6)
        bias = hf.read("attention_bias", bool, False)
        self.attn_norm = RMSNorm(f"{name}.input_layernorm", width, eps)
        self.attn = Attention(
            f"{name}.self_attn", hf, rope=Rope.read(hf), stored=Projections(qkv_bias=bias, out_bias=bias),
            scores=Scores(scale=hf.read("attention_multiplier", float, 1.0)),
        )  # fmt: skip
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", width, eps)
        self.mlp = GatedMLP(f"{name}.mlp", hf, bias=hf.read("mlp_bias", bool, False))
        self.residual = hf.read("residual_multiplier", float, 1.0)

    def forward(self, x_TD: ops.Value, batch: Batch) -> ops.Value:
        x_TD = ops.add(x_TD, ops.scale(self.attn(self.attn_norm(x_TD), batch), self.residual))
        return ops.add(x_TD, ops.scale(self.mlp(self.mlp_norm(x_TD)), self.residual))


def build(hf: HFConfig) -> Decoder:
    divisor = hf.read("logits_scaling", float, 1.0)
    if not divisor:
        raise ConfigError(f"{hf.source}: logits_scaling must not be 0")
    return Decoder(hf, Block, scales=Scales(hf.read("embedding_multiplier", float, 1.0), 1 / divisor))
