"""What is in quantised folders, read without any of our code: bit by bit, by the descriptions of the formats."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import safetensors
from plain_models import save

DTYPES = {"F32": "<f4", "F16": "<f2", "I32": "<i4", "I64": "<i8", "I8": "i1", "BF16": "<u2"}


def read(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of the folder's files, bfloat16 widened to float32."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        for name, info in safetensors.deserialize(path.read_bytes()):
            values = np.frombuffer(bytes(info["data"]), DTYPES[info["dtype"]])
            if info["dtype"] == "BF16":
                values = (values.astype("<u4") << 16).view("<f4")
            assert name not in tensors
            tensors[name] = values.reshape(info["shape"])
    return tensors


def fields(words: np.ndarray, bits: int) -> np.ndarray:
    """int32 [..., n] -> [..., n * 32 / bits]: the numbers in each word, from its lowest bit."""
    ones = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    return ones.reshape(*words.shape[:-1], -1, bits) @ (1 << np.arange(bits))


def gptq(tensors: dict[str, np.ndarray], name: str, bits: int = 4) -> np.ndarray:
    """float64 [N, K]."""
    codes_NK = fields(tensors[f"{name}.qweight"].T, bits)
    zeros_GN = fields(tensors[f"{name}.qzeros"], bits) + 1
    groups_K = tensors[f"{name}.g_idx"]
    scales_GN = tensors[f"{name}.scales"].astype(np.float64)
    return (codes_NK - zeros_GN[groups_K].T) * scales_GN[groups_K].T


def awq(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """float64 [N, K]: the word's fields hold channels 0 2 4 6 1 3 5 7."""

    def in_order(words: np.ndarray) -> np.ndarray:
        octets = fields(words, 4).reshape(words.shape[0], -1, 8)
        return np.stack([octets[..., (0, 4, 1, 5, 2, 6, 3, 7)[channel]] for channel in range(8)], axis=-1).reshape(words.shape[0], -1)

    codes_KN, zeros_GN = in_order(tensors[f"{name}.qweight"]), in_order(tensors[f"{name}.qzeros"])
    groups_K = np.arange(len(codes_KN)) // (len(codes_KN) // len(zeros_GN))
    return ((codes_KN - zeros_GN[groups_K]) * tensors[f"{name}.scales"].astype(np.float64)[groups_K]).T


def compressed(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """float64 [N, K] of packed or plain 8-bit weights."""
    if f"{name}.weight_packed" in tensors:
        codes_NK = fields(tensors[f"{name}.weight_packed"], 8) - 128
        assert tensors[f"{name}.weight_shape"].tolist() == list(codes_NK.shape)
    else:
        codes_NK = tensors[f"{name}.weight"].astype(np.int64)
    scales_NG = tensors[f"{name}.weight_scale"].astype(np.float64)
    return codes_NK * np.repeat(scales_NG, codes_NK.shape[1] // scales_NG.shape[1], axis=1)


def matrices(folder: Path) -> dict[str, np.ndarray]:
    """All rounded matrices of the folder, float64 [N, K], by module; the format is what config.json says."""
    tensors = read(folder)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    ends = {"gptq": ".qweight", "awq": ".qweight", "compressed-tensors": ".weight_scale"}
    reader = {"gptq": gptq, "awq": awq, "compressed-tensors": compressed}[config["quant_method"]]
    end = ends[config["quant_method"]]
    return {name.removesuffix(end): reader(tensors, name.removesuffix(end)) for name in tensors if name.endswith(end)}


def as_plain(folder: Path, target: Path, turned: bool = False) -> Path:
    """A plain float32 checkpoint of the same numbers. turned: matrices are stored [K, N] there."""
    tensors, values = read(folder), matrices(folder)
    ends = (".qweight", ".qzeros", ".scales", ".g_idx", ".weight_packed", ".weight_scale", ".weight_shape")
    plain = {name: v for name, v in tensors.items() if not name.endswith(ends)}
    plain |= {f"{name}.weight": v.T if turned else v for name, v in values.items()}
    target.mkdir()
    save(target / "model.safetensors", plain, "F32")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    return target
