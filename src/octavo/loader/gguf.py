"""Tensors of a GGUF file under Hugging Face's names and in Hugging Face's row order.

Knows each architecture's names in GGUF and what its converter did to rows; block types are the quantization room's matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np

from octavo.config import HFConfig
from octavo.errors import ModelFileError
from octavo.gguf_file import shown
from octavo.loader.gguf_parts import GGUFModel
from octavo.quantization import StoredTensor

OUTER = MappingProxyType({"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"})
# A layer's tensors that families share; an architecture adds or replaces its own.
LAYER = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
LAYER_NAME = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(\w+)\.(weight|bias)")
OUTER_NAME = re.compile(r"(\w+)\.(weight|bias)")
# The configuration has taken these already.
CONSUMED = ("rope_freqs.weight",)
# Model types whose q and k rows the converter reordered, per head, from two halves to pairs (what ggml's rope for them turns).
PAIRED = ("llama",)


class GGUFTensors:
    """Tensors of one model. `hf` is the configuration from the same files; it gives the heads that rows are grouped by."""

    kind = "gguf"

    def __init__(self, file: GGUFModel, hf: HFConfig) -> None:
        self.file = file
        file.read_ahead()
        self.tensors = {hf_name(name): tensor for name, tensor in file.tensors.items() if name not in CONSUMED}
        paired = hf.read("model_type", str) in PAIRED
        heads = hf.size("num_attention_heads")
        self.head_dim = hf.head_dim
        self.heads: Mapping[str, int] = {"q_proj": heads, "k_proj": hf.size("num_key_value_heads", heads)} if paired else {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def has(self, name: str) -> bool:
        return name in self.tensors

    def error(self, text: str) -> ModelFileError:
        return ModelFileError(f"{self.file.path}: {text}")

    def get(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            raise self.error(f"tensor {shown(gguf_name(name))} is missing")
        place = self.tensors[name]
        data = np.frombuffer(self.file.data(place.name), np.uint8)
        tensor = StoredTensor(str(self.file.file_of(place.name)), place.name, place.type.name, place.shape, data)
        heads = self.heads.get(name.split(".")[-2])
        return self.unpaired(tensor, heads) if heads else tensor

    def unpaired(self, tensor: StoredTensor, heads: int) -> StoredTensor:
        """Rows back in the order of two halves, which our rope turns; a copy. Whole rows move, so their type does not matter."""
        rows, half = tensor.shape[0], self.head_dim // 2
        if rows != heads * half * 2:
            raise tensor.error(f"has {rows} rows, but the configuration asks for {heads} heads of {self.head_dim}")
        pairs = tensor.data.reshape(heads, half, 2, -1)
        data = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)
        return StoredTensor(tensor.file, tensor.name, tensor.dtype, tensor.shape, data)


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; a name that no table knows stays as it is, to be reported as unused."""
    if (match := LAYER_NAME.fullmatch(name)) and match[2] in LAYER:
        return f"model.layers.{match[1]}.{LAYER[match[2]]}.{match[3]}"
    if (match := OUTER_NAME.fullmatch(name)) and match[1] in OUTER:
        return f"{OUTER[match[1]]}.{match[2]}"
    return name


def gguf_name(name: str) -> str:
    """The name that the file would have for it: messages speak of what is in the file."""
    prefix, _, kind = name.rpartition(".")
    for theirs, ours in OUTER.items():
        if prefix == ours:
            return f"{theirs}.{kind}"
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", prefix):
        for theirs, ours in LAYER.items():
            if match[2] == ours:
                return f"blk.{match[1]}.{theirs}.{kind}"
    return name
