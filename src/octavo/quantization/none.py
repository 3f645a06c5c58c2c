"""Weights that are not quantised: F32, F16 and BF16 matrices, kept as stored or converted to the dtype that was asked for."""

from __future__ import annotations

from octavo.config import HFConfig
from octavo.ops.packed import PackedWeight
from octavo.quantization import Tensors, declared, pack_plain


class Plain:
    is_four_bit = False

    def __init__(self, _hf: HFConfig, tensors: Tensors, dtype: str) -> None:
        self.tensors = tensors
        self.dtype = dtype

    @staticmethod
    def claims(hf: HFConfig, tensors: Tensors) -> bool:
        return tensors.kind == "safetensors" and declared(hf) is None

    def uses(self, name: str) -> tuple[str, ...]:
        return (f"{name}.weight",)

    def pack(self, name: str, n: int, k: int) -> PackedWeight:
        return pack_plain(self.tensors.get(f"{name}.weight"), n, k, self.dtype)


FORMAT = Plain
