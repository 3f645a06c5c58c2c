"""What this machine can do at most, measured; and how long single products take. For benchmarks: no engine asks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo.ops.cpu.peaks import Peaks, better, cache_sizes, cached_bytes
from octavo.ops.cpu.program import check_isa, native_weight
from octavo.ops.packed import PackedWeight

MEMORY_TIMES_CACHE = 16  # a buffer so many times the last cache is read from memory, for all that cache can do
LEAST_MEMORY, MOST_MEMORY = 256 << 20, 1 << 30


def measure_peaks(isa: str = "", seconds: float = 0.2) -> Peaks:
    """About `seconds` for each figure, on the process's kernel threads. isa: a variant's name, "" for the best. Raises ConfigError.

    In two rounds, of which the better counts: what disturbs a figure for a moment, such as two threads on one CPU, is gone by the second.
    """
    check_isa(isa)
    return better(_round(isa, seconds / 2), _round(isa, seconds / 2))


def _round(isa: str, seconds: float) -> Peaks:
    threads = int(_native.num_threads())
    l2, l3 = cache_sizes()
    memory_bytes = min(max(MEMORY_TIMES_CACHE * l3, LEAST_MEMORY), MOST_MEMORY)
    cached = cached_bytes(l2, l3, threads)
    return Peaks(
        isa=isa or best_isa(),
        num_threads=threads,
        f32=_native.peak_products("f32", seconds, isa),
        bf16=_native.peak_products("bf16", seconds, isa),
        w4=_native.peak_products("w4", seconds, isa),
        w8=_native.peak_products("w8", seconds, isa),
        memory=_native.peak_read(memory_bytes, seconds, True, isa),
        memory_small_pages=_native.peak_read(memory_bytes, seconds, False, isa),
        cache=_native.peak_read(cached, seconds, True, isa) if cached else None,
        cache_bytes=l3,
    )


def best_isa() -> str:
    """The variant that is chosen where none is asked for."""
    return str(_native.best_isa())


class Products:
    """Copies of a weight, as the kernels hold it, to be multiplied in turn: enough of them are in no cache when their turn comes again."""

    def __init__(self, weight: PackedWeight, copies: int, isa: str = "") -> None:
        self._isa = isa
        self._copies = [native_weight(weight, isa) for _ in range(copies)]

    @property
    def weight_bytes(self) -> int:
        """Of one copy."""
        return int(self._copies[0].nbytes)

    @property
    def all_bytes(self) -> int:
        return self.weight_bytes * len(self._copies)

    def seconds(self, x: NDArray[np.float32], least: float) -> float:
        """Of x [rows, K] with one of them, its quantisation included: the best of three rounds of `least` seconds or more."""
        all_once = _native.time_linear(x, self._copies, 1, self._isa) * len(self._copies)
        repeats = max(1, round(least / all_once))
        return float(min(_native.time_linear(x, self._copies, repeats, self._isa) for _ in range(3)))
