"""Needs numpy only: rotary frequencies against their formulas, tables, and refusals. Values against transformers are in tests/models."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.layers import Rope

BASE: dict[str, Any] = dict(hidden_size=64, num_attention_heads=4, rope_theta=10000.0, max_position_embeddings=512)
PLAIN = np.array([10000 ** (-2 * i / 16) for i in range(8)])
EIGHT = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5]


def rope(kind: str, more: dict[str, Any] | None = None, **scaling: Any) -> Rope:
    return Rope.read(HFConfig({**BASE, **(more or {}), "rope_scaling": {"rope_type": kind, **scaling}}))


def test_default_frequencies() -> None:
    plain = Rope.read(HFConfig(BASE))
    assert np.allclose(plain.frequencies(5), PLAIN, rtol=1e-6)
    table = plain.table(5)
    assert table.shape == (5, 16)
    assert table[3, 2] == pytest.approx(math.cos(3 * 10000 ** (-4 / 16)), abs=1e-6)
    assert table[3, 8 + 2] == pytest.approx(math.sin(3 * 10000 ** (-4 / 16)), abs=1e-6)


def test_linear_divides_all() -> None:
    assert np.allclose(rope("linear", factor=4.0).frequencies(5), PLAIN / 4, rtol=1e-6)


def test_llama3_keeps_short_waves_and_slows_long_ones() -> None:
    scaled = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32).frequencies(64)
    wavelength = 2 * np.pi / PLAIN
    assert np.allclose(scaled[wavelength < 32 / 4], PLAIN[wavelength < 32 / 4])
    assert np.allclose(scaled[wavelength > 32], PLAIN[wavelength > 32] / 8)
    between = (wavelength > 32 / 4) & (wavelength < 32)
    assert between.any()
    assert ((scaled < PLAIN) & (scaled > PLAIN / 8))[between].all()


def test_yarn_ramps_between_its_two_ends() -> None:
    scaled = rope("yarn", factor=4.0, original_max_position_embeddings=512)
    first, last = (16 * math.log(512 / (turns * 2 * math.pi)) / (2 * math.log(10000)) for turns in (32, 1))
    slowed = np.clip((np.arange(8) - math.floor(first)) / (math.ceil(last) - math.floor(first)), 0, 1)
    assert 0 < slowed.sum() < 8
    assert np.allclose(scaled.frequencies(64), PLAIN * (1 - slowed) + PLAIN / 4 * slowed, rtol=1e-6)
    assert scaled.scaling.amplitude == pytest.approx(0.1 * math.log(4) + 1)
    assert scaled.scaling.context(512) == 2048
    assert scaled.table(4)[0, 0] == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(
    ("given", "amplitude"),
    [
        (dict(attention_factor=1.5, mscale=3.0, mscale_all_dim=1.0), 1.5),
        (dict(mscale=3.0, mscale_all_dim=1.0), (0.3 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        (dict(mscale=3.0), 0.1 * math.log(4) + 1),
        (dict(factor=0.5), 1.0),
    ],
)
def test_how_much_yarn_amplifies(given: dict[str, float], amplitude: float) -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 512, **given}
    assert rope("yarn", **scaling).scaling.amplitude == pytest.approx(amplitude)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_longrope_chooses_its_list_by_the_longest_sequence_served(kind: str) -> None:
    """Under each of the names that files have used."""
    long = rope(kind, {"original_max_position_embeddings": 32}, short_factor=EIGHT, long_factor=EIGHT[::-1])
    assert np.allclose(long.frequencies(32), PLAIN / EIGHT, rtol=1e-6)
    assert np.allclose(long.frequencies(33), PLAIN / EIGHT[::-1], rtol=1e-6)
    assert long.scaling.amplitude == pytest.approx(math.sqrt(1 + math.log(512 / 32) / math.log(32)))
    assert long.scaling.context(512) == 512


def test_dynamic_turns_each_position_as_its_own_length_asks() -> None:
    dynamic = rope("dynamic", {"max_position_embeddings": 32}, factor=4.0)
    assert dynamic.scaling.context(32) == 128
    frequencies = dynamic.frequencies(128)
    assert np.allclose(frequencies[:32], PLAIN, rtol=1e-6)
    for position in (32, 60, 127):
        theta = 10000 * (4 * (position + 1) / 32 - 3) ** (16 / 14)
        assert np.allclose(frequencies[position], [theta ** (-2 * i / 16) for i in range(8)], rtol=1e-5)
    # A longer table has the shorter one's rows: what is served beside a request cannot show in it.
    assert np.array_equal(dynamic.table(128)[:50], dynamic.table(50))


def test_frequency_factors_divide() -> None:
    assert np.allclose(rope("frequency_factors", factors=EIGHT).frequencies(4), PLAIN / EIGHT, rtol=1e-6)


def test_queries_grow_with_the_logarithm_beyond_the_trained_length() -> None:
    grown = Rope.read(HFConfig(BASE), log_n=32)
    keys, queries = grown.table(64), grown.query_table(64)
    assert np.array_equal(keys[:32], queries[:32])
    assert np.allclose(queries[50], keys[50] * math.log(51, 32), rtol=1e-6)
    assert grown.query_table(32) is grown.table(32)
    plain = Rope.read(HFConfig(BASE))
    assert plain.query_table(64) is plain.table(64)


def test_part_of_a_head_turns() -> None:
    assert Rope.read(HFConfig({**BASE, "partial_rotary_factor": 0.75})).rot == 12
    assert Rope.read(HFConfig(BASE), part=0.5, pairs=True) == Rope(10000.0, 8, pairs=True)


def test_layer_types_may_differ() -> None:
    by_type = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    hf = HFConfig({**BASE, "rope_parameters": by_type})
    assert Rope.read(hf, "sliding_attention").theta == 1e4
    assert Rope.read(hf).theta == 1e6
    assert np.allclose(Rope.read(hf, "full_attention").frequencies(4), 1e6 ** (-np.arange(8) / 8) / 8, rtol=1e-6)
    with pytest.raises(ConfigError, match="has full_attention, sliding_attention, but no object 'chunked_attention'"):
        Rope.read(hf, "chunked_attention")


def test_equal_layers_share_one_table() -> None:
    assert Rope.read(HFConfig(BASE)).table(7) is Rope.read(HFConfig(dict(BASE))).table(7)


@pytest.mark.parametrize(
    ("scaling", "what"),
    [
        (dict(rope_type="mrope"), r"'mrope': supported are default, linear, dynamic, llama3, yarn, longrope"),
        (dict(rope_type=7), "7: supported are"),
        (dict(rope_type="linear"), "'factor' is missing"),
        (dict(rope_type="linear", factor=-1.0), "factor = -1.0: must be above 0"),
        (dict(rope_type="linear", factor=float("nan")), "factor = nan"),
        (dict(rope_type="linear", factor=1e30), "at most 1e.06"),
        (dict(rope_type="yarn", factor=4.0, beta_fast=-1.0), "beta_fast = -1.0: must be above 0"),
        (dict(rope_type="yarn", factor=4.0, mscale=-30.0, mscale_all_dim=1.0), "mscale = -30.0"),
        (dict(rope_type="longrope", original_max_position_embeddings=1, short_factor=EIGHT, long_factor=EIGHT), "must be at least 2"),
        (dict(rope_type="yarn", factor="4"), "must be float"),
        (dict(rope_type="llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0), "low_freq_factor = 4.0 must be below"),
        (dict(rope_type="longrope", short_factor=EIGHT), "'long_factor' is missing"),
        (dict(rope_type="longrope", short_factor=EIGHT[:7], long_factor=EIGHT), "7 factors for 8 frequencies"),
        (dict(rope_type="longrope", short_factor=EIGHT, long_factor=[*EIGHT[:7], 0]), "long_factor holds 0"),
        (dict(rope_type="longrope", short_factor=EIGHT, long_factor=[*EIGHT[:7], True]), "long_factor holds True"),
    ],
)
def test_refusals_name_file_and_key(scaling: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=f"some.json: rope_scaling: .*{what}"):
        Rope.read(HFConfig({**BASE, "rope_scaling": scaling}, "some.json"))


@pytest.mark.parametrize(("key", "value"), [("rope_theta", 1.0), ("rope_theta", math.inf), ("partial_rotary_factor", 0.1), ("partial_rotary_factor", 2.0), ("partial_rotary_factor", math.nan)])
def test_what_cannot_turn(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=key):
        Rope.read(HFConfig({**BASE, key: value}))
