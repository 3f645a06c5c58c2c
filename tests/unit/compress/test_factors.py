"""AWQ's and SmoothQuant's factors, and where they go: a block computes the same with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from plain_models import FAMILIES, write_model

from octavo.compress.awq import CLIPS, clip_group, clipping, error_of, scaling_factors
from octavo.compress.block import quantisable
from octavo.compress.capture import CalibrationOps, Observer, f32_weight, run_block
from octavo.compress.folding import NormFold, matrix_of, norm_folds, row_folds
from octavo.compress.rounding import Grid, to_nearest
from octavo.compress.run import embedded
from octavo.compress.smooth import smoothing_factors
from octavo.compress.source import SourceModel
from octavo.layers import Attention, Linear, Module
from octavo.loader.resolve import source_at
from octavo.ops.batch import AttentionSpec, Batch
from octavo.ops.reference import BACKEND, ReferenceKv

# What can be folded, by family: norms, and products before products.
FOLDS = {
    "llama": (2, 1), "mistral": (2, 2), "gemma2": (2, 1), "phi3": (2, 2), "starcoder2": (2, 0), "olmo2": (0, 1), "gpt2": (2, 1),
    "mixtral": (1, 4), "qwen2_moe": (1, 5),
}  # fmt: skip


def first_block(folder: Path) -> tuple[SourceModel, Module, list[Linear]]:
    model = SourceModel.open(source_at(folder, "m", "auto"))
    block = model.model.blocks[0]
    for linear in block.linears():
        linear.weights = f32_weight(np.concatenate([w.dequantize() for w in linear.weights]))
    return model, block, quantisable(block)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_folding_changes_nothing(tmp_path: Path, rng: np.random.Generator, family: str, dtype: str) -> None:
    """Whatever the factors are, and though the norm's own dtype rounds them."""
    model, block, linears = first_block(write_model(tmp_path / "m", family, dtype))
    hidden = [rng.normal(0, 1, (40, 64)).astype(np.float32)]
    before = run_block(block, hidden, 40)[0]
    norms, rows = norm_folds(block, linears, 64, model.round_vector), row_folds(block, linears, model.round_vector)
    assert (len(norms), len(rows)) == FOLDS[family]
    shapes = {linear: matrix_of(linear).copy() for linear in linears}
    for fold in norms + rows:
        fold.divide(rng.lognormal(0, 1, fold.readers[0].k).astype(np.float32))
    after = run_block(block, hidden, 40)[0]
    assert np.abs(after - before).max() < (2e-5 if dtype == "F32" else 5e-3) * np.abs(before).max()
    changed = {linear for linear in linears if not np.array_equal(shapes[linear], matrix_of(linear))}
    assert {linear for fold in norms + rows for linear in fold.readers} <= changed


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_are_those_of_the_definition(tmp_path: Path, rng: np.random.Generator, family: str) -> None:
    """The calibration's own attention and products are those of ops.reference: hidden states after all blocks are equal but for the order of sums."""
    model = SourceModel.open(source_at(write_model(tmp_path / "m", family), "m", "auto"))
    decoder, ids = model.model, rng.integers(0, 96, 50).astype(np.int32)
    layout, positions = decoder.kv_layout, np.arange(50, dtype=np.int32)
    table_GSB = np.arange(4 * len(layout.windows), dtype=np.int32).reshape(-1, 1, 4)
    slots_GT = table_GSB[:, 0, positions // 16] * 16 + positions % 16
    shape = (64 * len(layout.windows), layout.num_kv_heads, layout.head_dim)
    kv = [ReferenceKv(np.zeros(shape, np.float32), np.zeros(shape, np.float32), 16, False) for _ in range(layout.num_layers)]
    starts, lengths = np.array([0, 50], np.int32), np.array([50], np.int32)
    expected = decoder.forward(Batch(ids, positions, slots_GT, starts, lengths, table_GSB, kv, 50))
    hidden = [embedded(decoder, ids.tolist())]
    for block in decoder.blocks:
        for linear in block.linears():
            linear.weights = f32_weight(np.concatenate([w.dequantize() for w in linear.weights]))
        hidden = run_block(block, hidden, 50)
    assert np.abs(hidden[0] - expected).max() < 2e-5 * np.abs(expected).max()


def test_soft_caps_and_windows_of_attention(rng: np.random.Generator) -> None:
    q, k, v = (rng.normal(0, 2, (30, width)).astype(np.float32) for width in (64, 32, 32))
    spec = AttentionSpec(0, 4, 2, 16, 0.3, window=7, soft_cap=2.0)
    kv = [ReferenceKv(np.zeros((32, 2, 16), np.float32), np.zeros((32, 2, 16), np.float32), 16, False)]
    positions = np.arange(30, dtype=np.int32)
    whole = Batch(positions, positions, positions[None], np.array([0, 30]), np.array([30]), np.array([[[0, 1]]]), kv)
    expected = BACKEND.attention(q, k, v, whole, spec)
    assert np.allclose(CalibrationOps().attention(q, k, v, whole, spec), expected, atol=1e-5)


def test_observed_inputs(tmp_path: Path, rng: np.random.Generator) -> None:
    """Sums, largest sizes and products are those of all tokens of all sequences."""
    _, block, linears = first_block(write_model(tmp_path / "m", "llama"))
    hidden = [rng.normal(0, 1, (length, 64)).astype(np.float32) for length in (30, 7)]
    observer = Observer(linears, 4, products=True)
    run_block(block, hidden, 40, observer.note)
    assert set(observer.seen) == set(linears)
    qkv = next(m for m in block.walk() if isinstance(m, Attention)).qkv
    x = np.concatenate([block.attn_norm.forward(one) for one in hidden])  # type: ignore[attr-defined]
    seen = observer.seen[qkv]
    assert seen.count == 37
    assert np.allclose(seen.sums_K, np.abs(x).sum(axis=0), rtol=1e-4)
    assert np.allclose(seen.most_K, np.abs(x).max(axis=0))
    assert np.allclose(seen.products_KK, x.T @ x, rtol=1e-3, atol=1e-3)
    assert [len(rows) for rows in seen.rows] == [4, 4]


def test_a_norm_that_others_read_is_left_alone(tmp_path: Path) -> None:
    """The router of a mixture reads the norm as well, and it is not rounded."""
    model, block, linears = first_block(write_model(tmp_path / "m", "mixtral"))
    folds = [fold for fold in norm_folds(block, linears, 64, model.round_vector) if isinstance(fold, NormFold)]
    assert [fold.norm.weight.name for fold in folds] == ["model.layers.0.input_layernorm.weight"]


# SmoothQuant


def test_smoothing_evens_out(rng: np.random.Generator) -> None:
    """With strength one half, the largest of each channel's activations and weights become equal (Xiao et al. 2022, 4.2)."""
    x, w = rng.lognormal(0, 2, 32).astype(np.float32), rng.lognormal(0, 1, 32).astype(np.float32)
    factors = smoothing_factors(x, w)
    assert np.allclose(x / factors, w * factors, rtol=1e-5)
    assert np.allclose(smoothing_factors(x, w, 0.8), x**0.8 / w**0.2, rtol=1e-5)


def test_silent_channels_are_not_smoothed() -> None:
    factors = smoothing_factors(np.array([0, 3, 0], np.float32), np.array([2, 0, 0], np.float32))
    assert factors.tolist() == [1, 1, 1]


# AWQ


def spiky(rng: np.random.Generator, tokens: int, k: int) -> np.ndarray:
    """Few channels that are much larger than the others, as AWQ is about."""
    sizes = np.ones(k)
    sizes[rng.choice(k, k // 16, replace=False)] = 30
    return (rng.normal(0, 1, (tokens, k)) * sizes).astype(np.float32)


def test_factors_make_the_product_better(rng: np.random.Generator) -> None:
    x, grid = spiky(rng, 256, 128), Grid(4, 64, False)
    matrices = [rng.normal(0, 1, (n, 128)).astype(np.float32) for n in (24, 8)]
    factors, w = scaling_factors(x, np.abs(x).mean(axis=0), matrices, grid), np.concatenate(matrices)
    scaled = to_nearest(w * factors, grid).dequantize() / factors
    assert error_of(x, w, scaled) < 0.7 * error_of(x, w, to_nearest(w, grid).dequantize())
    large = np.abs(x).mean(axis=0) > 10
    assert factors[large].min() > factors[~large].max()


def test_factors_are_one_where_nothing_is_better() -> None:
    w = np.tile(np.arange(-8, 8, dtype=np.float32), (4, 4))
    x = np.eye(64, dtype=np.float32)
    assert scaling_factors(x, np.ones(64, np.float32), [w], Grid(4, 32, False)).tolist() == [1] * 64


def test_clipping_is_the_best_of_its_steps(rng: np.random.Generator) -> None:
    x, grid = spiky(rng, 100, 64), Grid(4, 32, False)
    w = (rng.standard_t(2, (300, 64))).astype(np.float32)
    keep = clipping(x, w, grid)
    assert keep.shape == (300, 2)
    assert 0 < (keep < 1).mean() < 1
    for row, group in ((0, 0), (299, 1)):
        part = w[row, group * 32 : group * 32 + 32]
        errors = []
        for clip in CLIPS:
            scale, zero = grid.fit(part, clip)
            errors.append(np.square(x[:, group * 32 : group * 32 + 32] @ (part - grid.nearest(part, scale, zero))).sum())
        assert keep[row, group] == np.float32(CLIPS[int(np.argmin(errors))])
    assert error_of(x, w, to_nearest(w, grid, keep).dequantize()) < error_of(x, w, to_nearest(w, grid).dequantize())
    assert clip_group(x[:, :32], w[:5, :32], grid).tolist() == keep[:5, 0].tolist()
