"""Needs the extension. A family is one file: a copied model file under a new name serves checkpoints of that model_type, and nothing else is edited."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import octavo.models
from octavo.config import HFConfig
from octavo.errors import ConfigError

safetensors = pytest.importorskip("safetensors.numpy")

WIDTH, INNER, HEADS, KV_HEADS, VOCAB = 64, 96, 4, 2, 48
IDS = np.random.default_rng(2).integers(0, VOCAB, 20).tolist()
LLAMA = Path(octavo.models.__file__).parent / "llama.py"


def write_checkpoint(folder: Path, model_type: str) -> Path:
    rng, kv = np.random.default_rng(1), WIDTH // HEADS * KV_HEADS
    shapes = {
        "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (kv, WIDTH), "self_attn.v_proj": (kv, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH),
        "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER),
        "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,),
    }  # fmt: skip
    whole = {f"model.layers.0.{name}": shape for name, shape in shapes.items()}
    whole |= {"model.embed_tokens": (VOCAB, WIDTH), "model.norm": (WIDTH,), "lm_head": (VOCAB, WIDTH)}
    tensors = {f"{name}.weight": (0.2 * rng.standard_normal(shape)).astype(np.float32) for name, shape in whole.items()}
    config = dict(
        model_type=model_type, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=1, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, vocab_size=VOCAB, max_position_embeddings=64, rms_norm_eps=1e-5,
    )  # fmt: skip
    folder.mkdir()
    safetensors.save_file(tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A further place in which models are looked for, as if it were src/octavo/models."""
    folder = tmp_path / "models"
    folder.mkdir()
    monkeypatch.setattr(octavo.models, "__path__", [*octavo.models.__path__, str(folder)])
    return folder


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_copied_file_is_a_family(tmp_path: Path, models_folder: Path, serve, backend: str) -> None:
    name = f"newcomer_{backend}"
    folder = write_checkpoint(tmp_path / "new", name)
    with pytest.raises(ConfigError, match=f"model_type = '{name}': supported are"):
        serve(folder, backend, longest=20)
    (models_folder / f"{name}.py").write_text(LLAMA.read_text())
    try:
        served = serve(folder, backend, longest=20)
        assert type(served.model.blocks[0]).__module__ == f"octavo.models.{name}"
        assert name in octavo.models.supported()
        (ours,) = served.logits([IDS])
    finally:
        sys.modules.pop(f"octavo.models.{name}", None)
    (llama,) = serve(write_checkpoint(tmp_path / "llama", "llama"), backend, longest=20).logits([IDS])
    assert np.array_equal(ours, llama)
    assert np.abs(ours).max() > 0.1


def test_the_copy_is_what_runs(models_folder: Path, tmp_path: Path, serve) -> None:
    """The test above can fail: a file that multiplies its embeddings gives other logits."""
    changed = LLAMA.read_text().replace("return Decoder(hf, Block)", "return Decoder(hf, Block, scales=Scales(embed=2.0))")
    changed = changed.replace("RMSNorm, Rope\n", "RMSNorm, Rope, Scales\n")
    (models_folder / "changed.py").write_text(changed)
    try:
        (ours,) = serve(write_checkpoint(tmp_path / "new", "changed"), "reference", longest=20).logits([IDS])
    finally:
        sys.modules.pop("octavo.models.changed", None)
    (llama,) = serve(write_checkpoint(tmp_path / "llama", "llama"), "reference", longest=20).logits([IDS])
    assert np.abs(ours - llama).max() > 1e-3


def test_a_class_name_finds_the_file_too(models_folder: Path) -> None:
    (models_folder / "newclass.py").write_text(LLAMA.read_text().replace('"LlamaForCausalLM"', '"NewClassForCausalLM"'))
    try:
        assert octavo.models.find(HFConfig(dict(model_type="odd", architectures=["NewClassForCausalLM"]))) == "newclass"
    finally:
        sys.modules.pop("octavo.models.newclass", None)
