"""The GPTQ format, first version: what most programs read as `gptq`.

Of a matrix: qweight int32 [K / 8, N], eight inputs to a word from the lowest bits; qzeros int32 [G, N / 8], eight channels to a word, each less
one; scales float16 [G, N]; g_idx int32 [K], the group of each input. (Numbers for 4 bits.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.compress.rounding import Grid, Quantised
from octavo.compress.settings import Settings
from octavo.compress.stored import floats, tensor
from octavo.errors import ConfigError
from octavo.quantization import StoredTensor

CONFIG_FILE = "quantize_config.json"
SUFFIX = ".weight"


def words(codes: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """[..., n] small whole numbers -> int32 [..., n * bits / 32], the first in the lowest bits."""
    per_word = 32 // bits
    parts = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, per_word)
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    return np.bitwise_or.reduce(parts << shifts, axis=-1).view(np.int32)


class GPTQWriter:
    """See octavo.compress.writers.Writer."""

    name = "gptq"
    reads_transposed = True

    def __init__(self, settings: Settings, dtype: str) -> None:
        self.settings = settings

    def grid(self, group: int) -> Grid:
        # A zero point of 0 would be stored as -1, which readers undo differently.
        return Grid(self.settings.bits, group, bool(self.settings.symmetric), "F16", lowest_zero=1)

    def check(self, name: str, n: int, k: int) -> None:
        if n % 8 or k % 8:
            raise ConfigError(f"{name}: {n} x {k} numbers: the format needs multiples of 8")

    def tensors(self, name: str, q: Quantised) -> list[StoredTensor]:
        bits = q.grid.bits
        stored_zeros = q.zeros.T.astype(np.int64) - 1 & q.grid.top
        return [
            tensor(f"{name}.qweight", words(q.codes, bits).T),
            tensor(f"{name}.qzeros", words(stored_zeros, bits)),
            floats(f"{name}.scales", np.ascontiguousarray(q.scales.T), "F16"),
            tensor(f"{name}.g_idx", q.groups),
        ]

    def config(self, group: int, plain: list[str]) -> dict[str, Any]:
        settings = self.settings
        config = {
            "bits": settings.bits, "group_size": group, "desc_act": settings.act_order, "sym": bool(settings.symmetric), "lm_head": False,
            "damp_percent": settings.damping, "quant_method": "gptq", "checkpoint_format": "gptq",
        }  # fmt: skip
        return config | ({"dynamic": {f"-:.*{name.replace('.', '[.]')}": {} for name in plain}} if plain else {})

    def companions(self, group: int, plain: list[str]) -> dict[str, dict[str, Any]]:
        return {CONFIG_FILE: self.config(group, plain)}
