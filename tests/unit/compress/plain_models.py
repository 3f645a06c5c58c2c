"""Small random checkpoints of several families, written without our code; and texts to calibrate on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from octavo.config import HFConfig
from octavo.layers import Decoder
from octavo.models import build_model

VOCAB = 96
SHARED = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, bos_token_id=0, eos_token_id=1,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(architectures=["LlamaForCausalLM"], attention_bias=True, tie_word_embeddings=False),
    "mistral": dict(architectures=["MistralForCausalLM"], num_key_value_heads=4, sliding_window=24),
    "gemma2": dict(architectures=["Gemma2ForCausalLM"], head_dim=16, sliding_window=24, query_pre_attn_scalar=20, hidden_activation="gelu_pytorch_tanh"),
    "phi3": dict(architectures=["Phi3ForCausalLM"], num_key_value_heads=4),
    "starcoder2": dict(architectures=["Starcoder2ForCausalLM"], use_bias=True, hidden_act="gelu_pytorch_tanh", norm_epsilon=1e-5),
    "olmo2": dict(architectures=["Olmo2ForCausalLM"]),
    "gpt2": dict(architectures=["GPT2LMHeadModel"], n_embd=64, n_layer=3, n_head=4, num_key_value_heads=4, n_inner=96, n_positions=128, layer_norm_epsilon=1e-5),
    "mixtral": dict(architectures=["MixtralForCausalLM"], num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": dict(
        architectures=["Qwen2MoeForCausalLM"], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, norm_topk_prob=True, mlp_only_layers=[1],
    ),
}  # fmt: skip
TORCH_WORDS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def as_bytes(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "F32":
        return values.astype("<f4").tobytes()
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    # Cut off rather than rounded: any bfloat16 will do for random numbers.
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()


def save(path: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    header, data = {}, b""
    for name, values in tensors.items():
        stored = as_bytes(np.ascontiguousarray(values), dtype)
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(stored)]}
        data += stored
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def random_tensors(model: Decoder, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Weights that make activations with some large channels, as real models have; matrices that are stored turned are turned."""
    tensors: dict[str, np.ndarray] = {}
    for linear in model.linears():
        for name, n in zip(linear.names, linear.n_each, strict=True):
            w = rng.normal(0, linear.k**-0.5, (n, linear.k)).astype(np.float32)
            tensors[f"{name}.weight"] = np.ascontiguousarray(w.T) if linear.transposed else w
        for name, n in zip(linear.bias_names or (), linear.n_each, strict=False):
            tensors[name] = rng.normal(0, 0.1, n).astype(np.float32)
    for vector in model.vectors():
        tensors[vector.name] = rng.lognormal(0, 0.7, vector.size).astype(np.float32)
    return tensors


def write_model(folder: Path, family: str, dtype: str = "F32", **more: Any) -> Path:
    """A checkpoint of the family in a new folder, with a tokenizer of one token a word."""
    folder.mkdir()
    config = {**SHARED, "model_type": family, "torch_dtype": TORCH_WORDS[dtype], **FAMILIES[family], **more}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    from octavo.loader.hf_config import normalised

    model = build_model(HFConfig(normalised(config, folder), "config"))
    save(folder / "model.safetensors", random_tensors(model, np.random.default_rng(7)), dtype)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    (folder / "modeling_own.py").write_text("raise SystemExit")
    return folder


def write_texts(path: Path, count: int = 12, length: int = 40) -> Path:
    """JSON lines of random words, some far commoner than others."""
    rng = np.random.default_rng(3)
    ids = np.minimum(rng.geometric(0.05, (count, length)), VOCAB - 1)
    path.write_text("\n".join(json.dumps({"text": " ".join(f"w{i}" for i in row)}) for row in ids))
    return path
