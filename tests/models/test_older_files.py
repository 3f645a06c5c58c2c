"""Needs transformers and the extension: checkpoints as older programs wrote them give the logits of the same ones written today, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

IDS = np.random.default_rng(4).integers(0, 96, 40).tolist()
SIZES = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, bos_token_id=0, eos_token_id=1, pad_token_id=2,
)  # fmt: skip
GPT2 = dict(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=1)
LISTS = dict(short_factor=[1.0 + i / 10 for i in range(8)], long_factor=[1.0 + i for i in range(8)])


def saved(folder: Path, family: str, config: dict[str, Any]) -> Path:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (parameter.ndim == 1))
    model.save_pretrained(folder)
    return folder


def rewritten(folder: Path, target: Path, config: Callable[[dict[str, Any]], dict[str, Any]], tensors: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config(json.loads((folder / "config.json").read_text()))))
    safetensors.save_file(tensors(safetensors.load_file(folder / "model.safetensors")), target / "model.safetensors")
    return target


def as_before(config: dict[str, Any]) -> dict[str, Any]:
    """As transformers 4 wrote it: rope_theta and partial_rotary_factor beside rope_scaling, whose kind was once called type."""
    rope = config.pop("rope_parameters")
    kind = rope.pop("rope_type")
    config["torch_dtype"] = config.pop("dtype")
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            config[key] = rope.pop(key)
    return {**config, "rope_scaling": None if kind == "default" else {"type": kind, **rope}}


def named_su(config: dict[str, Any]) -> dict[str, Any]:
    config = as_before(config)
    config["rope_scaling"]["type"] = "su"
    config["rope_scaling"].pop("original_max_position_embeddings")
    return config


def without_model_type(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "model_type"}


def bare(tensors: dict[str, Any]) -> dict[str, Any]:
    """As OpenAI's weights were first converted: without the body's name, with the masks that the program held."""
    out = {name.removeprefix("transformer."): tensor.contiguous() for name, tensor in tensors.items()}
    for i in range(2):
        out[f"h.{i}.attn.bias"] = torch.tril(torch.ones(1, 1, 128, 128))
        out[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    return out


def with_tables(tensors: dict[str, Any]) -> dict[str, Any]:
    return {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}


def same(value: dict[str, Any]) -> dict[str, Any]:
    return value


YARN = dict(rope_type="yarn", rope_theta=5e4, factor=4.0, original_max_position_embeddings=32, beta_fast=16.0)
OLDER = {
    "gpt2 without prefix, with masks": ("gpt2", GPT2, same, bare),
    "gpt2 by its class": ("gpt2", GPT2, without_model_type, same),
    "llama, yarn": ("llama", SIZES | dict(rope_parameters=YARN), as_before, with_tables),
    "mistral": ("mistral", SIZES | dict(sliding_window=16), as_before, same),
    "qwen2 by its class": ("qwen2", SIZES, without_model_type, same),
    "phi3, su": ("phi3", SIZES | dict(original_max_position_embeddings=32, rope_parameters=dict(rope_type="longrope", rope_theta=1e4, **LISTS)),
                 named_su, same),
    "glm, half a head": ("glm", SIZES | dict(head_dim=16), as_before, same),
}  # fmt: skip


@pytest.mark.parametrize("what", OLDER)
def test_older_files(tmp_path: Path, logits_of, what: str) -> None:
    family, config, change, spell = OLDER[what]
    new = saved(tmp_path / "new", family, config)
    old = rewritten(new, tmp_path / "old", change, spell)
    assert np.array_equal(logits_of(new, IDS, "cpu"), logits_of(old, IDS, "cpu"))


def test_a_tensor_that_nobody_asked_for_is_named(tmp_path: Path, logits_of) -> None:
    """What is ignored is a short list: another tensor of GPT-2's attention is refused."""
    new = saved(tmp_path / "new", "gpt2", GPT2)
    old = rewritten(new, tmp_path / "old", same, lambda tensors: {**tensors, "transformer.h.0.attn.scale": torch.ones(4)})
    with pytest.raises(ValueError, match=r"'transformer\.h\.0\.attn\.scale': the model of this configuration has no use for it"):
        logits_of(old, IDS, "cpu")
