"""Gemma 3 (Gemma Team 2025): Gemma 2's blocks with QK norm, and rotary embeddings that differ between windowed and other layers.

Of multimodal checkpoints the text model only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.layers import Attention, Decoder, HeadNorm, Projections, Rope
from octavo.layers.layer_types import SLIDING
from octavo.models.gemma2 import Block, kind_of, norm, scales, scores

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
GLOBAL_THETA, LOCAL_THETA = 1e6, 1e4
EVERY = 6  # layers of which the last sees all positions
# What configurations leave out where it is as in most sizes of the family.
USUAL = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256}
USUAL |= {"max_position_embeddings": 131072, "sliding_window": 4096}
LEFT_OUT = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def ropes(hf: HFConfig) -> dict[str, Any]:
    """Parameters for each kind of layer. Older configurations only have another base for windowed ones, which are not scaled."""
    if hf.read("rope_parameters", dict, {}):
        return hf.raw["rope_parameters"]  # type: ignore[no-any-return]
    scaling = hf.read("rope_scaling", dict, {})
    return {
        "full_attention": {**scaling, "rope_theta": hf.read("rope_theta", float, GLOBAL_THETA)},
        "sliding_attention": {"rope_theta": hf.read("rope_local_base_freq", float, LOCAL_THETA)},
    }


def block(hf: HFConfig, name: str, index: int) -> Block:
    every = hf.size("sliding_window_pattern", hf.size("_sliding_window_pattern", EVERY))
    bias, kind = hf.read("attention_bias", bool, False), kind_of(hf, index, every)
    rope = Rope.read(hf, kind, theta=LOCAL_THETA if kind == SLIDING else GLOBAL_THETA)
    attention = Attention(
        f"{name}.self_attn", hf, rope=rope, stored=Projections(qkv_bias=bias, out_bias=bias), scores=scores(hf, kind),
        head_norm=partial(head_norm, hf),
    )  # fmt: skip
    return Block(hf, name, attention)


def head_norm(hf: HFConfig, name: str, width: int) -> HeadNorm:
    like = norm(hf, name, width)
    return HeadNorm(name, width, like.eps, like.offset)


def build(hf: HFConfig) -> Decoder:
    if hf.read("use_bidirectional_attention", bool, False):
        raise ConfigError(f"{hf.source}: use_bidirectional_attention is not supported: it makes an encoder")
    given = {key: value for key, value in hf.raw.items() if value is not None}
    hf = HFConfig({**USUAL, **given, "rope_parameters": ropes(hf)}, hf.source)
    return Decoder(hf, block, norm=partial(norm, hf), scales=scales(hf), tied=True, left_out=LEFT_OUT)
