"""`octavo quantize` from the outside: what it prints, where, and its exit codes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "compress"))
from plain_models import write_model, write_texts

from octavo.cli.__main__ import run


def test_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One line on stdout; the bar of layers on stderr."""
    model, texts = write_model(tmp_path / "m", "llama"), write_texts(tmp_path / "t.jsonl")
    assert run(["quantize", str(model), "--scheme", "w4", "-o", str(tmp_path / "q"), "--calibration", str(texts)]) == 0
    out, err = capfd.readouterr()
    assert re.fullmatch(rf"{re.escape(str(tmp_path / 'q'))}: gptq, gptq, 21 matrices in groups of 32; 0\.\d MB of 0\.\d MB\n", out)
    assert "w4 gptq: 100%" in err
    assert "3/3" in err
    assert json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["bits"] == 4


def test_a_run_that_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between layers: exit code 130, and the same command ends the work."""
    from octavo.compress import block

    model, compress, calls = write_model(tmp_path / "m", "llama"), block.BlockCompressor.compress, []

    def interrupted(self, *args):  # type: ignore[no-untyped-def]
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return compress(self, *args)

    monkeypatch.setattr(block.BlockCompressor, "compress", interrupted)
    command = ["quantize", str(model), "-o", str(tmp_path / "q")]
    assert run(command) == 130
    assert not (tmp_path / "q").exists()
    assert run(command) == 0
    assert len(calls) == 4
    assert (tmp_path / "q" / "model.safetensors").exists()
    capfd.readouterr()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--scheme", "w3"], "scheme = 'w3': must be one of"),
        (["--method", "gptq"], "needs texts; give --calibration FILE"),
        (["--method", "magic"], "method = 'magic': scheme w4 has rtn, gptq, awq"),
        (["--calibration", "none.json"], "calibration = 'none.json': No such file"),
        (["--group-size", "33"], "group_size = 33"),
        (["-o", ""], "output = ''"),
        (["-o", "there"], "is there already"),
        (["--revision", "main"], "only a hub id has revisions"),
    ],
)
def test_mistakes(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, change: list[str], words: str) -> None:
    """Exit code 2 and one line that says what was wrong; nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path / "m", "llama")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x").write_text("x")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert run(["quantize", str(model), "-o", "q", *change]) == 2
    out, err = capfd.readouterr()
    assert not out
    assert words in err
    assert err.startswith("octavo: error: ")
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("model", ["no/such/thing/at/all", "smol.gguf", "empty"])
def test_models_that_are_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert run(["quantize", model, "-o", "q"]) == 2
    assert f"model = '{model}'" in capfd.readouterr().err
    assert not (tmp_path / "q").exists()
