"""ChatGLM2, ChatGLM3 and GLM-4 under the names of their own files: transformers' GLM with the same numbers, and an independent model in numpy.

The numpy model is written from the published configuration and description, and shares no code with ours.
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

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB, WIDTH, HEADS, GROUPS, HEAD, INNER, LAYERS, RATIO = 160, 64, 4, 2, 16, 96, 3, 3
CONFIG = {
    "architectures": ["ChatGLMModel"], "model_type": "chatglm", "auto_map": {"AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration"},
    "add_bias_linear": False, "add_qkv_bias": True, "apply_query_key_layer_scaling": True, "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0, "ffn_hidden_size": INNER, "hidden_size": WIDTH, "kv_channels": HEAD, "layernorm_epsilon": 1e-5,
    "multi_query_attention": True, "multi_query_group_num": GROUPS, "num_attention_heads": HEADS, "num_layers": LAYERS, "original_rope": True,
    "padded_vocab_size": VOCAB, "post_layer_norm": True, "rmsnorm": True, "rope_ratio": RATIO, "seq_length": 256, "torch_dtype": "float32",
    "tie_word_embeddings": False, "eos_token_id": 2,
}  # fmt: skip
IDS = np.random.default_rng(21).integers(0, VOCAB, 75).tolist()
BOUND = 2e-5  # of the largest logit: fp32 throughout, only the order of sums differs


def random_weights(bias_everywhere: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(22)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.12).astype(np.float32)

    def gain() -> np.ndarray:
        return (1 + 0.2 * rng.standard_normal(WIDTH)).astype(np.float32)

    qkv = (HEADS + 2 * GROUPS) * HEAD
    weights = {"transformer.embedding.word_embeddings.weight": matrix(VOCAB, WIDTH), "transformer.output_layer.weight": matrix(VOCAB, WIDTH)}
    weights["transformer.encoder.final_layernorm.weight"] = gain()
    for i in range(LAYERS):
        layer = {
            "input_layernorm.weight": gain(), "post_attention_layernorm.weight": gain(),
            "self_attention.query_key_value.weight": matrix(qkv, WIDTH), "self_attention.query_key_value.bias": matrix(qkv),
            "self_attention.dense.weight": matrix(WIDTH, HEADS * HEAD),
            "mlp.dense_h_to_4h.weight": matrix(2 * INNER, WIDTH), "mlp.dense_4h_to_h.weight": matrix(WIDTH, INNER),
        }  # fmt: skip
        if bias_everywhere:
            layer |= {"self_attention.dense.bias": matrix(WIDTH), "mlp.dense_h_to_4h.bias": matrix(2 * INNER), "mlp.dense_4h_to_h.bias": matrix(WIDTH)}
        weights |= {f"transformer.encoder.layers.{i}.{name}": values for name, values in layer.items()}
    return weights


class Original:
    """The model as its authors describe it, one token at a time with a cache, in float64."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self.weights = {name: values.astype(np.float64) for name, values in weights.items()}
        self.keys: list[list[np.ndarray]] = [[] for _ in range(LAYERS)]
        self.values: list[list[np.ndarray]] = [[] for _ in range(LAYERS)]

    def product(self, x: np.ndarray, name: str) -> np.ndarray:
        return self.weights[f"{name}.weight"] @ x + self.weights.get(f"{name}.bias", 0.0)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + 1e-5) * self.weights[f"{name}.weight"]

    def rotated(self, x: np.ndarray, position: int) -> np.ndarray:
        """Neighbouring columns of the first half of each head turn as one complex number; the second half stays."""
        turning = x[:, : HEAD // 2].reshape(len(x), -1, 2)
        rates = (10000.0 * RATIO) ** (-np.arange(0, HEAD // 2, 2) / (HEAD // 2))
        turned = (turning[..., 0] + 1j * turning[..., 1]) * np.exp(1j * position * rates)
        return np.concatenate([np.stack([turned.real, turned.imag], axis=-1).reshape(len(x), -1), x[:, HEAD // 2 :]], axis=1)

    def attention(self, x: np.ndarray, name: str, i: int, position: int) -> np.ndarray:
        qkv = self.product(x, f"{name}.query_key_value").reshape(-1, HEAD)
        q, k, v = qkv[:HEADS], qkv[HEADS : HEADS + GROUPS], qkv[HEADS + GROUPS :]
        self.keys[i].append(self.rotated(k, position))
        self.values[i].append(v)
        keys, values = (np.repeat(np.array(kept[i]), HEADS // GROUPS, axis=1) for kept in (self.keys, self.values))
        scores = np.einsum("hd,thd->ht", self.rotated(q, position), keys) / math.sqrt(HEAD)
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        mixed = np.einsum("ht,thd->hd", chances / chances.sum(axis=1, keepdims=True), values)
        return self.product(mixed.reshape(-1), f"{name}.dense")

    def mlp(self, x: np.ndarray, name: str) -> np.ndarray:
        gate, up = np.split(self.product(x, f"{name}.dense_h_to_4h"), 2)
        return self.product(gate / (1 + np.exp(-gate)) * up, f"{name}.dense_4h_to_h")

    def token(self, token_id: int) -> np.ndarray:
        position, x = len(self.keys[0]), self.weights["transformer.embedding.word_embeddings.weight"][token_id]
        for i in range(LAYERS):
            layer = f"transformer.encoder.layers.{i}"
            x = x + self.attention(self.norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attention", i, position)
            x = x + self.mlp(self.norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
        return self.product(self.norm(x, "transformer.encoder.final_layernorm"), "transformer.output_layer")


def glm_of(weights: dict[str, np.ndarray]) -> Any:
    """transformers' GLM, which has the same arithmetic under other names."""
    torch.set_num_threads(1)
    config = transformers.GlmConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=HEADS, head_dim=HEAD,
        num_key_value_heads=GROUPS, rms_norm_eps=1e-5, pad_token_id=0, rope_parameters=dict(rope_type="default", rope_theta=10000.0 * RATIO),
    )  # fmt: skip
    names = {
        "transformer.embedding.word_embeddings": "model.embed_tokens", "transformer.encoder.final_layernorm": "model.norm",
        "transformer.output_layer": "lm_head", "transformer.encoder.layers": "model.layers", "self_attention.dense": "self_attn.o_proj",
        "dense_h_to_4h": "gate_up_proj", "dense_4h_to_h": "down_proj",
    }  # fmt: skip
    state: dict[str, Any] = {}
    for name, values in weights.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        parts = np.split(values, [HEADS * HEAD, (HEADS + GROUPS) * HEAD]) if "query_key_value" in name else [values]
        for which, part in zip("qkv", parts, strict=False):
            state[name.replace("self_attention.query_key_value", f"self_attn.{which}_proj")] = torch.from_numpy(part.copy())
    model = transformers.GlmForCausalLM(config)
    model.load_state_dict(state)
    return model.eval().to(torch.float64)


@pytest.fixture(params=[False, True], ids=["biases of q, k, v", "biases everywhere"])
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, dict[str, np.ndarray]]:
    weights = random_weights(request.param)
    save_file(weights | {"transformer.rotary_pos_emb.inv_freq": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"add_bias_linear": request.param}))
    return tmp_path, weights


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_logits_and_greedy_tokens(checkpoint: tuple[Path, dict[str, np.ndarray]], serve: Any, backend: str) -> None:
    folder, weights = checkpoint
    original = Original(weights)
    theirs = np.array([original.token(i) for i in IDS])
    whole = None
    for chunk in (75, 7, 1):
        (ours,) = serve(folder, backend, longest=75).logits([IDS], chunk)
        assert np.abs(ours - theirs).max() < BOUND * np.abs(theirs).max(), chunk
        whole = ours if whole is None else whole
        assert backend == "reference" or np.array_equal(ours, whole)

    original, tokens = Original(weights), list(IDS[8:20])
    for i in range(12 + 23):
        logits = original.token(tokens[i])
        if i >= 11:
            tokens.append(int(logits.argmax()))
            assert np.diff(np.sort(logits)[-2:])[0] > 1e-3  # no order of sums bridges it
    assert serve(folder, backend, longest=60).greedy(IDS[8:20], 24) == tokens[12:36]


def test_transformers_agrees(tmp_path: Path, serve: Any) -> None:
    weights = random_weights(bias_everywhere=False)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with torch.no_grad():
        theirs = glm_of(weights)(torch.tensor([IDS])).logits[0].numpy()
    (ours,) = serve(tmp_path, "reference", longest=75).logits([IDS], 20)
    assert np.abs(ours - theirs).max() < BOUND * np.abs(theirs).max()


def test_batches(checkpoint: tuple[Path, dict[str, np.ndarray]], serve: Any) -> None:
    folder, _ = checkpoint
    batch = [IDS, IDS[30:50], IDS[5:6], IDS[40:57]]
    together = serve(folder, "cpu", longest=75, num_seqs=4).logits(batch, 7)
    for ids, ours in zip(batch, together, strict=True):
        (alone,) = serve(folder, "cpu", longest=75).logits([ids])
        assert np.array_equal(ours, alone)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position_encoding_2d": True}, "first ChatGLM-6B is not supported; ChatGLM2-6B and later are"),
        ({"inner_hidden_size": 16384}, "first ChatGLM-6B"),
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm = True is not supported for chatglm"),
        ({"rmsnorm": False}, "rmsnorm = False is not supported"),
        ({"post_layer_norm": False}, "post_layer_norm = False is not supported"),
        ({"multi_query_attention": False}, "multi_query_attention = False is not supported"),
        ({"multi_query_group_num": None}, "multi_query_group_num' is missing"),
        ({"pre_seq_len": 128}, "pre_seq_len = 128 is not supported"),
        ({"quantization_bit": 4}, "quantization_bit = 4 is not supported"),
    ],
)
def test_variants_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as e:
        build_model(HFConfig(CONFIG | change))
    assert "\n" not in str(e.value)


def test_the_page_of_models_says_what_it_has(what_it_has: Any) -> None:
    cases = tomllib.loads((Path(__file__).parent / "written_anew.toml").read_text())["case"]
    assert [set(case["shows"]) for case in cases if case["family"] == "chatglm"] == [what_it_has(build_model(HFConfig(CONFIG)))]
