"""Needs Python only. The options page is what config.py says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_options_page_is_current() -> None:
    made = subprocess.run([sys.executable, str(ROOT / "scripts" / "options_page.py")], capture_output=True, text=True, timeout=60, check=True)
    assert made.stdout == (ROOT / "docs" / "options.md").read_text(), "run: make docs"
