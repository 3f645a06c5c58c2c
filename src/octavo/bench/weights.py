"""Random weights of any kind and shape, as they would come from a file: for benchmarks without a model.

Kinds: w4 (groups of 32 with minimums, as Q4_1), w4s (without, as GPTQ's symmetric), w4g64, w4g128 (zero points, as AWQ's), w4gs64, w4gs128
(without), w8 (groups of 32), w8c (a scale per channel, as SmoothQuant's), t4 (a table, as IQ4_NL), f8 (a scale per 128 inputs), bf16, f16, f32.
"""

from __future__ import annotations

import re

import numpy as np

from octavo.errors import ConfigError
from octavo.ops.packed import GROUP, GROUPED, PackedWeight, WeightKind, WeightPart, f32_to_bf16

FORMS = ("w4", "w4s", "w4g64", "w4g128", "w4gs64", "w4gs128", "w8", "w8c", "t4", "f8", "bf16", "f16", "f32")
F8_GROUP = 128


def kind_of(form: str, n: int, k: int) -> WeightKind:
    """What is stored of such weights. Raises ConfigError if there is no such form, or not of that shape."""
    if form not in FORMS:
        raise ConfigError(f"kinds = {form!r}: choose from {', '.join(FORMS)}")
    kind = WeightKind(form[:2] if form.startswith("w") else form)
    if kind in GROUPED and k % GROUP:
        raise ConfigError(f"shapes = {n}x{k}: weights of kind {form} have a multiple of {GROUP} inputs")
    return kind


def random_weight(form: str, n: int, k: int) -> PackedWeight:
    """n output channels of k inputs. Groups that do not divide k are halved until they do. Raises ConfigError as kind_of does."""
    kind = kind_of(form, n, k)
    if kind not in GROUPED:
        return _plain(kind, n, k)
    rng, size = np.random.default_rng(0), _group(form, k)
    scales = rng.uniform(0.01, 0.02, (n, k // size)).astype(np.float16)
    if kind is WeightKind.W8:
        return PackedWeight(kind, n, k, (WeightPart(rng.integers(-127, 128, (*scales.shape, size), dtype=np.int8), scales),))
    if kind is WeightKind.F8:
        codes = rng.integers(0, 127, (*scales.shape, size), dtype=np.uint8)
        return PackedWeight(kind, n, k, (WeightPart(codes, scales.astype(np.float32)),))
    codes = rng.integers(0, 256, (*scales.shape, size // 2), dtype=np.uint8)
    if kind is WeightKind.T4:
        return PackedWeight(kind, n, k, (WeightPart(codes, scales),), table=rng.integers(-127, 128, 16, np.int8))
    mins = -scales if form == "w4" else None
    zeros = np.full_like(scales, 7) if form in ("w4g64", "w4g128") else None
    return PackedWeight(kind, n, k, (WeightPart(codes, scales, mins, zeros),))


def _plain(kind: WeightKind, n: int, k: int) -> PackedWeight:
    values = np.random.default_rng(0).standard_normal((n, k), np.float32)
    codes = f32_to_bf16(values) if kind is WeightKind.BF16 else values.astype(np.float16 if kind is WeightKind.F16 else np.float32)
    return PackedWeight(kind, n, k, (WeightPart(codes),))


def _group(form: str, k: int) -> int:
    if form == "w8c":
        return k
    told = re.search(r"gs?(\d+)$", form)
    size = F8_GROUP if form == "f8" else int(told[1]) if told else GROUP
    while k % size:
        size //= 2
    return size
