"""Needs numpy only. The page of models is what the model files and the cases of their tests say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_models_page_is_current() -> None:
    made = subprocess.run([sys.executable, str(ROOT / "scripts" / "models_page.py")], capture_output=True, text=True, timeout=60, check=True)
    assert made.stdout == (ROOT / "docs" / "models.md").read_text(), "run: make docs"
