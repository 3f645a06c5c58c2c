"""Needs Python only. From files to a model's layers: merging, tying, sharing, biases, dtypes, row order, and what is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_writers import (
    GGML,
    LLAMA_CONFIG,
    Gguf,
    joined,
    llama_tensors,
    random_tensor,
    safetensors_bytes,
    safetensors_parts,
    tiny_llama,
)

from octavo.errors import ConfigError, ModelFileError
from octavo.loader.hf_config import load_hf_config
from octavo.loader.load import LoadReport, load_weights, open_checkpoint
from octavo.loader.resolve import ModelSource
from octavo.models import build_model
from octavo.ops.packed import PackedWeight, WeightKind


@dataclass
class Slot:
    names: tuple[str, ...]
    n_each: tuple[int, ...]
    k: int
    bias_names: tuple[str, ...] | None = None
    weights: tuple[PackedWeight, ...] = ()
    bias: Any = None
    transposed: bool = False


@dataclass
class Vec:
    name: str
    size: int
    value: Any = None


@dataclass
class Slots:
    """A model that has the given layers and nothing else."""

    all_linears: list[Slot] = field(default_factory=list)
    all_vectors: list[Vec] = field(default_factory=list)
    left_out: tuple[str, ...] = ()

    def linears(self) -> list[Slot]:
        return self.all_linears

    def vectors(self) -> list[Vec]:
        return self.all_vectors


def folder_source(folder: Path, tensors: dict[str, tuple[str, np.ndarray]], **config: object) -> ModelSource:
    (folder / "model.safetensors").write_bytes(safetensors_bytes(*safetensors_parts(tensors)))
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG | config))
    return ModelSource(folder, "safetensors", "x")


def gguf_source(folder: Path, model: Gguf) -> ModelSource:
    (folder / "m.gguf").write_bytes(joined(model.fields()))
    return ModelSource(folder / "m.gguf", "gguf", "x")


def loaded(source: ModelSource, model: Any, **options: Any) -> LoadReport:
    return load_weights(model, open_checkpoint(source, load_hf_config(source), **options))


def values(slot: Slot) -> np.ndarray:
    return np.concatenate([weight.dequantize() for weight in slot.weights])


MATRICES = {"a.weight": ("F32", np.arange(12, dtype=np.float32).reshape(3, 4)), "b.weight": ("F32", -np.ones((2, 4), np.float32)),
            "c.weight": ("F16", np.full((1, 4), 0.5, np.float16))}  # fmt: skip


def test_neighbours_of_one_kind_are_merged_in_order(tmp_path: Path) -> None:
    slot = Slot(("b", "a", "c"), (2, 3, 1), 4)
    loaded(folder_source(tmp_path, MATRICES), Slots([slot]))
    assert [(weight.kind, weight.n) for weight in slot.weights] == [(WeightKind.F32, 5), (WeightKind.F16, 1)]
    expected = np.concatenate([MATRICES[name][1].astype(np.float32) for name in ("b.weight", "a.weight", "c.weight")])
    assert np.array_equal(values(slot), expected)
    assert slot.bias is None


def test_as_stored_weights_are_views(tmp_path: Path) -> None:
    slot = Slot(("a",), (3,), 4)
    loaded(folder_source(tmp_path, {"a.weight": MATRICES["a.weight"]}), Slots([slot]))
    assert not slot.weights[0].parts[0].codes.flags.owndata
    assert not slot.weights[0].parts[0].codes.flags.writeable


def test_a_tied_name_is_packed_once(tmp_path: Path) -> None:
    embed, head = Slot(("a",), (3,), 4), Slot(("a",), (3,), 4)
    report = loaded(folder_source(tmp_path, {"a.weight": MATRICES["a.weight"]}), Slots([embed, head]), dtype="bfloat16")
    assert embed.weights[0] is head.weights[0]
    assert report == LoadReport(weights_bytes=24, fp16_bytes=24)


def test_biases_and_vectors(tmp_path: Path) -> None:
    tensors = MATRICES | {"a.bias": ("F16", np.arange(3).astype(np.float16)), "b.bias": ("BF16", np.full(2, 0x3F80, np.uint16)),
                          "norm.weight": ("BF16", np.full(4, 0x4000, np.uint16))}  # fmt: skip
    del tensors["c.weight"]
    slot, norm = Slot(("a", "b"), (3, 2), 4, ("a.bias", "b.bias")), Vec("norm.weight", 4)
    report = loaded(folder_source(tmp_path, tensors), Slots([slot], [norm]))
    assert slot.bias.dtype == norm.value.dtype == np.float32
    assert slot.bias.tolist() == [0, 1, 2, 1, 1]
    assert norm.value.tolist() == [2, 2, 2, 2]
    assert report == LoadReport(weights_bytes=20 * 4 + 9 * 4, fp16_bytes=2 * 29)


@pytest.mark.parametrize(
    ("dtype", "kinds"),
    [("auto", {"F32", "F16", "BF16"}), ("float32", {"F32"}), ("bfloat16", {"BF16"}), ("float16", {"F16"})],
)
def test_dtype_of_unquantised_weights(tmp_path: Path, dtype: str, kinds: set[str]) -> None:
    source = folder_source(tmp_path, llama_tensors())
    model = build_model(load_hf_config(source))
    loaded(source, model, dtype=dtype)
    assert {weight.kind.name for linear in model.linears() for weight in linear.weights} == kinds


def test_wrong_shape_and_dtype_name_file_and_tensor(tmp_path: Path) -> None:
    tensors = MATRICES | {"i.weight": ("I8", np.zeros((3, 4), np.int8)), "v.weight": ("I64", np.zeros(4, np.int64))}
    checkpoint = open_checkpoint(source := folder_source(tmp_path, tensors), load_hf_config(source))
    with pytest.raises(ModelFileError, match=r"model.safetensors: tensor 'a.weight': has shape \[3, 4\], .* asks for \[4, 3\]"):
        checkpoint.packed("a", 4, 3)
    with pytest.raises(ModelFileError, match=r"model.safetensors: tensor 'i.weight': dtype I8 is not supported"):
        checkpoint.packed("i", 3, 4)
    with pytest.raises(ModelFileError, match=r"tensor 'v.weight': dtype I64"):
        checkpoint.vector("v.weight", 4)
    with pytest.raises(ModelFileError, match=r"tensor 'a.weight': has shape \[3, 4\]"):
        checkpoint.vector("a.weight", 12)
    with pytest.raises(ModelFileError, match=r"tensor 'absent.weight' is missing"):
        checkpoint.packed("absent", 3, 4)
    assert checkpoint.has("a.weight")
    assert not checkpoint.has("a")


def test_unused_tensors_are_refused_but_for_harmless_ones(tmp_path: Path) -> None:
    harmless = {"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", np.ones(16, np.float32)),
                "lm_head.weight": llama_tensors()["model.embed_tokens.weight"]}  # fmt: skip
    source = folder_source(tmp_path, llama_tensors() | harmless)
    loaded(source, build_model(load_hf_config(source)))

    tensors = llama_tensors() | {f"model.layers.0.self_attn.{p}_proj.bias": ("F32", np.ones(64, np.float32)) for p in "qo"}
    source = folder_source(tmp_path, tensors)
    with pytest.raises(ModelFileError, match=r"tensor 'model.layers.0.self_attn.q_proj.bias' and 1 more: .* no use"):
        loaded(source, build_model(load_hf_config(source)))


def test_quantization_must_agree_with_the_files(tmp_path: Path) -> None:
    plain = folder_source(tmp_path, llama_tensors())
    quantised = gguf_source(tmp_path, tiny_llama())
    assert open_checkpoint(plain, load_hf_config(plain), quantization="none").format_name == "none"
    assert open_checkpoint(quantised, load_hf_config(quantised), quantization="gguf").format_name == "gguf"
    with pytest.raises(ConfigError, match="quantization = 'gguf': .* say 'none'; supported: gguf, none"):
        open_checkpoint(plain, load_hf_config(plain), quantization="gguf")
    with pytest.raises(ConfigError, match="quantization = 'awq': .* say 'gguf'; supported: gguf, none"):
        open_checkpoint(quantised, load_hf_config(quantised), quantization="awq")


def test_an_unsupported_method_is_named(tmp_path: Path) -> None:
    source = folder_source(tmp_path, llama_tensors(), quantization_config={"quant_method": "exl3", "bits": 4})
    with pytest.raises(ConfigError, match=r"config.json: quantization_config: quant_method = 'exl3': not supported; supported: gguf, none, gptq, awq"):
        open_checkpoint(source, load_hf_config(source))
    source = folder_source(tmp_path, llama_tensors(), quantization_config={"bits": 4})
    with pytest.raises(ConfigError, match=r"config.json: quantization_config: key 'quant_method' is missing"):
        open_checkpoint(source, load_hf_config(source))


# GGUF


def paired_rows(matrix: np.ndarray, heads: int) -> np.ndarray:
    """What the converter does to q and k: row i of a head's first half and row i of its second half become neighbours."""
    rows = matrix.reshape(heads, -1, *matrix.shape[1:])
    half = rows.shape[1] // 2
    out = np.empty_like(rows)
    for i in range(half):
        out[:, 2 * i], out[:, 2 * i + 1] = rows[:, i], rows[:, half + i]
    return out.reshape(matrix.shape)


def with_tensor(model: Gguf, name: str, array: np.ndarray) -> Gguf:
    new = (name, array.shape[::-1], 0, array.astype(np.float32).tobytes())
    return Gguf(model.entries, [t for t in model.tensors if t[0] != name] + [new])


@pytest.mark.parametrize(("name", "module", "heads", "rows"), [("attn_q", "q_proj", 2, 64), ("attn_k", "k_proj", 1, 32)])
def test_rows_of_q_and_k_are_put_back(tmp_path: Path, rng: np.random.Generator, name: str, module: str, heads: int, rows: int) -> None:
    matrix, bias = rng.standard_normal((rows, 64), np.float32), rng.standard_normal(rows, np.float32)
    model = with_tensor(tiny_llama(), f"blk.0.{name}.weight", paired_rows(matrix, heads))
    model = with_tensor(model, f"blk.0.{name}.bias", paired_rows(bias, heads))
    source = gguf_source(tmp_path, model)
    checkpoint = open_checkpoint(source, load_hf_config(source))
    assert np.array_equal(checkpoint.packed(f"model.layers.0.self_attn.{module}", rows, 64).dequantize(), matrix)
    assert np.array_equal(checkpoint.vector(f"model.layers.0.self_attn.{module}.bias", rows), bias)


def test_rows_that_heads_do_not_divide_are_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    model = with_tensor(tiny_llama(), "blk.0.attn_k.weight", rng.standard_normal((33, 64), np.float32))
    source = gguf_source(tmp_path, model)
    with pytest.raises(ModelFileError, match=r"m.gguf: tensor 'blk.0.attn_k.weight': has 33 rows, .* 1 heads of 32"):
        loaded(source, build_model(load_hf_config(source)))


def test_other_rows_stay(tmp_path: Path) -> None:
    source = gguf_source(tmp_path, model := tiny_llama())
    checkpoint = open_checkpoint(source, load_hf_config(source))
    stored = {name: data for name, _, _, data in model.tensors}
    down = checkpoint.packed("model.layers.0.mlp.down_proj", 64, 96)
    assert down.dequantize().tobytes() == stored["blk.0.ffn_down.weight"]
    assert checkpoint.vector("model.norm.weight", 64).tobytes() == stored["output_norm.weight"]
    embed = checkpoint.packed("model.embed_tokens", 40, 64)
    assert (embed.kind, embed.group) == (WeightKind.W8, 32)
    assert checkpoint.weights_bytes == sum(len(data) for data in stored.values())


def test_messages_speak_of_the_files_own_names(tmp_path: Path) -> None:
    for missing in ("blk.0.ffn_up.weight", "output_norm.weight", "token_embd.weight", "blk.0.attn_norm.weight"):
        model = tiny_llama()
        model.tensors = [t for t in model.tensors if t[0] != missing]
        source = gguf_source(tmp_path, model)
        with pytest.raises(ModelFileError, match=f"m.gguf: tensor '{missing}' is missing"):
            loaded(source, build_model(load_hf_config(source)))


@pytest.mark.parametrize("name", ["blk.00.attn_q.weight", "blk.1.attn_q.weight", "blk.0.attn_q.scale", "blk.0.unknown.weight", "x", "output.bias.weight"])
def test_unknown_names_are_refused(tmp_path: Path, rng: np.random.Generator, name: str) -> None:
    model = tiny_llama()
    model.tensors.append(random_tensor(rng, name, (64,), 0))
    source = gguf_source(tmp_path, model)
    with pytest.raises(ModelFileError, match="has no use for it"):
        loaded(source, build_model(load_hf_config(source)))


@pytest.mark.parametrize("kind", GGML, ids=[name for name, _, _ in GGML.values()])
def test_every_type_loads(tmp_path: Path, rng: np.random.Generator, kind: int) -> None:
    wide = 4 if GGML[kind][1] == 256 else 1
    sizes = {"llama.embedding_length": (4, 64 * wide), "llama.feed_forward_length": (4, 96 * 8 if wide > 1 else 96)}
    model = tiny_llama(**sizes)
    model.tensors = [
        random_tensor(rng, name, tuple({64: 64 * wide, 32: 32 * wide, 96: sizes["llama.feed_forward_length"][1]}.get(n, n) for n in dims), kind if len(dims) > 1 else 0)
        for name, dims, _, _ in model.tensors
    ]
    source = gguf_source(tmp_path, model)
    built = build_model(load_hf_config(source))
    report = loaded(source, built)
    assert all(np.isfinite(weight.dequantize()).all() for linear in built.linears() for weight in linear.weights)
    assert report.fp16_bytes == 2 * sum(int(np.prod(dims)) for _, dims, _, _ in model.tensors)


def test_an_unsupported_type_is_named(tmp_path: Path, rng: np.random.Generator) -> None:
    model = tiny_llama()
    rows = 40
    model.tensors[0] = ("token_embd.weight", (64, rows), 9, bytes(rows * 2 * 40))
    source = gguf_source(tmp_path, model)
    with pytest.raises(ModelFileError, match=r"m.gguf: tensor 'token_embd.weight': type Q8_1 is not supported; supported: F32, F16, BF16, Q4_0"):
        loaded(source, build_model(load_hf_config(source)))
