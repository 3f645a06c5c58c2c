"""Models with some bytes changed at random, always the same ones for a seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from healthy import Files
from quantised import HEALTHY


@dataclass(frozen=True)
class Flipped:
    """A model of the given form in which `count` bytes of `file` are others."""

    form: str
    file: str
    count: int
    files: Files
    start: str


def flipped(seed: int) -> Flipped:
    """Half of the changes are in the first bytes, where headers are; a third of them change whole runs."""
    rng = np.random.default_rng(seed)
    form = list(HEALTHY)[seed % len(HEALTHY)]
    make, start = HEALTHY[form]
    files = make()
    file = str(rng.choice(sorted(files)))
    data = files[file]
    assert isinstance(data, bytes)
    new = bytearray(data)
    for _ in range(int(rng.integers(1, 6))):
        most = len(new) if rng.random() < 0.5 else min(len(new), 2000)
        at, run = int(rng.integers(most)), int(rng.integers(1, 9)) if rng.random() < 0.3 else 1
        for i in range(at, min(at + run, len(new))):
            new[i] = new[i] ^ (1 << int(rng.integers(8))) if run == 1 else int(rng.integers(256))
    count = sum(a != b for a, b in zip(new, data, strict=True))
    return Flipped(form, file, count, {**files, file: bytes(new)}, start)
