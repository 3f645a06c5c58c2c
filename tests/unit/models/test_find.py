"""Needs numpy only: which file a configuration leads to, and what is said where there is none."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.models import SAME_AS, build_model, files, find, load, supported


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (dict(model_type="llama"), "llama"),
        (dict(model_type="ministral", architectures=["MinistralForCausalLM"]), "mistral"),
        (dict(architectures=["LlamaForCausalLM"]), "llama"),
        (dict(model_type="", architectures=["LlamaForCausalLM"]), "llama"),
        (dict(model_type="my_finetune", architectures=["MyOwn", "Qwen2ForCausalLM"]), "qwen2"),
        (dict(model_type="llama", architectures=["MyOwn"], auto_map={"AutoModelForCausalLM": "mine.MyOwn"}), "llama"),
    ],
)
def test_found(raw: dict[str, Any], name: str) -> None:
    assert find(HFConfig(raw)) == name


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (dict(model_type="nonesuch"), "model_type = 'nonesuch': supported are "),
        (dict(), "model_type = '': supported are "),
        (dict(model_type="nonesuch", architectures=["Some", 3]), "model_type = 'nonesuch', architectures = Some, 3: supported are"),
        (dict(model_type="nonesuch", auto_map={"AutoModel": "x.Y"}), r"auto_map is not followed: no code of a checkpoint is ever run\): supported are"),
        (dict(model_type="../llama"), "supported are"),
        (dict(model_type="__init__"), "supported are"),
        (dict(model_type=7), "must be str"),
        (dict(architectures="LlamaForCausalLM"), "must be list"),
    ],
)
def test_not_found(raw: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what) as e:
        build_model(HFConfig(raw, "folder/config.json"))
    assert str(e.value).startswith("folder/config.json: ")
    assert "\n" not in str(e.value)


def test_the_list_of_what_is_supported() -> None:
    assert supported() == sorted(supported())
    assert {"llama", "ministral"} <= set(supported())
    assert not set(SAME_AS) & set(files())
    assert set(SAME_AS.values()) <= set(files())


def test_every_file_says_which_classes_it_is() -> None:
    """So that a checkpoint whose model_type is odd is found, and no two files claim one class."""
    architectures = [name for file in files() for name in load(file).ARCHITECTURES]
    assert len(set(architectures)) == len(architectures)
    for file in files():
        assert load(file).ARCHITECTURES
        assert callable(load(file).build)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        (None, 512),
        (dict(rope_type="linear", factor=4.0), 512),
        (dict(rope_type="dynamic", factor=4.0), 2048),
        (dict(rope_type="yarn", factor=4.0), 2048),
        (dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64), 512),
    ],
)
def test_how_far_a_model_sees(scaling: dict[str, Any] | None, context: int) -> None:
    sizes = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_hidden_layers=1, vocab_size=32, max_position_embeddings=512)
    assert build_model(HFConfig({"model_type": "llama", **sizes, "rope_scaling": scaling})).context_length == context
