"""Calibration texts: from a file to token ids. Knows forms of files and no model.

A file is ShareGPT's JSON (also one that is cut off), JSON lines, or plain text. An entry may be a text, or an object with `conversations`,
`messages`, `text`, `prompt`, `question` or `instruction`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.json_file import whole_values

LEAST_TOKENS = 8  # a text of fewer says little of a model's activations
MOST_BYTES = 4 << 30
CHARS_PER_TOKEN = 12  # more than any text has: what is beyond is cut off before it is encoded
LISTS = ("conversations", "messages")
TEXTS = ("text", "prompt", "question", "instruction", "value", "content")


def read_texts(path: Path) -> list[str]:
    """All texts of a file, in its order. Raises ConfigError if it cannot be read or has none."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"calibration = {str(path)!r}: has more than {MOST_BYTES >> 30} GiB")
        content = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"calibration = {str(path)!r}: {getattr(error, 'strerror', None) or error}") from None
    begin = content.lstrip()[:1]
    if begin == "[":
        texts = [text_of(entry) for entry in whole_values(content, content.index("[") + 1)]
    elif begin == "{":
        texts = [text_of(entry) for entry in whole_values(content, 0)]
    else:
        texts = re.split(r"\n\s*\n", content)
    texts = [text.strip() for text in texts if text.strip()]
    if not texts:
        raise ConfigError(f"calibration = {str(path)!r}: has no texts: neither ShareGPT's JSON, JSON lines nor plain text")
    return texts


def text_of(entry: Any) -> str:
    """The text of an entry: a conversation's messages one after the other."""
    if isinstance(entry, str):
        return entry
    if not isinstance(entry, dict):
        return ""
    for key in LISTS:
        if isinstance(entry.get(key), list):
            return "\n\n".join(text for text in map(text_of, entry[key]) if text)
    return next((entry[key] for key in TEXTS if isinstance(entry.get(key), str)), "")


def sequences(texts: list[str], encode: Callable[[str], list[int]], samples: int, length: int) -> list[list[int]]:
    """Token ids of at most `samples` texts, evenly picked, each cut to `length` tokens. Short texts are joined with those that follow.

    Raises ConfigError if there are too few tokens.
    """
    found: list[list[int]] = []
    step = max(1, len(texts) // samples)
    for start in range(0, len(texts), step):
        text = ""
        for piece in texts[start : start + step]:
            text = f"{text}\n\n{piece}" if text else piece
            if len(text) >= CHARS_PER_TOKEN * length:
                break
        ids = encode(text[: CHARS_PER_TOKEN * length])[:length]
        if len(ids) >= LEAST_TOKENS:
            found.append(ids)
        if len(found) == samples:
            break
    if not found:
        raise ConfigError(f"calibration: none of the {len(texts)} texts has {LEAST_TOKENS} tokens")
    return found
