"""Random weights of every kind for the tests of packing and products: canonical arrays as octavo.ops.packed describes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo import _native
from octavo.ops.packed import NIBBLES, PackedWeight, WeightKind, WeightPart, unpack_nibbles

ISAS = sorted(
    {*_native.isa_names(), "portable16"}
)  # portable16 is never chosen by itself, so it is not among the names


@dataclass(frozen=True)
class Form:
    """A kind of weight with its variations: inputs per scale (0: plain numbers), minimums or zero points, and fp32 scales."""

    kind: WeightKind
    group: int = 0
    mins: bool = False
    zeros: bool = False
    wide: bool = False

    def __str__(self) -> str:
        flags = "m" * self.mins + "z" * self.zeros + "w" * self.wide
        return f"{self.kind.value}{f'g{self.group}' if self.group else ''}{flags}"


TABLES = [Form(WeightKind.T4, 32), Form(WeightKind.T4, 32, wide=True), Form(WeightKind.T4, 96)]
# Neither in order nor even, with both ends of int8.
TABLE = np.array([5, -128, -104, 1, 127, 113, -83, 0, 13, -49, 88, -35, 69, -22, 38, -10], np.int8)
QUANTISED = [
    Form(WeightKind.W4, 32),
    Form(WeightKind.W4, 32, True),
    Form(WeightKind.W4, 32, zeros=True),
    Form(WeightKind.W4, 64),
    Form(WeightKind.W4, 96, True),
    Form(WeightKind.W4, 64, zeros=True),
    Form(WeightKind.W4, 96, wide=True),
    Form(WeightKind.W8, 32),
    Form(WeightKind.W8, 32, True),
    Form(WeightKind.W8, 16),
    Form(WeightKind.W8, 16, True),
    Form(WeightKind.W8, 96),
    Form(WeightKind.W8, 32, wide=True),
    Form(WeightKind.W8, 64, True),
    Form(WeightKind.W8, 64, zeros=True, wide=True),
    *TABLES,
]
PLAIN = [Form(WeightKind.F32), Form(WeightKind.F16), Form(WeightKind.BF16)]
F8 = [Form(WeightKind.F8, 32, wide=True), Form(WeightKind.F8, 288, wide=True)]
FORMS = QUANTISED + PLAIN + F8


def inputs(form: Form, k: int) -> int:
    """The k or the least number above it that is whole groups."""
    return -(-k // form.group) * form.group if form.group else k


def part(form: Form, n: int, k: int, seed: int = 0) -> WeightPart:
    """n random channels; k a multiple of the form's group. Codes take their extreme values often."""
    rng = np.random.default_rng(seed)
    if not form.group:
        values = rng.standard_normal((n, k)).astype(np.float32)
        if form.kind is WeightKind.BF16:
            return WeightPart((values.view(np.uint32) >> 16).astype(np.uint16))
        return WeightPart(values.astype(np.float16) if form.kind is WeightKind.F16 else values)
    groups = k // form.group
    scales = rng.uniform(-0.1, 0.1, (n, groups)).astype(np.float32 if form.wide else np.float16)
    if form.kind is WeightKind.F8:
        codes = rng.integers(0, 256, (n, groups, form.group), np.uint8)
        codes[codes & 0x7F == 0x7F] = 0x7E  # no NaN
        return WeightPart(codes, scales)
    if form.kind in NIBBLES:
        codes = rng.integers(0, 256, (n, groups, form.group // 2), np.uint8)
        codes[rng.random((n, groups)) < 0.1] = 0xFF
    else:
        codes = rng.integers(-128, 128, (n, groups, form.group), np.int8)
        codes[rng.random((n, groups)) < 0.1] = -128
    mins = rng.uniform(-1, 1, (n, groups)).astype(np.float16) if form.mins else None
    points = (0, 16) if form.kind is WeightKind.W4 else (-128, 128)
    zeros = rng.integers(*points, (n, groups)).astype(np.float16) if form.zeros else None
    return WeightPart(codes, scales, mins, zeros)


def weight(form: Form, n: int, k: int, seed: int = 0) -> PackedWeight:
    """n channels of k inputs, or a few more that make whole groups."""
    k = inputs(form, k)
    return of_parts(form, k, part(form, n, k, seed))


def of_parts(form: Form, k: int, *parts: WeightPart) -> PackedWeight:
    table = TABLE if form.kind is WeightKind.T4 else None
    return PackedWeight(form.kind, sum(p.codes.shape[0] for p in parts), k, parts, table=table)


def looked_up(w: PackedWeight) -> PackedWeight:
    """A weight of t4 as one of w8."""
    assert w.table is not None
    parts = tuple(WeightPart(w.table[unpack_nibbles(p.codes)], p.scales) for p in w.parts)
    return PackedWeight(WeightKind.W8, w.n, w.k, parts, w.columns)


def pack(weight: PackedWeight, isa: str) -> _native.PackedWeight:
    return _native.pack(weight.kind.value, weight.n, weight.k, [(p.codes, p.scales, p.mins, p.zeros) for p in weight.parts], isa, weight.table)


def rows(count: int, k: int, seed: int = 0) -> np.ndarray:
    """float32 [count, k]; rows of very different sizes, some with empty groups."""
    rng = np.random.default_rng(1000 + seed)
    x = rng.standard_normal((count, k)).astype(np.float32) * (10.0 ** rng.integers(-3, 3, (count, 1))).astype(
        np.float32
    )
    x[rng.random((count, k)) < 0.05] = 0
    if k >= 64:
        x[::3, 32:64] = 0
    return x
