"""Needs the extension. A model that cannot be served ends `octavo` with one line that says what was found and what there is, and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

LLAMA = dict(
    model_type="llama", hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=8, max_position_embeddings=64
)
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "architecture": (
        dict(model_type="nonesuch", architectures=["NoneSuchForCausalLM"], auto_map={"AutoModelForCausalLM": "modeling_nonesuch.NoneSuchForCausalLM"}),
        ("model_type = 'nonesuch', architectures = NoneSuchForCausalLM", "no code of a checkpoint is ever run", "supported are", "llama", "qwen2"),
    ),
    "rope": (dict(rope_scaling=dict(rope_type="mrope")), ("rope_scaling: rope_type = 'mrope': supported are default, linear",)),
    "activation": (dict(hidden_act="relu2"), ("hidden_act = 'relu2': supported are silu",)),
}
COMMANDS = {
    "generate": ["generate", "w1 w2", "--model", "{}"],
    "serve": ["serve", "{}", "--port", "0"],
    "serve, trusting": ["serve", "{}", "--port", "0", "--trust-remote-code"],
}


@pytest.mark.parametrize(("what", "command"), [*((what, "generate") for what in REFUSED), ("rope", "serve"), ("architecture", "serve, trusting")])
def test_one_line(tmp_path: Path, what: str, command: str) -> None:
    change, words = REFUSED[what]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "modeling_nonesuch.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(8)}, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    arguments = [word.format(tmp_path) for word in COMMANDS[command]]
    run = subprocess.run([sys.executable, "-m", "octavo.cli", *arguments], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert run.returncode == 2
    assert run.stdout == ""
    (line,) = run.stderr.splitlines()
    assert str(tmp_path / "config.json") in line
    for word in words:
        assert word in line
    assert not (tmp_path / "ran").exists()
