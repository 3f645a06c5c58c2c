"""Checkpoints of compressed-tensors (what llm-compressor writes): packed integers, plain int8 as SmoothQuant's W8A8, and FP8.

Of each matrix, packed: weight_packed int32 [N, K * bits / 32], weight_scale [N, G], weight_zero_point int32 [N * bits / 32, G], weight_shape
and weight_g_idx [K]. Plain: weight int8 or e4m3 [N, K], weight_scale [1], [N, 1], [N, G] or by blocks, weight_zero_point int8. Integers are
signed, and packed ones stored with 2^(bits - 1) added.

Activations: ours are int8 with a scale for each row and 32 inputs, or bf16 beside FP8. That is finer than the schemes' (a scale per token or one
for all), so that static scales and zero points of activations are checked and not used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.config import HFConfig
from octavo.ops.packed import PackedWeight
from octavo.quantization import PLAIN, StoredTensor, Tensors, declared, method_config, pack_plain
from octavo.quantization.compressed_schemes import PACKED, Scheme, read_schemes
from octavo.quantization.floats8 import F8, pack_f8
from octavo.quantization.integers import IntegerMatrix, column_order, integers_of, per_group, scales_of, spread, words
from octavo.quantization.modules import refuse_listed

METHOD = "compressed-tensors"
WEIGHT = ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
ACTIVATION = ("input_scale", "input_zero_point")


class CompressedTensors:
    def __init__(self, hf: HFConfig, tensors: Tensors, dtype: str) -> None:
        self.tensors, self.dtype = tensors, dtype
        self.schemes = read_schemes(method_config(hf))
        self.is_four_bit = all(scheme.bits == 4 for scheme in self.schemes.groups)

    @staticmethod
    def claims(hf: HFConfig, tensors: Tensors) -> bool:
        return tensors.kind == "safetensors" and declared(hf) == METHOD

    def uses(self, name: str) -> tuple[str, ...]:
        return tuple(full for full in (f"{name}.{one}" for one in (*WEIGHT, *ACTIVATION)) if self.tensors.has(full))

    def pack(self, name: str, n: int, k: int) -> PackedWeight:
        packed = self.tensors.has(f"{name}.weight_packed")
        stored = self.tensors.get(f"{name}.weight_packed" if packed else f"{name}.weight")
        if not packed and stored.dtype in PLAIN and not self.tensors.has(f"{name}.weight_scale"):
            return pack_plain(stored, n, k, self.dtype)
        refuse_listed(stored, name, self.schemes.ignore)
        scheme = self.schemes.of(name)
        if packed and self.tensors.has(f"{name}.weight"):
            raise stored.error("is there, and the plain weight too")
        if packed != (scheme.layout == PACKED):
            raise stored.error(f"is there, though the configuration says format = {scheme.layout}")
        self._check_activations(name)
        scales, group = self._scales(name, scheme, n, k)
        if scheme.kind == "float":
            if stored.dtype != F8:
                raise stored.error(f"has dtype {stored.dtype}; the configuration says 8-bit floats, {F8}")
            return pack_f8(stored, n, k, scales.astype(np.float32), group)
        try:
            return self._integers(stored, name, scheme, n, k, group, scales).pack()
        except ValueError as e:
            raise stored.error(str(e)) from None

    def _integers(self, stored: StoredTensor, name: str, scheme: Scheme, n: int, k: int, group: int, scales: NDArray[Any]) -> IntegerMatrix:
        per_word = 32 // scheme.bits
        if scheme.layout == PACKED:
            if k % per_word:
                raise stored.error(f"{k} inputs are no multiple of {per_word}, the codes in a word")
            stored.check_shape(n, k // per_word)
            whole = integers_of(stored, "I32")
            self._check_stored_shape(name, n, k)
        else:
            stored.check_shape(n, k)
            whole = integers_of(stored, "I8")

        def codes(first: int, last: int) -> NDArray[np.uint8]:
            if scheme.layout == PACKED:
                return words(whole[first:last], scheme.bits)
            return whole[first:last].view(np.uint8) ^ np.uint8(128)

        zeros = self._zeros(name, scheme, n, scales.shape[1])
        return IntegerMatrix(scheme.bits, n, k, group, codes, scales, zeros, self._order(name, scheme, k, group))

    def _scales(self, name: str, scheme: Scheme, n: int, k: int) -> tuple[NDArray[Any], int]:
        """Scales [N, G], and the inputs of each."""
        stored = self.tensors.get(f"{name}.weight_scale")
        values = scales_of(stored)
        if scheme.strategy == "tensor":
            if values.size != 1:
                raise stored.error(f"has shape {list(stored.shape)}, but the configuration asks for one scale")
            return per_group(values.reshape(1, 1), n), k
        if scheme.strategy == "block":
            stored.check_shape(-(-n // scheme.block[0]), -(-k // scheme.block[1]))
            return spread(values, n, k, scheme.block)
        group = k if scheme.strategy == "channel" else scheme.group
        groups = -(-k // group)
        if not (groups == 1 and stored.shape == (n,)):
            stored.check_shape(n, groups)
        return values.reshape(n, groups), group

    def _zeros(self, name: str, scheme: Scheme, n: int, groups: int) -> NDArray[np.uint8]:
        """Zero points as unsigned numbers [N, G]."""
        middle = 1 << (scheme.bits - 1)
        full = f"{name}.weight_zero_point"
        if not self.tensors.has(full):
            if not scheme.symmetric:
                raise self.tensors.error(f"tensor {full!r} is missing, though the configuration says symmetric = false")
            return np.full((n, groups), middle, np.uint8)
        stored = self.tensors.get(full)
        if stored.dtype == "I32" and scheme.layout == PACKED:
            per_word = 32 // scheme.bits
            stored.check_shape(-(-n // per_word), groups)
            zeros = words(integers_of(stored, "I32").T, scheme.bits)[:, :n].T
        else:
            signed = integers_of(stored, "I8")
            if signed.size != 1 and signed.size != n * groups:
                stored.check_shape(n, groups)
            low, high = -middle, middle - 1
            if signed.size and (signed.min() < low or signed.max() > high):
                raise stored.error(f"holds zero points outside {low}..{high}")
            shaped = signed.reshape(1, 1) if signed.size == 1 else signed.reshape(n, groups)
            zeros = np.broadcast_to((shaped.astype(np.int16) + middle).astype(np.uint8), (n, groups))
        if scheme.symmetric and not (zeros == middle).all():
            raise stored.error("holds zero points, though the configuration says symmetric = true")
        return zeros

    def _order(self, name: str, scheme: Scheme, k: int, group: int) -> NDArray[np.int32] | None:
        full = f"{name}.weight_g_idx"
        if not self.tensors.has(full):
            if scheme.ordered:
                raise self.tensors.error(f"tensor {full!r} is missing, though the configuration says actorder = group")
            return None
        stored = self.tensors.get(full)
        stored.check_shape(k)
        groups = integers_of(stored, "I32", "I64")
        if (groups == -1).all() and not scheme.ordered:  # never filled in
            return None
        order = column_order(stored, groups, k, group)
        if order is not None and not scheme.ordered:
            raise stored.error("has groups out of order, though the configuration does not say actorder = group")
        return order

    def _check_stored_shape(self, name: str, n: int, k: int) -> None:
        if self.tensors.has(f"{name}.weight_shape"):
            stored = self.tensors.get(f"{name}.weight_shape")
            stored.check_shape(2)
            if integers_of(stored, "I32", "I64").tolist() != [n, k]:
                raise stored.error(f"says {integers_of(stored, 'I32', 'I64').tolist()}, but the configuration asks for {[n, k]}")

    def _check_activations(self, name: str) -> None:
        full = f"{name}.input_scale"
        if self.tensors.has(full) and scales_of(self.tensors.get(full)).size != 1:
            raise self.tensors.get(full).error("must be one number")


FORMAT = CompressedTensors
