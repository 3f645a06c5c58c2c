"""What one step of the engine room costs: schedule and update at a batch of 32 decodes.

Over the number of waiting requests and of KV blocks, because neither may matter. Prints a table of microseconds (median of
`--steps` steps) and, with --json FILE, writes the same figures. No runner: a made-up token for each request.

    python benchmarks/scheduler.py [--batch 32] [--steps 300] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from time import perf_counter

from octavo.config import CacheConfig, SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.protocol import EngineCoreRequest, ModelRunnerOutput, SampledToken, SchedulerOutput
from octavo.sampling_params import SamplingParams

WAITING = (10, 1_000, 10_000)
BLOCKS = (1_000, 100_000, 1_000_000)
PROMPT_TOKENS = 100
SLACK = 50  # steps until all prompts are computed, and some more


def build(batch: int, num_waiting: int, num_blocks: int, steps: int) -> EngineCore:
    """An engine with `batch` running requests that will not end, and `num_waiting` more for which no seat is left."""
    core = EngineCore(
        SchedulerConfig(
            max_num_seqs=batch,
            max_num_batched_tokens=2048,
            max_model_len=1 << 20,
            max_num_queued_requests=num_waiting,
        ),
        CacheConfig(block_size=16, num_blocks=num_blocks),
    )
    params = SamplingParams(max_tokens=steps + SLACK)
    for i in range(batch + num_waiting):
        prompt = [(i * 7919 + j) % 50_000 for j in range(PROMPT_TOKENS)]
        core.add(EngineCoreRequest(f"r{i}", prompt, params, [2], [2], float(i)), 0.0)
    return core


def answer(plan: SchedulerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput(plan.step, [SampledToken(s.request_id, 7 if s.samples else None) for s in plan.scheduled])


def measure(core: EngineCore, batch: int, steps: int) -> tuple[float, float]:
    """Median microseconds of schedule and of update, over steps in which all of the batch decode."""
    schedule_us, update_us = [], []
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
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    rows = []
    print(f"{'waiting':>9} {'blocks':>9} {'schedule us':>12} {'update us':>10} {'both us':>9}")
    for num_waiting in WAITING:
        for num_blocks in BLOCKS:
            core = build(args.batch, num_waiting, num_blocks, args.steps)
            schedule_us, update_us = measure(core, args.batch, args.steps)
            both_us = schedule_us + update_us
            print(
                f"{num_waiting:>9} {num_blocks:>9} {schedule_us:>12.1f} {update_us:>10.1f} {both_us:>9.1f}", flush=True
            )
            rows.append(
                {"waiting": num_waiting, "blocks": num_blocks, "schedule_us": schedule_us, "update_us": update_us}
            )
    if args.json:
        args.json.write_text(json.dumps({"batch": args.batch, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
