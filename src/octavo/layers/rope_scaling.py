"""Kinds of rotary scaling: what a checkpoint asks for so that a model sees further than it was first trained to.

Each kind is a frozen record with the frequencies that it makes of the plain ones, and `amplitude`, which multiplies cosines and sines of both
queries and keys. `KINDS` finds them by the name in a configuration. Knows neither heads nor tables.

# F = frequencies, half the columns that turn; P = positions
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.config import HFConfig
from octavo.errors import ConfigError

F32 = NDArray[np.float32]
MOST = 1e6  # of any factor: beyond it fp32 has no frequencies left


class Scaling(Protocol):
    """One kind. Equal records give equal frequencies."""

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by."""
        ...

    def frequencies(self, theta: float, rot: int, positions: int) -> F32:
        """Radians per position, float32 [F]; or [P, F] where they depend on the position. `positions`: the longest sequence that is served."""
        ...

    def context(self, stated: int) -> int:
        """Positions that the model serves, where its configuration states `stated`."""
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """No scaling (Su et al. 2021)."""

    amplitude: float = 1.0

    def frequencies(self, theta: float, rot: int, positions: int) -> F32:
        return plain(theta, rot)

    def context(self, stated: int) -> int:
        return stated


@dataclass(frozen=True, slots=True)
class Linear(Plain):
    """Position interpolation (Chen et al. 2023): all frequencies divided by one factor."""

    factor: float = 1.0

    @staticmethod
    def read(scaling: HFConfig, hf: HFConfig) -> Linear:
        return Linear(factor=positive(scaling, "factor"))

    def frequencies(self, theta: float, rot: int, positions: int) -> F32:
        return plain(theta, rot) / np.float32(self.factor)


@dataclass(frozen=True, slots=True)
class Llama3(Plain):
    """Meta's: short waves stay, long ones are divided by the factor, between them a blend by how often they turn in the original context."""

    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original: int = 8192

    @staticmethod
    def read(scaling: HFConfig, hf: HFConfig) -> Llama3:
        low, high = positive(scaling, "low_freq_factor"), positive(scaling, "high_freq_factor")
        if low >= high:
            raise ConfigError(f"{scaling.source}: low_freq_factor = {low} must be below high_freq_factor = {high}")
        return Llama3(1.0, positive(scaling, "factor"), low, high, original_context(scaling, hf))

    def frequencies(self, theta: float, rot: int, positions: int) -> F32:
        freq_F = plain(theta, rot)
        turns_F = self.original / (2 * np.pi / freq_F)
        keep_F = np.clip((turns_F - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return ((1 - keep_F) * freq_F / self.factor + keep_F * freq_F).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Yarn(Plain):
    """YaRN (Peng et al. 2023): frequencies that turn more than `beta_fast` times in the original context stay, those that turn less than
    `beta_slow` times are divided by the factor, between them a ramp over the frequencies' indices, whose ends are whole if `truncate`."""

    factor: float = 1.0
    original: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @staticmethod
    def read(scaling: HFConfig, hf: HFConfig) -> Yarn:
        factor = positive(scaling, "factor")
        mscale, all_dim = scaling.read("mscale", float, 0.0), scaling.read("mscale_all_dim", float, 0.0)
        if min(mscale, all_dim) < 0:
            raise ConfigError(f"{scaling.source}: mscale = {mscale}, mscale_all_dim = {all_dim}: must not be below 0")
        if "attention_factor" in scaling:
            amplitude = positive(scaling, "attention_factor")
        elif mscale and all_dim:
            amplitude = magnitude(factor, mscale) / magnitude(factor, all_dim)
        else:
            amplitude = magnitude(factor)
        fast, slow = positive(scaling, "beta_fast", 32.0), positive(scaling, "beta_slow", 1.0)
        return Yarn(amplitude, factor, original_context(scaling, hf), fast, slow, scaling.read("truncate", bool, True))

    def frequencies(self, theta: float, rot: int, positions: int) -> F32:
        freq_F = plain(theta, rot)
        low, high = self.index(theta, rot, self.beta_fast), self.index(theta, rot, self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rot - 1)
        high = high + 0.001 if low == high else high
        slowed_F = np.clip((np.arange(rot // 2, dtype=np.float32) - low) / (high - low), 0, 1)
        return (freq_F / self.factor * slowed_F + freq_F * (1 - slowed_F)).astype(np.float32)

    def index(self, theta: float, rot: int, turns: float) -> float:
        """Where among the frequencies one would be that turns so often in the original context."""
        return rot * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def context(self, stated: int) -> int:
        return max(stated, int(self.original * self.factor))


@dataclass(frozen=True, slots=True)
class LongRope(Plain):
    """LongRoPE (Ding et al. 2024): a divisor for each frequency, from one of two lists.

    Which list is settled once, by the longest sequence that is served: the long one if that exceeds the original context. Other programs switch
    when a sequence grows over it, so that earlier keys in the cache were turned by other frequencies than later queries; here a request's
    tokens depend on neither its neighbours nor the moment at which it grows.
    """

    original: int = 4096
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    @staticmethod
    def read(scaling: HFConfig, hf: HFConfig) -> LongRope:
        original = original_context(scaling, hf)
        factor = positive(scaling, "factor") if "factor" in scaling else hf.size("max_position_embeddings", original) / original
        if "attention_factor" in scaling:
            amplitude = positive(scaling, "attention_factor")
        else:
            amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return LongRope(amplitude, original, divisors(scaling, "short_factor"), divisors(scaling, "long_factor"))

    def frequencies(self, theta: float, rot: int, positions: int) -> F32:
        return divided(theta, rot, self.long if positions > self.original else self.short)


@dataclass(frozen=True, slots=True)
class Divided(Plain):
    """A divisor for each frequency, as GGUF files carry them."""

    factors: tuple[float, ...] = ()

    @staticmethod
    def read(scaling: HFConfig, hf: HFConfig) -> Divided:
        return Divided(1.0, divisors(scaling, "factors"))

    def frequencies(self, theta: float, rot: int, positions: int) -> F32:
        return divided(theta, rot, self.factors)


@dataclass(frozen=True, slots=True)
class Dynamic(Plain):
    """Dynamic NTK: beyond the original context, theta grows with the length of the sequence.

    Position p turns by the frequencies of a sequence of p + 1 tokens: what a cache holds that was filled token by token. So the prompt's chunks do
    not show in the result. (A program that turns a whole long prompt by the frequencies of its full length computes something else for it.)
    """

    factor: float = 1.0
    original: int = 2048

    @staticmethod
    def read(scaling: HFConfig, hf: HFConfig) -> Dynamic:
        return Dynamic(1.0, positive(scaling, "factor"), hf.size("max_position_embeddings", 2048))

    def frequencies(self, theta: float, rot: int, positions: int) -> F32:
        lengths_P = np.maximum(np.arange(1, positions + 1), self.original)
        growth_P = self.factor * lengths_P / self.original - (self.factor - 1)
        theta_P = theta * growth_P ** (rot / (rot - 2))
        return (theta_P[:, None] ** (-np.arange(0, rot, 2) / rot)).astype(np.float32)

    def context(self, stated: int) -> int:
        return max(stated, int(self.original * self.factor))


PLAIN = Plain()
KINDS = {
    "linear": Linear.read,
    "dynamic": Dynamic.read,
    "llama3": Llama3.read,
    "yarn": Yarn.read,
    "longrope": LongRope.read,
    "su": LongRope.read,  # its first name
    "frequency_factors": Divided.read,
}


def read_scaling(scaling: HFConfig, hf: HFConfig) -> Scaling:
    """The scaling of one object of a configuration. Raises ConfigError naming the kind that was found and those that there are."""
    kind = scaling.raw.get("rope_type", scaling.raw.get("type")) or "default"
    if kind in ("default", "none"):
        return PLAIN
    if kind == "yarn" and "long_factor" in scaling:
        kind = "longrope"  # as early files of Phi-3 called it
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"{scaling.source}: rope_type = {kind!r}: supported are default, {', '.join(KINDS)}")
    return KINDS[kind](scaling, hf)


def plain(theta: float, rot: int) -> F32:
    """theta ** (-2 i / rot), in fp32 throughout, as the reference implementations compute it."""
    exponents_F = np.arange(0, rot, 2, dtype=np.float32) / np.float32(rot)
    return (1.0 / np.power(np.float32(theta), exponents_F)).astype(np.float32)


def divided(theta: float, rot: int, factors: tuple[float, ...]) -> F32:
    if len(factors) != rot // 2:
        raise ConfigError(f"rope_scaling: {len(factors)} factors for {rot // 2} frequencies")
    return (plain(theta, rot) / np.array(factors, np.float32)).astype(np.float32)


def magnitude(factor: float, mscale: float = 1.0) -> float:
    """YaRN's growth of attention with the factor."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def original_context(scaling: HFConfig, hf: HFConfig) -> int:
    """Positions of the first training. A key beside the scaling goes before one within it, as Phi-3's files mean it."""
    outer = hf if "original_max_position_embeddings" in hf else scaling
    original = outer.size("original_max_position_embeddings", hf.size("max_position_embeddings", 2048))
    if original < 2:
        raise ConfigError(f"{outer.source}: original_max_position_embeddings = {original}: must be at least 2")
    return original


def positive(scaling: HFConfig, key: str, absent: float | None = None) -> float:
    value = scaling.read(key, float, absent)
    if not 0 < value <= MOST:
        raise ConfigError(f"{scaling.source}: {key} = {value}: must be above 0 and at most {MOST:g}")
    return value


def divisors(scaling: HFConfig, key: str) -> tuple[float, ...]:
    values = scaling.read(key, list)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MOST:
            raise ConfigError(f"{scaling.source}: {key} holds {str(value)[:50]}: must hold numbers above 0 and at most {MOST:g}")
    return tuple(float(value) for value in values)
