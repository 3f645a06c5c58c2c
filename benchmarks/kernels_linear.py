"""The linear layer's kernels by themselves: kind x shape x rows, in operations and bytes per second and as shares of the machine's limits.

Needs only the extension. The limits are measured on the same machine: memory by `--gbps`, arithmetic by `--gflops` and `--gops`
(defaults: two cores of a Zen 3 server). A multiply-add counts as two operations; bytes are those of the packed weights. Weights are
copied until they exceed the caches, as in a model, whose layers follow each other. Usage: python benchmarks/kernels_linear.py
[--kinds w4 w4g128 w8] [--rows 1 512] [--shapes 576x576]

Kinds: w4 (groups of 32 with minimums), w4s (without, as GPTQ's symmetric), w4g64, w4g128 (zero points, as AWQ's), w4gs64, w4gs128 (without), w8,
w8c (a scale per channel, as SmoothQuant's), f8 (a scale per 128 inputs), bf16, f16, f32.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from octavo import _native

SHAPES = ("960x576", "576x576", "3072x576", "576x1536", "4096x4096", "11008x4096")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
CACHE_BYTES = 96 << 20
# Integer products per kind, as a share of the 4-bit rate: signed 8-bit products need twice the instructions without VNNI.
W8_SHARE = 0.5


def weight(kind: str, n: int, k: int, isa: str) -> Any:
    """A random packed weight, see above."""
    rng = np.random.default_rng(0)
    size = {"w8c": k, "f8": 128}.get(kind, int(kind.lstrip("w4gs") or 32) if kind.startswith("w4") else 32)
    while k % size:  # as an uneven last group is loaded
        size //= 2
    groups = (n, k // size)
    scales = rng.uniform(0.01, 0.02, groups).astype(np.float16)
    if kind.startswith("w4"):
        codes = rng.integers(0, 256, (*groups, size // 2), dtype=np.uint8)
        zeros = np.full_like(scales, 7)
        parts = [(codes, scales, None) if "s" in kind else (codes, scales, -scales) if kind == "w4" else (codes, scales, None, zeros)]
    elif kind.startswith("w8"):
        parts = [(rng.integers(-127, 128, (*groups, size), dtype=np.int8), scales, None)]
    elif kind == "t4":
        parts = [(rng.integers(0, 256, (*groups, size // 2), dtype=np.uint8), scales, None)]
    elif kind == "f8":
        parts = [(rng.integers(0, 127, (*groups, size), dtype=np.uint8), scales.astype(np.float32), None)]
    elif kind == "bf16":
        parts = [((rng.standard_normal((n, k), np.float32).view(np.uint32) >> 16).astype(np.uint16), None, None)]
    else:
        parts = [
            (rng.standard_normal((n, k), np.float32).astype(np.float16 if kind == "f16" else np.float32), None, None)
        ]
    table = rng.integers(-127, 128, 16, np.int8) if kind == "t4" else None
    return _native.pack(kind[:2] if kind[:2] in ("w4", "w8") else kind, n, k, parts, isa, table)


def measure(
    kind: str, n: int, k: int, all_rows: list[int], isa: str, seconds: float
) -> Iterator[tuple[int, float, int]]:
    """(rows, seconds per product, bytes of weights) for each number of rows."""
    first = weight(kind, n, k, isa)
    copies = max(1, min(64, CACHE_BYTES // first.nbytes))
    weights = [first] + [weight(kind, n, k, isa) for _ in range(copies - 1)]
    for rows in all_rows:
        x = np.random.default_rng(1).standard_normal((rows, k), np.float32)
        used = weights if rows <= 16 else weights[:4]
        once = _native.time_linear(x, used[:1], 1, isa)
        repeats = max(1, int(seconds / (once * len(used))))
        yield rows, min(_native.time_linear(x, used, repeats, isa) for _ in range(3)), first.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["w4", "w8", "bf16", "f16", "f32"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="NxK: output channels by inputs")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--isa", default="", help="instruction-set variant; empty: the best")
    parser.add_argument("--threads", type=int, default=0, help="0: all available")
    parser.add_argument("--seconds", type=float, default=0.05, help="aim for each of three measurements")
    parser.add_argument("--gbps", type=float, default=31.0, help="memory bandwidth")
    parser.add_argument("--gflops", type=float, default=199.0, help="peak of fp32 fma")
    parser.add_argument("--gops", type=float, default=573.0, help="peak of 8-bit products (vpmaddubsw + vpaddw)")
    args = parser.parse_args()
    if args.threads:
        _native.set_num_threads(args.threads, False)
    print(f"{'kind':8}{'shape':>12}{'rows':>6}{'us':>10}{'GOP/s':>9}{'of peak':>9}{'GB/s':>8}{'of peak':>9}")
    for kind in args.kinds:
        peak = {"w4": args.gops, "w8": args.gops * W8_SHARE, "t4": args.gops * W8_SHARE}.get(kind[:2], args.gflops)
        for shape in args.shapes:
            n, k = (int(side) for side in shape.split("x"))
            for rows, seconds, nbytes in measure(kind, n, k, args.rows, args.isa, args.seconds):
                gops, gbps = 2e-9 * rows * n * k / seconds, 1e-9 * nbytes / seconds
                print(
                    f"{kind:8}{shape:>12}{rows:6}{seconds * 1e6:10.1f}{gops:9.1f}{gops / peak:9.0%}{gbps:8.1f}{gbps / args.gbps:9.0%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
