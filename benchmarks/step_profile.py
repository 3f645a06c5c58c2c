"""Where a step's time goes: each instruction beside this machine's limits, and what the engine's Python takes around them. Prints Markdown.

First the model's program alone: a decode step of one sequence, of 32, and a chunk of 512 tokens of a prompt whose last row is sampled. Then the whole
engine room in this process, no sockets: requests of equal length are fed, and once all of them decode, every step is timed by phase. A phase is what
it takes itself, without the phases that it calls; medians over the steps. `bench/kernels` says how limits are counted.

    python benchmarks/step_profile.py [MODEL] [--context 512] [--streams 1 32] [--steps 40] [--seconds 1]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from octavo.bench.costs import Cut, Work
from octavo.bench.kernel_report import step_markdown
from octavo.bench.kernels import StepBench
from octavo.bench.programs import build_program
from octavo.config import EngineArgs
from octavo.host.build import Built, build_engine
from octavo.host.channel import InlineChannel
from octavo.host.loop import Loop
from octavo.loader.resolve import resolve_model
from octavo.ops.cpu.measure import measure_peaks
from octavo.protocol import EngineCoreOutputs, EngineCoreRequest
from octavo.sampling_params import SamplingParams

CHUNK = 512  # tokens of a prompt that a step takes at most
NATIVE = ("forward", "logits")
PHASES = {
    "schedule": "`engine/core`: the plan", "batch": "`runner`: its arrays", "forward": "native: all layers", "logits": "native: picked rows, head",
    "sample": "`sampling`: the draw, and results", "update": "`engine/core`: the books", "loop": "`host/loop`: messages in and out",
}  # fmt: skip


@dataclass
class Stopwatch:
    """Seconds of each phase since `take`, without those of phases within it."""

    spent: dict[str, float] = field(default_factory=dict)
    within: list[float] = field(default_factory=list)  # of each phase that runs, what inner ones have taken

    def put_on(self, owner: Any, method: str, phase: str) -> None:
        """Times a method of this one object from now on."""
        setattr(owner, method, self.timed(getattr(owner, method), phase))

    def timed(self, call: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            self.within.append(0.0)
            began = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                whole = time.perf_counter() - began
                self.spent[phase] = self.spent.get(phase, 0.0) + whole - self.within.pop()
                if self.within:
                    self.within[-1] += whole

        return run

    def take(self) -> dict[str, float]:
        spent, self.spent = self.spent, {}
        return spent


def watched(built: Built, channel: InlineChannel) -> tuple[Stopwatch, Callable[[], None]]:
    """A stopwatch on all phases of the engine, and a function that runs one step."""
    watch, loop = Stopwatch(), Loop(built.core, built.runner, channel)
    for owner, method, phase in (
        (built.core, "schedule", "schedule"), (built.core, "update", "update"), (built.runner, "launch", "batch"), (built.runner, "sample", "sample"),
        (built.program, "forward", "forward"), (built.program, "logits", "logits"),
    ):  # fmt: skip
        watch.put_on(owner, method, phase)
    return watch, watch.timed(loop.turn, "loop")


def requests(count: int, num_prompt: int, num_output: int, vocab: int) -> list[EngineCoreRequest]:
    """Greedy ones, with other prompts each, so that no prefix is shared."""
    ids = np.random.default_rng(0).integers(0, vocab, (count, num_prompt)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True, seed=0)
    return [EngineCoreRequest(f"r{count}-{i}", prompt, params, [], [], float(i)) for i, prompt in enumerate(ids)]


def phases(built: Built, streams: int, context: int, steps: int) -> dict[str, float]:
    """Median seconds of each phase over `steps` steps in which all streams decode, each with about `context` tokens."""
    channel = InlineChannel()
    watch, step = watched(built, channel)
    channel.inbox.extend(requests(streams, context - steps, outputs_for(streams, context, steps), built.ready.vocab_size))
    rows: list[dict[str, float]] = []
    while len(rows) < steps:
        step()
        spent, message = watch.take(), channel.outbox.popleft()
        assert isinstance(message, EngineCoreOutputs)
        if any(output.finish_reason is not None for output in message.outputs):
            raise RuntimeError(f"a request ended after {len(rows)} of {steps} steps: {message.outputs}")
        if len(message.outputs) == message.stats.batch_tokens == streams:
            rows.append(spent)
    return {phase: median(row.get(phase, 0.0) for row in rows) for phase in PHASES}


def outputs_for(streams: int, context: int, steps: int) -> int:
    """Tokens that a request needs so as not to end before the last one has been fed and so many steps are measured."""
    return steps + 2 * streams * (context // CHUNK + 1) + 2


def engine_phases(model: str, context: int, streams: Sequence[int], steps: int) -> str:
    columns = {}
    for count in streams:
        longest = context + outputs_for(count, context, steps)
        args = EngineArgs(
            model=model, max_model_len=longest, max_num_batched_tokens=CHUNK, itl_target_ms=0, enable_prefix_caching=False, num_speculative_tokens=0
        )
        columns[count] = phases(build_engine(args, str(resolve_model(model).path)), count, context, steps)
    return phase_table(columns)


def phase_table(columns: dict[int, dict[str, float]]) -> str:
    heads = "".join(f" {streams} decoding: us | of step |" for streams in columns)
    lines = [f"| phase | |{heads}", f"|---|---|{'--:|--:|' * len(columns)}"]
    wholes = {streams: sum(spent.values()) for streams, spent in columns.items()}

    def line(name: str, what: str, phases: Collection[str]) -> str:
        seconds = {streams: sum(spent[phase] for phase in phases) for streams, spent in columns.items()}
        cells = (f" {each * 1e6:,.0f} | {each / wholes[streams]:.1%} |" for streams, each in seconds.items())
        return f"| {name} | {what} |{''.join(cells)}"

    lines += [line(phase, what, (phase,)) for phase, what in PHASES.items()]
    lines.append(line("whole step", "", PHASES))
    lines.append(line("outside `forward` and `logits`", "", PHASES.keys() - NATIVE))
    return "\n".join(lines)


def instructions(model: str, context: int, streams: Sequence[int], seconds: float) -> str:
    program, longest = build_program(EngineArgs(model=model), (*streams, CHUNK), context)
    bench = StepBench(program, measure_peaks(program.isa), seconds)
    works = [*(Work((Cut(1, longest),) * count, count) for count in streams), Work((Cut(CHUNK, CHUNK),), 1)]
    return "\n\n".join(step_markdown(bench.measure(work)) for work in works)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=512, help="tokens of each sequence that decodes")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--steps", type=int, default=40, help="decode steps by phase")
    parser.add_argument("--seconds", type=float, default=1.0, help="aim for each measurement of instructions")
    args = parser.parse_args()
    print(instructions(args.model, args.context, args.streams, args.seconds), flush=True)
    print(f"\n{engine_phases(args.model, args.context, args.streams, args.steps)}")


if __name__ == "__main__":
    main()
