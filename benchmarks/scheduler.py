"""What one step of the engine room costs: schedule and update at a batch of 32 decodes.

Over the number of waiting requests and of KV blocks, because neither may matter, and for both reasons to wait: no seat is left, or
the front of the queue does not fit the memory (which is found out anew in every step). Prints a table of microseconds (median of
`--steps` steps) and, with --json FILE, writes the same figures. No runner: a made-up token for each request.

    python benchmarks/scheduler.py [--batch 32] [--steps 300] [--windows 0,512,512] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from time import perf_counter

from octavo.config import CacheConfig, SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.engine.scheduler import MAX_PREEMPTIONS
from octavo.protocol import EngineCoreRequest, ModelRunnerOutput, SampledTokens, SchedulerOutput
from octavo.sampling_params import SamplingParams

WAITING = (10, 1_000, 10_000)
BLOCKS = (1_000, 100_000, 1_000_000)
BLOCK_SIZE = 16
PROMPT_TOKENS = 100
SLACK = 50  # steps until all prompts are computed, and some more


def build(
    batch: int, num_waiting: int, num_blocks: int, steps: int, is_full_of_seats: bool, windows: tuple[int, ...]
) -> EngineCore:
    """An engine with `batch` running requests that will not end, and `num_waiting` more that will not be admitted."""
    limits = SchedulerConfig(
        max_num_seqs=batch if is_full_of_seats else batch + 1,
        max_num_batched_tokens=2048,
        max_model_len=1 << 30,
        max_num_queued_requests=num_waiting,
    )
    cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, windows=windows)
    core = EngineCore(limits, cache)
    runs = SamplingParams(max_tokens=steps + SLACK)
    waits = SamplingParams(max_tokens=cache.longest_sequence(2048, limits.max_model_len) - PROMPT_TOKENS)
    for i in range(batch + num_waiting):
        core.add(request(f"r{i}", i, runs if i < batch else waits), 0.0)
    # A guarded request needs its worst case free, which is the whole pool: it waits until all others have ended.
    core.requests[f"r{batch}"].num_preemptions = MAX_PREEMPTIONS
    return core


def request(request_id: str, number: int, params: SamplingParams) -> EngineCoreRequest:
    """The `number`-th to arrive; no two prompts begin alike."""
    prompt = [(number * 7919 + j) % 50_000 for j in range(PROMPT_TOKENS)]
    return EngineCoreRequest(request_id, prompt, params, [2], [2], float(number))


def answer(plan: SchedulerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput(plan.step, [SampledTokens(s.request_id, [7] if s.samples else []) for s in plan.scheduled])


def measure(core: EngineCore, batch: int, steps: int) -> tuple[float, float]:
    """Median microseconds of schedule and of update, over steps in which all of the batch decode."""
    schedule_us: list[float] = []
    update_us: list[float] = []
    while len(schedule_us) < steps:
        t0 = perf_counter()
        plan = core.schedule(t0)
        t1 = perf_counter()
        assert plan is not None
        result = answer(plan)
        t2 = perf_counter()
        core.update(plan, result, t2, t2 - t1)
        t3 = perf_counter()
        if plan.num_tokens == batch == len(plan.scheduled):
            schedule_us.append((t1 - t0) * 1e6)
            update_us.append((t3 - t2) * 1e6)
    return statistics.median(schedule_us), statistics.median(update_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--windows", default="0", help="of each group of layers, the positions that it sees; of one at least 0, for all")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    windows = tuple(map(int, args.windows.split(",")))
    rows = []
    print(f"{'wait for':>9} {'waiting':>9} {'blocks':>9} {'schedule us':>12} {'update us':>10} {'both us':>9}")
    for is_full_of_seats in (True, False):
        for num_waiting in WAITING:
            for num_blocks in (blocks * len(windows) for blocks in BLOCKS):
                core = build(args.batch, num_waiting, num_blocks, args.steps, is_full_of_seats, windows)
                schedule_us, update_us = measure(core, args.batch, args.steps)
                wait_for = "a seat" if is_full_of_seats else "memory"
                figures = f"{schedule_us:>12.1f} {update_us:>10.1f} {schedule_us + update_us:>9.1f}"
                print(f"{wait_for:>9} {num_waiting:>9} {num_blocks:>9} {figures}", flush=True)
                row = {"wait_for": wait_for, "waiting": num_waiting, "blocks": num_blocks}
                rows.append({**row, "schedule_us": schedule_us, "update_us": update_us})
    if args.json:
        args.json.write_text(json.dumps({"batch": args.batch, "windows": windows, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
