"""The AWQ format, GEMM version.

Of a matrix: qweight int32 [K, N / 8] and qzeros int32 [G, N / 8], eight channels to a word in the order 0 2 4 6 1 3 5 7 from the lowest bits;
scales float16 [G, N].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.compress.rounding import Grid, Quantised
from octavo.compress.settings import Settings
from octavo.compress.stored import floats, tensor
from octavo.compress.write_gptq import words
from octavo.errors import ConfigError
from octavo.quantization import StoredTensor

CHANNEL_AT = (0, 2, 4, 6, 1, 3, 5, 7)


def channel_words(rows: NDArray[Any]) -> NDArray[np.int32]:
    """[R, N] small whole numbers -> int32 [R, N / 8]."""
    octets = rows.reshape(rows.shape[0], -1, 8)[..., CHANNEL_AT]
    return words(octets.reshape(rows.shape), 4)


class AWQWriter:
    """See octavo.compress.writers.Writer."""

    name = "awq"
    reads_transposed = True

    def __init__(self, settings: Settings, dtype: str) -> None:
        self.settings = settings

    def grid(self, group: int) -> Grid:
        return Grid(4, group, symmetric=False, scales="F16")

    def check(self, name: str, n: int, k: int) -> None:
        if n % 8:
            raise ConfigError(f"{name}: {n} output channels: the format needs a multiple of 8")

    def tensors(self, name: str, q: Quantised) -> list[StoredTensor]:
        return [
            tensor(f"{name}.qweight", channel_words(q.codes.T)),
            tensor(f"{name}.qzeros", channel_words(q.zeros.T)),
            floats(f"{name}.scales", np.ascontiguousarray(q.scales.T), "F16"),
        ]

    def config(self, group: int, plain: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": plain or None,
        }  # fmt: skip

    def companions(self, group: int, plain: list[str]) -> dict[str, dict[str, Any]]:
        return {}
