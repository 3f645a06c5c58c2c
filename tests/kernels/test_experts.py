"""The steps of a mixture of experts around its products: choice, sorting, weighted sum. Against the definition, and by bits."""

from __future__ import annotations

import numpy as np
import pytest

from octavo import _native
from octavo.ops.batch import MoeSpec
from octavo.ops.reference import route

kernels = _native.kernels
ISAS = sorted({*_native.isa_names(), "portable16"})
ULP = 2.0**-23


def routed(logits, spec, isa="", threads=2):
    chosen = np.full((len(logits), spec.top_k), -1, np.int32)
    weights = np.full((len(logits), spec.top_k), np.nan, np.float32)
    kernels.route(logits, chosen, weights, spec.renormalise, isa=isa, threads=threads)
    return chosen, weights


def router(rows, experts, seed=0):
    """Logits on a coarse grid, so that ties are many; one row of equal ones, one of very different ones."""
    rng = np.random.default_rng(seed)
    logits = (np.round(rng.normal(size=(rows, experts)) * 4) / 4).astype(np.float32)
    logits[0], logits[1] = 1.5, np.linspace(-200, 200, experts)
    return logits


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (7, 3), (8, 2), (60, 4), (128, 8), (130, 130), (512, 10)])
@pytest.mark.parametrize("renormalise", [False, True])
def test_route(isa, experts, top_k, renormalise):
    spec = MoeSpec(top_k, renormalise)
    logits = router(9, experts)
    chosen, weights = routed(logits, spec, isa)
    expected_chosen, expected_weights = route(logits, spec)
    assert np.array_equal(chosen, expected_chosen)
    # Sums of up to 512 terms in another order, and exp within 2 ulp.
    np.testing.assert_allclose(weights, expected_weights, rtol=32 * ULP, atol=1e-37)


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_with_a_nan_has_nan_weights_and_valid_experts(isa):
    logits = router(5, 16)
    logits[2, 9], logits[3] = np.nan, np.nan
    for spec in (MoeSpec(4, True), MoeSpec(4, False)):
        chosen, weights = routed(logits, spec, isa)
        clean, clean_weights = routed(router(5, 16), spec, isa)
        assert np.isnan(weights[2:4]).all() and not np.isnan(weights[[0, 1, 4]]).any()
        assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 16 for row in chosen.tolist())
        assert np.array_equal(chosen[[0, 1, 4]], clean[[0, 1, 4]]) and weights[4].tobytes() == clean_weights[4].tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("renormalise", [False, True])
def test_rows_are_routed_alone(isa, renormalise):
    spec, logits = MoeSpec(8, renormalise), router(20, 100)
    chosen, weights = routed(logits, spec, isa, threads=1)
    for rows in (slice(3, 4), slice(19, None), slice(5, 17)):
        for threads in (1, 3):
            some = routed(np.ascontiguousarray(logits[rows]), spec, isa, threads)
            assert some[0].tobytes() == chosen[rows].tobytes() and some[1].tobytes() == weights[rows].tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("rows", "experts", "top_k"), [(1, 8, 2), (30, 6, 3), (17, 64, 8), (3, 2, 1)])
def test_dispatch_and_combine(isa, threads, rows, experts, top_k):
    rng = np.random.default_rng(rows)
    width = 37
    x = rng.normal(size=(rows, width)).astype(np.float32)
    chosen = np.argsort(rng.random((rows, experts)), axis=1)[:, :top_k].astype(np.int32)
    weights = rng.random((rows, top_k)).astype(np.float32)
    place, offsets = np.full((rows, top_k), -1, np.int32), np.full(experts + 1, -1, np.int32)
    y = np.full((rows * top_k, width), np.nan, np.float32)
    kernels.dispatch(x, chosen, place, offsets, y, isa=isa, threads=threads)
    order = np.argsort(chosen.ravel(), kind="stable")
    assert np.array_equal(np.argsort(place.ravel()), order)
    assert np.array_equal(offsets, np.searchsorted(chosen.ravel()[order], np.arange(experts + 1)))
    assert np.array_equal(y, x[order // top_k])

    memory = np.full((rows, width + 3), np.nan, np.float32)
    out = memory[:, :width]
    kernels.combine(y, weights, place, out, isa=isa, threads=threads)
    expected = (weights[:, :, None].astype(np.float64) * y[place]).sum(axis=1)
    np.testing.assert_allclose(out, expected, atol=top_k * 8 * ULP, rtol=0)
    assert np.isnan(memory[:, width:]).all()
    residual = rng.normal(size=(rows, width)).astype(np.float32)
    total = residual + out
    kernels.combine(y, weights, place, residual, residual, isa=isa, threads=threads)
    assert residual.tobytes() == total.tobytes()


def test_malformed_arguments_are_refused():
    logits, chosen, weights = router(3, 8), np.zeros((3, 2), np.int32), np.zeros((3, 2), np.float32)
    with pytest.raises(ValueError, match="chosen"):
        kernels.route(logits, np.zeros((3, 9), np.int32), np.zeros((3, 9), np.float32), True)
    with pytest.raises(ValueError, match="top_k"):
        kernels.route(logits, chosen, weights[:2], True)
    x, y, offsets = np.zeros((3, 16), np.float32), np.zeros((6, 16), np.float32), np.zeros(9, np.int32)
    with pytest.raises(ValueError, match="expert"):
        kernels.dispatch(x, np.full((3, 2), 8, np.int32), chosen.copy(), offsets, y)
    with pytest.raises(ValueError, match="pair"):
        kernels.dispatch(x, chosen, chosen.copy(), offsets, y[:5])
    with pytest.raises(ValueError, match="place"):
        kernels.combine(y, weights, np.full((3, 2), 6, np.int32), x)
    with pytest.raises(ValueError, match="residual"):
        kernels.combine(y, weights, chosen, x, y)
