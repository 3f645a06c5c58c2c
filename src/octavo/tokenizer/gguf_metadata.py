"""Typed reads of a GGUF file's metadata, which is untrusted. Knows no key's meaning."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelFileError


class Metadata:
    """Typed reads of untrusted metadata."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self.metadata = metadata
        self.source = source

    def error(self, key: str, why: str) -> ModelFileError:
        return ModelFileError(f"{self.source}: {key}: {why}")

    def text(self, key: str, default: str) -> str:
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "must be a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "must be a boolean")
        return value

    def numbers(self, key: str, count: int) -> list[Any]:
        """`count` numbers; of a longer array only the first are meant."""
        value = self.metadata.get(key)
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, (array, list)) or set(map(type, value)) - {int, float}:
            raise self.error(key, "must be a list of numbers")
        if len(value) < count:
            raise self.error(key, f"{len(value)} numbers for {count} tokens")
        return list(value)[:count]

    def strings(self, key: str) -> list[str]:
        value = self.metadata.get(key)
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, list) or set(map(type, value)) - {str}:
            raise self.error(key, "must be a list of strings")
        return value

    def token_id(self, key: str, vocab_size: int) -> int | None:
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
            raise self.error(key, f"{value!r} must be a token id in 0..{vocab_size - 1}")
        return value
