"""Needs transformers, gguf and the extension: GGUF files of each family give transformers' logits for the same numbers.

Small random models are written with the gguf package's writer, its names of tensors, and what its converter does to their rows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from octavo.errors import ModelFileError
from octavo.loader.gguf_names import ARCHITECTURES, FAMILIES
from octavo.loader.hf_config import load_hf_config
from octavo.loader.load import open_checkpoint
from octavo.loader.resolve import ModelSource

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB, LAYERS, HEADS, KV_HEADS = 160, 4, 4, 2
SHARED = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
    max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=2,
)  # fmt: skip
IDS = np.random.default_rng(5).integers(0, VOCAB, 60).tolist()
BOUND = 5e-5  # of the largest logit: fp32 throughout, only the order of sums differs
LINEAR = dict(rope_type="linear", rope_theta=20000.0, factor=4.0)
LONG = dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4],
            long_factor=[1.1, 1.4, 1.9, 2.7, 3.9, 5.6, 8.1, 11.7])  # fmt: skip
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
GEMMA_ROPE = dict(full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0), sliding_attention=dict(rope_type="default", rope_theta=1e4))
MOE = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32)
TWO_CAPS = dict(attn_logit_softcapping=5.0, final_logit_softcapping=7.0)


@dataclass(frozen=True)
class Case:
    """family: of transformers; arch: the file's; config: over SHARED; more: settings in the file; fused: q, k and v are one tensor;
    apart: experts are a tensor each."""

    family: str
    arch: str
    config: dict[str, Any] = field(default_factory=dict)
    more: Callable[[Any], None] = lambda writer: None
    fused: bool = False
    apart: bool = False
    kind: str = "F32"


def longrope_keys(writer: Any) -> None:
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(256 / 32) / math.log(32)))
    writer.add_rope_scaling_orig_ctx_len(32)


CASES = {
    "llama": Case("llama", "llama", dict(attention_bias=True)),
    "llama, quantised, tied": Case("llama", "llama", dict(tie_word_embeddings=True), kind="Q8_0"),
    "llama3": Case("llama", "llama", dict(rope_parameters=LLAMA3)),
    "linear": Case("llama", "llama", dict(rope_parameters=LINEAR)),
    "yarn": Case("qwen2", "qwen2", dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32))),
    "mistral": Case("mistral", "llama", dict(sliding_window=24), lambda w: w.add_sliding_window(24)),
    "mixtral": Case("mixtral", "llama", dict(num_local_experts=5, num_experts_per_tok=2)),
    "mixtral, quantised": Case("mixtral", "llama", dict(num_local_experts=5, num_experts_per_tok=5), kind="Q8_0"),  # all: no near ties
    "mixtral, a tensor for each expert": Case("mixtral", "llama", dict(num_local_experts=5, num_experts_per_tok=2), apart=True),
    "smollm3": Case("smollm3", "smollm3"),
    "granite": Case("granite", "granite", dict(embedding_multiplier=12.0, logits_scaling=0.25, residual_multiplier=0.22, attention_multiplier=0.1)),
    "qwen": Case("qwen2", "qwen", dict(num_key_value_heads=HEADS), fused=True),
    "qwen2": Case("qwen2", "qwen2"),
    "qwen3": Case("qwen3", "qwen3", dict(head_dim=32)),
    "qwen2moe": Case("qwen2_moe", "qwen2moe", dict(**MOE, shared_expert_intermediate_size=64, norm_topk_prob=False)),
    "qwen3moe": Case("qwen3_moe", "qwen3moe", dict(**MOE, head_dim=32, norm_topk_prob=True)),
    "phi3": Case("phi3", "phi3", dict(sliding_window=24), lambda w: w.add_sliding_window(24)),
    "phi3, longrope": Case("phi3", "phi3", dict(original_max_position_embeddings=32, rope_parameters=LONG), longrope_keys),
    "chatglm": Case("glm", "chatglm", dict(head_dim=16), fused=True),
    "glm": Case("glm", "chatglm", dict(head_dim=16)),
    "glm4": Case("glm4", "glm4", dict(head_dim=16, attention_bias=False)),
    "olmo2": Case("olmo2", "olmo2"),
    "gemma2": Case("gemma2", "gemma2", dict(head_dim=16, sliding_window=24, query_pre_attn_scalar=16, **TWO_CAPS)),
    "gemma3": Case("gemma3_text", "gemma3", dict(head_dim=32, sliding_window=24, query_pre_attn_scalar=32, num_hidden_layers=7)),
    "gemma3, pattern": Case(
        "gemma3_text", "gemma3", dict(head_dim=32, sliding_window=24, query_pre_attn_scalar=32, rope_parameters=GEMMA_ROPE)
        | dict(layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"]),
        lambda w: w.add_sliding_window_pattern([False, True, True, False]),
    ),
    "starcoder2": Case("starcoder2", "starcoder2"),
    "gpt2": Case("gpt2", "gpt2"),
}  # fmt: skip


def make(case: Case) -> Any:
    torch.manual_seed(2)
    torch.set_num_threads(1)
    known = transformers.AutoConfig.for_model(case.family)
    shared = {key: value for key, value in SHARED.items() if hasattr(known, key)}
    config = transformers.AutoConfig.for_model(case.family, **{**shared, **case.config})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.config._experts_implementation = "eager"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if parameter.ndim == 1 and not name.endswith("bias") else 0.0
            parameter.copy_(torch.randn_like(parameter) * (0.12 if parameter.ndim > 1 else 0.2) + around)
    return model


# What the converter does


def pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from two halves to pairs."""
    return np.ascontiguousarray(rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape))


def converted(case: Case, config: Any, stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors under Hugging Face's names, with rows, sums and stacks as in a GGUF file."""
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name in sorted(stored, key=lambda n: [int(part) if part.isdigit() else 0 for part in n.split(".")]):
        values, part = stored[name], name.split(".")[-2]
        if case.arch in ("llama", "smollm3", "granite") and part in ("q_proj", "k_proj"):
            values = pairs(values, config.num_attention_heads if part == "q_proj" else config.num_key_value_heads)
        if case.family.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if case.family == "gpt2" and part in ("c_attn", "c_proj", "c_fc") and name.endswith("weight"):
            values = np.ascontiguousarray(values.T)
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            experts.setdefault(f"{before}.experts.{after.split('.', 1)[1]}", []).append(values)
        else:
            tensors[name] = np.squeeze(values) if part == "shared_expert_gate" else values
    tensors |= {name: np.stack(parts) for name, parts in experts.items()}
    return fused(tensors) if case.fused else tensors


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out = {name: values for name, values in tensors.items() if name.split(".")[-2] not in ("q_proj", "k_proj", "v_proj")}
    for name in tensors:
        if ".q_proj." in name:
            out[name.replace(".q_proj.", ".qkv_proj.")] = np.concatenate([tensors[name.replace(".q_proj.", f".{x}_proj.")] for x in "qkv"])
    return out


def gguf_name(names: Any, name: str) -> str:
    """By the package's tables; under the family's own names where they differ from the model's that we took the numbers from."""
    layers, _, rest = name.partition(".block_sparse_moe.experts.")
    if rest:
        name = f"layers.{layers.split('.')[-1]}.feed_forward.experts.{rest}"
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None and ".qkv_proj." in name:
        found = f"blk.{name.split('.')[2]}.attn_qkv.{name.rsplit('.', 1)[1]}"
    assert found, name
    return str(found)


def write_keys(writer: Any, case: Case, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    writer.add_feed_forward_length(inner * (2 if case.arch == "qwen" else 1))
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(VOCAB)
    if hasattr(config, "num_key_value_heads"):
        writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(getattr(config, "norm_epsilon", None) or config.layer_norm_epsilon)
    if getattr(config, "head_dim", None) and case.arch != "granite":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    write_rope(writer, case, getattr(config, "rope_parameters", None) or {})
    if count := getattr(config, "num_local_experts", getattr(config, "num_experts", 0)):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if case.arch == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if case.arch.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if case.arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    case.more(writer)


def write_rope(writer: Any, case: Case, rope: dict[str, Any]) -> None:
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    if rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if local:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if case.family.startswith("glm"):
        writer.add_rope_dimension_count(8)
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def rope_tensors(rope: dict[str, Any], head_dim: int) -> dict[str, np.ndarray]:
    kind = rope.get("rope_type")
    if kind == "longrope":
        return {f"rope_factors_{which}.weight": np.array(rope[f"{which}_factor"], np.float32) for which in ("long", "short")}
    if kind != "llama3":
        return {}
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    original, low, high, factor = (rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "factor"))
    smooth = (original / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    factors = np.where(waves < original / high, 1.0, np.where(waves > original / low, factor, between))
    return {"rope_freqs.weight": factors.astype(np.float32)}


def taken_apart(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A tensor for each expert, as the converter wrote them before 2024."""
    out = {name: values for name, values in tensors.items() if "_exps." not in name}
    for name in tensors.keys() - out.keys():
        out |= {name.replace("_exps.", f".{i}."): expert for i, expert in enumerate(tensors[name])}
    return out


def write(case: Case, model: Any, folder: Path, without: str = "") -> Path:
    """The model as a GGUF file, perhaps `without` one of its tensors."""
    model.save_pretrained(folder)
    config, path = model.config, folder / "m.gguf"
    writer = gguf.GGUFWriter(path, case.arch)
    write_keys(writer, case, config)
    names = gguf.get_tensor_name_map({name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[case.arch], config.num_hidden_layers)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tensors = {gguf_name(names, name): values for name, values in converted(case, config, load_file(folder / "model.safetensors")).items()}
    tensors |= rope_tensors(getattr(config, "rope_parameters", None) or {}, head_dim)
    tensors.pop(without, None)
    tensors = taken_apart(tensors) if case.apart else tensors
    for name, values in tensors.items():
        kind = gguf.GGMLQuantizationType[case.kind if values.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rounded(model: Any, kind: str) -> Any:
    """The model with matrices that have gone through a block type and back."""
    exact = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in exact.parameters():
            if parameter.ndim > 1:
                codes = gguf.quants.quantize(parameter.numpy(), gguf.GGMLQuantizationType[kind])
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(codes, gguf.GGMLQuantizationType[kind])))
    return exact


@pytest.mark.parametrize("key", CASES)
def test_a_file_of_each_family(tmp_path: Path, serve: Any, key: str) -> None:
    case = CASES[key]
    model = make(case)
    path = write(case, model, tmp_path)
    exact = rounded(model, case.kind) if case.kind != "F32" else model
    with torch.no_grad():
        theirs = exact.to(torch.float64)(torch.tensor([IDS])).logits[0].numpy()
    (ours,) = serve(path, "reference", longest=len(IDS)).logits([IDS], chunk=25)
    bound = BOUND if case.kind == "F32" else 0.06  # activations are rounded to 8 bits there
    assert np.abs(ours - theirs).max() < bound * np.abs(theirs).max()


def test_each_family_has_a_case() -> None:
    assert {case.arch for case in CASES.values()} == set(ARCHITECTURES)
    assert {*ARCHITECTURES.values(), "mistral", "mixtral", "glm"} == set(FAMILIES)


def test_stacked_experts_are_views(tmp_path: Path) -> None:
    """Experts in one tensor are not copied apart."""
    path = write(CASES["qwen3moe"], make(CASES["qwen3moe"]), tmp_path)
    source = ModelSource(path, "gguf", "m")
    hf = load_hf_config(source)
    checkpoint = open_checkpoint(source, hf)
    packed = [checkpoint.packed(f"model.layers.1.mlp.experts.{i}.up_proj", 32, 64).parts[0].codes for i in range(6)]
    assert all(not codes.flags.owndata and not codes.flags.writeable for codes in packed)
    starts = [codes.__array_interface__["data"][0] for codes in packed]
    assert np.diff(starts).tolist() == [32 * 64 * 4] * 5


def yarn_with(more: Callable[[Any], None]) -> Callable[[Any], None]:
    def change(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        more(writer)

    return change


@pytest.mark.parametrize("key", ["llama, quantised, tied", "qwen2", "mistral", "gemma2", "gemma3"])
def test_transformers_reads_the_same_numbers(tmp_path: Path, key: str) -> None:
    """The files that these tests write are what another reader takes them for, where that has one for the family."""
    case = CASES[key]
    model = rounded(make(case), case.kind)
    write(case, model, tmp_path)
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).unlink()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file="m.gguf", dtype="float32").state_dict()
    for name, values in model.state_dict().items():
        assert torch.allclose(values, theirs[name], atol=1e-6), name


@pytest.mark.parametrize(
    ("family", "part", "message"),
    [
        ("gemma3", "model.layers.3.post_feedforward_layernorm.weight", "blk.3.post_ffw_norm.weight"),
        ("qwen3moe", "model.layers.0.self_attn.k_norm.weight", "blk.0.attn_k_norm.weight"),
        ("gpt2", "transformer.h.2.mlp.c_fc.bias", "blk.2.ffn_up.bias"),
        ("chatglm", "transformer.encoder.final_layernorm.weight", "output_norm.weight"),
    ],
)
def test_what_is_missing_is_called_as_in_the_file(tmp_path: Path, family: str, part: str, message: str) -> None:
    case = CASES[family]
    path = write(case, make(case), tmp_path, without=message)
    hf = load_hf_config(ModelSource(path, "gguf", "m"))
    with pytest.raises(ModelFileError, match=f"tensor '{message}' is missing"):
        open_checkpoint(ModelSource(path, "gguf", "m"), hf).vector(part, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_attention_scale(0.5), "attention.scale.*0.5 is not supported"),
        (lambda w: w.add_final_logit_softcapping(9.0), "final_logit_softcapping.*not supported"),
        (lambda w: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID), "expert_gating_func.*not supported"),
        (lambda w: w.add_causal_attention(False), "attention.causal.*not supported"),
        (yarn_with(lambda w: w.add_rope_scaling_attn_factors(1.2)), "rope.scaling.attn_factor.*not supported for yarn"),
        (yarn_with(lambda w: w.add_rope_scaling_yarn_log_mul(0.1)), "yarn_log_multiplier.*not supported"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "rope_factors_short.weight' is missing"),
    ],
)
def test_settings_that_would_change_the_arithmetic(tmp_path: Path, change: Callable[[Any], None], message: str) -> None:
    case = Case("llama", "llama", more=change)
    path = write(case, make(case), tmp_path)
    with pytest.raises(ModelFileError, match=message):
        load_hf_config(ModelSource(path, "gguf", "m"))
