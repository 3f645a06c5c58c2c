"""The most that a machine can do, as figures; and the sizes of its caches. Pure but for the system's own files; measures nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from octavo.ops.packed import WeightKind

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
L2_TIMES = 3  # what is read from L3 must exceed all L2 caches together by so much


@dataclass(frozen=True, slots=True)
class Peaks:
    """Operations per second (a multiply-add is two) and bytes per second of all threads together.

    f32, bf16, w4, w8: of products as a weight of that kind has them at best: in fp32, of bf16 (in fp32 where there is no instruction for it), of
    nibbles and of bytes with bytes. memory: reading huge pages, as weights lie in; memory_small_pages: of the smallest. cache: reading the last
    level, None where there is none that differs from the L2; cache_bytes: its size, 0 where unknown.
    """

    isa: str
    num_threads: int
    f32: float
    bf16: float
    w4: float
    w8: float
    memory: float
    memory_small_pages: float
    cache: float | None
    cache_bytes: int

    def products(self, kind: WeightKind | None) -> float:
        """The limit of a kernel for weights of a kind; None: of one without weights."""
        if kind is WeightKind.BF16:
            return self.bf16
        if kind is WeightKind.W4:
            return self.w4
        return self.w8 if kind in (WeightKind.W8, WeightKind.T4) else self.f32


def better(a: Peaks, b: Peaks) -> Peaks:
    """Of each rate the higher; the rest is of one machine."""
    rates = ("f32", "bf16", "w4", "w8", "memory", "memory_small_pages")
    cache = None if a.cache is None or b.cache is None else max(a.cache, b.cache)
    return replace(a, cache=cache, **{name: max(getattr(a, name), getattr(b, name)) for name in rates})


def cached_bytes(l2: int, l3: int, threads: int) -> int:
    """A size that lies in L3 but not in the threads' L2 caches; 0 if there is none."""
    wanted = L2_TIMES * l2 * threads
    return wanted if 0 < wanted <= l3 // 2 else 0


def cache_sizes(folder: Path = CACHES) -> tuple[int, int]:
    """Bytes of one L2 and of the L3 cache; 0 for what there is not or the system does not tell."""
    sizes = {"2": 0, "3": 0}
    for entry in sorted(folder.glob("index*")):
        try:
            level, size = (entry / "level").read_text().strip(), (entry / "size").read_text().strip()
        except OSError:
            continue
        if level in sizes and size.endswith("K") and size[:-1].isdigit():
            sizes[level] = int(size[:-1]) << 10
    return sizes["2"], sizes["3"]
