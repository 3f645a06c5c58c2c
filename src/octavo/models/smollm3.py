"""SmolLM3: Llama's blocks, some of whose layers know no positions (Bakouch et al. 2025; Yang et al. 2025)."""

# T = tokens of the batch, D = hidden size

from __future__ import annotations

from octavo import ops
from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.layers import Attention, Decoder, GatedMLP, Module, Projections, RMSNorm, Rope, Scores
from octavo.layers.layer_types import FULL, SLIDING, layer_type, read_window
from octavo.ops.batch import Batch

ARCHITECTURES = ("SmolLM3ForCausalLM",)


class Block(Module):
    def __init__(self, hf: HFConfig, name: str, index: int) -> None:
        width, eps = hf.size("hidden_size"), hf.read("rms_norm_eps", float, 1e-6)
        bias = hf.read("attention_bias", bool, False)
        turns = has_rope(hf, index)
        window = read_window(hf) if hf.read("use_sliding_window", bool, False) else 0
        kind = layer_type(hf, index, otherwise=SLIDING if window and not turns else FULL)
        self.attn_norm = RMSNorm(f"{name}.input_layernorm", width, eps)
        self.attn = Attention(
            f"{name}.self_attn", hf, rope=Rope.read(hf, kind, theta=2000000.0) if turns else None,
            stored=Projections(qkv_bias=bias, out_bias=bias), scores=Scores(window if kind == SLIDING else 0),
        )  # fmt: skip
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", width, eps)
        self.mlp = GatedMLP(f"{name}.mlp", hf, bias=hf.read("mlp_bias", bool, False))

    def forward(self, x_TD: ops.Value, batch: Batch) -> ops.Value:
        x_TD = ops.add(x_TD, self.attn(self.attn_norm(x_TD), batch))
        return ops.add(x_TD, self.mlp(self.mlp_norm(x_TD)))


def has_rope(hf: HFConfig, index: int) -> bool:
    """Whether a layer turns q and k: a 1 in `no_rope_layers`, or all but each fourth one."""
    if "no_rope_layers" not in hf:
        return (index + 1) % hf.size("no_rope_layer_interval", 4) != 0
    flags = hf.read("no_rope_layers", list)
    if index >= len(flags) or flags[index] not in (0, 1):
        raise ConfigError(f"{hf.source}: no_rope_layers must hold a 0 or 1 for each layer, also for layer {index}")
    return bool(flags[index])


def build(hf: HFConfig) -> Decoder:
    return Decoder(hf, Block, tied=True)
