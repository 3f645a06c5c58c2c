"""Module: a tree of layers that knows its parameters by their checkpoint names. Knows no device, file format or cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo import ops
from octavo.ops.packed import PackedWeight


class Module:
    """A layer. Its attributes that are modules, vectors, or lists of them are its children, in order of definition."""

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def forward(self, *args: Any) -> Any:
        raise NotImplementedError(type(self).__name__)

    def walk(self) -> Iterator[Module]:
        """This module and all below it, depth first."""
        yield self
        for value in vars(self).values():
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, Module):
                    yield from item.walk()

    def linears(self) -> Iterator[Linear]:
        return (m for m in self.walk() if isinstance(m, Linear))

    def vectors(self) -> Iterator[Vector]:
        return (m for m in self.walk() if isinstance(m, Vector))


class Vector(Module):
    """A one-dimensional parameter: checkpoint name, length, and once loaded its float32 value."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._value: NDArray[np.float32] | None = None

    @property
    def value(self) -> NDArray[np.float32]:
        if self._value is None:
            raise RuntimeError(f"{self.name} is not loaded")
        return self._value

    @value.setter
    def value(self, value: NDArray[np.float32]) -> None:
        self._value = value


class Linear(Module):
    """One or several stored matrices over the same input, their outputs side by side (merged q, k, v; gate, up).

    names: checkpoint paths without `.weight`. n_each: output channels of each. k: inputs. bias: whether each has a `.bias`. transposed: they
    are stored [inputs, outputs] where the file keeps them unquantised. After loading: `weights`, neighbours of one kind merged, and `bias`, float32 [N] or None.
    """

    def __init__(self, names: str | Sequence[str], k: int, n_each: int | Sequence[int], bias: bool = False, transposed: bool = False) -> None:
        self.names = (names,) if isinstance(names, str) else tuple(names)
        self.n_each = (n_each,) if isinstance(n_each, int) else tuple(n_each)
        self.k = k
        self.transposed = transposed
        self.bias_names = tuple(f"{name}.bias" for name in self.names) if bias else None
        self.weights: tuple[PackedWeight, ...] = ()
        self.bias: NDArray[np.float32] | None = None

    @property
    def n(self) -> int:
        return sum(self.n_each)

    def forward(self, x_TK: ops.Value) -> ops.Value:
        return ops.linear(x_TK, self.weights, self.bias)


class RMSNorm(Module):
    """Root-mean-square norm. offset: added to the stored weight (Gemma keeps what it adds to 1)."""

    def __init__(self, name: str, size: int, eps: float, offset: float = 0.0) -> None:
        self.weight = Vector(f"{name}.weight", size)
        self.eps = eps
        self.offset = offset

    @property
    def scale(self) -> NDArray[np.float32]:
        """What the normalised row is multiplied by."""
        return self.weight.value + np.float32(self.offset) if self.offset else self.weight.value

    def forward(self, x_TD: ops.Value) -> ops.Value:
        return ops.rms_norm(x_TD, self.scale, self.eps)


class HeadNorm(RMSNorm):
    """RMSNorm over each head's slice."""

    def forward(self, x_TN: ops.Value) -> ops.Value:
        return ops.head_norm(x_TN, self.scale, self.eps)


class LayerNorm(Module):
    """Layer norm (Ba et al. 2016), with a bias unless told otherwise."""

    def __init__(self, name: str, size: int, eps: float, bias: bool = True) -> None:
        self.weight = Vector(f"{name}.weight", size)
        self.bias = Vector(f"{name}.bias", size) if bias else None
        self.eps = eps

    def forward(self, x_TD: ops.Value) -> ops.Value:
        return ops.layer_norm(x_TD, self.weight.value, self.bias.value if self.bias else None, self.eps)


class Embedding(Module):
    """A token table [V, D]; `table` is a Linear so that an output head can be tied to it. scale: what its rows are multiplied by."""

    def __init__(self, name: str, vocab_size: int, width: int, scale: float = 1.0) -> None:
        self.table = Linear(name, width, vocab_size)
        self.scale = scale

    def forward(self, ids_T: ops.Value) -> ops.Value:
        return ops.embed(ids_T, self.table.weights[0], self.scale)
