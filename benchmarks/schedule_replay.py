"""Replays a workload against the real scheduler in modelled time: what a setting does to throughput, TTFT and ITL.

usage: schedule_replay.py WORKLOAD.json [--level c32r1] [--concurrency 32] [--itl-target-ms default 0 80] [--budget 512] [--step "3.2 0.9 1.0 0.64 0.58"]

A closed loop: so many clients each send their next request when one has ended. No runner: a step takes what `--step` says, in ms: the
coefficients of engine/step_time.py for the machine that is asked about, of which the scheduler knows only what it learns on the way. With --noise a
step takes up to that share more or less, and one of a hundred five times as long. Figures of another machine need its coefficients and nothing
else; a run takes a second. The workload is as `octavo bench serve --dataset file` reads it, with `n_prompt` beside `n_out`.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass, field
from pathlib import Path

from octavo.config import CacheConfig, SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.engine.step_time import StepShape, StepTimeModel
from octavo.protocol import EngineCoreRequest, ModelRunnerOutput, SampledTokens, SchedulerOutput
from octavo.sampling_params import SamplingParams

TURN_SECONDS = 0.0005  # between steps: update, messages


@dataclass
class Client:
    """What a request's client saw."""

    sent: float
    times: list[float] = field(default_factory=list)  # of tokens


def percentile(values: list[float], percent: float) -> float:
    values = sorted(values)
    return values[min(len(values) - 1, round(percent / 100 * (len(values) - 1)))]


def shape_of(plan: SchedulerOutput) -> StepShape:
    shape = StepShape(0, 0, 0, 0)
    for s in plan.scheduled:
        is_decode = s.samples and len(s.token_ids) == 1
        shape = shape.with_decode(s.num_computed_tokens) if is_decode else shape.with_prompt(len(s.token_ids), s.num_computed_tokens)
    return shape


class Replay:
    def __init__(self, lengths: list[tuple[int, int]], target_ms: float | None, budget: int, step_ms: list[float], noise: float) -> None:
        limits = SchedulerConfig(
            max_num_seqs=256, max_num_batched_tokens=budget, max_model_len=8192, max_num_queued_requests=10_000, itl_target_ms=target_ms
        )
        self.core = EngineCore(limits, CacheConfig(block_size=16, num_blocks=8192))
        self.truth = StepTimeModel()
        self.truth.coefficients = [ms / 1e3 for ms in step_ms]
        self.lengths = list(enumerate(lengths))[::-1]
        self.clients: dict[str, Client] = {}
        self.now = 0.0
        self.noise = noise
        self.rng = random.Random(1)
        self.steps: list[tuple[StepShape, float, float]] = []  # shape, seconds, predicted

    def send(self) -> None:
        if not self.lengths:
            return
        i, (num_prompt, num_output) = self.lengths.pop()
        prompt = [(i * 7919 + j) % 50_000 for j in range(num_prompt)]
        params = SamplingParams(max_tokens=num_output, ignore_eos=True, seed=0)
        self.clients[str(i)] = Client(self.now)
        self.core.add(EngineCoreRequest(str(i), prompt, params, [], [], self.now), self.now)

    def run(self, concurrency: int) -> None:
        for _ in range(concurrency):
            self.send()
        while self.core.has_work():
            plan = self.core.schedule(self.now)
            assert plan is not None
            shape = shape_of(plan)
            seconds = self.truth.predict(shape)
            if self.noise:
                seconds *= self.rng.uniform(1 - self.noise, 1 + self.noise) * (5 if self.rng.random() < 0.01 else 1)
            self.steps.append((shape, seconds, self.core.scheduler.pace.model.predict(shape)))
            self.now += seconds
            result = ModelRunnerOutput(plan.step, [SampledTokens(s.request_id, [7] if s.samples else []) for s in plan.scheduled])
            outputs = self.core.update(plan, result, self.now, seconds)
            self.now += TURN_SECONDS
            for output in outputs.outputs:
                self.clients[output.request_id].times.append(self.now)
                if output.finish_reason is not None:
                    self.send()

    def figures(self) -> dict[str, float]:
        clients = self.clients.values()
        first = [c.times[0] - c.sent for c in clients]
        gaps = [b - a for c in clients for a, b in zip(c.times, c.times[1:], strict=False)]
        return {
            "tok/s": sum(len(c.times) for c in clients) / self.now,
            "TTFT mean": 1e3 * sum(first) / len(first),
            "p50": 1e3 * percentile(first, 50),
            "p99": 1e3 * percentile(first, 99),
            "max": 1e3 * max(first),
            "ITL p50": 1e3 * percentile(gaps, 50),
            "p99 ": 1e3 * percentile(gaps, 99),
            "max ": 1e3 * max(gaps),
            "p99/p50": percentile(gaps, 99) / percentile(gaps, 50),
            "steps": len(self.steps),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path)
    parser.add_argument("--level", nargs="+", default=["c32r1"])
    parser.add_argument("--concurrency", type=int, help="default: the number in the level's name")
    parser.add_argument("--itl-target-ms", nargs="+", default=["0", "default"])
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--step", default="3.2 0.9 1.0 0.64 0.58")
    parser.add_argument("--noise", type=float, default=0.0)
    args = parser.parse_args()

    names: list[str] = []
    for level in args.level:
        lengths = [(r["n_prompt"], r["n_out"]) for r in json.loads(args.workload.read_text())[level]]
        concurrency = args.concurrency or int(level.split("r")[0][1:])
        for target in args.itl_target_ms:
            replay = Replay(lengths, None if target == "default" else float(target), args.budget, list(map(float, args.step.split())), args.noise)
            replay.run(concurrency)
            figures = replay.figures()
            if not names:
                names = list(figures)
                print(f"{'level':>8} {'target ms':>9} " + " ".join(f"{name.strip():>9}" for name in names))
            print(f"{level:>8} {target:>9} " + " ".join(f"{value:>9.1f}" for value in figures.values()), flush=True)


if __name__ == "__main__":
    main()
