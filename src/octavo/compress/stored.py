"""Writes safetensors: layout of the files, names of shards, and nothing half-written under its final name. Knows no model and no format."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.loader.resolve import INDEX
from octavo.ops.packed import f32_to_bf16
from octavo.quantization import StoredTensor

MOST_SHARD_BYTES = 5 << 30
WORDS = {"int32": "I32", "int64": "I64", "int8": "I8", "uint8": "U8", "float16": "F16", "float32": "F32"}
ITEM_BYTES = {"I64": 8, "F64": 8, "I32": 4, "F32": 4, "F16": 2, "BF16": 2}


def tensor(name: str, array: NDArray[Any]) -> StoredTensor:
    """An array of whole numbers or floats, as a file will hold it."""
    whole = np.ascontiguousarray(array)
    return StoredTensor("", name, WORDS[whole.dtype.name], whole.shape, whole.reshape(-1).view(np.uint8))


def floats(name: str, values: NDArray[np.float32], dtype: str) -> StoredTensor:
    """Numbers in the dtype that a file calls F32, F16 or BF16."""
    if dtype == "BF16":
        codes = f32_to_bf16(values)
        return StoredTensor("", name, dtype, codes.shape, np.ascontiguousarray(codes).reshape(-1).view(np.uint8))
    return tensor(name, values.astype(np.float16 if dtype == "F16" else np.float32))


def write_atomically(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """The file, whole and on the disk, or not at all."""
    part = path.with_name(path.name + ".tmp")
    with part.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, [(json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()])


def write_tensors(path: Path, tensors: Sequence[StoredTensor]) -> None:
    """One safetensors file. Tensors of wide numbers come first, so that all begin at multiples of their width."""
    ordered = sorted(tensors, key=lambda t: -ITEM_BYTES.get(t.dtype, 1))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for one in ordered:
        header[one.name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [start, start + one.data.nbytes]}
        start += one.data.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_atomically(path, [len(text).to_bytes(8, "little"), text, *(one.data.data for one in ordered)])


def write_model(folder: Path, tensors: Sequence[StoredTensor], most_bytes: int = MOST_SHARD_BYTES) -> None:
    """All tensors of a model: model.safetensors, or numbered shards and their index."""
    shards: list[list[StoredTensor]] = [[]]
    size = 0
    for one in tensors:
        if shards[-1] and size + one.data.nbytes > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append(one)
        size += one.data.nbytes
    if len(shards) == 1:
        write_tensors(folder / "model.safetensors", shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_tensors(folder / name, shard)
        weight_map |= {one.name: name for one in shard}
    total = sum(one.data.nbytes for one in tensors)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
