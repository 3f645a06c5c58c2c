"""Drafts that are known to hold or not: of the tokens that requests are known to generate, some changed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest


def foretell(monkeypatch: pytest.MonkeyPatch, known: Sequence[tuple[list[int], list[int]]], wrong: float = 0.3) -> None:
    """From now on every engine of this process drafts as much as it may: what these prompts go on with, each token another one with chance `wrong`."""
    rng = random.Random(11)

    class Foretold:
        chance = 0.5

        def __init__(self, token_ids: list[int]) -> None:
            self._token_ids = token_ids

        def follow(self) -> bool:
            return True

        def draft(self, most: int) -> list[int]:
            count = len(self._token_ids)
            whole = next(prompt + output for prompt, output in known if (prompt + output)[:count] == self._token_ids)
            tokens = whole[count : count + most]
            assert len(tokens) == most, "a draft beyond the end"
            return [token if rng.random() >= wrong else (token + 1) % 300 for token in tokens]

    monkeypatch.setattr("octavo.engine.scheduler.PromptLookup", Foretold)
    monkeypatch.setattr("octavo.engine.scheduler.worth", lambda chance, row, token, most: most)
