"""Sampling and log-probabilities of logits rows by the native kernels; see csrc/kernels/sample.cpp for the definition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo import _native

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U64 = NDArray[np.uint64]
Ragged = tuple[I32, I32]  # offsets [R + 1], ids
RaggedF32 = tuple[I32, I32, F32]  # offsets, ids, values
RaggedI32 = tuple[I32, I32, I32]  # offsets, ids, counts


@dataclass(slots=True)
class SampleInputs:
    """One step's sampling parameters, arrays of R rows; ragged lists are None where no row has any."""

    temperature: F32
    top_k: I32
    top_p: F32
    min_p: F32
    presence: F32
    frequency: F32
    repetition: F32
    seed: U64
    position: U64
    num_logprobs: I32
    bias: RaggedF32 | None = None
    banned: Ragged | None = None
    allowed: Ragged | None = None
    outputs: RaggedI32 | None = None
    prompts: Ragged | None = None


@dataclass(slots=True)
class Scores:
    """Log-probabilities and ranks of R tokens, and the K best of each row, descending: ids and log-probabilities [R, K]."""

    logprob: F32
    rank: I32
    top_ids: I32
    top_logprobs: F32


def sample(logits_RV: F32, inputs: SampleInputs, isa: str) -> tuple[I32, Scores | None]:
    """One token per row, -1 for a row with a NaN or nothing finite; and scores if any row wants them. Changes the logits."""
    i = inputs
    tokens, scores = _native.sample(
        logits_RV, i.temperature, i.top_k, i.top_p, i.min_p, i.presence, i.frequency, i.repetition, i.seed, i.position, i.num_logprobs,
        i.bias, i.banned, i.allowed, i.outputs, i.prompts, isa,
    )  # fmt: skip
    return tokens, None if scores is None else Scores(*scores)


def score(logits_RV: F32, targets_R: I32, num_top: int, isa: str) -> Scores:
    """Scores of given tokens among raw logits."""
    return Scores(*_native.logprobs(logits_RV, targets_R, num_top, isa))
