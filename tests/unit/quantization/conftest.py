"""Needs Python only. Puts the writers of quantised tensors on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
