"""Needs transformers and gguf: a GGUF file's weights, read by us, are the ones that transformers reads, to the last bit and in the same rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.loader.hf_config import load_hf_config
from octavo.loader.load import load_weights, open_checkpoint
from octavo.loader.resolve import ModelSource, resolve_model
from octavo.models import build_model

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

WIDTH, INNER, HEADS, KV_HEADS, LAYERS, VOCAB = 64, 96, 4, 2, 2, 48
LAYER_SHAPES = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64), "ffn_gate": (96, 64), "ffn_up": (96, 64),
                "ffn_down": (64, 96)}  # fmt: skip


def write_gguf(path: Path, tied: bool) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_vocab_size(VOCAB)
    rng = np.random.default_rng(3)
    kinds = [gguf.GGMLQuantizationType[name] for name in ("Q4_1", "Q8_0", "Q5_0", "F16", "Q4_0", "F32", "Q5_1")]

    def add(name: str, *shape: int, kind: object = gguf.GGMLQuantizationType.F32) -> None:
        values = rng.standard_normal(shape).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", VOCAB, WIDTH, kind=kinds[1])
    for i in range(LAYERS):
        for j, (name, shape) in enumerate(LAYER_SHAPES.items()):
            add(f"blk.{i}.{name}.weight", *shape, kind=kinds[(i + j) % len(kinds)])
        add(f"blk.{i}.attn_norm.weight", WIDTH)
        add(f"blk.{i}.ffn_norm.weight", WIDTH)
    add("output_norm.weight", WIDTH)
    if not tied:
        add("output.weight", VOCAB, WIDTH, kind=kinds[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, False])
def test_a_random_file(tmp_path: Path, tied: bool) -> None:
    write_gguf(tmp_path / "m.gguf", tied)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file="m.gguf", dtype="float32")
    source = ModelSource(tmp_path / "m.gguf", "gguf", "m")
    hf = load_hf_config(source)
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "head_dim",
                "max_position_embeddings", "tie_word_embeddings"):  # fmt: skip
        assert hf.raw[key] == getattr(theirs.config, key), key
    assert hf.raw["rope_theta"] == theirs.config.rope_parameters["rope_theta"]
    assert np.float32(hf.raw["rms_norm_eps"]) == np.float32(theirs.config.rms_norm_eps)

    checkpoint = open_checkpoint(source, hf)
    compared = 0
    for name, tensor in theirs.state_dict().items():
        values = tensor.numpy()
        if name == "lm_head.weight" and tied:
            continue
        if values.ndim == 2:
            ours = checkpoint.packed(name.removesuffix(".weight"), *values.shape).dequantize()
        else:
            ours = checkpoint.vector(name, *values.shape)
        assert np.array_equal(ours, values), name
        compared += 1
    assert compared == 2 + 9 * LAYERS + (0 if tied else 1)
    load_weights(build_model(hf), checkpoint)


def test_the_default_model_against_the_gguf_package() -> None:
    """The whole file: every tensor of it is some layer's, and the numbers of all kinds are the package's."""
    source = resolve_model("smollm2-135m")
    hf = load_hf_config(source)
    model = build_model(hf)
    checkpoint = open_checkpoint(source, hf)
    report = load_weights(model, checkpoint)
    assert report.weights_bytes == checkpoint.weights_bytes
    assert report.fp16_bytes == 2 * 134_515_008
    tensors = {t.name: t for t in gguf.GGUFReader(source.path).tensors}
    for ours, theirs in {"model.layers.7.self_attn.v_proj": "blk.7.attn_v", "model.layers.29.mlp.down_proj": "blk.29.ffn_down",
                         "model.layers.0.self_attn.o_proj": "blk.0.attn_output"}.items():  # fmt: skip
        tensor = tensors[f"{theirs}.weight"]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(checkpoint.packed(ours, *expected.shape).dequantize(), expected)
    q = tensors["blk.3.attn_q.weight"]
    paired = gguf.quants.dequantize(q.data, q.tensor_type).reshape(9, 32, 2, 576)
    expected = np.concatenate([paired[:, :, 0], paired[:, :, 1]], axis=1).reshape(576, 576)
    assert np.array_equal(checkpoint.packed("model.layers.3.self_attn.q_proj", 576, 576).dequantize(), expected)
