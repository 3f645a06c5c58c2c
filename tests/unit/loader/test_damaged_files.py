"""Needs Python only. Any change of a header is refused in one line that names the file, or harmless; configurations at odds with the tensors.

Damage of every other kind is in tests/damage, which also goes through the command line.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from file_writers import LLAMA_CONFIG, joined, llama_tensors, safetensors_bytes, safetensors_parts, tiny_llama
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.config import HFConfig
from octavo.errors import ConfigError, ModelFileError
from octavo.gguf_file import GGUFFile
from octavo.loader.hf_config import load_generation_config, load_hf_config
from octavo.loader.load import load_weights, open_checkpoint
from octavo.loader.resolve import ModelSource
from octavo.models import build_model

pytestmark = pytest.mark.timeout(60)


def load(source: ModelSource) -> object:
    """All that the loader does with a model."""
    hf = load_hf_config(source)
    model = build_model(hf)
    return load_weights(model, open_checkpoint(source, hf))


def gguf_source(folder: Path, data: bytes) -> ModelSource:
    path = folder / "damaged.gguf"
    path.write_bytes(data)
    return ModelSource(path, "gguf", "damaged")


def safetensors_source(folder: Path, data: bytes, config: object = LLAMA_CONFIG) -> ModelSource:
    (folder / "model.safetensors").write_bytes(data)
    (folder / "config.json").write_text(json.dumps(config))
    return ModelSource(folder, "safetensors", "damaged")


GOOD_GGUF = joined(tiny_llama().fields())
GGUF_HEADER = GGUF_DATA = GOOD_GGUF.index(tiny_llama().tensors[0][3][:64])
GOOD_SAFETENSORS = safetensors_bytes(*safetensors_parts(llama_tensors()))
SAFETENSORS_HEADER = 8 + int.from_bytes(GOOD_SAFETENSORS[:8], "little")


def edits(size: int) -> st.SearchStrategy[list[tuple[int, bytes]]]:
    """Places in a header and the bytes to put there."""
    return st.lists(st.tuples(st.integers(0, size - 1), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4)


def edited(data: bytes, changes: list[tuple[int, bytes]]) -> bytes:
    new = bytearray(data)
    for at, raw in changes:
        new[at : at + len(raw)] = raw
    return bytes(new)


def either_loads_or_is_refused(source: ModelSource) -> None:
    try:
        load(source)
        load_generation_config(source)
    except (ModelFileError, ConfigError) as e:
        assert "\n" not in str(e)
        assert str(source.path) in str(e)


FUZZ = settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(changes=edits(GGUF_HEADER))
def test_any_change_of_a_gguf_header(tmp_path: Path, changes: list[tuple[int, bytes]]) -> None:
    either_loads_or_is_refused(gguf_source(tmp_path, edited(GOOD_GGUF, changes)))


@FUZZ
@given(changes=edits(SAFETENSORS_HEADER))
def test_any_change_of_a_safetensors_header(tmp_path: Path, changes: list[tuple[int, bytes]]) -> None:
    either_loads_or_is_refused(safetensors_source(tmp_path, edited(GOOD_SAFETENSORS, changes)))


def test_each_byte_of_a_gguf_header_flipped(tmp_path: Path) -> None:
    """Whatever is accepted must place every tensor inside the file and leave the data's bytes where they were."""
    rng = np.random.default_rng(0)
    accepted = 0
    for at in range(GGUF_HEADER):
        path = gguf_source(tmp_path, edited(GOOD_GGUF, [(at, bytes([GOOD_GGUF[at] ^ (1 << rng.integers(8))]))])).path
        try:
            file = GGUFFile.open(path)
        except ModelFileError:
            continue
        accepted += 1
        assert min(tensor.offset for tensor in file.tensors.values()) == GGUF_DATA
        assert all(tensor.offset + tensor.nbytes <= len(GOOD_GGUF) for tensor in file.tensors.values())
    assert 0 < accepted < GGUF_HEADER


# Configurations


def test_config_at_odds_with_the_tensors(tmp_path: Path) -> None:
    data = safetensors_bytes(*safetensors_parts(llama_tensors()))
    changes = {"hidden_size": 32, "intermediate_size": 95, "vocab_size": 41, "num_hidden_layers": 2, "num_attention_heads": 4,
               "num_key_value_heads": 2, "attention_bias": True, "head_dim": 16}  # fmt: skip
    for key, value in changes.items():
        with pytest.raises(ModelFileError, match=r"tensor '"):
            load(safetensors_source(tmp_path, data, LLAMA_CONFIG | {key: value}))


def test_metadata_at_odds_with_the_tensors(tmp_path: Path) -> None:
    for key, value in {"embedding_length": 32, "feed_forward_length": 64, "attention.head_count": 4, "block_count": 2, "vocab_size": 41}.items():
        data = joined(tiny_llama(**{f"llama.{key}": (4, value)}).fields())
        with pytest.raises(ModelFileError, match=r"damaged.gguf: tensor '"):
            load(gguf_source(tmp_path, data))


def test_layers_fewer_than_stored_are_refused(tmp_path: Path) -> None:
    tensors = llama_tensors() | {"model.layers.1.input_layernorm.weight": ("F32", np.zeros(64, np.float32))}
    with pytest.raises(ModelFileError, match=r"tensor 'model.layers.1.input_layernorm.weight': .* no use"):
        load(safetensors_source(tmp_path, safetensors_bytes(*safetensors_parts(tensors))))


def test_hf_config_is_what_models_get(tmp_path: Path) -> None:
    assert isinstance(load_hf_config(gguf_source(tmp_path, GOOD_GGUF)), HFConfig)
