"""Needs Python only. Configurations from both kinds of files come out under one spelling; sampling defaults are checked."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from file_writers import ARRAY, LLAMA_CONFIG, STRING, Array, joined, random_tensor, tiny_llama

from octavo.errors import ModelFileError
from octavo.loader.hf_config import load_generation_config, load_hf_config
from octavo.loader.resolve import ModelSource


def of_json(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(raw))
    return load_hf_config(ModelSource(folder, "safetensors", "x")).raw


def of_gguf(folder: Path, model: Any) -> dict[str, Any]:
    (folder / "m.gguf").write_bytes(joined(model.fields()))
    return load_hf_config(ModelSource(folder / "m.gguf", "gguf", "x")).raw


def test_old_and_new_spellings_are_one(tmp_path: Path) -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    old = LLAMA_CONFIG | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **llama3}}
    new = {key: value for key, value in LLAMA_CONFIG.items() if key not in ("torch_dtype", "rope_theta")}
    new |= {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **llama3}}
    got = [of_json(tmp_path, old), of_json(tmp_path, new)]
    for config in got:
        assert config["torch_dtype"] == "bfloat16"
        assert config["rope_theta"] == 5e5
        assert config["rope_scaling"] == {"rope_type": "llama3", **llama3}
        assert "rope_parameters" not in config


@pytest.mark.parametrize("rope", [None, {"rope_type": "default"}, {"type": "default"}, {"rope_type": "default", "rope_theta": 1.0}])
def test_no_scaling_is_none(tmp_path: Path, rope: dict[str, Any] | None) -> None:
    assert of_json(tmp_path, {"rope_scaling": rope})["rope_scaling"] is None
    assert of_json(tmp_path, {"rope_parameters": rope})["rope_scaling"] is None


def test_rope_parameters_by_kind_of_layer_are_left_alone(tmp_path: Path) -> None:
    rope = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert of_json(tmp_path, {"rope_parameters": rope})["rope_parameters"] == rope


def test_the_text_part_of_a_multimodal_configuration(tmp_path: Path) -> None:
    """Its keys count, but for what the whole model is and where it ends."""
    text = {"model_type": "gemma3_text", "hidden_size": 8, "eos_token_id": 1, "rope_scaling": {"type": "linear", "factor": 8.0}}
    config = of_json(tmp_path, {"model_type": "gemma3", "eos_token_id": [1, 106], "dtype": "bfloat16", "hidden_size": 9, "text_config": text})
    expected = {"model_type": "gemma3", "eos_token_id": [1, 106], "hidden_size": 8, "torch_dtype": "bfloat16",
                "rope_scaling": {"rope_type": "linear", "factor": 8.0}}  # fmt: skip
    assert {key: config[key] for key in expected} == expected


def test_code_in_a_model_folder_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('ran')")
    (tmp_path / "configuration_evil.py").write_text("raise SystemExit('ran')")
    config = LLAMA_CONFIG | {"auto_map": {"AutoConfig": "configuration_evil.C", "AutoModelForCausalLM": "modeling_evil.M"}}
    assert of_json(tmp_path, config)["model_type"] == "llama"


def test_gguf_metadata_under_hugging_faces_keys(tmp_path: Path) -> None:
    config = of_gguf(tmp_path, tiny_llama())
    assert math.isclose(config.pop("rms_norm_eps"), 1e-5, rel_tol=1e-6)
    assert config == {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "intermediate_size": 96, "rope_theta": 10000.0, "partial_rotary_factor": None, "rope_scaling": None, "vocab_size": 40,
        "max_position_embeddings": 128, "sliding_window": None, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": [2], "torch_dtype": "bfloat16",
    }  # fmt: skip


def test_gguf_details(tmp_path: Path, rng: Any) -> None:
    model = tiny_llama(
        llama__vocab_size=(4, 50), llama__attention__key_length=(4, 16), llama__attention__value_length=(4, 16), llama__rope__dimension_count=(4, 8),
        llama__rope__scaling__type=(STRING, "linear"), llama__rope__scaling__factor=(6, 4.0), tokenizer__ggml__eot_token_id=(4, 7),
        tokenizer__ggml__bos_token_id=(4, 2**32 - 1), llama__attention__head_count_kv=None,
    )  # fmt: skip
    model.tensors.append(random_tensor(rng, "output.weight", (64, 40), 0))
    model.tensors.append(random_tensor(rng, "blk.0.attn_q.bias", (64,), 0))
    config = of_gguf(tmp_path, model)
    expected = {"vocab_size": 50, "head_dim": 16, "partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 4.0},
                "eos_token_id": [2, 7], "bos_token_id": None, "tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 2}  # fmt: skip
    assert {key: config[key] for key in expected} == expected


def llama3_divisors(factor: float, turned: int, theta: float) -> list[float]:
    """As the converter of llama.cpp computes them: by wavelength."""
    divisors = []
    for i in range(0, turned, 2):
        wavelength = 2 * math.pi * theta ** (i / turned)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def test_llama3_scaling_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    model = tiny_llama(llama__rope__freq_base=(6, 500000.0), llama__attention__key_length=(4, 128), llama__attention__value_length=(4, 128))
    stored = llama3_divisors(32.0, 128, 500000.0)
    assert len(set(stored)) > 3
    model.tensors.append(("rope_freqs.weight", (64,), 0, struct.pack("<64f", *stored)))
    assert of_gguf(tmp_path, model)["rope_scaling"] == {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                                                         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip

    stored[30] *= 1.01
    model.tensors[-1] = ("rope_freqs.weight", (64,), 0, struct.pack("<64f", *stored))
    assert of_gguf(tmp_path, model)["rope_scaling"]["rope_type"] == "frequency_factors"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"general__architecture": (STRING, "bert")}, "general.architecture"),
        ({"general__architecture": (4, 1)}, "general.architecture"),
        ({"general__architecture": None}, "general.architecture"),
        ({"llama__embedding_length": None}, "llama.embedding_length"),
        ({"llama__embedding_length": (STRING, "64")}, "llama.embedding_length"),
        ({"llama__attention__head_count": (4, 0)}, "head_count"),
        ({"llama__attention__head_count": (7, True)}, "head_count"),
        ({"llama__attention__head_count": (ARRAY, Array(4, [2]))}, "head_count"),
        ({"llama__attention__key_length": (4, 0)}, "dimension_count"),
        ({"llama__attention__value_length": (4, 16)}, "value_length"),
        ({"llama__rope__dimension_count": (4, 33)}, "dimension_count"),
        ({"llama__rope__freq_base": (6, math.nan)}, "freq_base"),
        ({"llama__rope__freq_base": (6, 0.0)}, "freq_base"),
        ({"llama__rope__freq_base": (6, math.inf)}, "freq_base"),
        ({"llama__logit_scale": (6, 16.0)}, "logit_scale"),
        ({"split__count": (2, 3)}, "split.count"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_gguf_metadata_that_cannot_be(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelFileError, match="m.gguf: key '") as e:
        of_gguf(tmp_path, tiny_llama(**changes))
    assert key in str(e.value)


@pytest.mark.parametrize("divisors", [[1.0] * 15, [1.0] * 15 + [math.nan], [1.0] * 15 + [0.0], [1.0] * 15 + [-1.0]])
def test_rope_divisors_that_cannot_be(tmp_path: Path, divisors: list[float]) -> None:
    model = tiny_llama()
    model.tensors.append(("rope_freqs.weight", (len(divisors),), 0, struct.pack(f"<{len(divisors)}f", *divisors)))
    with pytest.raises(ModelFileError, match=r"m.gguf: tensor 'rope_freqs.weight'"):
        of_gguf(tmp_path, model)


def test_sampling_defaults(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG | {"eos_token_id": 5}))
    source = ModelSource(tmp_path, "safetensors", "x")
    assert load_generation_config(source).given() == {}
    assert load_generation_config(source).eos_token_ids == (5,)

    raw = {"temperature": 0.6, "top_p": 1, "top_k": 20, "repetition_penalty": 1.1, "max_new_tokens": 99, "eos_token_id": [3, 4, 3], "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(raw))
    config = load_generation_config(source)
    assert config.given() == {"temperature": 0.6, "top_p": 1.0, "top_k": 20, "repetition_penalty": 1.1, "max_tokens": 99}
    assert config.eos_token_ids == (3, 4)


def test_sampling_defaults_of_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(joined(tiny_llama().fields()))
    assert load_generation_config(ModelSource(tmp_path / "m.gguf", "gguf", "x")).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", "hot"), ("temperature", -1), ("temperature", float("nan")), ("temperature", 10**400), ("top_p", 0), ("top_p", True),
     ("top_k", 1.5), ("top_k", 2**40), ("min_p", 2), ("max_new_tokens", 0), ("eos_token_id", "x"), ("eos_token_id", [1, -1]),
     ("eos_token_id", [True]), ("eos_token_id", {"a": 1})],
)  # fmt: skip
def test_sampling_defaults_that_cannot_be(tmp_path: Path, key: str, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ModelFileError, match=rf"generation_config.json: {key} = "):
        load_generation_config(ModelSource(tmp_path, "safetensors", "x"))
