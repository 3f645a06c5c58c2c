"""Needs transformers: random Llama checkpoints agree with it, logits and greedy tokens by value, on both backends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IDS = np.random.default_rng(0).integers(0, 320, 75).tolist()

SHAPES = {
    "grouped queries": dict(num_attention_heads=6, num_key_value_heads=2, hidden_size=96, intermediate_size=160),
    "one head per kv head": dict(num_attention_heads=4, num_key_value_heads=4, hidden_size=64, intermediate_size=96),
    "one kv head, wide heads, tied": dict(
        num_attention_heads=4, num_key_value_heads=1, hidden_size=128, intermediate_size=200, head_dim=64, tie_word_embeddings=True
    ),
    "biases": dict(
        num_attention_heads=4, num_key_value_heads=2, hidden_size=64, intermediate_size=104, attention_bias=True, mlp_bias=True
    ),
    "llama3 rope": dict(
        num_attention_heads=4, num_key_value_heads=2, hidden_size=64, intermediate_size=96,
        rope_parameters=dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                             original_max_position_embeddings=32),
    ),
    "linear rope": dict(
        num_attention_heads=4, num_key_value_heads=2, hidden_size=64, intermediate_size=96,
        rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0),
    ),
}  # fmt: skip


def checkpoint(folder: Path, dtype: str, **shape: object) -> tuple[Path, np.ndarray]:
    """A random checkpoint on disk and transformers' logits [T, V] for IDS."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(vocab_size=320, num_hidden_layers=3, max_position_embeddings=512, **shape)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # far from the tiny default initialisation: errors must show
            parameter.copy_(torch.randn_like(parameter) * (0.12 if parameter.ndim > 1 else 0.2) + (parameter.ndim == 1))
        model = model.to(getattr(torch, dtype))
        # The comparison is with exact arithmetic on the stored weights, not with another engine's rounding.
        expected = model.to(torch.float64)(torch.tensor([IDS])).logits[0].numpy()
        model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder, expected


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_agrees(tmp_path: Path, logits_of, shape: str, backend: str) -> None:
    folder, expected = checkpoint(tmp_path, "float32", **SHAPES[shape])
    logits = logits_of(folder, IDS, backend)
    # fp32 throughout: only the order of sums differs. Logits are of the order of 10.
    assert np.abs(logits - expected).max() < 2e-4 * np.abs(expected).max()
    assert (logits.argmax(1) == expected.argmax(1)).all()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_bf16_agrees(tmp_path: Path, logits_of, kv_dtype: str, backend: str) -> None:
    folder, expected = checkpoint(tmp_path, "bfloat16", **SHAPES["grouped queries"])
    logits = logits_of(folder, IDS, backend, kv_dtype=kv_dtype)
    # Activations are rounded to bf16 (8 bits) before each product, weights are exact.
    error = np.abs(logits - expected)
    assert error.max() < 0.06 * np.abs(expected).max()
    assert error.mean() < 0.012 * np.abs(expected).mean() + 0.01
    top = np.sort(expected, axis=1)
    clear = top[:, -1] - top[:, -2] > 4 * error.max(axis=1)
    assert clear.sum() > len(IDS) // 4
    assert (logits.argmax(1) == expected.argmax(1))[clear].all()


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_do_not_change_a_bit(tmp_path: Path, logits_of, dtype: str, chunk: int) -> None:
    folder, _ = checkpoint(tmp_path, dtype, **SHAPES["grouped queries"])
    whole = logits_of(folder, IDS, "cpu", kv_dtype=dtype)
    assert np.array_equal(whole, logits_of(folder, IDS, "cpu", chunk=chunk, kv_dtype=dtype))


def test_wrong_shape_is_named(tmp_path: Path, logits_of) -> None:
    folder, _ = checkpoint(tmp_path, "float32", **SHAPES["grouped queries"])
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 160', '"intermediate_size": 128'))
    with pytest.raises(ValueError, match=r"mlp\.gate_proj"):
        logits_of(folder, IDS, "cpu")
