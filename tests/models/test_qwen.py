"""Qwen of 2023, which transformers does not have: an independent model in numpy, written from the published configuration and description.

It decodes token by token with a cache of keys and values, in float64, and shares no code with ours.
"""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.models import build_model
from octavo.models.qwen import Stepped

TRAINED, VOCAB, WIDTH, HEADS, HEAD, INNER, LAYERS = 16, 160, 64, 4, 16, 96, 3
CONFIG = {
    "architectures": ["QWenLMHeadModel"], "model_type": "qwen", "auto_map": {"AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel"},
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "kv_channels": HEAD, "num_hidden_layers": LAYERS, "intermediate_size": 2 * INNER,
    "layer_norm_epsilon": 1e-6, "max_position_embeddings": 256, "seq_length": TRAINED, "rotary_emb_base": 10000, "rotary_pct": 1.0,
    "use_dynamic_ntk": True, "use_logn_attn": True, "no_bias": True, "scale_attn_weights": True, "tie_word_embeddings": False,
    "vocab_size": VOCAB, "torch_dtype": "float32",
}  # fmt: skip
IDS = np.random.default_rng(11).integers(0, VOCAB, 75).tolist()
BOUND = 2e-5  # of the largest logit: fp32 throughout, only the order of sums differs


def random_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(12)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.12).astype(np.float32)

    def gain() -> np.ndarray:
        return (1 + 0.2 * rng.standard_normal(WIDTH)).astype(np.float32)

    weights = {"transformer.wte.weight": matrix(VOCAB, WIDTH), "transformer.ln_f.weight": gain(), "lm_head.weight": matrix(VOCAB, WIDTH)}
    for i in range(LAYERS):
        layer = {
            "ln_1.weight": gain(), "ln_2.weight": gain(), "attn.c_attn.weight": matrix(3 * WIDTH, WIDTH), "attn.c_attn.bias": matrix(3 * WIDTH),
            "attn.c_proj.weight": matrix(WIDTH, WIDTH), "mlp.w1.weight": matrix(INNER, WIDTH), "mlp.w2.weight": matrix(INNER, WIDTH),
            "mlp.c_proj.weight": matrix(WIDTH, INNER),
        }  # fmt: skip
        weights |= {f"transformer.h.{i}.{name}": values for name, values in layer.items()}
    return weights


class Original:
    """The model as its authors describe it, one token at a time. Keys are kept as they were turned when they came."""

    def __init__(self, weights: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        self.weights = {name: values.astype(np.float64) for name, values in weights.items()}
        self.config = config
        self.keys: list[list[np.ndarray]] = [[] for _ in range(LAYERS)]
        self.values: list[list[np.ndarray]] = [[] for _ in range(LAYERS)]

    def inverse_frequencies(self, length: int) -> np.ndarray:
        base = self.config["rotary_emb_base"]
        if self.config["use_dynamic_ntk"]:
            context_value = math.log(length / self.config["seq_length"], 2) + 1
            ntk_alpha = max(2 ** math.ceil(context_value) - 1, 1)
            base = base * ntk_alpha ** (HEAD / (HEAD - 2))
        return 1.0 / (base ** (np.arange(0, HEAD, 2) / HEAD))

    def rotated(self, x: np.ndarray, position: int) -> np.ndarray:
        """x [heads, head]: turned by halves."""
        angles = np.tile(position * self.inverse_frequencies(position + 1), 2)
        first, second = np.split(x, 2, axis=1)
        return x * np.cos(angles) + np.concatenate([-second, first], axis=1) * np.sin(angles)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + self.config["layer_norm_epsilon"]) * self.weights[name]

    def attention(self, x: np.ndarray, i: int, position: int) -> np.ndarray:
        prefix = f"transformer.h.{i}.attn."
        q, k, v = np.split(self.weights[prefix + "c_attn.weight"] @ x + self.weights[prefix + "c_attn.bias"], 3)
        query = self.rotated(q.reshape(HEADS, HEAD), position)
        length, trained = position + 1, self.config["seq_length"]
        if self.config["use_logn_attn"] and length > trained:
            query = query * math.log(length, trained)
        self.keys[i].append(self.rotated(k.reshape(HEADS, HEAD), position))
        self.values[i].append(v.reshape(HEADS, HEAD))
        scores = np.einsum("hd,thd->ht", query, np.array(self.keys[i])) / math.sqrt(HEAD)
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        mixed = np.einsum("ht,thd->hd", chances, np.array(self.values[i]))
        return self.weights[prefix + "c_proj.weight"] @ mixed.reshape(-1)

    def mlp(self, x: np.ndarray, i: int) -> np.ndarray:
        w1, w2, out = (self.weights[f"transformer.h.{i}.mlp.{name}.weight"] for name in ("w1", "w2", "c_proj"))
        gate = w2 @ x
        return out @ ((w1 @ x) * (gate / (1 + np.exp(-gate))))

    def token(self, token_id: int) -> np.ndarray:
        position, x = len(self.keys[0]), self.weights["transformer.wte.weight"][token_id]
        for i in range(LAYERS):
            x = x + self.attention(self.norm(x, f"transformer.h.{i}.ln_1.weight"), i, position)
            x = x + self.mlp(self.norm(x, f"transformer.h.{i}.ln_2.weight"), i)
        return self.weights["lm_head.weight"] @ self.norm(x, "transformer.ln_f.weight")


KINDS = {
    "both": {},
    "neither": {"use_dynamic_ntk": False, "use_logn_attn": False},
    "ntk": {"use_logn_attn": False},
    "logn": {"use_dynamic_ntk": False},
}


@pytest.fixture
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, dict[str, Any], dict[str, np.ndarray]]:
    config = CONFIG | KINDS[request.param]
    weights = random_weights()
    save_file(weights | {"transformer.rotary_emb.inv_freq": np.ones(8, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, config, weights


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("checkpoint", KINDS, indirect=True)
def test_logits_and_greedy_tokens(checkpoint: Any, serve: Any, backend: str) -> None:
    """75 tokens where 16 were trained: alpha goes from 1 by 3 and 7 to 15."""
    folder, config, weights = checkpoint
    original = Original(weights, config)
    theirs = np.array([original.token(i) for i in IDS])
    whole = None
    for chunk in (75, 7, 1):
        (ours,) = serve(folder, backend, longest=75).logits([IDS], chunk)
        assert np.abs(ours - theirs).max() < BOUND * np.abs(theirs).max(), chunk
        whole = ours if whole is None else whole
        assert backend == "reference" or np.array_equal(ours, whole)

    original, expected, margins = Original(weights, config), list(IDS[:12]), []
    for i in range(12 + 24):
        logits = original.token(expected[i])
        if i >= 11:
            expected.append(int(logits.argmax()))
            margins.append(float(np.diff(np.sort(logits)[-2:])[0]))
    assert serve(folder, backend, longest=60).greedy(IDS[:12], 24) == expected[12:36]
    assert min(margins[:24]) > 1e-3  # no order of sums bridges it


@pytest.mark.parametrize("checkpoint", ["both"], indirect=True)
def test_batches(checkpoint: Any, serve: Any) -> None:
    """On the kernels each sequence has the bits that it has alone, on either side of the trained length."""
    folder, _, _ = checkpoint
    batch = [IDS, IDS[30:50], IDS[5:6], IDS[40:57]]
    together = serve(folder, "cpu", longest=75, num_seqs=4).logits(batch, 7)
    for ids, ours in zip(batch, together, strict=True):
        (alone,) = serve(folder, "cpu", longest=75).logits([ids])
        assert np.array_equal(ours, alone)


@pytest.mark.parametrize("checkpoint", ["both"], indirect=True)
@pytest.mark.parametrize("key", ["use_dynamic_ntk", "use_logn_attn"])
def test_without_either_it_shows(checkpoint: Any, serve: Any, key: str) -> None:
    folder, config, weights = checkpoint
    original = Original(weights, config | {key: False})
    other = np.array([original.token(i) for i in IDS])
    (ours,) = serve(folder, "reference", longest=75).logits([IDS])
    error = np.abs(ours - other).max(axis=1) / np.abs(other).max()
    assert error[:TRAINED].max() < BOUND
    assert error[-20:].max() > 20 * BOUND


def test_theta_grows_in_steps() -> None:
    """Frequencies change where the length passes a doubling of the trained one, and the first never does."""
    frequencies = Stepped(trained=16).frequencies(10000.0, 16, 140)
    changes = [p + 1 for p in range(1, 140) if not np.array_equal(frequencies[p], frequencies[p - 1])]
    assert changes == [17, 33, 65, 129]
    assert (frequencies[:, 0] == 1).all()
    slowest = frequencies[[0, 20, 40, 70, 139], -1] * 10000.0 ** (14 / 16)
    assert np.allclose(1 / slowest, [1, 3, 7, 15, 31], rtol=1e-4)  # the last exponent is 14 / 16, and alpha's power 16 / 14


def test_biases_and_refusals() -> None:
    model = build_model(HFConfig(CONFIG | {"no_bias": False}))
    assert all(linear.bias_names is not None for linear in model.blocks[0].linears())
    assert [linear.bias_names is not None for linear in build_model(HFConfig(CONFIG)).blocks[0].linears()] == [True, False, False, False]
    with pytest.raises(ConfigError, match="rotary_pct below 1"):
        build_model(HFConfig(CONFIG | {"rotary_pct": 0.5}))


def test_the_page_of_models_says_what_it_has(what_it_has: Any) -> None:
    cases = tomllib.loads((Path(__file__).parent / "written_anew.toml").read_text())["case"]
    assert [set(case["shows"]) for case in cases if case["family"] == "qwen"] == [what_it_has(build_model(HFConfig(CONFIG)))]
