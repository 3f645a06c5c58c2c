"""Gemma 3 (Gemma Team 2025): Gemma 2's blocks with QK norm, and rotary embeddings that differ between windowed and other layers.

Of multimodal checkpoints the text model only.
"""

# T = tokens of the batch, D = hidden size

from __future__ import annotations

import math
from functools import partial
from typing import Any

from octavo import ops
from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.layers import (
    Attention,
    Decoder,
    GatedMLP,
    HeadNorm,
    Module,
    Projections,
    RMSNorm,
    Rope,
    Scales,
    Scores,
    as_stored,
)
from octavo.layers.layer_types import FULL, SLIDING, layer_type, read_window
from octavo.ops.batch import Batch

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
GLOBAL_THETA, LOCAL_THETA = 1e6, 1e4
EVERY = 6  # layers of which the last sees all positions
# What configurations leave out where it is as in most sizes of the family.
USUAL = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256}
USUAL |= {"max_position_embeddings": 131072, "sliding_window": 4096}
LEFT_OUT = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def norm(hf: HFConfig, name: str, width: int, kind: type[RMSNorm] = RMSNorm) -> RMSNorm:
    """Checkpoints hold what is added to 1, GGUF files the sum."""
    return kind(name, width, hf.read("rms_norm_eps", float, 1e-6), hf.read("norm_offset", float, 1.0))


class Block(Module):
    def __init__(self, hf: HFConfig, name: str, index: int) -> None:
        width, bias = hf.size("hidden_size"), hf.read("attention_bias", bool, False)
        every = hf.size("sliding_window_pattern", hf.size("_sliding_window_pattern", EVERY))
        kind = layer_type(hf, index, otherwise=SLIDING if (index + 1) % every else FULL)
        scale = hf.read("query_pre_attn_scalar", float) ** -0.5
        self.attn_norm = norm(hf, f"{name}.input_layernorm", width)
        self.attn = Attention(
            f"{name}.self_attn", hf, rope=Rope.read(hf, kind, theta=LOCAL_THETA if kind == SLIDING else GLOBAL_THETA),
            stored=Projections(qkv_bias=bias, out_bias=bias), head_norm=partial(norm, hf, kind=HeadNorm),
            scores=Scores(read_window(hf) if kind == SLIDING else 0, scale, hf.read("attn_logit_softcapping", float, 0.0)),
        )  # fmt: skip
        self.after_attn = norm(hf, f"{name}.post_attention_layernorm", width)
        self.mlp_norm = norm(hf, f"{name}.pre_feedforward_layernorm", width)
        self.mlp = GatedMLP(f"{name}.mlp", hf, act=hf.read("hidden_activation", str, "gelu_pytorch_tanh"))
        self.after_mlp = norm(hf, f"{name}.post_feedforward_layernorm", width)

    def forward(self, x_TD: ops.Value, batch: Batch) -> ops.Value:
        x_TD = ops.add(x_TD, self.after_attn(self.attn(self.attn_norm(x_TD), batch)))
        return ops.add(x_TD, self.after_mlp(self.mlp(self.mlp_norm(x_TD))))


def ropes(hf: HFConfig) -> dict[str, Any]:
    """Parameters for each kind of layer. Older configurations only have another base for windowed ones, which are not scaled."""
    if by_kind := hf.read("rope_parameters", dict, {}):
        return by_kind
    scaling = hf.read("rope_scaling", dict, {})
    return {
        FULL: {**scaling, "rope_theta": hf.read("rope_theta", float, GLOBAL_THETA)},
        SLIDING: {"rope_theta": hf.read("rope_local_base_freq", float, LOCAL_THETA)},
    }


def build(hf: HFConfig) -> Decoder:
    if hf.read("use_bidirectional_attention", bool, False):
        raise ConfigError(f"{hf.source}: use_bidirectional_attention is not supported: it makes an encoder")
    given = {key: value for key, value in hf.raw.items() if value is not None}
    hf = HFConfig({**USUAL, **given, "rope_parameters": ropes(hf)}, hf.source)
    embed = hf.read("embedding_scale", float, as_stored(math.sqrt(hf.size("hidden_size")), hf))
    scales = Scales(embed, logit_cap=hf.read("final_logit_softcapping", float, 0.0))
    return Decoder(hf, Block, norm=partial(norm, hf), scales=scales, tied=True, left_out=LEFT_OUT)
