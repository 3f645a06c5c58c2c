"""AWQ checkpoints (Lin et al. 2023) of 4 bits, in the GEMM layout.

Of each matrix: qweight int32 [K, N / 8], eight channels in a word in the order 0 2 4 6 1 3 5 7, lowest bits first; scales [G, N]; qzeros int32
[G, N / 8] packed likewise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.gguf_file import shown
from octavo.ops.packed import PackedWeight
from octavo.quantization import Tensors, declared, method_config, pack_plain
from octavo.quantization.integers import IntegerMatrix, integers_of, require_middle, scales_of
from octavo.quantization.modules import group_size, refuse_listed, refuse_set

TENSORS = ("qweight", "qzeros", "scales")
PER_WORD = 8
# The nibble that holds each of a word's channels.
NIBBLE_OF = (0, 4, 1, 5, 2, 6, 3, 7)


class AWQ:
    is_four_bit = True

    def __init__(self, hf: HFConfig, tensors: Tensors, dtype: str) -> None:
        self.tensors, self.dtype = tensors, dtype
        config = method_config(hf)
        source = config.source
        bits = config.read("bits", int, config.read("w_bit", int, 4))
        if bits != 4:
            raise ConfigError(f"{source}: bits = {bits}: supported is 4")
        if "group_size" not in config and "q_group_size" in config:
            config.raw["group_size"] = config.raw["q_group_size"]
        self.group = group_size(config)
        layout = config.read("version", str, config.read("checkpoint_format", str, config.read("format", str, "gemm")))
        if layout.lower() != "gemm":
            raise ConfigError(f"{source}: version = {shown(layout)}: supported is gemm")
        self.zero_point = config.read("zero_point", bool, True)
        refuse_set(config, "dynamic", "rotation", "adapter", "desc_act")
        self.unquantised = config.read("modules_to_not_convert", list, [])

    @staticmethod
    def claims(hf: HFConfig, tensors: Tensors) -> bool:
        return tensors.kind == "safetensors" and declared(hf) == "awq"

    def uses(self, name: str) -> tuple[str, ...]:
        if not self.tensors.has(f"{name}.qweight"):
            return (f"{name}.weight",)
        return tuple(f"{name}.{one}" for one in TENSORS)

    def pack(self, name: str, n: int, k: int) -> PackedWeight:
        if self.tensors.has(f"{name}.weight") and not self.tensors.has(f"{name}.qweight"):
            return pack_plain(self.tensors.get(f"{name}.weight"), n, k, self.dtype)
        stored = self.tensors.get(f"{name}.qweight")
        refuse_listed(stored, name, self.unquantised)
        group = k if self.group == -1 else self.group
        groups = -(-k // group)
        if n % PER_WORD:
            raise stored.error(f"{n} channels are no multiple of {PER_WORD}, the codes in a word")
        stored.check_shape(k, n // PER_WORD)
        qweight = integers_of(stored, "I32")
        stored_zeros, stored_scales = self.tensors.get(f"{name}.qzeros"), self.tensors.get(f"{name}.scales")
        stored_zeros.check_shape(groups, n // PER_WORD)
        stored_scales.check_shape(groups, n)

        def codes(first: int, last: int) -> NDArray[np.uint8]:
            return np.ascontiguousarray(channels(qweight[:, first // PER_WORD : last // PER_WORD]).T)

        zeros = channels(integers_of(stored_zeros, "I32"))
        if not self.zero_point:
            require_middle(stored_zeros, zeros, 4, "zero_point = false")
        matrix = IntegerMatrix(4, n, k, group, codes, scales_of(stored_scales).T, zeros.T)
        try:
            return matrix.pack()
        except ValueError as e:
            raise stored.error(str(e)) from None


FORMAT = AWQ


def channels(packed: NDArray[np.int32]) -> NDArray[np.uint8]:
    """int32 [rows, N / 8] -> uint8 [rows, N], channels in order."""
    stored = packed.view(np.uint32) if packed.flags.c_contiguous else np.ascontiguousarray(packed).view(np.uint32)
    out = np.empty((*stored.shape, PER_WORD), np.uint8)
    for channel, nibble in enumerate(NIBBLE_OF):
        out[..., channel] = stored >> np.uint32(4 * nibble) & np.uint32(15)
    return out.reshape(stored.shape[0], -1)
