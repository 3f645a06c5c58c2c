"""Needs transformers: experts in whichever way a writer stored them, and what the choice of experts depends on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.config import HFConfig
from octavo.errors import ConfigError, ModelFileError
from octavo.layers import GatedMLP, MoE
from octavo.loader.hf_config import load_hf_config
from octavo.loader.load import load_weights, open_checkpoint
from octavo.loader.resolve import source_at
from octavo.models import build_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IDS = np.random.default_rng(6).integers(0, 160, 40).tolist()
SIZES = dict(
    vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, bos_token_id=0, eos_token_id=1, pad_token_id=2,
)  # fmt: skip
FAMILIES = {
    "mixtral": dict(num_local_experts=5, num_experts_per_tok=2),
    "qwen2_moe": dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48),
    "qwen3_moe": dict(num_local_experts=5, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16),
}


def made(family: str, folder: Path, **more: Any) -> Any:
    """A random model, saved; experts as transformers' writer spells them."""
    torch.set_num_threads(1)
    torch.manual_seed(8)
    config = transformers.AutoConfig.for_model(family, **SIZES, **FAMILIES[family], **more)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.config._experts_implementation = "eager"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.12 + (parameter.ndim == 1))
    model.save_pretrained(folder)
    return model


def packed_experts(folder: Path) -> tuple[list[np.ndarray], int]:
    """Values of all experts' products, and how many of their arrays are copies."""
    source = source_at(folder, "m", "auto")
    hf = load_hf_config(source)
    model = build_model(hf)
    load_weights(model, open_checkpoint(source, hf))
    experts = [expert for moe in model.walk() if isinstance(moe, MoE) for expert in moe.experts]
    weights = [weight for expert in experts for linear in (expert.gate_up, expert.down) for weight in linear.weights]
    parts = [part.codes for weight in weights for part in weight.parts]
    return [weight.dequantize() for weight in weights], sum(codes.flags.owndata for codes in parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_stacked_and_single_experts_are_the_same_model(tmp_path: Path, family: str) -> None:
    """One tensor for each expert, as older writers have it; or all experts of a layer in two, of which ours are views."""
    model = made(family, tmp_path)
    single, _ = packed_experts(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stacked = {name: values for name, values in stored.items() if ".experts." not in name}
    stacked |= {name: tensor.numpy() for name, tensor in model.state_dict().items() if ".experts." in name}
    assert any(tensor.ndim == 3 for tensor in stacked.values())
    assert len(stacked) < len(stored)
    save_file(stacked, tmp_path / "model.safetensors")
    together, copies = packed_experts(tmp_path)
    assert copies == 0
    assert len(single) == len(together) == 2 * 5 * 2
    assert all(np.array_equal(one, other) for one, other in zip(single, together, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_renormalised_or_not(tmp_path: Path, serve: Any, family: str) -> None:
    """Mixtral always divides the chosen weights by their sum; Qwen if it is told to, and the other way gives other logits."""
    (tmp_path / "a").mkdir()
    more = {} if family == "mixtral" else {"norm_topk_prob": True}
    model = made(family, tmp_path / "a", **more)
    with torch.no_grad():
        theirs = model.to(torch.float64)(torch.tensor([IDS])).logits[0].numpy()
    (ours,) = serve(tmp_path / "a", "reference", longest=40).logits([IDS])
    bound = 2e-4 * np.abs(theirs).max()
    assert np.abs(ours - theirs).max() < bound
    if family != "mixtral":
        config = json.loads((tmp_path / "a" / "config.json").read_text())
        (tmp_path / "a" / "config.json").write_text(json.dumps({**config, "norm_topk_prob": False}))
        (other,) = serve(tmp_path / "a", "reference", longest=40).logits([IDS])
        assert np.abs(other - theirs).max() > 20 * bound


def test_which_layers_have_experts() -> None:
    def kinds(**more: Any) -> list[bool]:
        config = {"model_type": "qwen3_moe", **SIZES, **FAMILIES["qwen3_moe"], "num_hidden_layers": 5, **more}
        blocks = build_model(HFConfig(config)).blocks
        assert all(isinstance(block.mlp, (MoE, GatedMLP)) for block in blocks)
        return [isinstance(block.mlp, MoE) for block in blocks]

    assert kinds() == [True] * 5
    assert kinds(decoder_sparse_step=2) == [False, True, False, True, False]
    assert kinds(mlp_only_layers=[0, 3]) == [False, True, True, False, True]


def test_more_experts_per_token_than_experts() -> None:
    with pytest.raises(ConfigError, match="6 experts per token of 5"):
        build_model(HFConfig({"model_type": "mixtral", **SIZES, "num_local_experts": 5, "num_experts_per_tok": 6}))


def test_a_stack_that_is_too_small_is_named(tmp_path: Path) -> None:
    model = made("mixtral", tmp_path)
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    name = "model.layers.1.mlp.experts.gate_up_proj"
    save_file({**tensors, name: np.ascontiguousarray(tensors[name][:4])}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"experts\.4\.gate_proj\.weight' is missing"):
        packed_experts(tmp_path)
    save_file({**tensors, name: np.ascontiguousarray(tensors[name][:, :-1])}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"layers\.1\.mlp\.experts\.gate_up_proj.*are no 10 equal matrices"):
        packed_experts(tmp_path)
