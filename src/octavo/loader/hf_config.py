"""A model's configuration under Hugging Face's keys, from config.json or (see `gguf_config`) a GGUF file's metadata; and its sampling defaults.

One spelling leaves this file, whatever came in: `torch_dtype` (not `dtype`), the right side of SAME_KEYS, `rope_theta` and `rope_scaling`
with `rope_type` (not `rope_parameters`, not `type`). Knows no architecture beyond its name, imports no code from a model's folder
(`auto_map` is data that nobody reads), and reads no weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from octavo.config import HFConfig, shortened
from octavo.errors import ModelFileError
from octavo.json_file import read_json, read_optional_json
from octavo.loader.gguf_config import MOST_LAYERS, Translator
from octavo.loader.gguf_parts import GGUFModel
from octavo.loader.resolve import ModelSource

# Where quantisers wrote what config.json says today, and their methods.
QUANTIZE_CONFIGS = (("quantize_config.json", "gptq"), ("quant_config.json", "awq"))
MOST_HEAD_DIM = 1 << 16
MOST_LAYERS_OF_EXPERTS = 1 << 18  # layers times experts
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")

# Keys of some families (first GPT-2's) -> those of most. The first that is there counts.
SAME_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "n_ctx": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
    "norm_epsilon": "layer_norm_eps",
}


def load_hf_config(source: ModelSource) -> HFConfig:
    """The configuration of a model on disk. Raises ModelFileError naming file and key."""
    if source.kind == "gguf":
        file = GGUFModel.open(source.path, skip=("tokenizer.",))
        return checked(HFConfig(Translator(file).config(), str(source.path)))
    path = source.path / "config.json"
    config = normalised(read_json(path), path)
    for name, method in QUANTIZE_CONFIGS:
        if config.get("quantization_config") is None and (stored := read_optional_json(source.path / name)):
            config["quantization_config"] = {"quant_method": method, **stored}
    return checked(HFConfig(config, str(path)))


def checked(hf: HFConfig) -> HFConfig:
    """What no family can mean: layers or experts so many, or heads so wide, that the model alone, without a weight, would fill the memory; and,
    under a square root, a number below zero, which gives a model that computes and is wrong."""
    most = {"num_hidden_layers": MOST_LAYERS, "num_layers": MOST_LAYERS, "head_dim": MOST_HEAD_DIM}
    most |= dict.fromkeys(EXPERTS, MOST_LAYERS_OF_EXPERTS // hf.size("num_hidden_layers", 1, MOST_LAYERS))
    for key, value in hf.raw.items():
        if isinstance(value, int) and value > most.get(key, value):
            raise ModelFileError(f"{hf.source}: {key} = {shortened(value)}: must be in 1..{most[key]}")
        if key.endswith(("_eps", "_epsilon")) and isinstance(value, (int, float)) and value < 0:
            raise ModelFileError(f"{hf.source}: {key} = {value}: must not be negative")
        if key == "query_pre_attn_scalar" and isinstance(value, (int, float)) and value <= 0:
            raise ModelFileError(f"{hf.source}: {key} = {value}: must be above 0")
    return hf


# Hugging Face


def normalised(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """`raw` with one spelling for what has several; of a multimodal configuration the keys of the text model too."""
    text = raw.get("text_config")
    if isinstance(text, dict):
        whole = {key: raw[key] for key in ("model_type", "eos_token_id") if raw.get(key) is not None}
        return normalised({**raw, **text, **whole, "text_config": None}, path)
    config = dict(raw)
    for theirs, ours in SAME_KEYS.items():
        if config.get(ours) is None and config.get(theirs) is not None:
            config[ours] = config[theirs]
    if config.get("torch_dtype") is None and config.get("dtype") is not None:
        config["torch_dtype"] = config["dtype"]
    rope = config.pop("rope_parameters", None)
    if isinstance(rope, dict) and any(isinstance(value, dict) for value in rope.values()):
        config["rope_parameters"] = rope  # one set for each kind of layer: the architecture's own matter
    elif isinstance(rope, dict):
        for key in ("rope_theta", "partial_rotary_factor"):
            if rope.get(key) is not None:
                config[key] = rope[key]
        config["rope_scaling"] = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    elif rope is not None:
        raise ModelFileError(f"{path}: rope_parameters must be an object, not {type(rope).__name__}")
    config["rope_scaling"] = rope_scaling(config.get("rope_scaling"), path)
    return config


def rope_scaling(scaling: Any, path: Path) -> dict[str, Any] | None:
    """None for no scaling; else with the kind under `rope_type` only."""
    if scaling is None:
        return None
    if not isinstance(scaling, dict):
        raise ModelFileError(f"{path}: rope_scaling must be an object, not {type(scaling).__name__}")
    rest = {key: value for key, value in scaling.items() if key not in ("type", "rope_type")}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return None if kind in ("default", None) else {"rope_type": kind, **rest}


# Sampling defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """Sampling defaults that a model's files suggest; None where they say nothing. `eos_token_ids` end a generation."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def given(self) -> dict[str, float]:
        """The sampling defaults that are not None, under SamplingParams' names."""
        names = {"max_new_tokens": "max_tokens"}
        values = {names.get(f.name, f.name): getattr(self, f.name) for f in fields(self) if f.name != "eos_token_ids"}
        return {name: value for name, value in values.items() if value is not None}


# Key, type, and range: what lies outside would be refused in a request, too.
LIMITS: tuple[tuple[str, type[Any], float, float], ...] = (
    ("temperature", float, 0.0, 2.0),
    ("top_p", float, 1e-9, 1.0),
    ("top_k", int, -1, 2**31 - 1),
    ("min_p", float, 0.0, 1.0),
    ("repetition_penalty", float, 1e-9, 1e9),
    ("max_new_tokens", int, 1, 2**31 - 1),
)


def load_generation_config(source: ModelSource) -> GenerationConfig:
    """Defaults from generation_config.json beside the weights, with the end tokens of the configuration where it names none.

    Raises ModelFileError naming the file and the key whose value cannot be.
    """
    path = source.folder / "generation_config.json"
    raw = read_optional_json(path)
    values = {key: number(path, key, raw.get(key), kind, low, high) for key, kind, low, high in LIMITS}
    eos = raw.get("eos_token_id")
    if eos is None and (source.kind == "gguf" or (source.path / "config.json").exists()):
        eos = load_hf_config(source).raw.get("eos_token_id")
    return GenerationConfig(**values, eos_token_ids=token_ids(path, eos))


def number(path: Path, key: str, value: Any, kind: type[Any], low: float, high: float) -> Any:
    if value is None:
        return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1e300 else math.inf
    if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high:
        raise ModelFileError(f"{path}: {key} = {str(value)[:50]}: must be {kind.__name__} in {low:g}..{high:g}")
    return value


def token_ids(path: Path, value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**31 for i in ids):
        raise ModelFileError(f"{path}: eos_token_id = {str(value)[:50]}: must be a token id or a list of them")
    return tuple(dict.fromkeys(ids))
