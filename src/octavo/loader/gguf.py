"""Tensors of a GGUF file under Hugging Face's names and in Hugging Face's row order.

Knows each architecture's names in GGUF and what its converter did to rows; block types are the quantization room's matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from octavo.config import HFConfig
from octavo.errors import ModelFileError
from octavo.gguf_file import shown
from octavo.loader.gguf_names import FAMILIES, LAYER, OUTER
from octavo.loader.gguf_parts import GGUFModel
from octavo.quantization import StoredTensor

LAYER_NAME = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(\w+)\.(weight|bias)")
# As files of before 2024 have experts: a matrix each.
EXPERT_NAME = re.compile(r"blk\.(0|[1-9]\d{0,3})\.ffn_(gate|up|down)\.(0|[1-9]\d{0,3})\.weight")
OUTER_NAME = re.compile(r"(\w+)\.(weight|bias)")
# The configuration has taken these already.
CONSUMED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

# Matrices of one row, which the converter writes as vectors.
ONE_ROW = "shared_expert_gate.weight"


class GGUFTensors:
    """Tensors of one model. `hf` is the configuration from the same files; it gives the heads that rows are grouped by."""

    kind = "gguf"

    def __init__(self, file: GGUFModel, hf: HFConfig) -> None:
        self.file = file
        file.read_ahead()
        self.family = FAMILIES[hf.read("model_type", str)]
        self.outer, self.layer = {**OUTER, **self.family.outer}, {**LAYER, **self.family.layer}
        self.tensors = {self.hf_name(name): tensor for name, tensor in file.tensors.items() if name not in CONSUMED}
        heads, self.head_dim = hf.size("num_attention_heads"), hf.head_dim
        self.heads = {"q_proj": heads, "k_proj": hf.size("num_key_value_heads", heads)} if self.family.paired else {}

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
            raise self.error(f"tensor {shown(self.gguf_name(name))} is missing")
        place = self.tensors[name]
        data = np.frombuffer(self.file.data(place.name), np.uint8)
        shape = (1, *place.shape) if name.endswith(ONE_ROW) and len(place.shape) == 1 else place.shape
        tensor = StoredTensor(str(self.file.file_of(place.name)), place.name, place.type.name, shape, data)
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

    def hf_name(self, name: str) -> str:
        """Hugging Face's name of a GGUF tensor; a name that no table knows stays as it is, to be reported as unused."""
        if (match := LAYER_NAME.fullmatch(name)) and match[2] in self.layer:
            return f"{self.family.prefix}.{match[1]}.{self.layer[match[2]]}.{match[3]}"
        if match := EXPERT_NAME.fullmatch(name):
            return f"{self.family.prefix}.{match[1]}.mlp.experts.{match[3]}.{match[2]}_proj.weight"
        if (match := OUTER_NAME.fullmatch(name)) and match[1] in self.outer:
            return f"{self.outer[match[1]]}.{match[2]}"
        return name

    def gguf_name(self, name: str) -> str:
        """The name that the file would have for it: messages speak of what is in the file."""
        prefix, _, kind = name.rpartition(".")
        for theirs, ours in self.outer.items():
            if prefix == ours:
                return f"{theirs}.{kind}"
        if match := re.fullmatch(rf"{re.escape(self.family.prefix)}\.(\d+)\.(.+)", prefix):
            for theirs, ours in self.layer.items():
                if match[2] == ours:
                    return f"blk.{match[1]}.{theirs}.{kind}"
        return name
