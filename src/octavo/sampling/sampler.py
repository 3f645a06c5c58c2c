"""Sampler: what each request wants of sampling, kept in one row of arrays, gathered for a step.

A draw is a function of the request's seed and the token's position in its sequence (Philox, counter-based), so it does not depend on the
batch, on chunking, or on how often a sequence was computed again. Knows nothing of models or blocks.

A request may sample in several rows of a step: behind its last known token and behind each token of a draft. Each row is sampled as if the
drafts before it were known, so what it gives is right if they are: a draft holds if it is the very token that the row before it gives.

# R = rows that sample in this step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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

    def banned_after(self, num_output: int) -> list[int]:
        """Ids that would end the request before min_tokens."""
        return self.stop_token_ids if num_output < self.params.min_tokens else []

    def counts_after(self, drafts: list[int]) -> Counter[int]:
        """How often each token is in the output, if these are known."""
        return self.output_counts + Counter(drafts) if drafts else self.output_counts

    def take(self, token: int) -> None:
        """A token has become known."""
        self.num_output += 1
        if self.counts_outputs:
            self.output_counts[token] += 1


class Row(NamedTuple):
    """One row to sample: a request, as if so many tokens of a draft were known."""

    state: SamplingState
    drafts: list[int]


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

    def sample(
        self, logits_RV: NDArray[np.float32], wanted: Sequence[tuple[SamplingState, list[int]]]
    ) -> list[list[tuple[int, TokenLogprobs | None]]]:
        """Of each request and its draft: the tokens that are sampled, each with its log-probabilities if wanted.

        The logits have a row for each request and each token of its draft, in order. A request's tokens are one, and one more for each draft token
        that held; they end before a row that cannot be sampled, so there may be none. Changes the logits.
        """
        rows = [Row(state, draft[:i]) for state, draft in wanted for i in range(len(draft) + 1)]
        tokens_R, scores = sample(logits_RV, self._gather(rows), self._isa)
        tokens, at = tokens_R.tolist(), 0
        out = []
        for state, draft in wanted:
            num_top = state.params.logprobs
            found: list[tuple[int, TokenLogprobs | None]] = []
            for i, token in enumerate(tokens[at : at + len(draft) + 1], at):
                if token < 0:
                    break
                state.take(token)
                found.append((token, None if num_top is None or scores is None else token_logprobs(scores, i, token, num_top)))
                if len(found) > len(draft) or token != draft[len(found) - 1]:
                    break
            out.append(found)
            at += len(draft) + 1
        return out

    def _gather(self, rows: Sequence[Row]) -> SampleInputs:
        states = [row.state for row in rows]
        num_output = [row.state.num_output + len(row.drafts) for row in rows]
        places = np.fromiter((s.row for s in states), np.int64, len(rows))
        position = np.fromiter((s.num_prompt + n for s, n in zip(states, num_output, strict=True)), np.uint64, len(rows))
        scalars: dict[str, Any] = {name: values[places] for name, values in self._rows.items()}
        inputs = SampleInputs(position=position, **scalars)
        inputs.banned = _ragged([s.banned_after(n) for s, n in zip(states, num_output, strict=True)])
        inputs.allowed = _ragged([s.allowed_ids for s in states])
        inputs.prompts = _ragged([s.prompt_ids for s in states])
        if bias := _ragged([s.bias_ids for s in states]):
            inputs.bias = (*bias, np.array([v for s in states for v in s.bias_values], np.float32))
        if any(s.counts_outputs for s in states):
            counts = [row.state.counts_after(row.drafts) if row.state.counts_outputs else {} for row in rows]
            if outputs := _ragged([list(c) for c in counts]):
                inputs.outputs = (*outputs, np.array([n for c in counts for n in c.values()], np.int32))
        return inputs


def token_logprobs(scores: Scores, row: int, token: int, num_top: int) -> TokenLogprobs:
    """One row's scores as the protocol carries them: the token itself, then the best."""
    ids = [token, *scores.top_ids[row, :num_top].tolist()]
    logprobs = [float(scores.logprob[row]), *scores.top_logprobs[row, :num_top].tolist()]
    return TokenLogprobs(ids, logprobs, int(scores.rank[row]))


def _ragged(lists: Sequence[list[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
    if not any(lists):
        return None
    offsets = np.zeros(len(lists) + 1, np.int32)
    np.cumsum([len(ids) for ids in lists], out=offsets[1:])
    return offsets, np.array([i for ids in lists for i in ids], np.int32)
