"""Rotary tables: cosines and sines by position, and how a configuration asks for them. The kinds of scaling are in `rope_scaling`.

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
from octavo.layers.rope_scaling import PLAIN, Scaling, read_scaling


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding. `rot`: columns of a head that turn; `pairs`: neighbours turn together, not halves.

    log_n: the length in training of a model whose queries grow by log(p + 1) / log(log_n) at positions p beyond it (Su 2021; Qwen), 0 for none;
    then all columns of a head must turn. Frozen, so that equal layers share one table.
    """

    theta: float
    rot: int
    scaling: Scaling = PLAIN
    pairs: bool = False
    log_n: int = 0

    @staticmethod
    def read(
        hf: HFConfig, layer_type: str | None = None, *, theta: float = 10000.0, part: float = 1.0, pairs: bool = False, log_n: int = 0
    ) -> Rope:
        """What a configuration asks for; of layers of a type, where it distinguishes them. theta, part: where it does not say.

        part: of a head's columns, those that turn. Raises ConfigError for a scaling that is not implemented, or what cannot be.
        """
        asked = parameters(hf, layer_type)
        theta = asked.read("rope_theta", float, hf.read("rope_theta", float, theta))
        if theta <= 1:
            raise ConfigError(f"{hf.source}: rope_theta = {theta}: must be above 1")
        part = asked.read("partial_rotary_factor", float, hf.read("partial_rotary_factor", float, part))
        rot = int(hf.head_dim * part) if 0 < part <= 1 else 0
        if rot % 2 or rot < 4:
            raise ConfigError(f"{hf.source}: partial_rotary_factor = {part}: of a head's {hf.head_dim} columns an even number must turn, at least 4")
        rope = Rope(theta, rot, read_scaling(asked, hf), pairs, log_n)
        try:
            rope.frequencies(1)
        except ConfigError as e:
            raise ConfigError(f"{hf.source}: {e}") from None
        return rope

    def table(self, positions: int) -> NDArray[np.float32]:
        """float32 [positions, rot]: cosines of rot/2 frequencies, then their sines. `positions` is the longest sequence that is served."""
        return _table(self, positions)

    def query_table(self, positions: int) -> NDArray[np.float32]:
        """The table that queries turn by; the same object wherever it is the same."""
        return _query_table(self, positions) if 0 < self.log_n < positions else self.table(positions)

    def frequencies(self, positions: int) -> NDArray[np.float32]:
        """Radians per position, float32 [rot / 2], or [positions, rot / 2] for scalings that depend on the position."""
        return self.scaling.frequencies(self.theta, self.rot, positions)


def parameters(hf: HFConfig, layer_type: str | None) -> HFConfig:
    """The object that describes the rope of a type of layers: one of `rope_parameters`, or what all layers share."""
    by_type = hf.read("rope_parameters", dict, {})
    if not by_type:
        return HFConfig(hf.read("rope_scaling", dict, {}), f"{hf.source}: rope_scaling")
    wanted = layer_type or "full_attention"
    if not isinstance(by_type.get(wanted), dict):
        raise ConfigError(f"{hf.source}: rope_parameters: has {', '.join(map(str, by_type))}, but no object {wanted!r}")
    return HFConfig(by_type[wanted], f"{hf.source}: rope_parameters.{wanted}")


@lru_cache(maxsize=8)
def _table(rope: Rope, positions: int) -> NDArray[np.float32]:
    angles = np.arange(positions, dtype=np.float32)[:, None] * rope.frequencies(positions)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    if rope.scaling.amplitude != 1.0:
        table *= np.float32(rope.scaling.amplitude)
    table.flags.writeable = False
    return table


@lru_cache(maxsize=8)
def _query_table(rope: Rope, positions: int) -> NDArray[np.float32]:
    lengths = np.maximum(np.arange(1, positions + 1), rope.log_n)
    table = _table(rope, positions) * (np.log(lengths) / math.log(rope.log_n)).astype(np.float32)[:, None]
    table.flags.writeable = False
    return table
