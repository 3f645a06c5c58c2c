"""FP8 checkpoints of quant_method `fp8`: e4m3 weights with a scale per block of 128 x 128 (DeepSeek's), per channel or per tensor.

Of each matrix: weight F8_E4M3 [N, K], and weight_scale_inv [ceil(N / rows), ceil(K / columns)] or weight_scale [], [1] or [N, 1]; both are what a
weight is multiplied with. input_scale of static activations is checked and not used: ours stay bf16.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.gguf_file import shown
from octavo.ops.packed import PackedWeight
from octavo.quantization import Tensors, declared, method_config, pack_plain
from octavo.quantization.floats8 import F8, pack_f8
from octavo.quantization.integers import per_group, scales_of, spread
from octavo.quantization.modules import refuse_listed

TENSORS = ("weight", "weight_scale_inv", "weight_scale", "input_scale")


class FP8:
    is_four_bit = False

    def __init__(self, hf: HFConfig, tensors: Tensors, dtype: str) -> None:
        self.tensors, self.dtype = tensors, dtype
        config = method_config(hf)
        if config.read("fmt", str, "e4m3") != "e4m3":
            raise ConfigError(f"{config.source}: fmt = {shown(config.raw['fmt'])}: supported is e4m3")
        scheme = config.read("activation_scheme", str, "dynamic")
        if scheme not in ("dynamic", "static"):
            raise ConfigError(f"{config.source}: activation_scheme = {shown(scheme)}: supported are dynamic, static")
        self.block = block_size(config)
        self.unquantised = [*config.read("modules_to_not_convert", list, []), *config.read("ignored_layers", list, [])]

    @staticmethod
    def claims(hf: HFConfig, tensors: Tensors) -> bool:
        return tensors.kind == "safetensors" and declared(hf) == "fp8"

    def uses(self, name: str) -> tuple[str, ...]:
        return tuple(full for full in (f"{name}.{one}" for one in TENSORS) if self.tensors.has(full))

    def pack(self, name: str, n: int, k: int) -> PackedWeight:
        stored = self.tensors.get(f"{name}.weight")
        if stored.dtype != F8:
            return pack_plain(stored, n, k, self.dtype)
        refuse_listed(stored, name, self.unquantised)
        if self.tensors.has(f"{name}.input_scale") and scales_of(self.tensors.get(f"{name}.input_scale")).size != 1:
            raise self.tensors.get(f"{name}.input_scale").error("must be one number")
        return pack_f8(stored, n, k, *self._scales(name, n, k))

    def _scales(self, name: str, n: int, k: int) -> tuple[NDArray[np.float32], int]:
        """float32 [N, G], and the inputs of each."""
        if self.block is not None:
            scale = self.tensors.get(f"{name}.weight_scale_inv")
            scale.check_shape(-(-n // self.block[0]), -(-k // self.block[1]))
            return spread(scales_of(scale), n, k, self.block)
        scale = self.tensors.get(f"{name}.weight_scale_inv" if self.tensors.has(f"{name}.weight_scale_inv") else f"{name}.weight_scale")
        values = scales_of(scale).astype(np.float32)
        if values.size != 1 and scale.shape not in ((n,), (n, 1)):
            scale.check_shape(n, 1)
        return per_group(values.reshape(-1, 1), n), k


FORMAT = FP8


def block_size(config: HFConfig) -> tuple[int, int] | None:
    value = config.raw.get("weight_block_size")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and 0 < size < 1 << 24 for size in value):
        raise ConfigError(f"{config.source}: weight_block_size = {shown(str(value))}: must be two sizes")
    return value[0], value[1]
