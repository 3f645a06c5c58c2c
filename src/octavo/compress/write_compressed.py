"""The compressed-tensors format, as llm-compressor writes it: W8A16 packed into words, W8A8 as plain int8.

Packed: weight_packed int32 [N, K / 4], four inputs to a word from the lowest bits, each plus 128; weight_shape int64 [2]. Plain: weight int8
[N, K]. Both: weight_scale [N, 1] or [N, G] in the model's dtype.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.compress.rounding import Grid, Quantised
from octavo.compress.settings import Settings
from octavo.compress.stored import floats, tensor
from octavo.compress.write_gptq import words
from octavo.errors import ConfigError
from octavo.quantization import StoredTensor

MIDDLE = 128


class CompressedWriter:
    """See octavo.compress.writers.Writer."""

    name = "compressed-tensors"

    def __init__(self, settings: Settings, dtype: str) -> None:
        self.settings, self.dtype = settings, dtype
        self.packed = settings.scheme == "w8"

    @property
    def reads_transposed(self) -> bool:
        return self.packed

    def grid(self, group: int) -> Grid:
        return Grid(8, group, symmetric=True, scales=self.dtype)

    def check(self, name: str, n: int, k: int) -> None:
        if k % 4:
            raise ConfigError(f"{name}: {k} inputs: the format needs a multiple of 4")

    def tensors(self, name: str, q: Quantised) -> list[StoredTensor]:
        scale = floats(f"{name}.weight_scale", q.scales, self.dtype)
        if not self.packed:
            return [tensor(f"{name}.weight", (q.codes ^ MIDDLE).view(np.int8)), scale]
        shape = tensor(f"{name}.weight_shape", np.array(q.codes.shape, np.int64))
        return [tensor(f"{name}.weight_packed", words(q.codes, 8)), scale, shape]

    def config(self, group: int, plain: list[str]) -> dict[str, Any]:
        layout = "pack-quantized" if self.packed else "int-quantized"
        weights = numbers("channel" if group < 0 else "group") | {"group_size": None if group < 0 else group, "observer": "minmax"}
        inputs = None if self.packed else numbers("token") | {"group_size": None, "dynamic": True}
        scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None, "format": layout}
        return {
            "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed", "config_groups": {"group_0": scheme},
            "ignore": ["lm_head", *plain], "kv_cache_scheme": None, "global_compression_ratio": None,
        }  # fmt: skip

    def companions(self, group: int, plain: list[str]) -> dict[str, dict[str, Any]]:
        return {}


def numbers(strategy: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": False, "actorder": None, "block_structure": None}
