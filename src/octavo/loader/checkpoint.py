"""Checkpoint: what the rest of the loader sees of weights on disk, whatever files and format hold them.

Joins stored tensors (one of `safetensors`, `gguf`) with a format of the quantization room. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.ops.packed import PackedWeight
from octavo.quantization import Format, Tensors, pack_transposed, plain_values, turned
from octavo.quantization.on_load import OnLoad


class Checkpoint(Protocol):
    """Weights by Hugging Face's names."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of all stored tensors."""
        ...

    def names(self) -> Iterable[str]:
        """Full names of all stored tensors."""
        ...

    def has(self, name: str) -> bool: ...

    def packed(self, name: str, n: int, k: int, transposed: bool = False) -> PackedWeight:
        """Weights of the module `name` (without `.weight`): n output channels or rows of k inputs; `transposed`: plain ones are stored [k, n].

        Views into the mapped files where their layout allows. Raises ModelFileError naming file, tensor, stored and expected shape.
        """
        ...

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        """float32 [size] of a norm or bias, under its full name. Raises ModelFileError likewise."""
        ...

    def uses(self, name: str) -> tuple[str, ...]:
        """Full names of the stored tensors that `packed(name)` reads."""
        ...

    def error(self, text: str) -> Exception:
        """A ModelFileError about the checkpoint as a whole."""
        ...


class FileCheckpoint:
    """Stored tensors, read through a format."""

    def __init__(self, tensors: Tensors, format: Format, format_name: str, dtype: str = "auto") -> None:
        self.tensors = tensors
        self.format = format
        self.format_name = format_name
        self.dtype = dtype

    @property
    def weights_bytes(self) -> int:
        return self.tensors.nbytes

    def names(self) -> Iterable[str]:
        return self.tensors.names()

    def has(self, name: str) -> bool:
        return self.tensors.has(name)

    def packed(self, name: str, n: int, k: int, transposed: bool = False) -> PackedWeight:
        weight_name = f"{name}.weight"
        if transposed and self.tensors.kind == "safetensors" and self.tensors.has(weight_name):
            stored = self.tensors.get(weight_name)
            if isinstance(self.format, OnLoad):
                return self.format.rounded(turned(stored), name, n, k)
            return pack_transposed(stored, n, k, self.dtype)
        return self.format.pack(name, n, k)

    def uses(self, name: str) -> tuple[str, ...]:
        return self.format.uses(name)

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        tensor = self.tensors.get(name)
        tensor.check_shape(size)
        values = plain_values(tensor)
        if not np.isfinite(values).all():
            raise tensor.error("holds a number that is not finite")
        return values

    def error(self, text: str) -> Exception:
        return self.tensors.error(text)
