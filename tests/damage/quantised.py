"""The tiny model with its matrices quantised, in the layouts of GPTQ, AWQ, compressed-tensors and FP8. Undamaged, and written from the layouts alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import numpy as np
from file_writers import as_bf16, llama_tensors, safetensors_bytes, safetensors_parts
from healthy import CONFIG, PLAIN_FORMS, Content, as_json, companions

Tensors = dict[str, tuple[str, np.ndarray]]
GROUP = 32
Q = "model.layers.0.self_attn.q_proj"


def matrices() -> list[tuple[str, int, int]]:
    """Name, channels and inputs of all linear layers."""
    return [(name.removesuffix(".weight"), *array.shape) for name, (_, array) in llama_tensors().items() if "_proj" in name]


def others() -> Tensors:
    return {name: entry for name, entry in llama_tensors().items() if "_proj" not in name}


def nibbles(codes: np.ndarray, axis: int) -> np.ndarray:
    """Codes 0..15 packed eight to an int32 along an axis, the first lowest."""
    moved = np.moveaxis(codes, axis, -1).astype(np.uint32)
    runs = moved.reshape(*moved.shape[:-1], -1, 8)
    packed = np.bitwise_or.reduce(runs << (4 * np.arange(8, dtype=np.uint32)), axis=-1).astype(np.uint32).view(np.int32)
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis))


def scales(rng: np.random.Generator, *shape: int) -> tuple[str, np.ndarray]:
    return "F16", rng.uniform(0.001, 0.02, shape).astype(np.float16)


def gptq() -> Tensors:
    rng, tensors = np.random.default_rng(1), others()
    for name, n, k in matrices():
        tensors[f"{name}.qweight"] = ("I32", nibbles(rng.integers(0, 16, (k, n)), 0))
        tensors[f"{name}.qzeros"] = ("I32", nibbles(np.full((k // GROUP, n), 7), 1))
        tensors[f"{name}.scales"] = scales(rng, k // GROUP, n)
        tensors[f"{name}.g_idx"] = ("I32", (np.arange(k) // GROUP).astype(np.int32))
    return tensors


def awq() -> Tensors:
    rng, tensors = np.random.default_rng(2), others()
    for name, n, k in matrices():
        tensors[f"{name}.qweight"] = ("I32", nibbles(rng.integers(0, 16, (k, n)), 1))
        tensors[f"{name}.qzeros"] = ("I32", nibbles(rng.integers(0, 16, (k // GROUP, n)), 1))
        tensors[f"{name}.scales"] = scales(rng, k // GROUP, n)
    return tensors


def packed() -> Tensors:
    rng, tensors = np.random.default_rng(3), others()
    for name, n, k in matrices():
        tensors[f"{name}.weight_packed"] = ("I32", nibbles(rng.integers(0, 16, (n, k)), 1))
        tensors[f"{name}.weight_scale"] = scales(rng, n, k // GROUP)
        tensors[f"{name}.weight_shape"] = ("I64", np.array([n, k], np.int64))
    return tensors


def integers() -> Tensors:
    rng, tensors = np.random.default_rng(4), others()
    for name, n, k in matrices():
        tensors[f"{name}.weight"] = ("I8", rng.integers(-127, 128, (n, k), np.int8))
        tensors[f"{name}.weight_scale"] = ("BF16", as_bf16(rng.uniform(0.001, 0.02, (n, 1)).astype(np.float32)))
    return tensors


def floats() -> Tensors:
    rng, tensors = np.random.default_rng(5), others()
    for name, n, k in matrices():
        codes = rng.integers(0, 256, (n, k), np.uint8)
        tensors[f"{name}.weight"] = ("F8_E4M3", np.where(codes & 0x7F == 0x7F, codes & 0x80, codes))  # no NaN
        tensors[f"{name}.weight_scale_inv"] = ("F32", rng.uniform(0.001, 0.02, (-(-n // 32), -(-k // 32))).astype(np.float32))
    return tensors


def scheme(layout: str, **weights: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
W4A16 = scheme("pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP)
W8A8 = scheme("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel")
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}

FORMS: Mapping[str, tuple[dict[str, object], Callable[[], Tensors]]] = MappingProxyType(
    {"gptq": (GPTQ, gptq), "awq": (AWQ, awq), "w4a16": (W4A16, packed), "w8a8": (W8A8, integers), "fp8": (FP8, floats)}
)


def files_of(quantization: object, tensors: Tensors) -> dict[str, Content]:
    config = dict(CONFIG) if quantization is None else {**CONFIG, "quantization_config": quantization}
    return {**companions(), "model.safetensors": safetensors_bytes(*safetensors_parts(tensors)), "config.json": as_json(config)}


def quantised_files(form: str) -> dict[str, Content]:
    quantization, tensors = FORMS[form]
    return files_of(quantization, tensors())


HEALTHY: Mapping[str, tuple[Callable[[], dict[str, Content]], str]] = MappingProxyType(
    {**PLAIN_FORMS, **{form: (partial(quantised_files, form), "") for form in FORMS}}
)
