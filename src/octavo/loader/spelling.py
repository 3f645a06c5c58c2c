"""One spelling for tensors that writers name or stack differently; what models ask for. Knows no architecture and no format.

Renamed: the text part of a multimodal checkpoint, GPT-2's body saved without its head, Mixtral's experts. Taken apart: experts stacked in
one tensor [experts, rows, columns].
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.errors import ModelFileError
from octavo.gguf_file import shown
from octavo.quantization import StoredTensor, Tensors

RENAMED = (
    (re.compile(r"^(wte|wpe|h|ln_f)\."), r"transformer.\1."),  # saved from a model without its head: the body's name is missing
    (re.compile(r"^language_model\.lm_head\."), "lm_head."),
    (re.compile(r"^(model\.)?language_model\.(model\.)?"), "model."),
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"(\.experts\.\d+)\.w1\."), r"\1.gate_proj."),
    (re.compile(r"(\.experts\.\d+)\.w2\."), r"\1.down_proj."),
    (re.compile(r"(\.experts\.\d+)\.w3\."), r"\1.up_proj."),
)
MOST_EXPERTS = 4096
STACKED = re.compile(r"(.+\.experts)\.(gate_proj|up_proj|gate_up_proj|down_proj)(\.weight)?")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is stored: under which name, and which of how many equal pieces of it along its rows; 0 pieces for all of it."""

    stored: str
    piece: int = 0
    pieces: int = 0


class Spelled:
    """`tensors` under the names that models use. Pieces of a stack are views."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.kind = tensors.kind
        self.places: dict[str, Place] = {}
        for stored in tensors.names():
            for name, place in self.places_of(stored):
                if name in self.places:
                    raise tensors.error(f"tensors {shown(self.places[name].stored)} and {shown(stored)} are the same part of the model")
                self.places[name] = place

    def places_of(self, stored: str) -> Iterable[tuple[str, Place]]:
        name = stored
        for pattern, replacement in RENAMED:
            name = pattern.sub(replacement, name)
        match = STACKED.fullmatch(name)
        shape = self.tensors.get(stored).shape if match else ()
        if not match or len(shape) != 3 or not 1 <= shape[0] <= MOST_EXPERTS:
            return [(name, Place(stored))]
        experts, kind = shape[0], match[2]
        kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        pieces = experts * len(kinds)
        return [
            (f"{match[1]}.{i // len(kinds)}.{kinds[i % len(kinds)]}.weight", Place(stored, i, pieces)) for i in range(pieces)
        ]

    @property
    def nbytes(self) -> int:
        return self.tensors.nbytes

    def names(self) -> Iterable[str]:
        return self.places.keys()

    def has(self, name: str) -> bool:
        return name in self.places

    def error(self, text: str) -> ModelFileError:
        return self.tensors.error(text)

    def get(self, name: str) -> StoredTensor:
        place = self.places.get(name, Place(name))
        tensor = self.tensors.get(place.stored)
        return piece_of(tensor, place) if place.pieces else tensor


def piece_of(tensor: StoredTensor, place: Place) -> StoredTensor:
    """A matrix of the stack. Rows lie one after the other whatever their type, so equal pieces are equal runs of bytes."""
    rows = tensor.shape[0] * tensor.shape[1]
    if rows % place.pieces:
        raise tensor.error(f"has shape {list(tensor.shape)}: its rows are no {place.pieces} equal matrices")
    size = tensor.data.shape[0] // place.pieces
    data = tensor.data[place.piece * size : (place.piece + 1) * size]
    return StoredTensor(tensor.file, tensor.name, tensor.dtype, (rows // place.pieces, tensor.shape[2]), data)
