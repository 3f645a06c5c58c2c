"""Qwen2-MoE and Qwen1.5-MoE: Qwen2's attention, mixtures of experts beside one expert that every token goes through (Yang et al. 2024)."""

# T = tokens of the batch, D = hidden size

from __future__ import annotations

from octavo import ops
from octavo.config import HFConfig
from octavo.layers import Attention, Decoder, GatedMLP, Linear, Module, MoE, Projections, RMSNorm, Rope, Scores
from octavo.layers.layer_types import FULL, SLIDING, layer_type, read_window
from octavo.ops.batch import Batch, MoeSpec

ARCHITECTURES = ("Qwen2MoeForCausalLM",)


def is_sparse(hf: HFConfig, index: int) -> bool:
    """Whether the layer has experts: every `decoder_sparse_step`-th has, unless it is named as one that has not."""
    return index not in hf.read("mlp_only_layers", list, []) and (index + 1) % hf.size("decoder_sparse_step", 1) == 0


def mixture(hf: HFConfig, name: str) -> MoE:
    num_experts = hf.size("num_experts", hf.size("num_local_experts", 60))
    spec = MoeSpec(hf.size("num_experts_per_tok"), hf.read("norm_topk_prob", bool, False))
    return MoE(name, hf, num_experts=num_experts, spec=spec, inner=hf.size("moe_intermediate_size"))


class SharedMoE(Module):
    """mixture(x) + sigmoid(gate . x) * expert(x)."""

    def __init__(self, hf: HFConfig, name: str) -> None:
        self.mixture = mixture(hf, name)
        self.shared = GatedMLP(f"{name}.shared_expert", hf, inner=hf.size("shared_expert_intermediate_size"))
        self.gate = Linear(f"{name}.shared_expert_gate", hf.size("hidden_size"), 1)

    def forward(self, x_TD: ops.Value) -> ops.Value:
        return ops.add(self.mixture(x_TD), ops.sigmoid_rows(self.shared(x_TD), self.gate(x_TD)))


class Block(Module):
    def __init__(self, hf: HFConfig, name: str, index: int) -> None:
        width, eps = hf.size("hidden_size"), hf.read("rms_norm_eps", float, 1e-6)
        window = read_window(hf, absent=4096) if hf.read("use_sliding_window", bool, False) else 0
        every_other = window and index % 2 == 0 and index < hf.read("max_window_layers", int, 28)
        kind = layer_type(hf, index, otherwise=SLIDING if every_other else FULL)
        self.attn_norm = RMSNorm(f"{name}.input_layernorm", width, eps)
        self.attn = Attention(
            f"{name}.self_attn", hf, rope=Rope.read(hf, kind), stored=Projections(qkv_bias=hf.read("qkv_bias", bool, True)),
            scores=Scores(window if kind == SLIDING else 0),
        )  # fmt: skip
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", width, eps)
        self.mlp = SharedMoE(hf, f"{name}.mlp") if is_sparse(hf, index) else GatedMLP(f"{name}.mlp", hf)

    def forward(self, x_TD: ops.Value, batch: Batch) -> ops.Value:
        x_TD = ops.add(x_TD, self.attn(self.attn_norm(x_TD), batch))
        return ops.add(x_TD, self.mlp(self.mlp_norm(x_TD)))


def build(hf: HFConfig) -> Decoder:
    return Decoder(hf, Block)
