"""The definition of sampling, in plain numpy, one row at a time: what the native kernel is held to.

Knows no batches, threads or speed. The steps and their order are those at the head of csrc/kernels/sample.cpp. Everything
after the weights is integer arithmetic, so that an implementation may differ only where its float32 exp does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

GREEDY_BELOW = 1e-5
WEIGHT_ONE = np.float32(2**30)
LOGPROB_FLOOR = -9999.0


@dataclass
class SampleParams:
    """One row's parameters; ids of a list are distinct."""

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    seed: int = 0
    position: int = 0
    bias: dict[int, float] = field(default_factory=dict)
    banned: list[int] = field(default_factory=list)
    allowed: list[int] = field(default_factory=list)  # empty: all
    outputs: dict[int, int] = field(default_factory=dict)  # id -> how often it was generated
    prompt: list[int] = field(default_factory=list)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four words of 32 bits, a pure function of counter and key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniform_bits(seed: int, position: int) -> int:
    """The 64 random bits of one position of one request."""
    low, high, _, _ = philox4x32((position & 0xFFFFFFFF, position >> 32, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    return high << 32 | low


def adjust(logits: np.ndarray, p: SampleParams) -> np.ndarray:
    """Allowed ids, bans, bias, then penalties; float32 [vocab], a new array."""
    out = logits.astype(np.float32, copy=True)
    vocab = len(out)
    if p.allowed:
        mask = np.ones(vocab, bool)
        mask[[i for i in p.allowed if i < vocab]] = False
        out[mask] = -np.inf
    out[[i for i in p.banned if i < vocab]] = -np.inf
    for i, value in p.bias.items():
        out[i] += np.float32(value)
    for i in {*p.prompt, *p.outputs}:
        r = np.float32(p.repetition)
        out[i] = out[i] / r if out[i] > 0 else out[i] * r
    for i, count in p.outputs.items():
        out[i] -= np.float32(p.frequency) * np.float32(count)
        out[i] -= np.float32(p.presence)
    return out


def weights(adjusted: np.ndarray, p: SampleParams) -> np.ndarray:
    """Integer weights int64 [vocab] of the tokens that survive min-p, top-k and top-p; 0 for the others."""
    inverse = max(np.float32(1) / np.float32(p.temperature), np.finfo(np.float32).tiny)
    ratio = np.exp((adjusted - adjusted.max()) * inverse)
    ratio[ratio < min(np.float32(p.min_p), np.float32(1))] = 0
    w = np.floor(ratio * WEIGHT_ONE).astype(np.int64)

    order = np.lexsort((np.arange(len(w)), -adjusted))  # logit descending, id ascending
    if p.top_k > 0:
        w[order[p.top_k :]] = 0
    if p.top_p < 1:
        need = max(1.0, np.ceil(float(np.float32(p.top_p)) * float(w.sum())))
        kept = int(np.searchsorted(np.cumsum(w[order]), need)) + 1
        w[order[kept:]] = 0
    return w


def sample_row(logits: np.ndarray, p: SampleParams) -> int:
    """The token id, or -1 for a row that holds a NaN or +inf, or ends without a finite logit."""
    if not (logits < np.inf).all() or not np.isfinite(logits).any():
        return -1
    adjusted = adjust(logits, p)
    if not (adjusted < np.inf).all() or not np.isfinite(adjusted).any():
        return -1
    if p.temperature < GREEDY_BELOW:
        return int(adjusted.argmax())
    running = np.cumsum(weights(adjusted, p))
    threshold = uniform_bits(p.seed, p.position) * int(running[-1]) >> 64
    return int(np.searchsorted(running, threshold, side="right"))


def row_logprobs(logits: np.ndarray, target: int, num_top: int) -> tuple[float, int, np.ndarray, np.ndarray]:
    """(logprob, rank, top ids, top logprobs) of the raw logits, in float64; not for rows with NaN."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max()
    logprobs = np.maximum(LOGPROB_FLOOR, shifted - np.log(np.exp(shifted).sum()))
    order = np.lexsort((np.arange(len(wide)), -wide))[:num_top]
    return float(logprobs[target]), int((logits > logits[target]).sum()) + 1, order, logprobs[order]
