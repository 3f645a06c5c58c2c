"""Needs Python only. Puts `played_engine` on the path and makes its fixtures."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from played_engine import Served, Server


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """Call it for a `Served`; options are ServerArgs' fields, `engine={...}` AsyncEngineArgs' and `tokenizer={...}`."""
    maker = Server()
    yield maker
    await maker.close()


@pytest.fixture
async def served(server: Server) -> Served:
    return await server()
