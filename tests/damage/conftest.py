"""Needs the extension. Puts the generator of damaged models on the path, and the writers of good files that the loader's tests use."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "unit" / "loader")]
