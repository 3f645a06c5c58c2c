"""Mistral: Llama's blocks, their attention over a sliding window (Jiang et al. 2023). Ministral: some layers see all positions."""

# T = tokens of the batch, D = hidden size

from __future__ import annotations

from octavo import ops
from octavo.config import HFConfig
from octavo.layers import Attention, Decoder, GatedMLP, Module, RMSNorm, Rope, Scores
from octavo.layers.layer_types import SLIDING, layer_type, read_window
from octavo.ops.batch import Batch

ARCHITECTURES = ("MistralForCausalLM", "MinistralForCausalLM")


class Block(Module):
    def __init__(self, hf: HFConfig, name: str, index: int) -> None:
        width, eps = hf.size("hidden_size"), hf.read("rms_norm_eps", float, 1e-6)
        kind = layer_type(hf, index, otherwise=SLIDING)
        window = read_window(hf, absent=4096) if kind == SLIDING else 0
        self.attn_norm = RMSNorm(f"{name}.input_layernorm", width, eps)
        self.attn = Attention(f"{name}.self_attn", hf, rope=Rope.read(hf, kind), scores=Scores(window))
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", width, eps)
        self.mlp = GatedMLP(f"{name}.mlp", hf)

    def forward(self, x_TD: ops.Value, batch: Batch) -> ops.Value:
        x_TD = ops.add(x_TD, self.attn(self.attn_norm(x_TD), batch))
        return ops.add(x_TD, self.mlp(self.mlp_norm(x_TD)))


def build(hf: HFConfig) -> Decoder:
    return Decoder(hf, Block)
