"""The sampling kernel: against its numpy definition, against exact distributions, and by bits across batches and threads."""

from __future__ import annotations

import numpy as np
import pytest
from sample_reference import (
    SampleParams,
    adjust,
    philox4x32,
    row_logprobs,
    sample_row,
    uniform_bits,
    weights,
)

from octavo import _native

ISAS = sorted({*_native.isa_names(), "portable16"})
INF = np.float32(np.inf)


def ragged(lists, dtype=np.int32):
    offsets = np.zeros(len(lists) + 1, np.int32)
    offsets[1:] = np.cumsum([len(x) for x in lists])
    return offsets, np.array([v for x in lists for v in x], dtype)


def run(logits, params, num_logprobs=-1, **options):
    """The kernel on a copy of logits [rows, vocab] with one SampleParams a row."""

    def column(name, dtype):
        return np.array([getattr(p, name) for p in params], dtype)

    offsets, bias_ids = ragged([list(p.bias) for p in params])
    _, bias = ragged([list(p.bias.values()) for p in params], np.float32)
    out_offsets, out_ids = ragged([list(p.outputs) for p in params])
    _, counts = ragged([list(p.outputs.values()) for p in params])
    wanted = np.broadcast_to(np.asarray(num_logprobs, np.int32), (len(params),)).copy()
    return _native.sample(
        np.array(logits, np.float32),
        column("temperature", np.float32),
        column("top_k", np.int32),
        column("top_p", np.float32),
        column("min_p", np.float32),
        column("presence", np.float32),
        column("frequency", np.float32),
        column("repetition", np.float32),
        column("seed", np.uint64),
        column("position", np.uint64),
        wanted,
        bias=(offsets, bias_ids, bias),
        banned=ragged([p.banned for p in params]),
        allowed=ragged([p.allowed for p in params]),
        outputs=(out_offsets, out_ids, counts),
        prompts=ragged([p.prompt for p in params]),
        **options,
    )


def random_params(rng, vocab):
    def some(most):
        return [int(i) for i in rng.choice(vocab, size=rng.integers(0, min(vocab, most) + 1), replace=False)]

    def maybe(value, off):
        return value if rng.random() < 0.5 else off

    return SampleParams(
        temperature=maybe(float(rng.uniform(0.05, 2.0)), 1.0) if rng.random() < 0.9 else 0.0,
        top_k=maybe(int(rng.integers(1, vocab + 2)), 0),
        top_p=maybe(float(rng.uniform(0.05, 1.0)), 1.0),
        min_p=maybe(float(rng.uniform(0.0, 0.3)), 0.0),
        presence=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency=maybe(float(rng.uniform(-2, 2)), 0.0),
        repetition=maybe(float(rng.uniform(0.5, 2)), 1.0),
        seed=int(rng.integers(0, 2**63)) * 2 + int(rng.integers(2)),
        position=int(rng.integers(0, 2**40)),
        bias=maybe({i: float(rng.uniform(-5, 5)) for i in some(20)}, {}),
        banned=maybe(some(5), []),
        allowed=maybe(some(100), []),
        outputs=maybe({i: int(rng.integers(1, 5)) for i in some(30)}, {}),
        prompt=maybe(some(30), []),
    )


def random_logits(rng, rows, vocab):
    logits = rng.normal(0, rng.choice([0.01, 1, 4], size=(rows, 1)), (rows, vocab)).astype(np.float32)
    ties = rng.random(rows) < 0.4  # rows of few distinct values: every edge is a tie
    logits[ties] = np.round(logits[ties])
    logits[rng.random((rows, vocab)) < 0.02] = -np.inf
    return logits


def test_philox_known_answers():
    ones = 0xFFFFFFFF
    assert philox4x32((0,) * 4, (0,) * 2) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox4x32((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert philox4x32(*pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [1, 2, 7, 63, 64, 65, 257, 1000, 5003])
def test_equals_definition(isa, vocab):
    rng = np.random.default_rng(vocab)
    rows = 60
    logits = random_logits(rng, rows, vocab)
    params = [random_params(rng, vocab) for _ in range(rows)]
    tokens, logprobs = run(logits, params, isa=isa)
    assert logprobs is None
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [sample_row(row, p) for row, p in zip(logits, params, strict=True)]


@pytest.mark.parametrize("isa", ISAS)
def test_processed_logits_equal_definition_by_bits(isa):
    rng = np.random.default_rng(3)
    logits = random_logits(rng, 40, 300)
    params = [random_params(rng, 300) for _ in range(40)]
    for row, p in zip(logits, params, strict=True):
        changed = row[None].copy()
        none = np.array([-1], np.int32)
        one = lambda v, t: np.array([v], t)  # noqa: E731
        offsets, ids = ragged([list(p.bias)])
        _native.sample(
            changed, one(0, np.float32), one(0, np.int32), one(1, np.float32), one(0, np.float32),
            one(p.presence, np.float32), one(p.frequency, np.float32), one(p.repetition, np.float32),
            one(0, np.uint64), one(0, np.uint64), none,
            bias=(offsets, ids, np.array(list(p.bias.values()), np.float32)),
            banned=ragged([p.banned]), allowed=ragged([p.allowed]),
            outputs=(*ragged([list(p.outputs)]), ragged([list(p.outputs.values())])[1]),
            prompts=ragged([p.prompt]), isa=isa,
        )  # fmt: skip
        if np.isfinite(row).any():
            np.testing.assert_array_equal(changed[0].view(np.int32), adjust(row, p).view(np.int32))


DISTRIBUTIONS = {
    "plain": SampleParams(),
    "hot": SampleParams(temperature=2.0),
    "cold": SampleParams(temperature=0.5),
    "top_k": SampleParams(top_k=7),
    "top_p": SampleParams(top_p=0.8),
    "min_p": SampleParams(min_p=0.1),
    "all": SampleParams(temperature=1.3, top_k=12, top_p=0.9, min_p=0.02),
    "penalties": SampleParams(presence=0.5, frequency=0.2, repetition=1.3, outputs={1: 3, 4: 1}, prompt=[2, 4]),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_follow_the_exact_distribution(name):
    base, draws, vocab = DISTRIBUTIONS[name], 20000, 40
    logits = np.random.default_rng(5).normal(0, 1.5, vocab).astype(np.float32)
    params = [SampleParams(**{**base.__dict__, "seed": 11, "position": i}) for i in range(draws)]
    tokens, _ = run(np.tile(logits, (draws, 1)), params)

    adjusted = adjust(logits, base)
    shifted = adjusted.astype(np.float64) / base.temperature
    exact = np.exp(shifted - shifted.max()) * (weights(adjusted, base) > 0)
    expected = exact / exact.sum() * draws
    seen = np.bincount(tokens, minlength=vocab)
    assert (seen[expected == 0] == 0).all()
    kept = expected > 0
    chi_square = ((seen[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def test_truncation_keeps_what_the_words_say():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    sets = {
        "top_p 0.69": (SampleParams(top_p=0.69), {0, 1}),
        "top_p 0.71": (SampleParams(top_p=0.71), {0, 1, 2}),
        "top_p 0": (SampleParams(top_p=0.0), {0}),
        "top_k 3": (SampleParams(top_k=3), {0, 1, 2}),
        "top_k beyond": (SampleParams(top_k=9), {0, 1, 2, 3}),
        "top_k -1": (SampleParams(top_k=-1), {0, 1, 2, 3}),
        "min_p 0.6": (SampleParams(min_p=0.6), {0, 1}),
        "min_p 1": (SampleParams(min_p=1.0), {0}),
        "top_k, then top_p of what is left": (SampleParams(top_k=2, top_p=0.57), {0}),
        "temperature first": (SampleParams(temperature=0.25, top_p=0.7), {0}),
        "almost no temperature": (SampleParams(temperature=1e-6), {0}),
    }
    for name, (base, expected) in sets.items():
        params = [SampleParams(**{**base.__dict__, "position": i}) for i in range(300)]
        tokens, _ = run(np.tile(logits, (300, 1)), params)
        assert set(tokens.tolist()) == expected, name


def test_ties_go_to_the_lowest_ids():
    flat = np.zeros(1000, np.float32)
    assert run(flat[None], [SampleParams(temperature=0)])[0].tolist() == [0]
    for base, most in [(SampleParams(top_k=5), 5), (SampleParams(top_k=400), 400), (SampleParams(top_p=0.25), 250)]:
        params = [SampleParams(**{**base.__dict__, "position": i}) for i in range(4000)]
        tokens, _ = run(np.zeros((4000, 1000)), params)
        assert tokens.max() == most - 1
        assert tokens.min() == 0


@pytest.mark.parametrize("temperature", [1e-4, 0.01, 100.0, 1e30, np.inf])
def test_extreme_temperatures(temperature):
    logits = np.array([[1.0, 3.0, -np.inf, 2.0]] * 50)
    params = [SampleParams(temperature=temperature, top_p=0.99, position=i) for i in range(50)]
    tokens = set(run(logits, params)[0].tolist())
    assert tokens == ({1} if temperature < 1 else {0, 1, 3})


@pytest.mark.parametrize("isa", ISAS)
def test_a_bad_row_fails_alone(isa):
    rng = np.random.default_rng(1)
    good = rng.normal(size=(8, 333)).astype(np.float32)
    params = [SampleParams(seed=9, position=i, top_p=0.9) for i in range(8)]
    expected, _ = run(good, params, isa=isa)
    bad = good.copy()
    bad[1, 332] = np.nan
    bad[2] = -np.inf
    bad[3, 64] = np.inf
    bad[5, 0] = np.nan
    tokens, (logprob, rank, top_ids, top) = run(bad, params, num_logprobs=2, isa=isa)
    for row in range(8):
        if row in (1, 2, 3, 5):
            assert (tokens[row], rank[row], logprob[row]) == (-1, 0, -9999)
            assert top_ids[row].tolist() == [-1, -1]
        else:
            assert tokens[row] == expected[row]
    assert np.isfinite(logprob).all()
    assert np.isfinite(top).all()


def test_everything_banned_is_a_failed_row():
    p = SampleParams(allowed=[3, 4], banned=[3, 4])
    assert run(np.zeros((1, 10)), [p])[0].tolist() == [-1]


def test_bits_do_not_depend_on_batch_threads_or_neighbours():
    rng = np.random.default_rng(8)
    logits = random_logits(rng, 24, 2050)
    params = [random_params(rng, 2050) for _ in range(24)]
    tokens, logprobs = run(logits, params, num_logprobs=5, threads=1)
    for threads in (2, 3):
        again, others = run(logits, params, num_logprobs=5, threads=threads)
        assert again.tobytes() == tokens.tobytes()
        assert all(a.tobytes() == b.tobytes() for a, b in zip(logprobs, others, strict=True))
    for row in range(24):
        alone, one = run(logits[row : row + 1], params[row : row + 1], num_logprobs=5)
        assert alone[0] == tokens[row]
        assert all(a[0].tobytes() == b[row].tobytes() for a, b in zip(one, logprobs, strict=True))


def test_the_draw_is_a_function_of_seed_and_position():
    logits = np.zeros((3, 4096), np.float32)
    rows = [SampleParams(seed=1, position=7), SampleParams(seed=2, position=7), SampleParams(seed=1, position=8)]
    first, _ = run(logits, rows)
    assert len(set(first.tolist())) == 3
    assert first.tobytes() == run(logits, rows)[0].tobytes()
    assert first.tolist() == [uniform_bits(p.seed, p.position) * 4096 >> 64 for p in rows]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [1, 5, 64, 100, 1003])
def test_logprobs_against_float64(isa, vocab):
    rng = np.random.default_rng(vocab)
    logits = random_logits(rng, 30, vocab)
    logits[:, 0] = 1.0  # some finite logit in every row
    num_top = min(vocab, 20)
    targets = rng.integers(0, vocab, 30).astype(np.int32)
    logprob, rank, top_ids, top = _native.logprobs(logits, targets, num_top, isa=isa)
    for row in range(30):
        want = row_logprobs(logits[row], targets[row], num_top)
        finite = np.isfinite(logits[row][want[2]])
        assert rank[row] == want[1]
        assert logprob[row] == pytest.approx(want[0], abs=4e-6, rel=1e-6)
        assert top_ids[row].tolist() == np.where(finite, want[2], -1).tolist()
        np.testing.assert_allclose(top[row], np.where(finite, want[3], -9999), atol=4e-6, rtol=1e-6)
    # The sampler reports the same bits for the same token, whatever was done to the logits before the draw.
    tokens, found = run(logits, [SampleParams(bias={0: 2.0}, top_k=3, position=i) for i in range(30)], num_top, isa=isa)
    same = _native.logprobs(logits, tokens, num_top, isa=isa)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(found, same, strict=True))


def test_rows_that_want_no_logprobs_stay_empty():
    _, (_, _, ids, values) = run(np.zeros((3, 50)), [SampleParams()] * 3, num_logprobs=[2, -1, 0])
    assert ids.tolist() == [[0, 1], [-1, -1], [-1, -1]]
    assert (values[1:] == -9999).all()


def test_ids_outside_the_vocabulary_are_ignored():
    ids = [5, 2**31 - 1, 6]
    p = SampleParams(temperature=0, bias={5: 1.0}, banned=ids[1:], allowed=[4, *ids], prompt=ids[1:])
    guarded = np.full((1, 8), 7.0, np.float32)
    guarded[0, :6] = 0
    memory = guarded.copy()
    one = lambda v, t: np.array([v], t)  # noqa: E731
    tokens, _ = _native.sample(
        memory[:, :6], one(0, np.float32), one(0, np.int32), one(1, np.float32), one(0, np.float32), one(0, np.float32),
        one(0, np.float32), one(1.5, np.float32), one(0, np.uint64), one(0, np.uint64), one(-1, np.int32),
        bias=(*ragged([[5]]), np.ones(1, np.float32)), banned=ragged([p.banned]), allowed=ragged([p.allowed]),
        prompts=ragged([[-1, *p.prompt]]),
    )  # fmt: skip
    assert tokens.tolist() == [5]
    assert memory[0, 6:].tolist() == [7.0, 7.0]


def test_malformed_arguments_are_refused():
    one = SampleParams()
    with pytest.raises(ValueError, match="one value for each row"):
        run(np.zeros((2, 5)), [one])
    with pytest.raises(ValueError, match="vocabulary"):
        run(np.zeros((1, 5)), [one], num_logprobs=6)
    logits = np.zeros((1, 5), np.float32)
    with pytest.raises(ValueError, match="one for each row"):
        _native.logprobs(logits, np.zeros(2, np.int32), 0)
    with pytest.raises(TypeError):
        _native.logprobs(logits.astype(np.float64), np.zeros(1, np.int32), 0)
    with pytest.raises(ValueError, match="isa|variant|unknown|choose"):
        run(np.zeros((1, 5)), [one], isa="no-such-variant")


@pytest.mark.parametrize("offsets", [[0, 2, 1], [0, 1, 9], [-1, 0, 1], [0, 1]])
def test_bad_offsets_are_refused(offsets):
    logits = np.zeros((2, 5), np.float32)
    f, i, u = np.zeros(2, np.float32), np.zeros(2, np.int32), np.zeros(2, np.uint64)
    with pytest.raises(ValueError, match="offsets"):
        _native.sample(
            logits, f, i, f, f, f, f, f, u, u, i, banned=(np.array(offsets, np.int32), np.zeros(2, np.int32))
        )
