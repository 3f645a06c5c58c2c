"""GPTQ checkpoints (Frantar et al. 2022) of 4 and 8 bits, in the layouts `gptq` (version 1) and `gptq_v2`.

Of each matrix: qweight int32 [K * bits / 32, N], inputs packed downwards, lowest bits first; scales [G, N]; qzeros int32 [G, N * bits / 32], in
version 1 one less than meant; g_idx int32 [K], the group of each input, ascending unless the columns were quantised in order of activation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.gguf_file import shown
from octavo.ops.packed import PackedWeight
from octavo.quantization import Tensors, declared, method_config, pack_plain
from octavo.quantization.integers import IntegerMatrix, column_order, integers_of, require_middle, scales_of, words
from octavo.quantization.modules import group_size, refuse_listed, refuse_set

TENSORS = ("qweight", "qzeros", "scales", "g_idx")
LAYOUTS = ("gptq", "gptq_v2")
LEFT_OUT = "-:"  # before a pattern of modules that are not quantised, which their tensors show as well


class GPTQ:
    def __init__(self, hf: HFConfig, tensors: Tensors, dtype: str) -> None:
        self.tensors, self.dtype = tensors, dtype
        config = method_config(hf)
        self.source = config.source
        self.bits = config.read("bits", int)
        if self.bits not in (4, 8):
            raise ConfigError(f"{self.source}: bits = {self.bits}: supported are 4, 8")
        self.is_four_bit = self.bits == 4
        self.group = group_size(config)
        self.sym = config.read("sym", bool, True)
        self.ordered = config.read("desc_act", bool, False)
        layout = config.read("checkpoint_format", str, config.read("format", str, "gptq"))
        if layout not in LAYOUTS:
            raise ConfigError(f"{self.source}: checkpoint_format = {shown(layout)}: supported are {', '.join(LAYOUTS)}")
        self.zero_offset = 1 if layout == "gptq" else 0
        if config.read("pack_dtype", str, "int32") != "int32":
            raise ConfigError(f"{self.source}: pack_dtype = {shown(config.raw['pack_dtype'])}: supported is int32")
        refuse_set(config, "rotation", "adapter", "is_marlin_format")
        for pattern in config.read("dynamic", dict, {}):
            if not str(pattern).startswith(LEFT_OUT):
                raise ConfigError(f"{self.source}: dynamic: {shown(str(pattern))}: settings of single modules are not supported")
        self.unquantised = config.read("modules_to_not_convert", list, [])

    @staticmethod
    def claims(hf: HFConfig, tensors: Tensors) -> bool:
        return tensors.kind == "safetensors" and declared(hf) == "gptq"

    def uses(self, name: str) -> tuple[str, ...]:
        if not self.tensors.has(f"{name}.qweight"):
            return (f"{name}.weight",)
        return tuple(f"{name}.{one}" for one in TENSORS if one != "g_idx" or self.tensors.has(f"{name}.g_idx"))

    def pack(self, name: str, n: int, k: int) -> PackedWeight:
        if self.tensors.has(f"{name}.weight") and not self.tensors.has(f"{name}.qweight"):
            return pack_plain(self.tensors.get(f"{name}.weight"), n, k, self.dtype)
        stored = self.tensors.get(f"{name}.qweight")
        refuse_listed(stored, name, self.unquantised)
        per_word = 32 // self.bits
        group = k if self.group == -1 else self.group
        groups = -(-k // group)
        if n % per_word or k % per_word:
            raise stored.error(f"{n} channels of {k} inputs are no multiples of {per_word}, the codes in a word")
        stored.check_shape(k // per_word, n)
        qweight = integers_of(stored, "I32")
        stored_scales = self.tensors.get(f"{name}.scales")
        stored_scales.check_shape(groups, n)

        def codes(first: int, last: int) -> NDArray[np.uint8]:
            return words(qweight[:, first:last].T, self.bits)

        matrix = IntegerMatrix(
            self.bits, n, k, group, codes, scales_of(stored_scales).T, self._zeros(name, groups, n), self._order(name, k, group)
        )
        try:
            return matrix.pack()
        except ValueError as e:
            raise stored.error(str(e)) from None

    def _zeros(self, name: str, groups: int, n: int) -> NDArray[np.uint8]:
        """Unsigned zero points [N, G]."""
        stored = self.tensors.get(f"{name}.qzeros")
        stored.check_shape(groups, n * self.bits // 32)
        zeros = (words(integers_of(stored, "I32"), self.bits) + np.uint8(self.zero_offset)) & np.uint8((1 << self.bits) - 1)
        if self.sym:
            require_middle(stored, zeros, self.bits, "sym = true")
        return zeros.T

    def _order(self, name: str, k: int, group: int) -> NDArray[np.int32] | None:
        if not self.tensors.has(f"{name}.g_idx"):
            if self.ordered:
                raise self.tensors.error(f"tensor '{name}.g_idx' is missing, though the configuration says desc_act = true")
            return None
        stored = self.tensors.get(f"{name}.g_idx")
        stored.check_shape(k)
        order = column_order(stored, integers_of(stored, "I32"), k, group)
        if order is not None and not self.ordered:
            raise stored.error("has groups out of order, though the configuration says desc_act = false")
        return order


FORMAT = GPTQ
