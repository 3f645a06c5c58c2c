"""Needs sentencepiece, tiktoken and transformers, the originals that ids are compared with. Puts this folder's modules on the path."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

for package in ("sentencepiece", "tiktoken"):
    pytest.importorskip(package)
