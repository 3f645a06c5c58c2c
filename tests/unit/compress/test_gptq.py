"""GPTQ against the method that it makes fast, and against rounding to nearest."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.compress.gptq import Order, gptq, inverse_root
from octavo.compress.rounding import Grid, to_nearest


def correlated(rng: np.random.Generator, tokens: int, k: int) -> np.ndarray:
    """Inputs whose channels go together, and are of very different size."""
    return (rng.normal(0, 1, (tokens, k // 4)) @ rng.normal(0, 1, (k // 4, k)) + rng.normal(0, 0.3, (tokens, k))) * rng.lognormal(0, 1, k)


def column_by_column(w: np.ndarray, hessian: np.ndarray, grid: Grid, damping: float) -> np.ndarray:
    """Optimal Brain Quantization with a fixed order: after each column, the others take its error over, and it leaves the inverse Hessian."""
    w, k = w.astype(np.float64), w.shape[1]
    inverse = np.linalg.inv(hessian + damping * np.mean(np.diag(hessian)) * np.eye(k))
    out = np.empty_like(w)
    for j in range(k):
        if j % grid.group == 0:
            columns = slice(j, j + grid.group)
            scale, zero = grid.search(w[:, columns].astype(np.float32), np.diag(hessian)[columns].astype(np.float32))
        out[:, j] = grid.nearest(w[:, j].astype(np.float32), scale, zero)
        error = (w[:, j] - out[:, j]) / inverse[j, j]
        w[:, j:] -= np.outer(error, inverse[j, j:])
        inverse = inverse - np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return out


def output_error(x: np.ndarray, w: np.ndarray, other: np.ndarray) -> float:
    return float(np.square(x @ (w - other).T).sum())


@pytest.mark.parametrize("grid", [Grid(4, 32, True), Grid(4, 64, False), Grid(8, 32, True)])
def test_equals_the_method_it_makes_fast(rng: np.random.Generator, grid: Grid) -> None:
    """Across blocks of 128 columns; a number on the edge between two codes may fall either way, after which its row differs."""
    x, w = correlated(rng, 400, 192), rng.normal(0, 1, (16, 192)).astype(np.float32)
    hessian = x.T @ x
    ours = gptq(w, hessian, grid, Order.STORED, 0.01).dequantize()
    theirs = column_by_column(w, hessian, grid, 0.01)
    same = np.isclose(ours, theirs, atol=1e-6).all(axis=1)
    assert same.mean() > 0.9
    assert output_error(x, w, ours) == pytest.approx(output_error(x, w, theirs), rel=0.05)


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_product_is_nearer_than_with_rounding_to_nearest(rng: np.random.Generator, order: Order, symmetric: bool) -> None:
    x, w, grid = correlated(rng, 512, 128), rng.normal(0, 1, (32, 128)).astype(np.float32), Grid(4, 32, symmetric)
    ours = gptq(w, x.T @ x, grid, order, 0.01).dequantize()
    assert output_error(x, w, ours) < 0.5 * output_error(x, w, to_nearest(w, grid).dequantize())


@pytest.mark.parametrize("order", Order)
def test_groups_are_those_of_the_order(rng: np.random.Generator, order: Order) -> None:
    x, w = correlated(rng, 300, 128), rng.normal(0, 1, (8, 128)).astype(np.float32)
    hessian = x.T @ x
    q = gptq(w, hessian, Grid(4, 32, True), order, 0.01)
    if order is not Order.GROUPED:
        assert q.group_of is None
        assert q.groups.tolist() == (np.arange(128) // 32).tolist()
        return
    assert np.bincount(q.groups).tolist() == [32] * 4
    sizes = [np.diag(hessian)[q.groups == group] for group in range(4)]
    assert all(sizes[i].min() >= sizes[i + 1].max() for i in range(3))


def test_unrelated_inputs_of_one_size_are_rounded_to_nearest(rng: np.random.Generator) -> None:
    w, grid = rng.normal(0, 1, (8, 64)).astype(np.float32), Grid(4, 32, True)
    scale, zero = grid.search(w.reshape(8, 2, 32), np.ones(32, np.float32))
    nearest = grid.nearest(w.reshape(8, 2, 32), scale[..., None], zero[..., None]).reshape(8, 64)
    assert np.array_equal(gptq(w, np.eye(64) * 5, grid, Order.STORED, 0.01).dequantize(), nearest)


def test_inputs_that_were_never_there_weigh_nothing(rng: np.random.Generator) -> None:
    x = correlated(rng, 200, 64)
    x[:, 5] = 0
    q = gptq(rng.normal(0, 1, (8, 64)).astype(np.float32), x.T @ x, Grid(4, 32, False), Order.IMPORTANT, 0.01)
    assert not q.dequantize()[:, 5].any()


def test_fewer_tokens_than_inputs(rng: np.random.Generator) -> None:
    """The products alone would have no inverse."""
    x, w = rng.normal(0, 1, (4, 64)), rng.normal(0, 1, (8, 64)).astype(np.float32)
    q = gptq(w, x.T @ x, Grid(4, 32, True), Order.STORED, 0.01)
    assert output_error(x, w, q.dequantize()) < output_error(x, w, to_nearest(w, q.grid).dequantize())


def test_inverse_root(rng: np.random.Generator) -> None:
    x = rng.normal(0, 1, (100, 24))
    hessian = x.T @ x
    root = inverse_root(hessian.copy(), 0.01)
    damped = hessian + 0.01 * np.mean(np.diag(hessian)) * np.eye(24)
    assert np.allclose(root.T @ root @ damped, np.eye(24), atol=1e-9)
    assert np.array_equal(root, np.triu(root))


def test_numbers_beyond_range_are_told() -> None:
    with pytest.raises(ValueError, match="beyond float32"):
        gptq(np.ones((2, 32), np.float32), np.full((32, 32), np.inf), Grid(4, 32, True), Order.STORED, 0.01)
