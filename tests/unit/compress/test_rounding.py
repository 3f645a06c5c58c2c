"""Grids: what is rounded is on the grid, near, and told the same when written and read."""

from __future__ import annotations

import independent
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from octavo.compress.rounding import SHARES, Grid, Quantised, to_nearest
from octavo.compress.settings import Settings
from octavo.compress.writers import writer_for

FORMATS = {
    "gptq": (Settings("w4", symmetric=True), independent.gptq),
    "gptq, zero points": (Settings("w4", symmetric=False), independent.gptq),
    "awq": (Settings("w4", "awq"), independent.awq),
    "w8, packed": (Settings("w8"), independent.compressed),
    "w8a8, plain": (Settings("w8a8"), independent.compressed),
}
GRIDS = [Grid(4, 32, True), Grid(4, 64, False), Grid(4, 32, False, lowest_zero=1), Grid(8, -1, True, "BF16"), Grid(8, 32, True, "F32")]


HUNDREDTHS = st.integers(-5000, 5000).map(lambda i: np.float32(i / 100))  # float16 holds the scales of numbers of such size


@given(arrays(np.float32, (3, 128), elements=HUNDREDTHS), st.sampled_from(GRIDS))
def test_the_error_is_at_most_half_a_step(w: np.ndarray, grid: Grid) -> None:
    """Of the symmetric grid a whole one at its upper end, which has one code less than the lower; a little more as scales are rounded."""
    q = to_nearest(w, grid)
    step = q.scales[:, q.groups]
    error = np.abs(q.dequantize() - w)
    assert (error <= step * (1.1 if grid.symmetric or grid.lowest_zero else 0.6)).all()
    width = grid.width(128)
    inner = np.abs(w) <= np.abs(w.reshape(3, -1, width)).max(axis=2).repeat(width, axis=1) * 0.8
    assert not grid.symmetric or (error[inner] <= step[inner] * 0.501).all()


@given(arrays(np.float32, (2, 64), elements=HUNDREDTHS), st.sampled_from(GRIDS))
def test_numbers_on_the_grid_stay(w: np.ndarray, grid: Grid) -> None:
    q = to_nearest(w, grid)
    scale, zero = q.scales[:, q.groups], q.zeros[:, q.groups].astype(np.float32)
    assert np.array_equal(grid.nearest(q.dequantize(), scale, zero), q.dequantize())
    assert q.codes.max() <= grid.top


def test_zeros_stay_zeros() -> None:
    for grid in GRIDS:
        q = to_nearest(np.zeros((2, 64), np.float32), grid)
        assert not q.dequantize().any()
        assert (q.scales == 1).all()


def test_numbers_of_one_sign_reach_to_zero() -> None:
    """A grid without zero would turn padding into something."""
    w = np.linspace(5, 6, 32, dtype=np.float32)[None]
    q = to_nearest(w, Grid(4, 32, False))
    assert q.zeros.tolist() == [[0]]
    assert np.abs(q.dequantize() - w).max() <= q.scales[0, 0]


def test_clipping_takes_its_share_of_the_range() -> None:
    w = np.linspace(-1, 1, 64, dtype=np.float32)[None]
    keep = np.array([[1.0, 0.5]], np.float32)
    whole, clipped = to_nearest(w, Grid(4, 32, False)), to_nearest(w, Grid(4, 32, False), keep)
    assert clipped.scales[0, 0] == whole.scales[0, 0]
    assert clipped.scales[0, 1] == pytest.approx(whole.scales[0, 1] / 2, rel=1e-3)
    assert clipped.dequantize()[0, -1] == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("grid", GRIDS)
def test_a_search_finds_the_best_of_its_ranges(rng: np.random.Generator, grid: Grid) -> None:
    w, importance = rng.standard_t(3, (20, 2, 32)).astype(np.float32), rng.lognormal(0, 2, (2, 32)).astype(np.float32)
    scale, zero = grid.search(w, importance)
    errors, found = [], np.square(w - grid.nearest(w, scale[..., None], zero[..., None])) @ np.eye(32)
    for share in (1.0, *SHARES):
        other = [part[..., None] for part in grid.fit(w, share)]
        errors.append((np.square(w - grid.nearest(w, *other)) * importance).sum(axis=-1))
    assert np.allclose((found * importance).sum(axis=-1), np.min(errors, axis=0), rtol=1e-5)
    assert (np.min(errors, axis=0) < errors[0]).any()


@pytest.mark.parametrize("key", FORMATS)
@pytest.mark.parametrize("group", [32, 64, -1])
def test_what_is_written_is_what_was_computed(rng: np.random.Generator, key: str, group: int) -> None:
    """Read bit by bit from the stored words, every number is exactly that of the grid."""
    settings, read = FORMATS[key]
    writer = writer_for(settings.checked() if settings.method != "awq" else Settings("w4", "awq", True).checked(), "BF16")
    q = to_nearest(rng.normal(0, 1, (24, 128)).astype(np.float32), writer.grid(group))
    assert written(writer, q, read).tolist() == q.dequantize().tolist()


def test_an_order_of_columns_is_written(rng: np.random.Generator) -> None:
    writer = writer_for(Settings("w4", "gptq", True, symmetric=False, act_order=True).checked(), "F16")
    q = to_nearest(rng.normal(0, 1, (8, 96)).astype(np.float32), writer.grid(32))
    turned = Quantised(q.grid, q.codes, q.scales, q.zeros, rng.permutation(96).astype(np.int32) // 32)
    assert written(writer, turned, independent.gptq).tolist() == turned.dequantize().tolist()


def test_every_code_and_zero_point_survives() -> None:
    """All pairs of code and zero point that the formats can hold."""
    codes = np.tile(np.arange(16, dtype=np.uint8).repeat(2), (16, 1))
    for settings, read, lowest in ((Settings("w4", symmetric=False), independent.gptq, 1), (Settings("w4", "awq", True), independent.awq, 0)):
        writer = writer_for(settings.checked(), "F16")
        zeros = np.maximum(np.arange(16, dtype=np.uint8), lowest)[:, None]
        q = Quantised(writer.grid(32), codes, np.linspace(0.5, 2, 16, dtype=np.float16).astype(np.float32)[:, None], zeros)
        assert written(writer, q, read).tolist() == q.dequantize().tolist()
    writer = writer_for(Settings("w8").checked(), "F32")
    q = Quantised(writer.grid(-1), np.arange(256, dtype=np.uint8)[None], np.ones((1, 1), np.float32), np.full((1, 1), 128, np.uint8))
    assert written(writer, q, independent.compressed).tolist() == [list(range(-128, 128))]


def written(writer, q: Quantised, read) -> np.ndarray:
    tensors = {}
    for one in writer.tensors("m", q):
        values = one.data.view(independent.DTYPES[one.dtype])
        values = (values.astype("<u4") << 16).view("<f4") if one.dtype == "BF16" else values
        tensors[one.name] = values.reshape(one.shape)
    return read(tensors, "m").astype(np.float32)
