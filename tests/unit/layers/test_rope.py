"""Needs numpy only: rotary frequencies against their formulas, and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.layers import Rope

BASE = dict(hidden_size=64, num_attention_heads=4, rope_theta=10000.0)


def test_default_frequencies() -> None:
    rope = Rope.read(HFConfig(BASE))
    assert np.allclose(rope.frequencies(5), [10000 ** (-2 * i / 16) for i in range(8)], rtol=1e-6)
    table = rope.table(5)
    assert table.shape == (5, 16)
    assert table[3, 2] == pytest.approx(math.cos(3 * 10000 ** (-4 / 16)), abs=1e-6)
    assert table[3, 8 + 2] == pytest.approx(math.sin(3 * 10000 ** (-4 / 16)), abs=1e-6)


def test_llama3_keeps_short_waves_and_slows_long_ones() -> None:
    scaling = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
    plain = Rope.read(HFConfig(BASE)).frequencies(64)
    scaled = Rope.read(HFConfig({**BASE, "rope_scaling": scaling})).frequencies(64)
    wavelength = 2 * np.pi / plain
    assert np.allclose(scaled[wavelength < 32 / 4], plain[wavelength < 32 / 4])
    assert np.allclose(scaled[wavelength > 32], plain[wavelength > 32] / 8)


def test_equal_layers_share_one_table() -> None:
    assert Rope.read(HFConfig(BASE)).table(7) is Rope.read(HFConfig(dict(BASE))).table(7)


@pytest.mark.parametrize("scaling", [dict(rope_type="mrope", factor=2.0), dict(rope_type="linear"), dict(rope_type="linear", factor=-1.0)])
def test_refusals_name_the_key(scaling: dict) -> None:
    with pytest.raises(ConfigError, match="rope_scaling"):
        Rope.read(HFConfig({**BASE, "rope_scaling": scaling}))
