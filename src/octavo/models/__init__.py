"""Architectures, found by file name: model_type `llama` is models/llama.py, whose `build(hf)` returns the model."""

from __future__ import annotations

import importlib
import pkgutil

from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.layers import Decoder

# model_type of families that are another one's architecture under a further name
SAME_AS = {"mistral": "llama", "smollm2": "llama"}


def supported() -> list[str]:
    """All model types that can be served."""
    return sorted([m.name for m in pkgutil.iter_modules(__path__)] + list(SAME_AS))


def build_model(hf: HFConfig) -> Decoder:
    """The model of a configuration, without weights. ConfigError if its model_type is not implemented."""
    model_type = hf.read("model_type", str)
    module = SAME_AS.get(model_type, model_type)
    if model_type not in supported():
        raise ConfigError(f"{hf.source}: model_type = {model_type!r}: supported are {', '.join(supported())}")
    if model_type == "mistral" and hf.raw.get("sliding_window"):
        context, window = hf.size("max_position_embeddings"), hf.size("sliding_window")
        if window < context:
            raise ConfigError(f"{hf.source}: sliding_window = {window} below max_position_embeddings = {context} is not supported for mistral")
    model: Decoder = importlib.import_module(f"octavo.models.{module}").build(hf)
    return model
