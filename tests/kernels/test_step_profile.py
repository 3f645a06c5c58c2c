"""Needs the extension: the page of a step's profile accounts for the whole step, by instruction and by phase."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def scripts() -> tuple[Any, Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import make_random
        import step_profile
    finally:
        sys.path.remove(str(BENCHMARKS))
    return make_random, step_profile


def test_a_phase_has_not_the_time_of_those_within_it(scripts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, profile = scripts
    ticks = iter([0.0, 1.0, 3.0, 3.5, 7.5, 10.0])  # outer from 0 to 10, inner from 1 to 3 and from 3.5 to 7.5
    monkeypatch.setattr(profile.time, "perf_counter", lambda: next(ticks))
    watch = profile.Stopwatch()
    inner = watch.timed(lambda: None, "inner")
    watch.timed(lambda: (inner(), inner()), "outer")()
    assert watch.take() == {"outer": 4.0, "inner": 6.0}
    assert watch.take() == {}


def test_a_step_by_phase(scripts: tuple[Any, Any], tmp_path: Path) -> None:
    make_random, profile = scripts
    make_random.write_model(tmp_path, "tiny", False)
    make_random.write_tokenizer(tmp_path, 1000)
    lines = profile.engine_phases(str(tmp_path), 40, (1, 3), 2).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in cells[2:]] == [*profile.PHASES, "whole step", "outside `forward` and `logits`"]
    for column in (2, 4):
        us = {row[0]: float(row[column].replace(",", "")) for row in cells[2:]}
        assert all(us[phase] > 0 for phase in profile.PHASES)
        assert us["whole step"] == pytest.approx(sum(us[phase] for phase in profile.PHASES), abs=5)
        assert us["outside `forward` and `logits`"] == pytest.approx(us["whole step"] - us["forward"] - us["logits"], abs=5)
