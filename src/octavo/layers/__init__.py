"""Layers that model files are made of."""

from octavo.layers.attention import Attention
from octavo.layers.decoder import Decoder
from octavo.layers.mlp import GatedMLP
from octavo.layers.module import Embedding, HeadNorm, Linear, Module, RMSNorm, Vector
from octavo.layers.rope import Rope

__all__ = ["Attention", "Decoder", "Embedding", "GatedMLP", "HeadNorm", "Linear", "Module", "RMSNorm", "Rope", "Vector"]
