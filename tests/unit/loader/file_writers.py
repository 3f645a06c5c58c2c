"""Writes GGUF and safetensors files as lists of labelled fields, so that a test can cut or replace any one of them.

Written from the formats' specifications and not from our readers, of which it knows nothing.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

Fields = list[tuple[str, bytes]]

FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclass
class Array:
    """A metadata array: the type of its elements, and those."""

    kind: int
    items: list


@dataclass
class Gguf:
    """entries: (key, type, value). tensors: (name, dims with the innermost first, ggml type, data)."""

    entries: list[tuple[str, int, object]] = field(default_factory=list)
    tensors: list[tuple[str, tuple[int, ...], int, bytes]] = field(default_factory=list)
    version: int = 3
    alignment: int = 32

    def fields(self) -> Fields:
        out: Fields = [("magic", b"GGUF"), ("version", u32(self.version)), ("num_tensors", u64(len(self.tensors)))]
        out.append(("num_entries", u64(len(self.entries))))
        for key, kind, value in self.entries:
            out += [(f"{key}:key_length", u64(len(key.encode()))), (f"{key}:key", key.encode()), (f"{key}:type", u32(kind))]
            out += value_fields(key, kind, value)
        offset = 0
        for name, dims, kind, data in self.tensors:
            out += [(f"{name}:name_length", u64(len(name.encode()))), (f"{name}:name", name.encode()), (f"{name}:num_dims", u32(len(dims)))]
            out += [(f"{name}:dim{i}", u64(n)) for i, n in enumerate(dims)]
            out += [(f"{name}:type", u32(kind)), (f"{name}:offset", u64(offset))]
            offset += padded(len(data), self.alignment)
        size = sum(len(raw) for _, raw in out)
        out.append(("padding", bytes(padded(size, self.alignment) - size)))
        for name, _, _, data in self.tensors:
            out.append((f"{name}:data", data + bytes(padded(len(data), self.alignment) - len(data))))
        return out


def value_fields(key: str, kind: int, value: object) -> Fields:
    if kind == STRING:
        raw = value if isinstance(value, bytes) else str(value).encode()
        return [(f"{key}:length", u64(len(raw))), (f"{key}:text", raw)]
    if kind == ARRAY:
        assert isinstance(value, Array)
        out = [(f"{key}:item_type", u32(value.kind)), (f"{key}:count", u64(len(value.items)))]
        for i, item in enumerate(value.items):
            out += value_fields(f"{key}[{i}]", value.kind, item)
        return out
    return [(f"{key}:value", struct.pack("<" + FORMS[kind], value))]


def u32(n: int) -> bytes:
    return struct.pack("<I", n)


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


def padded(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def joined(fields: Fields) -> bytes:
    return b"".join(raw for _, raw in fields)


def replaced(fields: Fields, label: str, raw: bytes) -> bytes:
    """The file with one field's bytes replaced."""
    assert any(name == label for name, _ in fields), label
    return b"".join(raw if name == label else old for name, old in fields)


# ggml types by number: name, elements and bytes of a block.
GGML = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17)}  # fmt: skip
# Where a block's scales are, and minimums; two bytes from its beginning, if not here.
SCALES_AT = {3: slice(0, 4), 7: slice(0, 4), 12: slice(0, 4), 13: slice(0, 4), 10: slice(80, 84), 11: slice(108, 110), 14: slice(208, 210),
             34: slice(52, 54), 35: slice(64, 66)}  # fmt: skip


def random_tensor(rng: np.random.Generator, name: str, dims: tuple[int, ...], kind: int) -> tuple[str, tuple[int, ...], int, bytes]:
    """Random bits, but with small finite scales."""
    n = int(np.prod(dims))
    _, width, nbytes = GGML[kind]
    if kind == 0:
        return name, dims, kind, rng.standard_normal(n, np.float32).tobytes()
    if kind == 1:
        return name, dims, kind, rng.standard_normal(n).astype("<f2").tobytes()
    if kind == 30:
        return name, dims, kind, (rng.standard_normal(n, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    blocks = rng.integers(0, 256, (n // width, nbytes), np.uint8)
    halves = rng.uniform(0.01, 0.1, (n // width, 2)).astype("<f2").view(np.uint8)
    at = SCALES_AT.get(kind, slice(0, 2))
    if kind == 39:  # powers of two
        blocks[:, 0] = rng.integers(115, 125, n // width)
    else:
        blocks[:, at] = halves[:, : at.stop - at.start]
    return name, dims, kind, blocks.tobytes()


def tiny_llama(seed: int = 0, **changes: object) -> Gguf:
    """One layer, 64 wide, 2 heads over 1 kv head, 40 tokens, tied; a different type for every matrix."""
    rng = np.random.default_rng(seed)
    values: dict[str, tuple[int, object]] = {
        "general.architecture": (STRING, "llama"),
        "general.name": (STRING, "tiny"),
        "llama.block_count": (4, 1),
        "llama.context_length": (4, 128),
        "llama.embedding_length": (4, 64),
        "llama.feed_forward_length": (4, 96),
        "llama.attention.head_count": (4, 2),
        "llama.attention.head_count_kv": (4, 1),
        "llama.attention.layer_norm_rms_epsilon": (6, 1e-5),
        "llama.rope.freq_base": (6, 10000.0),
        "general.alignment": (4, 32),
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.tokens": (ARRAY, Array(STRING, [f"t{i}" for i in range(40)])),
        "tokenizer.ggml.token_type": (ARRAY, Array(5, [1] * 40)),
        "tokenizer.ggml.scores": (ARRAY, Array(6, [0.5] * 40)),
        "tokenizer.ggml.eos_token_id": (4, 2),
        "tokenizer.ggml.add_bos_token": (7, False),
    }
    for key, value in changes.items():
        key = key.replace("__", ".")
        if value is None:
            values.pop(key, None)
        else:
            values[key] = value  # type: ignore[assignment]
    layer = {"attn_norm": ((64,), 0), "attn_q": ((64, 64), 3), "attn_k": ((64, 32), 6), "attn_v": ((64, 32), 7),
             "attn_output": ((64, 64), 2), "ffn_norm": ((64,), 0), "ffn_gate": ((64, 96), 1), "ffn_up": ((64, 96), 30),
             "ffn_down": ((96, 64), 0)}  # fmt: skip
    tensors = [random_tensor(rng, "token_embd.weight", (64, 40), 8)]
    tensors += [random_tensor(rng, f"blk.0.{name}.weight", dims, kind) for name, (dims, kind) in layer.items()]
    tensors.append(random_tensor(rng, "output_norm.weight", (64,), 0))
    return Gguf([(key, kind, value) for key, (kind, value) in values.items()], tensors)


def split_gguf(model: Gguf, *cuts: int, **changes: dict[int, object]) -> list[Gguf]:
    """The model in parts, cut before these tensors: the first has all metadata, the others only what joins them.

    changes: for no, count, tensors (the keys split.*): values by part, None to leave the key out.
    """
    edges = [0, *cuts, len(model.tensors)]
    parts = []
    for i in range(len(edges) - 1):
        keys = {"no": ("split.no", 2, i), "count": ("split.count", 2, len(edges) - 1), "tensors": ("split.tensors.count", 5, len(model.tensors))}
        entries: list[tuple[str, int, object]] = []
        for name, (key, kind, value) in keys.items():
            changed = changes.get(name, {}).get(i, value)
            if changed is not None:
                entries.append((key, STRING if isinstance(changed, str) else kind, changed))
        parts.append(Gguf([*model.entries, *entries] if i == 0 else entries, model.tensors[edges[i] : edges[i + 1]]))
    return parts


def write_parts(folder: Path, parts: list[Gguf], name: str = "m", count: int = 0) -> list[Path]:
    """Writes them under the names that they must have."""
    paths = [folder / f"{name}-{i + 1:05}-of-{count or len(parts):05}.gguf" for i in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        path.write_bytes(joined(part.fields()))
    return paths


# safetensors


def safetensors_bytes(header: object, data: bytes) -> bytes:
    """`header` is an object to write as JSON, or the JSON's own bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return u64(len(text)) + text + data


def safetensors_parts(tensors: dict[str, tuple[str, np.ndarray]]) -> tuple[dict, bytes]:
    """Header and data of tensors given as (dtype in the file, array of its bits)."""
    header: dict = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, array) in tensors.items():
        raw = array.tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return header, data


def as_bf16(array: np.ndarray) -> np.ndarray:
    """The upper halves of floats: numbers that bfloat16 holds exactly come out as they are."""
    return (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)


LLAMA_CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 96, "vocab_size": 40, "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "rope_theta": 10000.0,
}  # fmt: skip


def llama_tensors(seed: int = 0) -> dict[str, tuple[str, np.ndarray]]:
    """The same tiny model in safetensors: bf16 matrices but one fp16 and one fp32, fp32 norms."""
    rng = np.random.default_rng(seed)
    layer = "model.layers.0"
    shapes = {"model.embed_tokens.weight": (40, 64), f"{layer}.self_attn.q_proj.weight": (64, 64), f"{layer}.self_attn.k_proj.weight": (32, 64),
              f"{layer}.self_attn.v_proj.weight": (32, 64), f"{layer}.self_attn.o_proj.weight": (64, 64),
              f"{layer}.mlp.gate_proj.weight": (96, 64), f"{layer}.mlp.up_proj.weight": (96, 64), f"{layer}.mlp.down_proj.weight": (64, 96)}  # fmt: skip
    tensors = {name: ("BF16", as_bf16(rng.standard_normal(shape, np.float32))) for name, shape in shapes.items()}
    tensors[f"{layer}.self_attn.o_proj.weight"] = ("F16", rng.standard_normal((64, 64)).astype(np.float16))
    tensors[f"{layer}.mlp.down_proj.weight"] = ("F32", rng.standard_normal((64, 96), np.float32))
    for name in ("model.norm.weight", f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight"):
        tensors[name] = ("F32", rng.standard_normal(64, np.float32))
    return tensors
