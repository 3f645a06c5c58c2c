"""Fills a model with a checkpoint's weights. Knows layers by what they declare (names, shapes), and no architecture, format or device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.config import HFConfig
from octavo.gguf_file import shown
from octavo.loader.checkpoint import Checkpoint, FileCheckpoint
from octavo.loader.gguf import GGUFTensors
from octavo.loader.gguf_parts import GGUFModel
from octavo.loader.resolve import ModelSource
from octavo.loader.safetensors import SafetensorsTensors
from octavo.loader.spelling import Spelled
from octavo.ops.packed import PackedWeight, merge
from octavo.quantization import Tensors, choose_format

# Stored by some writers and used by no model of ours: tables that follow from the configuration, GPT-2's causal masks, and a head that is
# tied anyway.
IGNORED = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", ".attn.bias", ".attn.masked_bias", "lm_head.weight")


class LinearSlot(Protocol):
    """A layer with matrices. `names` are module paths, `n_each` their output channels, `k` their inputs; `transposed`: stored [k, n]."""

    names: tuple[str, ...]
    n_each: tuple[int, ...]
    k: int
    transposed: bool
    bias_names: tuple[str, ...] | None
    weights: tuple[PackedWeight, ...]
    bias: NDArray[np.float32] | None


class VectorSlot(Protocol):
    """A one-dimensional parameter of `size` numbers."""

    name: str
    size: int

    @property
    def value(self) -> NDArray[np.float32]: ...

    @value.setter
    def value(self, value: NDArray[np.float32]) -> None: ...


class Loadable(Protocol):
    """A model as the loader sees it. left_out: prefixes of the stored tensors that it knows of and has no use for."""

    left_out: tuple[str, ...]

    def linears(self) -> Iterable[LinearSlot]: ...

    def vectors(self) -> Iterable[VectorSlot]: ...


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Bytes of the weights as packed, each counted once, and what they would take in fp16; stored tensors that the model leaves out."""

    weights_bytes: int
    fp16_bytes: int
    left_out: tuple[str, ...] = ()


def open_checkpoint(
    source: ModelSource, hf: HFConfig, dtype: str = "auto", quantization: str | None = None, rounds_embeddings: bool = False
) -> FileCheckpoint:
    """The weights of a model on disk, mapped and checked, none of them read yet.

    `dtype` is auto (as stored), float32, bfloat16 or float16, for matrices that are not quantised; `quantization` None, or what the files must
    say; rounds_embeddings: see `choose_format`. Raises ModelFileError for a fault of the files, ConfigError if an option disagrees with them.
    """
    stored: Tensors
    if source.kind == "gguf":
        stored = GGUFTensors(GGUFModel.open(source.path, skip=("tokenizer.",)), hf)
    else:
        stored = SafetensorsTensors(source.path)
    tensors = Spelled(stored)
    name, opened = choose_format(hf, tensors, dtype, quantization, rounds_embeddings)
    return FileCheckpoint(tensors, opened, name, dtype)


def load_weights(model: Loadable, checkpoint: Checkpoint, threads: int = 1) -> LoadReport:
    """Sets the weights, biases and vectors of all layers. Layers that name the same tensor share one object.

    threads: for tensors that need work. Raises ModelFileError for a tensor that is missing, of another shape or type, or that no layer asked for.
    """
    used: set[str] = set()
    size = Tally()
    packed = load_matrices(model, checkpoint, threads)
    for name, weight in packed.items():
        used.update(checkpoint.uses(name))
        size.add(weight.nbytes, weight.n * weight.k)
    for linear in model.linears():
        linear.weights = merge([packed[name] for name in linear.names])
        if linear.bias_names is not None:
            parts = [checkpoint.vector(name, n) for name, n in zip(linear.bias_names, linear.n_each, strict=True)]
            linear.bias = np.concatenate(parts)
            used.update(linear.bias_names)
            size.add(linear.bias.nbytes, linear.bias.size)
    for vector in model.vectors():
        vector.value = checkpoint.vector(vector.name, vector.size)
        used.add(vector.name)
        size.add(vector.value.nbytes, vector.size)
    left_out = tuple(name for name in checkpoint.names() if name.startswith(model.left_out)) if model.left_out else ()
    refuse_unused(checkpoint, used.union(left_out))
    return LoadReport(size.nbytes, 2 * size.numbers, left_out)


def load_matrices(model: Loadable, checkpoint: Checkpoint, threads: int) -> dict[str, PackedWeight]:
    """Every matrix by its name, each once. With several faults the first in the model's order is raised."""
    wanted: dict[str, tuple[int, int, bool]] = {}
    for linear in model.linears():
        for name, n in zip(linear.names, linear.n_each, strict=True):
            wanted.setdefault(name, (n, linear.k, linear.transposed))
    with ThreadPoolExecutor(max(1, threads)) as pool:
        return dict(zip(wanted, pool.map(lambda name: checkpoint.packed(name, *wanted[name]), wanted), strict=True))


@dataclass(slots=True)
class Tally:
    """Running sums for the report."""

    nbytes: int = 0
    numbers: int = 0

    def add(self, nbytes: int, numbers: int) -> None:
        self.nbytes += nbytes
        self.numbers += numbers


def refuse_unused(checkpoint: Checkpoint, used: set[str]) -> None:
    """A tensor that no layer asked for is a part of the model that would silently be left out."""
    unused = list(left_over(checkpoint.names(), used))
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise checkpoint.error(f"tensor {shown(unused[0])}{more}: the model of this configuration has no use for it")


def left_over(names: Iterable[str], used: set[str]) -> Iterator[str]:
    return (name for name in names if name not in used and not name.endswith(IGNORED))
