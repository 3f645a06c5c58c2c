"""Needs Python only. Puts the simulation's own modules on the path: they are also used by scripts/simulate.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
