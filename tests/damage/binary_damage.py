"""Damage of GGUF and safetensors files: at each edge, in each field, and in what the metadata says."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

import numpy as np
from cases import Case, Must
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
    u32,
    u64,
)
from healthy import EOS, KINDS, MERGES, TOKENS, folder_files, gguf_model

Damage = tuple[str, bytes, str]  # what is wrong, the file, and a word that the message must hold
HUGE = (2**31, 2**32 - 1, 2**61, 2**63, 2**64 - 1)


def cases() -> Iterator[Case]:
    for name, data, word in gguf_damage():
        yield Case(f"gguf: {name}", "gguf", {"m.gguf": data}, "m.gguf", words=("m.gguf", word))
    for name, changes, words in gguf_values():
        yield Case(f"gguf: {name}", "gguf", {"m.gguf": joined(gguf_model(**changes).fields())}, "m.gguf", words=("m.gguf", *words))
    yield from gguf_harmless()
    for name, data, word in safetensors_damage():
        yield Case(f"safetensors: {name}", "folder", folder_files() | {"model.safetensors": data}, "", words=("model.safetensors", word))
    for name, data in random_bytes():
        yield Case(f"gguf: {name}", "gguf", {"m.gguf": data}, "m.gguf", words=("m.gguf",))
        yield Case(f"safetensors: {name}", "folder", folder_files() | {"model.safetensors": data}, "", words=("model.safetensors",))


def random_bytes() -> Iterator[tuple[str, bytes]]:
    rng = np.random.default_rng(0)
    for size in (0, 1, 8, 24, 64, 1000, 100_000):
        yield f"{size} random bytes", rng.bytes(size)
    for size in (8, 24, 1000, 100_000):
        yield f"{size} zeros", bytes(size)


def gguf_damage() -> Iterator[Damage]:
    model = gguf_model()
    fields = model.fields()
    yield from truncations(fields)
    yield from gguf_header(fields)
    yield from gguf_metadata(fields)
    yield from gguf_structure(model)
    yield from gguf_tensors(fields)


def truncations(fields: Fields) -> Iterator[Damage]:
    """Cut at the edge of each section, and in the middle of each field of more than one byte."""
    whole, at = joined(fields), 0
    last_number = len(whole.rstrip(b"\0"))
    yield "last byte missing", whole[: last_number - 1], "beyond the file"
    seen = set()
    for label, raw in fields:
        short = label.split("[")[0] if "[" in label else label
        cuts = dict.fromkeys((at, at + len(raw) // 2)) if short not in seen else []
        seen.add(short)
        for cut in cuts:
            if cut < last_number:
                yield f"cut at {cut} in {label}", whole[:cut], ""
        at += len(raw)


def gguf_header(fields: Fields) -> Iterator[Damage]:
    yield "no magic", replaced(fields, "magic", b"GGML"), "magic"
    yield "a zip file", replaced(fields, "magic", b"PK\3\4"), "magic"
    for version in (0, 1, 4, 2**32 - 1):
        yield f"version {version}", replaced(fields, "version", u32(version)), f"version {version}"
    yield "big-endian", replaced(fields, "version", struct.pack(">I", 3)), "big-endian"
    for count in HUGE:
        yield f"{count} tensors", replaced(fields, "num_tensors", u64(count)), "tensors"
        yield f"{count} entries", replaced(fields, "num_entries", u64(count)), "entries"
    model = gguf_model()
    yield "one tensor less", replaced(fields, "num_tensors", u64(len(model.tensors) - 1)), ""
    yield "one tensor more", replaced(fields, "num_tensors", u64(len(model.tensors) + 1)), "tensor"
    yield "one entry more", replaced(fields, "num_entries", u64(len(model.entries) + 1)), ""
    yield "one entry less", replaced(fields, "num_entries", u64(len(model.entries) - 1)), ""


def gguf_metadata(fields: Fields) -> Iterator[Damage]:
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


def gguf_structure(model: Gguf) -> Iterator[Damage]:
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


def gguf_tensors(fields: Fields) -> Iterator[Damage]:
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


INT, FLOAT = 5, 6  # int32, float32
NAN, INFINITY = float("nan"), float("inf")
COUNTS = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv")


def gguf_values() -> Iterator[tuple[str, dict[str, object], tuple[str, ...]]]:
    """Metadata that says what cannot be: the changes, and words of the message."""
    arch = "general.architecture"
    for label, value in {"missing": None, "a number": (4, 3), "unknown": (STRING, "no-such"), "empty": (STRING, ""), "long": (STRING, "x" * 5000),
                         "of two lines": (STRING, "llama\nllama")}.items():  # fmt: skip
        yield f"architecture {label}", {arch: value}, (arch,)
    for key in COUNTS:
        full = f"llama.{key}"
        required = key not in ("attention.head_count_kv",)
        values = {"zero": (4, 0), "negative": (INT, -1), "2^32 - 1": (4, 2**32 - 1), "2^63": (10, 2**63), "text": (STRING, "1"), "a truth": (7, True),
                  "a fraction": (FLOAT, 1.5), "a list": (ARRAY, Array(4, [1]))}  # fmt: skip
        for label, value in values.items():
            yield f"{key} {label}", {full: value}, ()
        if required:
            yield f"{key} missing", {full: None}, (full,)
    for key in ("attention.layer_norm_rms_epsilon", "rope.freq_base"):
        for label, number in {"NaN": NAN, "infinite": INFINITY, "negative": -1.0}.items():
            yield f"{key} {label}", {f"llama.{key}": (FLOAT, number)}, ()
        yield f"{key} text", {f"llama.{key}": (STRING, "x")}, (key,)
    yield "rope.freq_base zero", {"llama.rope.freq_base": (FLOAT, 0.0)}, ("rope.freq_base",)
    for factor in (NAN, INFINITY, -1.0, 0.0):
        changes: dict[str, object] = {"llama.rope.scaling.type": (STRING, "linear"), "llama.rope.scaling.factor": (FLOAT, factor)}
        yield f"scaled by {factor}", changes, ()
    yield "scaled in an unknown way", {"llama.rope.scaling.type": (STRING, "sideways"), "llama.rope.scaling.factor": (FLOAT, 2.0)}, ()
    for value in (0, 7, 65, 2**31):
        yield f"heads of {value}", {"llama.attention.key_length": (4, value)}, ()
        yield f"{value} of a head turned", {"llama.rope.dimension_count": (4, value)}, ()
    for value in (0, 39, 41, 2**31):
        yield f"a vocabulary of {value}", {"llama.vocab_size": (4, value)}, ()
    yield from vocabularies()


def vocabularies() -> Iterator[tuple[str, dict[str, object], tuple[str, ...]]]:
    tokens, types, merges = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"
    yield "model of vocabulary unknown", {"tokenizer.ggml.model": (STRING, "no-such")}, ("tokenizer.ggml.model",)
    yield "model of vocabulary a number", {"tokenizer.ggml.model": (4, 1)}, ("tokenizer.ggml.model",)
    yield "rule of words unknown", {"tokenizer.ggml.pre": (STRING, "no-such")}, ("tokenizer.ggml.pre",)
    yield "rule of words a list", {"tokenizer.ggml.pre": (ARRAY, Array(STRING, ["gpt-2"]))}, ("tokenizer.ggml.pre",)
    yield "no tokens", {tokens: None}, ()
    yield "tokens [] ", {tokens: (ARRAY, Array(STRING, []))}, ()
    yield "tokens are numbers", {tokens: (ARRAY, Array(INT, [1] * 40))}, (tokens,)
    yield "tokens are a text", {tokens: (STRING, "abc")}, ()
    yield "a token twice", {tokens: (ARRAY, Array(STRING, ["b" if token == "9" else token for token in TOKENS]))}, (tokens,)
    yield "a token more than rows", {tokens: (ARRAY, Array(STRING, [*TOKENS, "x1"])), types: (ARRAY, Array(INT, [*KINDS, 1]))}, ()
    yield "types a number", {types: (4, 1)}, (types,)
    yield "types a text", {types: (STRING, "1" * 40)}, (types,)
    yield "types are texts", {types: (ARRAY, Array(STRING, ["1"] * 40))}, (types,)
    yield "a type too few", {types: (ARRAY, Array(INT, KINDS[:-1]))}, (types,)
    yield "a type unknown", {types: (ARRAY, Array(INT, [77, *KINDS[1:]]))}, (types,)
    yield "no merges", {merges: None}, (merges,)
    yield "merges a text", {merges: (STRING, "a b")}, (merges,)
    for merge in ("ab", "a b c", "", " ", "a  b", "a ?", "? b", "y z"):
        yield f"merge {merge!r}", {merges: (ARRAY, Array(STRING, [*MERGES, merge]))}, (merges,)
    for which in ("bos", "eos", "unknown", "padding"):
        key = f"tokenizer.ggml.{which}_token_id"
        for label, value in {"beyond": (4, 40), "negative": (INT, -2), "text": (STRING, "<eos>"), "a list": (ARRAY, Array(4, [1]))}.items():
            yield f"{which} {label}", {key: value}, (key,)
    yield "add_bos_token a text", {"tokenizer.ggml.add_bos_token": (STRING, "no"), "tokenizer.ggml.bos_token_id": (4, 1)}, ("add_bos_token",)
    yield "template a number", {"tokenizer.chat_template": (4, 7)}, ("tokenizer.chat_template",)
    yield "templates a number", {"tokenizer.chat_templates": (4, 7)}, ("tokenizer.chat_templates",)
    yield "templates of numbers", {"tokenizer.chat_templates": (ARRAY, Array(4, [7]))}, ("tokenizer.chat_templates",)


def gguf_harmless() -> Iterator[Case]:
    def case(name: str, data: bytes, must: Must = Must.LOAD) -> Case:
        return Case(f"gguf: {name}", "gguf", {"m.gguf": data}, "m.gguf", must)

    model = gguf_model()
    yield case("padding at the end is missing", joined(model.fields()).rstrip(b"\0") + bytes(3))
    yield case("a part of the padding more", joined(model.fields()) + bytes(31))
    yield case("junk in the padding", replaced(model.fields(), "padding", b"\xff" * len(dict(model.fields())["padding"])))
    yield case("version 2", replaced(model.fields(), "version", u32(2)))
    for label, entry in {"numbers": ("x.y", ARRAY, Array(11, list(range(1000)))), "lists in lists": ("x.y", ARRAY, Array(ARRAY, [Array(0, [1])] * 9)),
                         "no numbers": ("x.y", FLOAT, NAN), "a text with NUL": ("x.y", STRING, "a\0b"), "an empty key": ("", 4, 1),
                         "texts with NUL": ("x.y", ARRAY, Array(STRING, ["", "\0", "a\0\0b"]))}.items():  # fmt: skip
        yield case(f"an entry that nobody reads: {label}", joined(Gguf([*model.entries, entry], model.tensors).fields()))
    yield case("eos none", joined(gguf_model(**{"tokenizer.ggml.padding_token_id": (4, EOS)}).fields()))
    yield case("a template that is none", joined(gguf_model(**{"tokenizer.chat_template": (STRING, "{% for x in %}")}).fields()))
    where = {"output_norm.weight": np.dtype("<f4"), "token_embd.weight": np.dtype("<f2"), "blk.0.attn_q.weight": np.dtype("<f2"), "blk.0.ffn_gate.weight": np.dtype("<f2")}
    for name, kind in where.items():
        for label, number in {"NaN": NAN, "infinite": INFINITY}.items():
            raw = np.array(number, kind).tobytes()
            data = replaced(model.fields(), f"{name}:data", raw + dict(model.fields())[f"{name}:data"][len(raw) :])
            if name == "blk.0.ffn_gate.weight":  # a plain matrix: reading all of its numbers would take as long as everything else
                yield case(f"{name} {label}", data, Must.FAIL)
            else:
                yield Case(f"gguf: {name} {label}", "gguf", {"m.gguf": data}, "m.gguf", Must.REFUSE, ("m.gguf", name, "finite"))


# safetensors


def safetensors_damage() -> Iterator[Damage]:
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


def json_cases(header: dict, data: bytes) -> Iterator[Damage]:
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


def safetensors_tensors(header: dict, data: bytes) -> Iterator[Damage]:
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
