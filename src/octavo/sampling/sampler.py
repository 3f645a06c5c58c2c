"""Sampler: what each request wants of sampling, kept in one row of arrays, gathered for a step.

A draw is a function of the request's seed and the token's position in its sequence (Philox, counter-based), so it does not depend on the
batch, on chunking, or on how often a sequence was computed again. Knows nothing of models or blocks.

# R = rows that sample in this step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.ops.cpu.sampling import SampleInputs, Scores, sample
from octavo.protocol import NewRequest, TokenLogprobs
from octavo.sampling_params import SamplingParams

SEED_MASK = 2**64 - 1
_FIELDS: tuple[tuple[str, Any], ...] = (
    ("temperature", np.float32), ("top_k", np.int32), ("top_p", np.float32), ("min_p", np.float32), ("presence", np.float32),
    ("frequency", np.float32), ("repetition", np.float32), ("seed", np.uint64), ("num_logprobs", np.int32),
)  # fmt: skip


@dataclass(slots=True)
class SamplingState:
    """One request's lists; its scalars are in row `row` of the sampler's arrays. Lists are kept only where a parameter needs them."""

    row: int
    params: SamplingParams
    num_prompt: int
    num_output: int
    stop_token_ids: list[int]
    prompt_ids: list[int] = field(default_factory=list)  # distinct
    output_counts: Counter[int] = field(default_factory=Counter)
    counts_outputs: bool = False
    bias_ids: list[int] = field(default_factory=list)
    bias_values: list[float] = field(default_factory=list)
    allowed_ids: list[int] = field(default_factory=list)

    @property
    def banned_ids(self) -> list[int]:
        """Ids that would end the request before min_tokens."""
        return self.stop_token_ids if self.num_output < self.params.min_tokens else []


class Sampler:
    """At most `max_num_seqs` requests at a time."""

    def __init__(self, max_num_seqs: int, isa: str = "") -> None:
        self._rows = {name: np.zeros(max_num_seqs, dtype) for name, dtype in _FIELDS}
        self._free = list(range(max_num_seqs))
        self._isa = isa

    def add(self, request: NewRequest) -> SamplingState:
        """Takes a row for the request; `release` gives it back."""
        p = request.sampling_params
        row = self._free.pop()
        values = (p.temperature, p.top_k, p.top_p, p.min_p, p.presence_penalty, p.frequency_penalty, p.repetition_penalty,
                  (p.seed or 0) & SEED_MASK, -1 if p.logprobs is None else p.logprobs)  # fmt: skip
        for (name, _), value in zip(_FIELDS, values, strict=True):
            self._rows[name][row] = value
        state = SamplingState(row, p, len(request.prompt_token_ids), len(request.output_token_ids), request.stop_token_ids)
        state.counts_outputs = bool(p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0)
        if state.counts_outputs:
            state.output_counts = Counter(request.output_token_ids)
        if p.repetition_penalty != 1.0:
            state.prompt_ids = sorted(set(request.prompt_token_ids))
        if p.logit_bias:
            state.bias_ids, state.bias_values = list(p.logit_bias), list(p.logit_bias.values())
        state.allowed_ids = list(p.allowed_token_ids or ())
        return state

    def release(self, state: SamplingState) -> None:
        self._free.append(state.row)

    def sample(self, logits_RV: NDArray[np.float32], states: Sequence[SamplingState]) -> list[tuple[int, TokenLogprobs | None]]:
        """(token, log-probabilities if wanted) per row; token -1 where the row cannot be sampled. Changes the logits."""
        tokens, scores = sample(logits_RV, self._gather(states), self._isa)
        out: list[tuple[int, TokenLogprobs | None]] = []
        for i, (token, state) in enumerate(zip(tokens.tolist(), states, strict=True)):
            state.num_output += 1
            if state.counts_outputs and token >= 0:
                state.output_counts[token] += 1
            wanted = state.params.logprobs
            out.append((token, None if wanted is None or scores is None or token < 0 else token_logprobs(scores, i, token, wanted)))
        return out

    def _gather(self, states: Sequence[SamplingState]) -> SampleInputs:
        rows = np.fromiter((s.row for s in states), np.int64, len(states))
        position = np.fromiter((s.num_prompt + s.num_output for s in states), np.uint64, len(states))
        scalars: dict[str, Any] = {name: values[rows] for name, values in self._rows.items()}
        inputs = SampleInputs(position=position, **scalars)
        inputs.banned = _ragged(states, lambda s: s.banned_ids)
        inputs.allowed = _ragged(states, lambda s: s.allowed_ids)
        inputs.prompts = _ragged(states, lambda s: s.prompt_ids)
        if bias := _ragged(states, lambda s: s.bias_ids):
            inputs.bias = (*bias, np.array([v for s in states for v in s.bias_values], np.float32))
        if any(s.counts_outputs for s in states) and (outputs := _ragged(states, lambda s: list(s.output_counts))):
            inputs.outputs = (*outputs, np.array([c for s in states for c in s.output_counts.values()], np.int32))
        return inputs


def token_logprobs(scores: Scores, row: int, token: int, num_top: int) -> TokenLogprobs:
    """One row's scores as the protocol carries them: the token itself, then the best."""
    ids = [token, *scores.top_ids[row, :num_top].tolist()]
    logprobs = [float(scores.logprob[row]), *scores.top_logprobs[row, :num_top].tolist()]
    return TokenLogprobs(ids, logprobs, int(scores.rank[row]))


def _ragged(
    states: Sequence[SamplingState], ids_of: Callable[[SamplingState], list[int]]
) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
    lists = [ids_of(state) for state in states]
    if not any(lists):
        return None
    offsets = np.zeros(len(lists) + 1, np.int32)
    np.cumsum([len(ids) for ids in lists], out=offsets[1:])
    return offsets, np.array([i for ids in lists for i in ids], np.int32)
