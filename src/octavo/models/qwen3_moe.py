"""Qwen3-MoE: Qwen3's attention, mixtures of experts without a shared one (Yang et al. 2025)."""

# T = tokens of the batch, D = hidden size

from __future__ import annotations

from octavo import ops
from octavo.config import HFConfig
from octavo.layers import Attention, Decoder, GatedMLP, HeadNorm, Module, MoE, Projections, RMSNorm, Rope, Scores
from octavo.layers.layer_types import read_window
from octavo.ops.batch import Batch, MoeSpec

ARCHITECTURES = ("Qwen3MoeForCausalLM",)


def is_sparse(hf: HFConfig, index: int) -> bool:
    """Whether the layer has experts: every `decoder_sparse_step`-th has, unless it is named as one that has not."""
    return index not in hf.read("mlp_only_layers", list, []) and (index + 1) % hf.size("decoder_sparse_step", 1) == 0


def mixture(hf: HFConfig, name: str) -> MoE:
    num_experts = hf.size("num_experts", hf.size("num_local_experts", 128))
    spec = MoeSpec(hf.size("num_experts_per_tok"), hf.read("norm_topk_prob", bool, False))
    return MoE(name, hf, num_experts=num_experts, spec=spec, inner=hf.size("moe_intermediate_size"))


class Block(Module):
    def __init__(self, hf: HFConfig, name: str, index: int) -> None:
        width, eps = hf.size("hidden_size"), hf.read("rms_norm_eps", float, 1e-6)
        bias = hf.read("attention_bias", bool, False)
        window = read_window(hf, absent=4096) if hf.read("use_sliding_window", bool, False) else 0
        self.attn_norm = RMSNorm(f"{name}.input_layernorm", width, eps)
        self.attn = Attention(
            f"{name}.self_attn", hf, rope=Rope.read(hf), stored=Projections(qkv_bias=bias, out_bias=bias), scores=Scores(window),
            head_norm=lambda part, size: HeadNorm(part, size, eps),
        )  # fmt: skip
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", width, eps)
        self.mlp = mixture(hf, f"{name}.mlp") if is_sparse(hf, index) else GatedMLP(f"{name}.mlp", hf)

    def forward(self, x_TD: ops.Value, batch: Batch) -> ops.Value:
        x_TD = ops.add(x_TD, self.attn(self.attn_norm(x_TD), batch))
        return ops.add(x_TD, self.mlp(self.mlp_norm(x_TD)))


def build(hf: HFConfig) -> Decoder:
    return Decoder(hf, Block)
