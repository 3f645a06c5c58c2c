"""Needs numpy only: which layers have a window, and how layers share out the room in a block."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.layers import Attention, Scores
from octavo.layers.decoder import share_out
from octavo.layers.layer_types import FULL, SLIDING, layer_type, read_window

BASE: dict[str, Any] = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)


def test_layer_types() -> None:
    hf = HFConfig({**BASE, "layer_types": [SLIDING, FULL, "linear_attention"]}, "some.json")
    assert [layer_type(hf, i) for i in range(2)] == [SLIDING, FULL]
    assert layer_type(HFConfig(BASE), 0) == FULL
    assert layer_type(HFConfig(BASE), 0, otherwise=SLIDING) == SLIDING
    with pytest.raises(ConfigError, match=r"some.json: layer_types\[2\] = 'linear_attention': supported are"):
        layer_type(hf, 2)
    with pytest.raises(ConfigError, match="has 3 entries, but there is a layer 3"):
        layer_type(hf, 3)


@pytest.mark.parametrize(("given", "window"), [({}, 256), ({"sliding_window": None}, 0), ({"sliding_window": 24}, 24), ({"sliding_window": 512}, 0)])
def test_windows(given: dict[str, Any], window: int) -> None:
    """Absent is the family's default, null is none, and one as long as the context is none."""
    assert read_window(HFConfig({**BASE, **given}), absent=256) == window


def test_a_window_must_be_a_size() -> None:
    for value in (0, -1, "24", 2.5):
        with pytest.raises(ConfigError, match="sliding_window"):
            read_window(HFConfig({**BASE, "sliding_window": value}))


@pytest.mark.parametrize(
    ("windows", "size", "groups"),
    [
        ([0, 0, 0], 3, (0,)),
        ([24, 24], 2, (24,)),
        ([24, 0, 24], 1, (24, 24, 0)),
        ([24, 24, 24, 24, 24, 0] * 3, 3, (24, 24, 24, 24, 24, 0)),
        ([24, 24, 24, 0, 0], 2, (24, 24, 0)),
    ],
)
def test_layers_share_out_the_room_in_a_block(windows: list[int], size: int, groups: tuple[int, ...]) -> None:
    layers = [Attention(f"{i}", HFConfig(BASE), rope=None, scores=Scores(window)) for i, window in enumerate(windows)]
    layout = share_out(layers)
    assert (layout.num_layers, layout.windows) == (size, groups)
    places = [(layer.group, layer.layer_id) for layer in layers]
    assert len(set(places)) == len(places)
    for layer in layers:
        assert groups[layer.group] == layer.scores.window
        assert layer.layer_id < size
