"""The linear layer's kernels by themselves: kind x shape x rows, in operations and bytes per second and as shares of the machine's limits.

Needs only the extension. The limits are measured on the same machine: memory by `--gbps`, arithmetic by `--gflops` and `--gops`
(defaults: two cores of a Zen 3 server). A multiply-add counts as two operations; bytes are those of the packed weights. Weights are
copied until they exceed the caches, as in a model, whose layers follow each other. Usage: python benchmarks/kernels_linear.py
[--kinds w4 w8] [--rows 1 512] [--shapes 576x576]
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
    """A random packed weight; w4 with minimums (GGUF's Q4_1), w8 without (Q8_0)."""
    rng = np.random.default_rng(0)
    groups = (n, k // 32)
    scales = rng.uniform(0.01, 0.02, groups).astype(np.float16)
    if kind == "w4":
        parts = [(rng.integers(0, 256, (*groups, 16), dtype=np.uint8), scales, -scales)]
    elif kind == "w8":
        parts = [(rng.integers(-127, 128, (*groups, 32), dtype=np.int8), scales, None)]
    elif kind == "bf16":
        parts = [((rng.standard_normal((n, k), np.float32).view(np.uint32) >> 16).astype(np.uint16), None, None)]
    else:
        parts = [
            (rng.standard_normal((n, k), np.float32).astype(np.float16 if kind == "f16" else np.float32), None, None)
        ]
    return _native.pack(kind, n, k, parts, isa)


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
    print(f"{'kind':5}{'shape':>12}{'rows':>6}{'us':>10}{'GOP/s':>9}{'of peak':>9}{'GB/s':>8}{'of peak':>9}")
    for kind in args.kinds:
        peak = {"w4": args.gops, "w8": args.gops * W8_SHARE}.get(kind, args.gflops)
        for shape in args.shapes:
            n, k = (int(side) for side in shape.split("x"))
            for rows, seconds, nbytes in measure(kind, n, k, args.rows, args.isa, args.seconds):
                gops, gbps = 2e-9 * rows * n * k / seconds, 1e-9 * nbytes / seconds
                print(
                    f"{kind:5}{shape:>12}{rows:6}{seconds * 1e6:10.1f}{gops:9.1f}{gops / peak:9.0%}{gbps:8.1f}{gbps / args.gbps:9.0%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
