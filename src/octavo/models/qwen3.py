"""Qwen3: as Qwen2, with a norm over each head of q and k in place of the biases (Yang et al. 2025)."""

# T = tokens of the batch, D = hidden size

from __future__ import annotations

from octavo import ops
from octavo.config import HFConfig
from octavo.layers import Attention, Decoder, GatedMLP, HeadNorm, Module, Projections, RMSNorm, Rope, Scores
from octavo.layers.layer_types import FULL, SLIDING, layer_type, read_window
from octavo.ops.batch import Batch

ARCHITECTURES = ("Qwen3ForCausalLM",)


class Block(Module):
    def __init__(self, hf: HFConfig, name: str, index: int) -> None:
        width, eps = hf.size("hidden_size"), hf.read("rms_norm_eps", float, 1e-6)
        bias = hf.read("attention_bias", bool, False)
        window = read_window(hf, absent=4096) if hf.read("use_sliding_window", bool, False) else 0
        kind = layer_type(hf, index, otherwise=SLIDING if window and index >= hf.read("max_window_layers", int, 28) else FULL)
        self.attn_norm = RMSNorm(f"{name}.input_layernorm", width, eps)
        self.attn = Attention(
            f"{name}.self_attn", hf, rope=Rope.read(hf, kind), stored=Projections(qkv_bias=bias, out_bias=bias),
            scores=Scores(window if kind == SLIDING else 0), head_norm=lambda part, size: HeadNorm(part, size, eps),
        )  # fmt: skip
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", width, eps)
        self.mlp = GatedMLP(f"{name}.mlp", hf)

    def forward(self, x_TD: ops.Value, batch: Batch) -> ops.Value:
        x_TD = ops.add(x_TD, self.attn(self.attn_norm(x_TD), batch))
        return ops.add(x_TD, self.mlp(self.mlp_norm(x_TD)))


def build(hf: HFConfig) -> Decoder:
    return Decoder(hf, Block)
