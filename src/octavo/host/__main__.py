"""Entry point of the engine process: `python -m octavo.host FD PARENT_PID`. See `octavo.host.process`."""

from __future__ import annotations

import sys

from octavo.host.build import build_engine
from octavo.host.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], build_engine))
