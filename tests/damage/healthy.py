"""One tiny model in each of the forms that models come in, undamaged, as the files of a folder."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from file_writers import (
    ARRAY,
    LLAMA_CONFIG,
    STRING,
    Array,
    Gguf,
    joined,
    llama_tensors,
    safetensors_bytes,
    safetensors_parts,
    split_gguf,
    tiny_llama,
)

INDEX = "model.safetensors.index.json"
TOKENS = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", *"0123456789", "ab", "<eos>", "cd"]
MERGES = ["a b", "c d"]
EOS = TOKENS.index("<eos>")
KINDS = [3 if token == "<eos>" else 1 for token in TOKENS]


@dataclass(frozen=True)
class Link:
    """A symbolic link."""

    target: str


@dataclass(frozen=True)
class Folder:
    """A folder where a file should be."""


@dataclass(frozen=True)
class Pipe:
    """A named pipe: whoever opens it to read waits for a writer."""


@dataclass(frozen=True)
class Sparse:
    """A file of `size` bytes that begins with `head` and takes no room for the rest."""

    size: int
    head: bytes = b""


@dataclass(frozen=True)
class Locked:
    """A file that its owner may not read."""

    data: bytes


Content = bytes | Link | Folder | Pipe | Sparse | Locked
Files = Mapping[str, Content]


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


def gguf_model(**changes: object) -> Gguf:
    """The tiny llama with a vocabulary that encodes text."""
    vocabulary = {
        "tokenizer.ggml.tokens": (ARRAY, Array(STRING, TOKENS)),
        "tokenizer.ggml.token_type": (ARRAY, Array(5, KINDS)),
        "tokenizer.ggml.merges": (ARRAY, Array(STRING, MERGES)),
        "tokenizer.ggml.eos_token_id": (4, EOS),
    }
    return tiny_llama(**(vocabulary | changes))


def gguf_files(model: Gguf | None = None) -> dict[str, Content]:
    return {"m.gguf": joined((model or gguf_model()).fields())}


def part_files(parts: list[Gguf] | None = None, count: int = 3) -> dict[str, Content]:
    parts = parts if parts is not None else split_gguf(gguf_model(), 4, 8)
    return {f"m-{i + 1:05}-of-{count:05}.gguf": joined(part.fields()) for i, part in enumerate(parts)}


CONFIG: Mapping[str, object] = MappingProxyType(LLAMA_CONFIG | {"eos_token_id": EOS})
GENERATION: Mapping[str, object] = MappingProxyType({"eos_token_id": [EOS], "temperature": 0.5, "top_p": 0.9, "top_k": 20})
TOKENIZER: Mapping[str, object] = MappingProxyType(
    {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": EOS, "content": "<eos>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(TOKENS)}, "merges": [merge.split() for merge in MERGES],
        },
    }
)  # fmt: skip


def companions() -> dict[str, Content]:
    return {
        "config.json": as_json(dict(CONFIG)),
        "generation_config.json": as_json(dict(GENERATION)),
        "tokenizer.json": as_json(dict(TOKENIZER)),
        "tokenizer_config.json": as_json({"eos_token": "<eos>"}),
    }


def folder_files() -> dict[str, Content]:
    return {"model.safetensors": safetensors_bytes(*safetensors_parts(llama_tensors())), **companions()}


SHARDS = tuple(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))


def shard_parts() -> list[tuple[dict, bytes]]:
    """Header and data of each shard."""
    tensors = llama_tensors()
    names = list(tensors)
    return [safetensors_parts({name: tensors[name] for name in part}) for part in (names[:4], names[4:5], names[5:])]


def weight_map() -> dict[str, str]:
    return {name: shard for shard, (header, _) in zip(SHARDS, shard_parts(), strict=True) for name in header if name != "__metadata__"}


def shard_files() -> dict[str, Content]:
    shards: dict[str, Content] = {shard: safetensors_bytes(*parts) for shard, parts in zip(SHARDS, shard_parts(), strict=True)}
    return {**shards, INDEX: as_json({"metadata": {"total_size": 1}, "weight_map": weight_map()}), **companions()}


PIECES = [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("▁", 1), *((c, 1) for c in "abcdefghijklmnopqrstuvwxyz"), *((c, 1) for c in "012345678"), ("ab", 1)]


def field(number: int, value: int | float | bytes | str) -> bytes:
    """A field of a protocol buffer: a varint below 128, a float of four bytes, or bytes."""
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    raw = value.encode() if isinstance(value, str) else value
    tag = varint(number << 3 | (0 if isinstance(raw, int) else 2))
    return tag + (varint(raw) if isinstance(raw, int) else varint(len(raw)) + raw)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def piece(text: str | bytes, score: float, kind: int) -> bytes:
    return field(1, text) + field(2, score) + (field(3, kind) if kind != 1 else b"")


TRAINER = field(3, 2) + field(40, 0) + field(41, 1) + field(42, 2)
NORMALIZER = field(1, "identity") + field(3, 1) + field(4, 0) + field(5, 1)


def sentencepiece_model(*, trainer: bytes = TRAINER, normalizer: bytes = NORMALIZER, pieces: list[bytes] | None = None) -> bytes:
    """A byte-pair model of as many pieces as the tiny llama has rows."""
    usual = [piece(text, -float(i), kind) for i, (text, kind) in enumerate(PIECES)]
    return b"".join(field(1, one) for one in (usual if pieces is None else pieces)) + field(2, trainer) + field(3, normalizer)


def spm_files() -> dict[str, Content]:
    """A folder whose tokenizer is a SentencePiece model."""
    files = {name: content for name, content in folder_files().items() if name != "tokenizer.json"}
    config = as_json({"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "bos_token": "<s>"})
    return files | {"tokenizer.model": sentencepiece_model(), "tokenizer_config.json": config}


# By form: the files, and which of them is given to the program ("" is the folder).
PLAIN_FORMS: Mapping[str, tuple[Callable[[], dict[str, Content]], str]] = MappingProxyType(
    {
        "gguf": (gguf_files, "m.gguf"),
        "parts": (part_files, "m-00001-of-00003.gguf"),
        "folder": (folder_files, ""),
        "shards": (shard_files, ""),
        "spm": (spm_files, ""),
    }
)
