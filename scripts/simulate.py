"""Run the simulation of the engine room under many seeds, on all CPUs; stop at the first seed that fails."""

import argparse
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "simulation"))
from simulator import run_seeds

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("seeds", type=int, nargs="?", default=5000)
parser.add_argument("--first", type=int, default=0, help="the first seed")
args = parser.parse_args()

last = args.first + args.seeds
happened: Counter[str] = Counter()
with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
    for part in pool.map(run_seeds, [range(seed, min(seed + 50, last)) for seed in range(args.first, last, 50)]):
        happened += part
print(f"seeds {args.first}..{last - 1}: no violation")
for event, count in sorted(happened.items()):
    print(f"{count:>12,} {event}")
