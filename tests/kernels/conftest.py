"""Needs the extension. Puts the reference and case modules of this folder on the path, and the maker of GGUF blocks."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "unit" / "quantization")]
