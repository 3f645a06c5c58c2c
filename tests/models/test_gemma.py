"""Needs transformers: what is Gemma's own: multimodal checkpoints, older configurations, and the precision of the embeddings' factor."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.config import HFConfig
from octavo.errors import ConfigError, ModelFileError
from octavo.loader.hf_config import load_hf_config
from octavo.loader.load import load_weights, open_checkpoint
from octavo.loader.resolve import source_at
from octavo.models import build_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IDS = np.random.default_rng(3).integers(5, 150, 60).tolist()
TEXT = dict(
    vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    sliding_window=24, query_pre_attn_scalar=16, max_position_embeddings=512, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    rope_parameters=dict(
        full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6), sliding_attention=dict(rope_type="default", rope_theta=1e4)
    ),
)  # fmt: skip
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)


def saved(model: Any, folder: Path) -> np.ndarray:
    """Random numbers far from the tiny default, saved; exact logits of IDS."""
    torch.set_num_threads(1)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.12 if parameter.ndim > 1 else 0.2))
        model.save_pretrained(folder)
        return model.eval().to(torch.float64)(torch.tensor([IDS])).logits[0].numpy()


def edited(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "gone"}))


@pytest.fixture
def multimodal(tmp_path: Path) -> tuple[Path, np.ndarray]:
    config = transformers.Gemma3Config(
        text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4, image_token_index=1, boi_token_index=2, eoi_token_index=3
    )
    return tmp_path, saved(transformers.Gemma3ForConditionalGeneration(config), tmp_path)


def test_the_text_part_of_a_multimodal_checkpoint(multimodal: tuple[Path, np.ndarray], serve: Any) -> None:
    folder, theirs = multimodal
    (ours,) = serve(folder, "reference", longest=60).logits([IDS], chunk=13)
    assert np.abs(ours - theirs).max() < 2e-4 * np.abs(theirs).max()


def test_what_is_left_out_is_told_and_nothing_else_is(multimodal: tuple[Path, np.ndarray]) -> None:
    folder, _ = multimodal
    stored = load_file(folder / "model.safetensors")
    source = source_at(folder, "m", "auto")
    hf = load_hf_config(source)
    report = load_weights(build_model(hf), open_checkpoint(source, hf))
    assert set(report.left_out) == {name for name in stored if not name.startswith("language_model.")}
    assert len(report.left_out) > 10

    save_file({**stored, "audio_tower.conv.weight": np.zeros((2, 2), np.float32)}, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"audio_tower\.conv\.weight.*no use for it"):
        load_weights(build_model(hf), open_checkpoint(source, hf))


@pytest.mark.parametrize("prefix", ["model.language_model.", ""])
def test_other_names_of_the_text_part(multimodal: tuple[Path, np.ndarray], serve: Any, prefix: str) -> None:
    folder, theirs = multimodal
    stored = load_file(folder / "model.safetensors")
    spelled = {name.replace("language_model.model.", prefix or "model."): values for name, values in stored.items()}
    assert spelled.keys() != stored.keys()
    save_file(spelled, folder / "model.safetensors")
    (ours,) = serve(folder, "reference", longest=60).logits([IDS])
    assert np.abs(ours - theirs).max() < 2e-4 * np.abs(theirs).max()


def test_older_configurations(tmp_path: Path, serve: Any) -> None:
    """Windows by a pattern, one rope for global layers and a base for local ones; and of what is as usual, nothing."""
    theirs = saved(transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**TEXT | {"layer_types": None, "num_hidden_layers": 4})), tmp_path)
    edited(
        tmp_path, layer_types="gone", rope_parameters="gone", rope_theta=1e6, rope_local_base_freq=1e4, _sliding_window_pattern="gone",
        rope_scaling={"rope_type": "linear", "factor": 8.0}, sliding_window_pattern=6, tie_word_embeddings="gone", rms_norm_eps="gone",
    )  # fmt: skip
    (ours,) = serve(tmp_path, "reference", longest=60).logits([IDS])
    assert np.abs(ours - theirs).max() < 2e-4 * np.abs(theirs).max()

    edited(tmp_path, sliding_window_pattern=2)
    model = serve(tmp_path, "reference", longest=60).model
    assert [block.attn.scores.window for block in model.blocks] == [24, 0, 24, 0]
    assert [block.attn.rope.theta for block in model.blocks] == [1e4, 1e6, 1e4, 1e6]


def test_sizes_that_configurations_leave_out() -> None:
    given = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 6, "vocab_size": 16}
    model = build_model(HFConfig(given))
    first, last = model.blocks[0].attn, model.blocks[5].attn
    assert (first.num_heads, first.num_kv_heads, first.head_dim, first.scale) == (8, 4, 256, 1 / 16)
    assert (first.scores.window, last.scores.window, model.context_length) == (4096, 0, 131072)


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_the_factor_of_embeddings_has_the_weights_precision(model_type: str) -> None:
    def factor(**more: Any) -> float:
        sizes = {key: value for key, value in TEXT.items() if key != "rope_parameters"}
        return build_model(HFConfig({"model_type": model_type, **sizes, "hidden_size": 640, **more})).scales.embed

    assert factor(torch_dtype="bfloat16") == 25.25
    assert factor(torch_dtype="float16") == float(np.float16(math.sqrt(640)))
    assert factor(torch_dtype="float32") == float(np.float32(math.sqrt(640)))
    assert factor(torch_dtype="bfloat16", embedding_scale=math.sqrt(640)) == math.sqrt(640)  # as GGUF files mean it


def test_bfloat16_agrees_at_a_width_whose_root_is_not_exact(tmp_path: Path, serve: Any) -> None:
    """With the exact root logits would be off by more."""
    torch.manual_seed(4)
    torch.set_num_threads(1)
    config = transformers.Gemma3TextConfig(**TEXT | {"hidden_size": 40, "num_hidden_layers": 1, "layer_types": ["full_attention"]})
    model = transformers.Gemma3ForCausalLM(config).to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path)
    served = serve(tmp_path, "reference", longest=60).model
    embedded = model.model.embed_tokens(torch.tensor(IDS)).float().detach().numpy()
    ours = served.embed(np.array(IDS, np.int32))
    assert np.abs(ours - embedded).max() <= np.abs(embedded).max() / 256  # theirs is rounded once more
    assert abs(float((ours * embedded).sum() / (ours * ours).sum()) - 1) < 2e-4


def test_encoders_are_refused() -> None:
    with pytest.raises(ConfigError, match="use_bidirectional_attention"):
        build_model(HFConfig({"model_type": "gemma3_text", **TEXT, "use_bidirectional_attention": True}))
