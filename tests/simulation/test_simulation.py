"""The engine room under many seeds. Needs Python only.

200 seeds by default; OCTAVO_SIMULATION_SEEDS=5000 (or `make simulate`) for more. A failure names its seed; `Simulator(seed).run()`
repeats it exactly.
"""

import os

import pytest
from simulator import Simulator, run_seeds

NUM_SEEDS = int(os.environ.get("OCTAVO_SIMULATION_SEEDS", "200"))
NUM_PARTS = max(8, NUM_SEEDS // 50)


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_seeds(part: int) -> None:
    first, last = NUM_SEEDS * part // NUM_PARTS, NUM_SEEDS * (part + 1) // NUM_PARTS
    run_seeds(range(first, last))


def test_all_kinds_of_events_happen() -> None:
    """A simulation that never preempts, forks or crashes would prove nothing about it."""
    happened = run_seeds(range(1000, 1060))
    wanted = {
        "abort",
        "crash",
        "duplicate",
        "draft token",
        "draft token that held",
        "failing",
        "finished",
        "fork",
        "fork behind a window",
        "freed",
        "hit",
        "hit behind a window",
        "mangled",
        "paced",
        "paced drafts",
        "passed",
        "preemption no. 1",
        "preemption no. 2",
        "refused: context_length",
        "refused: overloaded",
        "reset",
        "senseless",
        "step",
        "bomb in end_reason",
        "bomb in hashes_of_full_blocks",
        "bomb in num_prompt_logprobs_before",
        "bomb in take_new_prompt_logprobs",
        "bomb in to_new_request",
    }
    missing = {event for event in wanted if happened[event] < 3}
    assert not missing, happened


def test_same_seed_same_run() -> None:
    traces = []
    for _ in range(2):
        simulator = Simulator(7)
        simulator.run()
        traces.append(simulator.trace)
    assert traces[0] and traces[0] == traces[1]
    other = Simulator(8)
    other.run()
    assert other.trace != traces[0]
