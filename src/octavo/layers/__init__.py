"""Layers that model files are made of."""

from octavo.layers.attention import Attention, Projections, Scores
from octavo.layers.decoder import Decoder, Names, Scales, as_stored
from octavo.layers.mlp import GatedMLP, MoE, PlainMLP
from octavo.layers.module import Embedding, HeadNorm, LayerNorm, Linear, Module, RMSNorm, Vector
from octavo.layers.rope import Rope

__all__ = [
    "Attention", "Decoder", "Embedding", "GatedMLP", "HeadNorm", "LayerNorm", "Linear", "MoE", "Module", "Names",
    "PlainMLP", "Projections", "RMSNorm", "Rope", "Scales", "Scores", "Vector", "as_stored",
]  # fmt: skip
