"""Needs the extension. A row behind a draft is sampled as it would be if the draft were known."""

from __future__ import annotations

import random

import numpy as np
import pytest

from octavo.protocol import NewRequest
from octavo.sampling.sampler import Sampler
from octavo.sampling_params import SamplingParams

VOCAB = 40
STOP = 7
WAYS = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.7, "frequency_penalty": 0.9, "presence_penalty": 0.4, "logprobs": 3},
    {"seed": 3, "logprobs": 0},
    {"seed": 4, "temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_tokens": 6},
    {"seed": 5, "temperature": 0.8, "frequency_penalty": 1.5, "logit_bias": {4: 3.0}, "min_tokens": 3, "logprobs": 5},
    {"seed": 6, "allowed_token_ids": [STOP, 1, 2, 3], "min_tokens": 4, "min_p": 0.01},
]


def new(sampler: Sampler, i: int):
    params = SamplingParams(max_tokens=50, **WAYS[i % len(WAYS)])
    return sampler.add(NewRequest(f"r{i}", [1, 2, 2, 3 + i], [5, 5], params, [STOP]))


def one_by_one(logits: np.ndarray, i: int):
    """What a request samples from these rows, a row a step."""
    sampler = Sampler(1)
    state = new(sampler, i)
    return [sampler.sample(row[None].copy(), [(state, [])])[0][0] for row in logits]


@pytest.mark.parametrize("seed", range(20))
def test_with_drafts_the_same_is_sampled(seed: int) -> None:
    """Several requests at once, each with a draft that holds for some tokens; then the rest, from where they stand."""
    rng = random.Random(seed)
    logits = np.random.default_rng(seed).normal(0, 2, (len(WAYS), 12, VOCAB)).astype(np.float32)
    wanted = [one_by_one(rows, i) for i, rows in enumerate(logits)]
    sampler = Sampler(len(WAYS))
    states = [new(sampler, i) for i in range(len(WAYS))]
    found: list[list] = [[] for _ in WAYS]
    while any(len(f) < 12 for f in found):
        open_ = [i for i, f in enumerate(found) if len(f) < 12]
        drafts = []
        for i in open_:
            at = len(found[i])
            tokens = [token for token, _ in wanted[i][at : at + rng.randint(0, 11 - at)]]
            if tokens and rng.random() < 0.7:
                place = rng.randrange(len(tokens))
                tokens[place] = (tokens[place] + 1) % VOCAB
            drafts.append(tokens)
        rows = np.concatenate([logits[i, len(found[i]) : len(found[i]) + len(d) + 1] for i, d in zip(open_, drafts, strict=True)])
        for i, draft, sampled in zip(open_, drafts, sampler.sample(rows.copy(), [(states[i], d) for i, d in zip(open_, drafts, strict=True)]), strict=True):
            held = [token for token, _ in sampled[:-1]]
            assert held == draft[: len(held)] and (len(held) == len(draft) or sampled[-1][0] != draft[len(held)])
            found[i] += sampled
    assert found == wanted


def test_a_row_that_cannot_be_sampled_ends_the_tokens_before_it() -> None:
    logits = np.zeros((3, VOCAB), np.float32)
    logits[0, 9] = logits[1, 8] = 5.0
    logits[2] = np.nan
    sampler = Sampler(1)
    state = new(sampler, 0)
    assert sampler.sample(logits.copy(), [(state, [9, 8])]) == [[(9, None), (8, None)]]
    assert state.num_output == 4
    assert sampler.sample(logits[2:].copy(), [(state, [])]) == [[]]
