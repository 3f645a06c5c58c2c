"""Needs Python only. Every key that a family reads, with values that it should not have: a model of finite numbers, or one line that names the file.

The configurations are the cases of tests/models; what transformers would add to them is missing here, which is one more kind of damage.
"""

from __future__ import annotations

import copy
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_writers import ARRAY, STRING, Array, Gguf, joined, tiny_llama

from octavo.config import HFConfig
from octavo.errors import ConfigError, ModelFileError
from octavo.loader.gguf_names import ARCHITECTURES, FAMILIES
from octavo.loader.hf_config import checked, load_hf_config, normalised
from octavo.loader.resolve import ModelSource
from octavo.models import build_model

SHARED = dict(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=512, bos_token_id=0, eos_token_id=1,
)  # fmt: skip
NAN, INFINITY = math.nan, math.inf
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, NAN, INFINITY, 2**24, 2**24 + 1, 10**400, -1e308, "x", [], ["x"], {}, {"a": 1}, {"rope_type": []}, ["full_attention"] * 3, [0] * 3,
)  # fmt: skip
CASES = [
    entry
    for path in sorted((Path(__file__).parents[1] / "models" / "cases").glob("*.toml"))
    for entry in tomllib.loads(path.read_text())["case"]
]
FIRST = {entry["family"]: entry for entry in reversed(CASES)}
SOURCE = "some folder/config.json"


class Watched(dict[str, Any]):
    """Keeps which keys somebody asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def base_of(entry: dict[str, Any]) -> dict[str, Any]:
    given = {key: None if value == "null" else value for key, value in entry["config"].items()}
    return {**SHARED, **given, "model_type": entry["family"]}


def build(raw: dict[str, Any]) -> object:
    return build_model(checked(HFConfig(normalised(raw, Path(SOURCE)), SOURCE)))


def keys_read(base: dict[str, Any]) -> list[str]:
    """All keys that the family asks for, also where the base has none."""
    watched = Watched(normalised(dict(base), Path(SOURCE)))
    build_model(HFConfig(watched, SOURCE))
    return sorted(watched.asked | set(base))


def changed(base: dict[str, Any], keys: list[str]) -> Iterator[dict[str, Any]]:
    """The base with one value replaced, at the top or in an object below it."""
    paths: list[tuple[str, ...]] = [(key,) for key in keys]
    paths += [(key, inner) for key in keys if isinstance(base.get(key), dict) for inner in base[key]]
    for path in paths:
        for value in VALUES:
            raw = copy.deepcopy(base)
            place = raw
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            yield raw


def odd_number(part: object, depth: int = 0) -> bool:
    """Whether something in a model is complex, infinite or no number."""
    if isinstance(part, (complex, np.complexfloating)):
        return True
    if isinstance(part, float):
        return not math.isfinite(part)
    if isinstance(part, np.ndarray):
        return part.dtype.kind == "f" and not bool(np.isfinite(part).all())
    if depth > 7 or isinstance(part, type):
        return False
    if isinstance(part, (list, tuple)):
        return any(odd_number(one, depth + 1) for one in part[:4])
    if not type(part).__module__.startswith("octavo"):
        return False
    names = [*getattr(part, "__dict__", ()), *getattr(type(part), "__slots__", ())]
    return any(odd_number(getattr(part, name, None), depth + 1) for name in names)


@pytest.mark.parametrize("family", FIRST)
def test_values_of_a_configuration(family: str) -> None:
    base = base_of(FIRST[family])
    built = 0
    for raw in changed(base, keys_read(base)):
        try:
            model = build(raw)
        except (ConfigError, ModelFileError) as e:
            assert SOURCE in str(e)
            assert "\n" not in str(e)
            assert len(str(e)) < 700
            continue
        built += 1
        assert not odd_number(model), raw
    assert built > 20


SETTINGS: dict[str, tuple[int, object]] = {
    "block_count": (4, 2), "context_length": (4, 128), "embedding_length": (4, 64), "feed_forward_length": (4, 96), "attention.head_count": (4, 2),
    "attention.head_count_kv": (4, 1), "attention.layer_norm_rms_epsilon": (6, 1e-5), "attention.layer_norm_epsilon": (6, 1e-5), "rope.freq_base": (6, 1e4),
}  # fmt: skip
FURTHER = (
    "attention.sliding_window", "attention.sliding_window_pattern", "attention.key_length", "attention.value_length", "rope.dimension_count", "vocab_size",
    "rope.scaling.type", "rope.scaling.factor", "expert_count", "expert_used_count", "attention.causal",
)  # fmt: skip
METADATA: tuple[tuple[int, object] | None, ...] = (
    None, (4, 0), (5, -1), (4, 2**32 - 1), (10, 2**63), (STRING, "x"), (7, True), (6, 1.5), (6, NAN), (6, INFINITY), (12, 1e308), (ARRAY, Array(4, [1])),
)  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_values_of_metadata(architecture: str, tmp_path: Path) -> None:
    settings = SETTINGS | ({"expert_count": (4, 4), "expert_used_count": (4, 2)} if "moe" in architecture else {})
    names = [*settings, *FURTHER, *(key.name for key in FAMILIES[ARCHITECTURES[architecture]].keys.values())]
    outer = {"general.architecture": (STRING, architecture), "tokenizer.ggml.tokens": (ARRAY, Array(STRING, ["a"] * 40))}
    tensors = tiny_llama().tensors[:2]
    path = tmp_path / "m.gguf"
    for name in dict.fromkeys(names):
        for value in METADATA:
            inner = {key: one for key, one in {**settings, name: value}.items() if one is not None}
            entries = outer | {f"{architecture}.{key}": one for key, one in inner.items()}
            path.write_bytes(joined(Gguf([(key, *one) for key, one in entries.items()], tensors).fields()))
            try:
                model = build_model(load_hf_config(ModelSource(path, "gguf", "m")))
            except (ConfigError, ModelFileError) as e:
                assert str(path) in str(e)
                assert "\n" not in str(e)
                assert len(str(e)) < 700 + len(str(path))
                continue
            assert not odd_number(model), (name, value)
