"""How checkpoints store weights, one file a format: each turns stored tensors into a PackedWeight.

A format is found by what a checkpoint's files say, never by guessing from its name. Formats see tensors under Hugging Face's names through
`Tensors` and know nothing of files, models or devices. A new format is a new file with a class `FORMAT`, and its name in `NAMES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.config import HFConfig
from octavo.errors import ConfigError, ModelFileError
from octavo.gguf_file import shown
from octavo.ops.packed import PackedWeight, WeightKind, WeightPart, bf16_to_f32, f32_to_bf16

NAMES = ("gguf", "none", "gptq", "awq", "compressed_tensors", "fp8")
# What plain checkpoints may be rounded to while they are loaded.
ON_LOAD = ("w4", "w8")

# The dtype option -> what plain weights become.
DTYPES = {"float32": WeightKind.F32, "bfloat16": WeightKind.BF16, "float16": WeightKind.F16}
# What plain weights are called in files, and the numpy type of their codes.
PLAIN: dict[str, tuple[WeightKind, np.dtype[Any]]] = {
    "F32": (WeightKind.F32, np.dtype("<f4")),
    "F16": (WeightKind.F16, np.dtype("<f2")),
    "BF16": (WeightKind.BF16, np.dtype("<u2")),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file holds it. `dtype` is the file's own word for it (BF16, Q4_K); `data` are its bytes, uint8 [nbytes], a view."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def error(self, text: str) -> ModelFileError:
        return ModelFileError(f"{self.file}: tensor {self.name!r}: {text}")

    def check_shape(self, *shape: int) -> None:
        if self.shape != shape:
            raise self.error(f"has shape {list(self.shape)}, but the configuration asks for {list(shape)}")


class Tensors(Protocol):
    """The stored tensors of a checkpoint, under Hugging Face's names. `kind` is what kind of files hold them: gguf or safetensors."""

    kind: str

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        ...

    def names(self) -> Iterable[str]: ...

    def has(self, name: str) -> bool: ...

    def get(self, name: str) -> StoredTensor:
        """Raises ModelFileError if there is none of this name."""
        ...

    def error(self, text: str) -> ModelFileError:
        """An error about the checkpoint as a whole, naming its file or folder."""
        ...


class Format(Protocol):
    """One way of storing weights, opened for one checkpoint."""

    @property
    def is_four_bit(self) -> bool:
        """Whether it is a format of safetensors whose layers are stored in 4 bits."""
        ...

    def pack(self, name: str, n: int, k: int) -> PackedWeight:
        """The weights of the module `name`, n output channels of k inputs. Raises ModelFileError naming file and tensor."""
        ...

    def uses(self, name: str) -> tuple[str, ...]:
        """The stored tensors that hold the weights of the module `name`."""
        ...


class FormatKind(Protocol):
    """A format's class."""

    def __call__(self, hf: HFConfig, tensors: Tensors, dtype: str, /) -> Format: ...

    @staticmethod
    def claims(hf: HFConfig, tensors: Tensors) -> bool:
        """Whether the checkpoint says that it is stored so. At most one format does."""
        ...


def declared(hf: HFConfig) -> str | None:
    """The quantisation method that the configuration names, if any. ConfigError if it is no text."""
    if "quantization_config" not in hf:
        return None
    return method_config(hf).read("quant_method", str)


def method_config(hf: HFConfig) -> HFConfig:
    """The configuration's section on quantisation."""
    return HFConfig(dict(hf.read("quantization_config", dict)), f"{hf.source}: quantization_config")


def choose_format(hf: HFConfig, tensors: Tensors, dtype: str, asked: str | None, rounds_embeddings: bool = False) -> tuple[str, Format]:
    """The name and the format of a checkpoint, opened; `asked` (the option `quantization`) must agree with the files, or is what to round them to.
    rounds_embeddings: of 4-bit checkpoints, embedding and head in 16 bits become 8.

    Raises ConfigError naming what the files say and what is supported.
    """
    supported = f"supported: {', '.join(NAMES)}; plain checkpoints also {', '.join(ON_LOAD)}"
    for name in NAMES:
        kind: FormatKind = importlib.import_module(f"octavo.quantization.{name}").FORMAT
        if kind.claims(hf, tensors):
            if asked in ON_LOAD and name == "none":
                rounded: Format = importlib.import_module("octavo.quantization.on_load").OnLoad(tensors, asked)
                return asked, rounded
            if asked is not None and asked.replace("-", "_") != name:
                raise ConfigError(f"quantization = {asked!r}: the files of this checkpoint say {name!r}; {supported}")
            opened = kind(hf, tensors, dtype)
            if declared(hf) is not None:
                refuse_plain(hf, tensors)
            if rounds_embeddings and opened.is_four_bit:
                opened = importlib.import_module("octavo.quantization.on_load").OnLoadOutside(tensors, opened)
            return name, opened
    raise ConfigError(f"{hf.source}: quantization_config: quant_method = {shown(declared(hf) or '')}: not supported; {supported}")


def refuse_plain(hf: HFConfig, tensors: Tensors) -> None:
    """A checkpoint that says it is quantised, and is not: files that do not belong together."""
    if all(tensors.get(name).dtype in PLAIN for name in tensors.names()):
        raise tensors.error(f"no tensor is quantised, though quantization_config says quant_method = {declared(hf)!r}")


# Plain tensors: every format leaves some matrices unquantised.


def plain_codes(tensor: StoredTensor) -> NDArray[Any]:
    """Codes of an F32, F16 or BF16 tensor in its shape, a view. ModelFileError for any other dtype."""
    if tensor.dtype not in PLAIN:
        raise tensor.error(f"dtype {tensor.dtype} is not supported here; supported: {', '.join(PLAIN)}")
    return tensor.data.view(PLAIN[tensor.dtype][1]).reshape(tensor.shape)


def plain_values(tensor: StoredTensor) -> NDArray[np.float32]:
    """Numbers of an F32, F16 or BF16 tensor as float32, contiguous; exact."""
    codes = plain_codes(tensor)
    if tensor.dtype == "BF16":
        return bf16_to_f32(codes)
    return np.ascontiguousarray(codes, np.float32)


def pack_plain(tensor: StoredTensor, n: int, k: int, dtype: str) -> PackedWeight:
    """As stored and without a copy for `dtype` auto; else rounded to nearest even. ModelFileError if float16 would overflow."""
    tensor.check_shape(n, k)
    codes = plain_codes(tensor)
    stored = PLAIN[tensor.dtype][0]
    wanted = DTYPES.get(dtype, stored)
    if wanted is not stored:
        codes = converted(tensor, wanted)
    return PackedWeight(wanted, n, k, (WeightPart(codes),))


def turned(tensor: StoredTensor) -> StoredTensor:
    """A plain matrix with rows and columns exchanged; a copy."""
    codes = np.ascontiguousarray(plain_codes(tensor).T)
    return StoredTensor(tensor.file, tensor.name, tensor.dtype, codes.shape, codes.reshape(-1).view(np.uint8))


def pack_transposed(tensor: StoredTensor, n: int, k: int, dtype: str) -> PackedWeight:
    """A plain matrix that is stored [k, n], as GPT-2's are; a copy."""
    tensor.check_shape(k, n)
    stored = pack_plain(tensor, k, n, dtype)
    return PackedWeight(stored.kind, n, k, (WeightPart(np.ascontiguousarray(stored.parts[0].codes.T)),))


def converted(tensor: StoredTensor, wanted: WeightKind) -> NDArray[Any]:
    values = plain_values(tensor)
    if wanted is WeightKind.F32:
        return values
    if wanted is WeightKind.BF16:
        return f32_to_bf16(values)
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if bool(np.any(np.isinf(halves) & np.isfinite(values))):
        raise tensor.error("holds numbers beyond float16's range; use dtype bfloat16 or float32")
    return halves
