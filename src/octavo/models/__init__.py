"""Architectures, found by file name: model_type `llama` is models/llama.py, whose `build(hf)` returns the model.

A file's `ARCHITECTURES` are the classes that checkpoints name, for those whose model_type is missing or unknown. No code of a checkpoint is
ever run: what is not in this folder is refused.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.layers import Decoder

# model_type of families that are another one's architecture under a further name
SAME_AS = {"gemma3_text": "gemma3", "ministral": "mistral"}


def supported() -> list[str]:
    """All model types that can be served."""
    return sorted([*files(), *SAME_AS])


def files() -> list[str]:
    return [m.name for m in pkgutil.iter_modules(__path__)]


def load(name: str) -> ModuleType:
    return importlib.import_module(f"octavo.models.{name}")


def build_model(hf: HFConfig) -> Decoder:
    """The model of a configuration, without weights. ConfigError naming what was found and what is supported if it is not implemented."""
    model: Decoder = load(find(hf)).build(hf)
    return model


def find(hf: HFConfig) -> str:
    """The file of a configuration: by its model_type, or else by the first of its `architectures` that some file knows."""
    model_type = hf.read("model_type", str, "")
    if model_type in files():
        return model_type
    if model_type in SAME_AS:
        return SAME_AS[model_type]
    architectures = hf.read("architectures", list, [])
    for name in files() if architectures else ():
        if set(map(str, architectures)) & set(load(name).ARCHITECTURES):
            return name
    found = f"model_type = {model_type!r}" + (f", architectures = {', '.join(map(str, architectures))}" if architectures else "")
    remote = " (auto_map is not followed: no code of a checkpoint is ever run)" if "auto_map" in hf else ""
    raise ConfigError(f"{hf.source}: {found[:200]}{remote}: supported are {', '.join(supported())}")
