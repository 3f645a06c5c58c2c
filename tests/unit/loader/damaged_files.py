"""Generates damaged GGUF and safetensors files: each a name, the file's bytes, and a word that the message must hold."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

import numpy as np
from file_writers import (
    ARRAY,
    STRING,
    Array,
    Fields,
    Gguf,
    joined,
    llama_tensors,
    replaced,
    safetensors_bytes,
    safetensors_parts,
    tiny_llama,
    u32,
    u64,
)

Case = tuple[str, bytes, str]
HUGE = (2**31, 2**32 - 1, 2**61, 2**63, 2**64 - 1)


def gguf_cases() -> Iterator[Case]:
    model = tiny_llama()
    fields = model.fields()
    yield from truncations(fields)
    yield from gguf_header(fields)
    yield from gguf_metadata(fields)
    yield from gguf_structure(model)
    yield from gguf_tensors(fields)


def truncations(fields: Fields) -> Iterator[Case]:
    """Cut at the edge of each section, and in the middle of each field of more than one byte."""
    whole, at = joined(fields), 0
    last_number = len(whole.rstrip(b"\0"))
    yield "last byte missing", whole[: last_number - 1], "beyond the file"
    seen = set()
    for label, raw in fields:
        short = label.split("[")[0] if "[" in label else label
        cuts = [at, at + len(raw) // 2] if short not in seen else []
        seen.add(short)
        for cut in cuts:
            if cut < last_number:
                yield f"cut at {cut} in {label}", whole[:cut], ""
        at += len(raw)


def gguf_header(fields: Fields) -> Iterator[Case]:
    yield "no magic", replaced(fields, "magic", b"GGML"), "magic"
    yield "a zip file", replaced(fields, "magic", b"PK\3\4"), "magic"
    for version in (0, 1, 4, 2**32 - 1):
        yield f"version {version}", replaced(fields, "version", u32(version)), f"version {version}"
    yield "big-endian", replaced(fields, "version", struct.pack(">I", 3)), "big-endian"
    for count in HUGE:
        yield f"{count} tensors", replaced(fields, "num_tensors", u64(count)), "tensors"
        yield f"{count} entries", replaced(fields, "num_entries", u64(count)), "entries"
    yield "one tensor less", replaced(fields, "num_tensors", u64(10)), ""
    yield "one tensor more", replaced(fields, "num_tensors", u64(12)), "tensor"
    yield "one entry more", replaced(fields, "num_entries", u64(18)), ""
    yield "one entry less", replaced(fields, "num_entries", u64(16)), ""


def gguf_metadata(fields: Fields) -> Iterator[Case]:
    for length in HUGE:
        yield f"key of {length}", replaced(fields, "general.name:key_length", u64(length)), "string"
        yield f"text of {length}", replaced(fields, "general.name:length", u64(length)), "general.name"
        yield f"{length} tokens", replaced(fields, "tokenizer.ggml.tokens:count", u64(length)), "tokenizer.ggml.tokens"
        yield f"token of {length}", replaced(fields, "tokenizer.ggml.tokens[7]:length", u64(length)), "tokenizer.ggml.tokens"
        yield f"{length} scores", replaced(fields, "tokenizer.ggml.scores:count", u64(length)), "tokenizer.ggml.scores"
    yield "unknown type", replaced(fields, "llama.block_count:type", u32(13)), "llama.block_count"
    yield "unknown item type", replaced(fields, "tokenizer.ggml.scores:item_type", u32(99)), "tokenizer.ggml.scores"
    yield "scores as nested arrays", replaced(fields, "tokenizer.ggml.scores:item_type", u32(ARRAY)), "tokenizer.ggml.scores"
    yield "scores as strings", replaced(fields, "tokenizer.ggml.scores:item_type", u32(STRING)), ""
    yield "a boolean of 2", replaced(fields, "tokenizer.ggml.add_bos_token:value", b"\2"), "add_bos_token"
    yield "text not UTF-8", replaced(fields, "general.name:text", b"\xff\xfe\xfd\xfc"), "general.name"
    yield "key not UTF-8", replaced(fields, "general.name:key", b"\xff" * 12), "UTF-8"
    for alignment in (0, 1, 3, 48, 2**31):
        yield f"alignment {alignment}", replaced(fields, "general.alignment:value", u32(alignment)), "general.alignment"


def gguf_structure(model: Gguf) -> Iterator[Case]:
    """Damage that needs a file of another structure."""
    twice = Gguf([*model.entries, model.entries[1]], model.tensors)
    yield "an entry twice", joined(twice.fields()), "general.name"
    yield "a tensor twice", joined(Gguf(model.entries, [*model.tensors, model.tensors[1]]).fields()), "blk.0.attn_norm.weight"
    nested: object = 1
    for _ in range(12):
        nested = Array(ARRAY, [nested]) if isinstance(nested, Array) else Array(5, [1])
    yield "arrays 12 deep", joined(Gguf([*model.entries, ("deep", ARRAY, nested)], model.tensors).fields()), "deep"
    wide = Array(ARRAY, [Array(0, [])] * 20_000)
    yield "20,000 arrays", joined(Gguf([*model.entries, ("wide", ARRAY, wide)], model.tensors).fields()), "wide"
    texts = ("texts", ARRAY, Array(0, [0] * 400))
    yield "strings of nothing", claim_strings(Gguf([*model.entries, texts], model.tensors).fields()), "texts"
    big = ("big", STRING, "x" * (17 << 20))
    yield "text of 17 MiB", joined(Gguf([*model.entries, big], model.tensors).fields()), "big"
    wrong_kind = [(k, STRING, "32") if k == "general.alignment" else (k, t, v) for k, t, v in model.entries]
    yield "alignment as text", joined(Gguf(wrong_kind, model.tensors).fields()), "general.alignment"
    bool_array = [*model.entries, ("flags", ARRAY, Array(0, [0, 1, 7]))]
    yield "booleans of 7", replaced(Gguf(bool_array, model.tensors).fields(), "flags:item_type", u32(7)), "flags"
    yield "bytes after the end", joined(model.fields()) + bytes(4096), "follow"
    gap = [(n, d, k, raw + bytes(32) if i == 3 else raw) for i, (n, d, k, raw) in enumerate(model.tensors)]
    yield "a gap in the data", joined(Gguf(model.entries, gap).fields()), "gap"


def claim_strings(fields: Fields) -> bytes:
    """An array of bytes that says it holds as many strings as its bytes could."""
    fields = [(label, u32(STRING) if label == "texts:item_type" else raw) for label, raw in fields]
    return replaced(fields, "texts:count", u64(2**20))


def gguf_tensors(fields: Fields) -> Iterator[Case]:
    q, norm = "blk.0.attn_q.weight", "blk.0.attn_norm.weight"
    for count in (0, 5, 2**31, 2**32 - 1):
        yield f"{count} dims", replaced(fields, f"{q}:num_dims", u32(count)), q
    for size in (0, 33, 2**32, 2**62, 2**63, 2**64 - 1):
        yield f"a row of {size}", replaced(fields, f"{q}:dim0", u64(size)), q
    for size in (0, 63, 65, 2**58, 2**59, 2**64 - 1):
        yield f"{size} rows", replaced(fields, f"{q}:dim1", u64(size)), ""
    for kind in (4, 5, 31, 36, 99, 2**31):
        yield f"type {kind}", replaced(fields, f"{q}:type", u32(kind)), q
    for kind in (0, 2, 8, 12, 16):
        yield f"q as type {kind}", replaced(fields, f"{q}:type", u32(kind)), ""
    for offset in (0, 1, 32, 2**32, 2**63, 2**64 - 32):
        yield f"norm at {offset}", replaced(fields, f"{norm}:offset", u64(offset)), ""
    yield "name of 2^62", replaced(fields, f"{q}:name_length", u64(2**62)), "string"
    yield "name not UTF-8", replaced(fields, f"{q}:name", b"\xff" * len(q)), "UTF-8"


# safetensors


def safetensors_cases() -> Iterator[Case]:
    header, data = safetensors_parts(llama_tensors())
    whole = safetensors_bytes(header, data)
    start = len(whole) - len(data)
    for cut in (1, 7, 8, 9, start // 2, start - 1, start, start + 1, len(whole) - len(data) // 2, len(whole) - 1):
        yield f"cut at {cut}", whole[:cut], ""
    for length in (0, 1, start, len(whole) - 7, len(whole), 33 << 20, *HUGE):
        word = f"header: its length {length} exceeds the file" if length > len(whole) - 8 else "header"
        yield f"header length {length}", u64(length) + whole[8:], word
    yield "header of 33 MiB", u64(33 << 20) + bytes(33 << 20), "header: its length 34603008 exceeds 33554432"
    yield "bytes after the end", whole + b"\0", "follow"
    yield from json_cases(header, data)
    yield from safetensors_tensors(header, data)


def json_cases(header: dict, data: bytes) -> Iterator[Case]:
    text = json.dumps(header).encode()
    entry = b'"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    yield "header not JSON", safetensors_bytes(text[:-1] + b"]", data), "JSON"
    yield "header a list", safetensors_bytes(b"[1, 2]", data), "object"
    yield "header a number", safetensors_bytes(b"7", data), "object"
    yield "header not UTF-8", safetensors_bytes(b"\xff" + text[1:], data), "UTF-8"
    yield "header empty", safetensors_bytes(b"", data), "JSON"
    yield "header 100,000 deep", safetensors_bytes(b"[" * 100_000 + b"]" * 100_000, data), ""
    yield "header an endless number", safetensors_bytes(b'{"a": ' + b"9" * 10_000 + b"}", data), ""
    yield "a tensor twice", safetensors_bytes(b"{" + entry + b", " + entry + b"}", bytes(4)), "twice"


def safetensors_tensors(header: dict, data: bytes) -> Iterator[Case]:
    name = "model.layers.0.self_attn.q_proj.weight"
    good = header[name]
    begin, end = good["data_offsets"]
    later = {key: info | {"data_offsets": [n + 64 for n in info["data_offsets"]]} for key, info in header.items()
             if key != "__metadata__" and info["data_offsets"][0] >= end}  # fmt: skip
    yield "a gap in the data", safetensors_bytes(header | later, data[:end] + bytes(64) + data[end:]), "gap"
    yield "two tensors in one place", safetensors_bytes(header | {"twin": good}, data), "overlaps"
    changes: dict[str, object] = {
        "no dtype": {"shape": good["shape"], "data_offsets": good["data_offsets"]},
        "no shape": {"dtype": "BF16", "data_offsets": good["data_offsets"]},
        "a list": [1, 2],
        "null": None,
        "an extra key": good | {"strides": [1, 1]},
    }
    for dtype in ("F99", "", 3, None, "BF16\n", "F32", "I8"):
        changes[f"dtype {dtype!r}"] = good | {"dtype": dtype}
    for shape in (64, "64", [], [64], [64, 64, 2], [64, -64], [64.0, 64], [True, 4096], ["64", 64], [2**62, 4], [0, 64], [1] * 9, [2**63, 2**63]):
        changes[f"shape {shape}"] = good | {"shape": shape}
    for offsets in ([], [begin], [begin, end, end], [end, begin], [begin, end + 2], [begin + 2, end + 2], [begin - 2, end - 2], [0, end - begin],
                    [-2, end - begin - 2], [begin, 2**64], [float(begin), end], [str(begin), end], None, [begin + 1, end + 1],
                    [len(data), len(data) + end - begin]):  # fmt: skip
        changes[f"offsets {offsets}"] = good | {"data_offsets": offsets}
    for label, info in changes.items():
        word = "shape must be" if any(kind in label for kind in ("True", "64.0", "'64'", "-64", "2**63")) else ""
        yield label, safetensors_bytes(header | {name: info}, data), word


def random_bytes() -> Iterator[tuple[str, bytes]]:
    rng = np.random.default_rng(0)
    for size in (1, 8, 24, 64, 1000, 100_000):
        yield f"{size} random bytes", rng.bytes(size)
        yield f"{size} zeros", bytes(size)
