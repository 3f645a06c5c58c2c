"""SentencePiece's normaliser: replacements by a compiled table, runs of spaces, the dummy prefix, the mark for a space.

For models whose rules the `tokenizers` package cannot express or applies otherwise (it looks at grapheme clusters where SentencePiece takes
the longest match). Runs in Python, about a microsecond for each character; models of the Llama kind need none of it. Knows no vocabulary.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import Any

from tokenizers import Regex

from octavo.errors import ModelFileError
from octavo.tokenizer.decoding import MARK
from octavo.tokenizer.sentencepiece_file import NormalizerSpec

_ALL = Regex(r"[\s\S]+")


class CharsMap:
    """The compiled table: the longest beginning of a text that is replaced, and by what.

    The file's layout is a length, a double-array trie of 32-bit units over the bytes of the keys, and the replacements, each ended by a
    zero byte. Every step of a walk is checked against the array.
    """

    def __init__(self, blob: bytes, source: str) -> None:
        size = int.from_bytes(blob[:4], "little") if len(blob) >= 4 else -1
        if size < 4 or size % 4 or size > len(blob) - 4:
            raise ModelFileError(f"{source}: precompiled_charsmap: a trie of {size} bytes in {len(blob)}")
        self._units = array("I", blob[4 : 4 + size])
        if self._units.itemsize != 4:
            raise ModelFileError(f"{source}: precompiled_charsmap: this machine has no 32-bit array")
        self._texts = blob[4 + size :]
        self._root = _offset(self._units[0])
        self._first: dict[str, tuple[int, str | None]] = {}

    def longest(self, text: str, at: int) -> tuple[int, str] | None:
        """Where the longest key that begins at `at` ends, and its replacement; None if no key begins there."""
        node, found = self._step_first(text[at])
        best = (at + 1, found) if found is not None else None
        at += 1
        while node >= 0 and at < len(text):
            node, found = self._step(node, text[at])
            at += 1
            if found is not None:
                best = (at, found)
        return best

    def _step_first(self, char: str) -> tuple[int, str | None]:
        known = self._first.get(char)
        if known is None:
            known = self._first[char] = self._step(self._root, char)
        return known

    def _step(self, node: int, char: str) -> tuple[int, str | None]:
        """The node behind a character, -1 if there is none, and the replacement of what was walked so far."""
        units = self._units
        value: int | None = None
        for byte in char.encode():
            node ^= byte
            if node >= len(units):
                return -1, None
            unit = units[node]
            if unit & 0x800000FF != byte:
                return -1, None
            node ^= _offset(unit)
            value = units[node] & 0x7FFFFFFF if unit >> 8 & 1 and node < len(units) else None
        return node, None if value is None else self._text(value)

    def _text(self, start: int) -> str | None:
        end = self._texts.find(b"\0", start)
        try:
            return self._texts[start:end].decode() if end >= 0 else None
        except UnicodeDecodeError:
            return None


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & 0x200) >> 6)


class SpmNormalizer:
    """What the package calls for each stretch of text between special tokens.

    `user_defined` pieces pass as they are. While `active` is false only spaces become marks: user-defined pieces are themselves given
    to the normaliser when they are registered, and must not get a prefix.
    """

    def __init__(self, spec: NormalizerSpec, user_defined: Sequence[str], source: str) -> None:
        self.active = False
        self._spec = spec
        self._space = MARK if spec.escape_whitespaces else " "
        self._map = CharsMap(spec.charsmap, source) if spec.charsmap else None
        longest_first = sorted(user_defined, key=len, reverse=True)
        self._whole = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if user_defined else None

    def normalize(self, text: Any) -> None:
        """Changes a `tokenizers.NormalizedString` in place."""
        before = str(text.normalized)
        after = self.apply(before) if self.active else before.replace(" ", self._space)
        if after != before:
            text.replace(_ALL, after)

    def apply(self, text: str) -> str:
        """The normalised text."""
        spec = self._spec
        result = text if self._map is None and not spec.remove_extra_whitespaces else self._changed(text)
        if not result:
            return ""
        result = result.replace(" ", self._space)
        if spec.add_dummy_prefix:
            result = self._space + result
        return result.rstrip(self._space) if spec.remove_extra_whitespaces else result

    def _changed(self, text: str) -> str:
        parts = self._replaced(text)
        return _without_extra_spaces(parts) if self._spec.remove_extra_whitespaces else "".join(parts)

    def _replaced(self, text: str) -> list[str]:
        """The replacements in order; a user-defined piece or a character without a rule stands for itself."""
        if self._whole is None:
            return self._by_map(text)
        parts: list[str] = []
        for i, part in enumerate(self._whole.split(text)):
            parts += [part] if i % 2 else self._by_map(part)
        return parts

    def _by_map(self, text: str) -> list[str]:
        if self._map is None:
            return list(text)
        longest = self._map.longest
        parts, at = [], 0
        while at < len(text):
            found = longest(text, at)
            if found is None:
                parts.append(text[at])
                at += 1
            else:
                at, part = found
                parts.append(part)
        return parts


def _without_extra_spaces(parts: list[str]) -> str:
    """The parts joined, with no spaces at the front and never two in a row across parts."""
    kept: list[str] = []
    after_space = True
    for part in parts:
        rest = part.lstrip(" ") if after_space else part
        if rest:
            kept.append(rest)
            after_space = rest[-1] == " "
    return "".join(kept)
