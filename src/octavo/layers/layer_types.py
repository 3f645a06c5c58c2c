"""Which layers see only a window of the positions, as configurations say it. Knows no model."""

from __future__ import annotations

from octavo.config import HFConfig
from octavo.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_type(hf: HFConfig, index: int, otherwise: str = FULL) -> str:
    """FULL or SLIDING: layer `index`'s entry of `layer_types`, or `otherwise` if there is no such list. ConfigError for any other entry."""
    if "layer_types" not in hf:
        return otherwise
    types = hf.read("layer_types", list)
    if index >= len(types):
        raise ConfigError(f"{hf.source}: layer_types has {len(types)} entries, but there is a layer {index}")
    if types[index] not in (FULL, SLIDING):
        raise ConfigError(f"{hf.source}: layer_types[{index}] = {str(types[index])[:50]!r}: supported are {FULL}, {SLIDING}")
    return str(types[index])


def read_window(hf: HFConfig, absent: int = 0) -> int:
    """Positions that a layer with a window sees; 0, for all, if the key is null or the window is no shorter than the context.

    absent: where the configuration has no such key.
    """
    if "sliding_window" not in hf.raw:
        window = absent
    else:
        window = hf.size("sliding_window") if hf.raw["sliding_window"] is not None else 0
    return window if window < hf.size("max_position_embeddings", 2048) else 0
