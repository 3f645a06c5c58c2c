"""The kernels' thread pool, one per process."""

from __future__ import annotations

from octavo import _native


def available_cpus() -> int:
    """CPUs of the process's affinity mask, capped by its cgroup's quota."""
    return int(_native.available_cpus())


def set_num_threads(n: int, pin: bool = False) -> None:
    """Replaces the pool by one of n threads; not while a step runs."""
    _native.set_num_threads(n, pin)
