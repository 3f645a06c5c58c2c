"""JSON files of a model, which are untrusted input: bounded in size, strict where two readers could see two different files.

Part of the base, because the loader and the tokenizer read such files. Knows no key. NaN and Infinity are let through, since some writers put
them under keys that nobody reads; whoever reads a number checks it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.errors import ModelFileError
from octavo.gguf_file import map_file, shown

MOST_JSON_BYTES = 4 << 20
GAP = re.compile(r"[\s,]*")


def read_json(path: Path, most_bytes: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelFileError naming the file and what is wrong, also if there is none."""
    with map_file(path) as buffer:
        if len(buffer) > most_bytes:
            raise ModelFileError(f"{path}: has {len(buffer)} bytes, more than {most_bytes}")
        return parse_json(buffer[:], str(path))


def read_optional_json(path: Path, most_bytes: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """As above, and empty if there is no such file; a link that leads nowhere is one that should be there."""
    return read_json(path, most_bytes) if os.path.lexists(path) else {}


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """The object that `text` holds; `where` begins the message."""
    try:
        value = json.loads(text.decode(), object_pairs_hook=no_repeats)
    except UnicodeDecodeError:
        raise ModelFileError(f"{where}: is not UTF-8 text") from None
    except RecursionError:
        raise ModelFileError(f"{where}: is nested too deeply") from None
    except ValueError as e:
        raise ModelFileError(f"{where}: is not valid JSON: {str(e)[:200]}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{where}: must hold an object, not {type(value).__name__}")
    return value


def whole_values(text: str, at: int) -> Iterator[Any]:
    """The JSON values from a place on, white-space and commas between them, until one is not whole: of a list that was cut off, what is there."""
    decoder = json.JSONDecoder()
    while True:
        gap = GAP.match(text, at)
        try:
            value, at = decoder.raw_decode(text, gap.end() if gap else at)
        except (ValueError, RecursionError):
            return
        yield value


def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A repeated key means that two readers may see two different files."""
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {shown(key)} appears twice")
            seen.add(key)
    return value
