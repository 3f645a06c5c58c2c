"""Rotary tables: cosines and sines by position, with the scalings that checkpoints ask for.

Follows RoFormer (Su et al. 2021); `linear` is position interpolation (Chen et al. 2023), `llama3` is Meta's piecewise scaling by wavelength.
Arithmetic in fp32, as the reference implementations do it: at long positions the rounding of the angle is part of the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from octavo.config import HFConfig
from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding. `rot`: columns of a head that turn; `pairs`: neighbours turn together, not halves.

    Frozen, so that equal layers share one table.
    """

    theta: float
    rot: int
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    pairs: bool = False

    @staticmethod
    def read(hf: HFConfig) -> Rope:
        """Raises ConfigError for a scaling that is not implemented."""
        theta = hf.read("rope_theta", float, 10000.0)
        rot = int(hf.head_dim * hf.read("partial_rotary_factor", float, 1.0))
        scaling = hf.read("rope_scaling", dict, {})
        kind = str(scaling.get("rope_type", scaling.get("type", "default")))
        if kind in ("default", "none"):
            return Rope(theta, rot)
        inner = HFConfig(scaling, f"{hf.source}: rope_scaling")
        factor = inner.read("factor", float)
        if not (math.isfinite(factor) and factor > 0):
            raise ConfigError(f"{hf.source}: rope_scaling.factor = {factor}: must be above 0")
        if kind == "linear":
            return Rope(theta, rot, kind, factor)
        if kind == "llama3":
            return Rope(theta, rot, kind, factor, inner.read("low_freq_factor", float), inner.read("high_freq_factor", float),
                        inner.size("original_max_position_embeddings"))
        raise ConfigError(f"{hf.source}: rope_scaling type {kind!r}: supported are default, linear, llama3")

    def table(self, positions: int) -> NDArray[np.float32]:
        """float32 [positions, rot]: cosines of rot/2 frequencies, then their sines."""
        return _table(self, positions)

    def query_table(self, positions: int) -> NDArray[np.float32]:
        """The table that queries turn by; the same object wherever it is the same."""
        return self.table(positions)

    def frequencies(self) -> NDArray[np.float32]:
        """float32 [rot / 2], radians per position."""
        exponents = np.arange(0, self.rot, 2, dtype=np.float32) / np.float32(self.rot)
        plain = (1.0 / np.power(np.float32(self.theta), exponents)).astype(np.float32)
        if self.kind == "linear":
            return plain / np.float32(self.factor)
        if self.kind == "llama3":
            return self._llama3(plain)
        return plain

    def _llama3(self, plain: NDArray[np.float32]) -> NDArray[np.float32]:
        turns = self.original_context / (2 * np.pi / plain)  # over the original context
        mix = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return ((1 - mix) * plain / self.factor + mix * plain).astype(np.float32)


@lru_cache(maxsize=4)
def _table(rope: Rope, positions: int) -> NDArray[np.float32]:
    angles = np.arange(positions, dtype=np.float32)[:, None] * rope.frequencies()[None]
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    table.flags.writeable = False
    return table
