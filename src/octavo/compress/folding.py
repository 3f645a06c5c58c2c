"""Where a factor for each input of a product can go: what is taken from an activation's channel is given back by the weights that read it.

A norm's weight takes the factors of all products that read its result; the up part of a gated MLP takes those of its down product, v those of
the output product where each head has its own. Found from what the block's ops do (norms) and what its layers are (the others).

# K = inputs of a product, N = outputs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.compress.capture import f32_weight, uses_of_norms
from octavo.layers import Attention, GatedMLP, LayerNorm, Linear, Module, RMSNorm, Vector

F32 = NDArray[np.float32]
Stored = Callable[[str, F32], F32]  # a vector's numbers, rounded as the file will hold them


class Fold(Protocol):
    """Products that read the same channels, and what comes before them."""

    @property
    def readers(self) -> Sequence[Linear]: ...

    def divide(self, factors_K: F32) -> list[Vector | Linear]:
        """Takes the factors from the channels and gives them to the readers. Returns whose vectors or biases changed."""
        ...


@dataclass(frozen=True, slots=True)
class NormFold:
    """A norm, and all that reads it. stored: see Stored."""

    norm: RMSNorm | LayerNorm
    readers: tuple[Linear, ...]
    stored: Stored

    def divide(self, factors_K: F32) -> list[Vector | Linear]:
        weight, offset = self.norm.weight, np.float32(getattr(self.norm, "offset", 0.0))
        before_K = weight.value + offset
        value_K = self.stored(weight.name, before_K / factors_K - offset)
        after_K = value_K + offset
        # The file's dtype rounds the norm, so that the weights give back what was really taken.
        real_K = np.divide(before_K, after_K, out=np.ones_like(before_K), where=(after_K != 0) & (before_K != 0))
        weight.value = value_K
        changed: list[Vector | Linear] = [weight]
        bias = getattr(self.norm, "bias", None)
        if bias is not None:
            bias.value = self.stored(bias.name, bias.value / real_K)
            changed.append(bias)
        for linear in self.readers:
            linear.weights = f32_weight(matrix_of(linear) * real_K)
        return changed


@dataclass(frozen=True, slots=True)
class RowFold:
    """Output channels `first` .. `last` of a product, and the one product that reads them. stored: see Stored."""

    source: Linear
    first: int
    last: int
    reader: Linear
    stored: Stored

    @property
    def readers(self) -> tuple[Linear, ...]:
        return (self.reader,)

    def divide(self, factors_K: F32) -> list[Vector | Linear]:
        rows = slice(self.first, self.last)
        matrix_NK = matrix_of(self.source).copy()
        matrix_NK[rows] /= factors_K[:, None]
        self.source.weights = f32_weight(matrix_NK)
        self.reader.weights = f32_weight(matrix_of(self.reader) * factors_K)
        if self.source.bias is None or self.source.bias_names is None:
            return []
        bias_N = self.source.bias.copy()
        bias_N[rows] /= factors_K
        parts = np.split(bias_N, np.cumsum(self.source.n_each)[:-1])
        self.source.bias = np.concatenate([self.stored(name, part) for name, part in zip(self.source.bias_names, parts, strict=True)])
        return [self.source]


def matrix_of(linear: Linear) -> F32:
    """Float32 [N, K] of a product whose weights are float32."""
    codes: F32 = linear.weights[0].parts[0].codes
    return codes


def norm_folds(block: Module, linears: Sequence[Linear], width: int, stored: Stored) -> list[Fold]:
    """The norms whose results only go into the given products."""
    norms = [m for m in block.walk() if isinstance(m, (RMSNorm, LayerNorm))]
    values = [norm.weight.value for norm in norms]
    by_id = {id(linear.weights): linear for linear in linears}
    found: dict[int, list[Linear | None]] = {}
    try:
        # Norms may hold equal numbers, or make their weight anew at each call: told apart by a number that each holds for the time of the search.
        for number, norm in enumerate(norms):
            norm.weight.value = np.full_like(norm.weight.value, 1000 * (number + 1))
        for use in uses_of_norms(block, width):
            number = int(use.norm[0]) // 1000 - 1
            found.setdefault(number, []).append(by_id.get(use.weights) if use.weights is not None else None)
    finally:
        for norm, value in zip(norms, values, strict=True):
            norm.weight.value = value
    folds: list[Fold] = []
    for number, users in sorted(found.items()):
        readers = tuple(user for user in users if user is not None)
        if len(readers) == len(users) and len(set(readers)) == len(readers):
            folds.append(NormFold(norms[number], readers, stored))
    return folds


def row_folds(block: Module, linears: Sequence[Linear], stored: Stored) -> list[Fold]:
    """v before the output product, up before down."""
    wanted, folds = set(linears), list[Fold]()
    for module in block.walk():
        if isinstance(module, Attention) and module.widths[0] == module.widths[2] and {module.qkv, module.out} <= wanted:
            folds.append(RowFold(module.qkv, module.qkv.n - module.widths[2], module.qkv.n, module.out, stored))
        elif isinstance(module, GatedMLP) and {module.gate_up, module.down} <= wanted:
            folds.append(RowFold(module.gate_up, module.gate_up.n // 2, module.gate_up.n, module.down, stored))
    return folds
