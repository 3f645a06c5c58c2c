"""Tensors of safetensors files, single or sharded, as views into their mappings.

The header is read here and not by the `safetensors` package, for two reasons: its numpy side has no bfloat16, so that the commonest
checkpoints could not be viewed without a copy; and a file's fault should name file and tensor in one line.

Layout: 8 bytes of header length, JSON header {name: {dtype, shape, data_offsets}}, data without gaps or overlaps.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from octavo.errors import ModelFileError
from octavo.gguf_file import map_file, shown
from octavo.json_file import parse_json, read_json
from octavo.loader.resolve import INDEX
from octavo.quantization import StoredTensor

# The format allows 100 MB; the largest models in use need 20 KB a shard and a few MB in one file, and Python's objects take ten times the text.
MOST_HEADER_BYTES = 32 << 20
MOST_INDEX_BYTES = 32 << 20
MOST_DIMS = 8
MOST_NAME_BYTES = 255
BITS = MappingProxyType(
    {"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64, "F16": 16, "BF16": 16, "F32": 32}
    | {"F64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is: `start` and `end` count from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """One mapped file. Raises ModelFileError naming file and tensor for anything that does not fit together."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.buffer = map_file(path)
        self.places: Mapping[str, Place] = MappingProxyType(read_places(path, self.buffer))
        self.buffer.madvise(mmap.MADV_WILLNEED)  # from a disk in large pieces, while we go on

    def get(self, name: str) -> StoredTensor:
        place = self.places[name]
        data = np.frombuffer(self.buffer, np.uint8, place.end - place.start, place.start) if place.end > place.start else np.empty(0, np.uint8)
        return StoredTensor(str(self.path), name, place.dtype, place.shape, data)


def read_places(path: Path, buffer: mmap.mmap) -> dict[str, Place]:
    size = len(buffer)
    if size < 8:
        raise ModelFileError(f"{path}: has {size} bytes, too few for a safetensors header")
    length = int.from_bytes(buffer[:8], "little")
    if length > size - 8:
        raise ModelFileError(f"{path}: header: its length {length} exceeds the file's {size} bytes")
    if length > MOST_HEADER_BYTES:
        raise ModelFileError(f"{path}: header: its length {length} exceeds {MOST_HEADER_BYTES} bytes")
    header = parse_json(buffer[8 : 8 + length], f"{path}: header")
    header.pop("__metadata__", None)
    places = {name: read_place(path, name, info, 8 + length, size) for name, info in header.items()}
    check_tiling(path, places, 8 + length, size)
    return places


def read_place(path: Path, name: str, info: Any, data_start: int, size: int) -> Place:
    def error(text: str) -> ModelFileError:
        return ModelFileError(f"{path}: tensor {shown(name)}: {text}")

    if not isinstance(info, dict) or set(info) != {"dtype", "shape", "data_offsets"}:
        raise error("must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise error(f"dtype {shown(str(dtype))} is unknown")
    if not is_sizes(shape) or len(shape) > MOST_DIMS:
        raise error(f"shape must be a list of at most {MOST_DIMS} sizes")
    if not is_sizes(offsets) or len(offsets) != 2:
        raise error("data_offsets must be two positions")
    begin, end = offsets
    if not begin <= end <= size - data_start:
        raise error(f"data_offsets {begin}..{end} exceed the {size - data_start} bytes of data")
    bits = BITS[dtype]
    for n in shape:
        bits *= n
    if bits != (end - begin) * 8:
        raise error(f"{dtype} of shape {shape} takes {bits / 8:g} bytes, but data_offsets span {end - begin}")
    return Place(dtype, tuple(shape), data_start + begin, data_start + end)


def is_sizes(value: Any) -> bool:
    """Whether it is a list of whole numbers that a size can be. True and 1.0 are numbers to Python, but not to other readers."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 48 for n in value)


def check_tiling(path: Path, places: dict[str, Place], start: int, size: int) -> None:
    """Tensors must cover the data exactly: otherwise some offset is not what the writer meant."""
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].end)):
        if place.start != start:
            fault = "overlaps the tensor before it" if place.start < start else "leaves a gap before it"
            raise ModelFileError(f"{path}: tensor {shown(name)}: {fault}")
        start = place.end
    if start != size:
        raise ModelFileError(f"{path}: {size - start} bytes follow the last tensor")


class SafetensorsTensors:
    """All tensors of a folder."""

    kind = "safetensors"

    def __init__(self, folder: Path) -> None:
        self.files = open_folder(folder)
        paths = {file.path for file in self.files.values()}
        self.where = folder / INDEX if len(paths) > 1 else next(iter(paths), folder)

    @property
    def nbytes(self) -> int:
        return sum(file.places[name].end - file.places[name].start for name, file in self.files.items())

    def names(self) -> Iterable[str]:
        return self.files.keys()

    def has(self, name: str) -> bool:
        return name in self.files

    def error(self, text: str) -> ModelFileError:
        return ModelFileError(f"{self.where}: {text}")

    def get(self, name: str) -> StoredTensor:
        if name not in self.files:
            raise self.error(f"tensor {shown(name)} is missing")
        return self.files[name].get(name)


def open_folder(folder: Path) -> dict[str, SafetensorsFile]:
    """The file of each tensor: of model.safetensors, or of the shards that the index names, or of the folder's only file."""
    single, index = folder / "model.safetensors", folder / INDEX
    if not single.exists() and index.exists():
        return open_shards(folder, index)
    if not single.exists():
        found = sorted(folder.glob("*.safetensors"))
        if len(found) != 1:
            raise ModelFileError(f"{folder}: has {len(found)} .safetensors files but neither model.safetensors nor {INDEX}")
        single = found[0]
    file = SafetensorsFile(single)
    return dict.fromkeys(file.places, file)


def open_shards(folder: Path, index: Path) -> dict[str, SafetensorsFile]:
    weight_map = read_json(index, MOST_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index}: key 'weight_map' must be an object that is not empty")
    shards: dict[str, SafetensorsFile] = {}
    for name, shard in weight_map.items():
        if not is_shard_name(shard):
            raise ModelFileError(f"{index}: tensor {shown(name)}: {shown(str(shard))} is not the name of a .safetensors file in the folder")
        if shard not in shards:
            shards[shard] = SafetensorsFile(folder / shard)
        if name not in shards[shard].places:
            raise ModelFileError(f"{folder / shard}: tensor {shown(name)} is missing, though {INDEX} says that it is there")
    return joined(shards.values())


def is_shard_name(name: Any) -> bool:
    """Whether it names a file of the folder itself, and can be shown in a message."""
    return (
        isinstance(name, str)
        and Path(name).name == name
        and name.endswith(".safetensors")
        and name.isprintable()
        and len(name.encode()) <= MOST_NAME_BYTES
    )


def joined(shards: Iterable[SafetensorsFile]) -> dict[str, SafetensorsFile]:
    """The file of each tensor of all shards. What the index does not name is there all the same, for the model to use or to refuse."""
    files: dict[str, SafetensorsFile] = {}
    for shard in shards:
        for name in shard.places:
            if name in files:
                raise ModelFileError(f"{shard.path}: tensor {shown(name)}: is in {files[name].path.name} too")
            files[name] = shard
    return files
