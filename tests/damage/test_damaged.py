"""Needs the extension. Hundreds of damaged models, through the loader and through the command line.

Each is refused with exit code 2 and one line that names the file, or it is harmless and gives what the undamaged model gives. Never a traceback,
a crash, a hang, or more memory than twice the files and a constant. Two processes load them, so that one that dies names its case.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import Case, Must, write
from generate import all_cases
from quantised import HEALTHY

CASES = all_cases()
NAMES = [case.name for case in CASES]
WORKERS = 2
SPARE_MEMORY = 64 << 20  # what a load takes whatever the file: libraries' first use, KV blocks, arenas
MOST_MESSAGE = 600

Report = dict[str, Any]


def collect(process: subprocess.Popen[str], errors: Path) -> list[Report]:
    """What a worker said. A case that it began and did not end is reported with its last words."""
    assert process.stdout is not None
    lines = [json.loads(line) for line in process.stdout]
    process.wait()
    if lines and "begun" in lines[-1]:
        last = errors.read_text()[-3000:]
        lines.append({"name": lines[-1]["name"], "outcome": "died", "text": f"exit code {process.returncode}: {last}"})
    assert lines or process.returncode == 0, errors.read_text()[-3000:]
    return lines


def run_workers(what: str, roots: pytest.TempPathFactory) -> dict[str, Report]:
    """What happened to each case, by name. A worker that died is followed by one that goes on behind the case."""
    found: dict[str, Report] = {}
    starts: list[int] = list(range(WORKERS))
    while starts:
        running = []
        for first in starts:
            root = roots.mktemp(what)
            errors = root / "stderr"
            command = [sys.executable, str(Path(__file__).with_name("worker.py")), what, str(root), str(first), str(WORKERS)]
            with errors.open("w") as stream:
                running.append((subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stream, text=True), errors))
        starts = []
        for process, errors in running:
            lines = collect(process, errors)
            found |= {line["name"]: line for line in lines if "outcome" in line}
            if lines and lines[-1]["outcome"] == "died":
                starts.append(lines[-2]["begun"] + WORKERS)
    return found


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return run_workers("cases", tmp_path_factory)


def test_there_are_enough_cases() -> None:
    assert len(CASES) > 500
    assert len(set(NAMES)) == len(NAMES)
    assert {case.form for case in CASES} == set(HEALTHY)


def test_the_generator_repeats_itself() -> None:
    again = all_cases()
    assert [(case.name, case.files) for case in again] == [(case.name, case.files) for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_damaged(case: Case, reports: dict[str, Report]) -> None:
    report = reports[case.name]
    assert report["outcome"] in ("refused", "loaded"), report["text"]
    assert report["peak"] < 2 * report["size"] + SPARE_MEMORY
    if case.must is Must.REFUSE:
        refused(case, report)
    elif case.must is Must.LOAD:
        healthy = reports[case.form]
        assert (report["outcome"], report["text"]) == ("loaded", healthy["text"]), report["text"]
        assert (report["code"], report["out"], report["err"]) == (0, healthy["out"], ""), report["err"]
    else:
        assert report["outcome"] == "loaded"
        assert report["code"] in (1, 2)
        assert one_line(report["err"])


def one_line(text: str) -> bool:
    return text.startswith("octavo: error: ") and text.endswith("\n") and text.count("\n") == 1


def refused(case: Case, report: Report) -> None:
    assert report["code"] == 2, report["err"] or report["out"]
    assert report["out"] == ""
    assert one_line(report["err"]), report["err"]
    message = report["err"]
    in_prompt = "token id" in case.words
    for word in ("" if in_prompt or len(case.start) > 255 else report["folder"], *case.words):
        assert word in message
    assert len(message.replace(report["folder"], "")) < MOST_MESSAGE
    if report["outcome"] == "refused":
        assert "\n" not in report["text"]


def test_random_flips(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever bytes change: a clean refusal, or tensors that are the same but for the bytes that were changed."""
    found = run_workers("flips", tmp_path_factory)
    assert len(found) >= 500
    for report in found.values():
        assert report["outcome"] in ("refused", "loaded"), report["text"]
        assert report["peak"] < 2 * report["size"] + SPARE_MEMORY
        if report["outcome"] == "refused":
            assert report["folder"] in report["text"]
            assert "\n" not in report["text"]
        assert report["changed"] <= report["flipped"], report
    outcomes = [report["outcome"] for report in found.values()]
    assert min(outcomes.count("refused"), outcomes.count("loaded")) > 50


SAMPLE = ("gguf: no magic", "gguf: context_length zero", "parts: two have changed places", "index: a shard called '../../x.safetensors'", "tokenizer.json: empty",
          "config.json: num_hidden_layers is as large as can be")  # fmt: skip


def test_the_server_refuses_them_too(tmp_path: Path) -> None:
    """The real command, with an engine process: exit code 2 and one line."""
    samples = [case for case in CASES if case.name in SAMPLE]
    assert len(samples) == len(SAMPLE)
    running = []
    for i, case in enumerate(samples):
        folder = tmp_path / str(i)
        folder.mkdir()
        write(folder, case.files)
        command = [sys.executable, "-m", "octavo.cli", "serve", str(folder / case.start), "--port", "0", "--num-threads", "1"]
        running.append((case, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)))
    for case, process in running:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (2, ""), (case.name, err)
        assert one_line(err), (case.name, err)
