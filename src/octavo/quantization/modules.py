"""Fields that quantisation configurations share: lists of modules by name and pattern, group sizes, and what must be empty.

The tensors say how a module is stored; the lists are checked against them. Patterns come from a file, so that only those that cannot take long
to match are understood: literals, `.`, `.*` and the two ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from octavo.config import HFConfig
from octavo.errors import ConfigError
from octavo.gguf_file import shown
from octavo.quantization import StoredTensor

PATTERN = "re:"
SIMPLE = re.compile(r"\^?(?:[\w.\-]|\\\.|\.\*)*\$?")
MOST_PATTERN = 200
MOST_STARS = 4


def refuse_set(config: HFConfig, *keys: str) -> None:
    """ConfigError for a field that would change arithmetic and is not supported, unless it is empty or false."""
    for key in keys:
        if config.raw.get(key):
            raise ConfigError(f"{config.source}: {key} = {shown(str(config.raw[key]))}: not supported")


def group_size(config: HFConfig) -> int:
    """-1 (a channel is one group) or a positive multiple of 32."""
    size = config.read("group_size", int)
    if size != -1 and (size <= 0 or size % 32):
        raise ConfigError(f"{config.source}: group_size = {size}: must be -1 or a multiple of 32")
    return size


def is_simple(pattern: str) -> bool:
    return len(pattern) <= MOST_PATTERN and pattern.count("*") <= MOST_STARS and SIMPLE.fullmatch(pattern) is not None


def matches(entry: str, name: str) -> bool:
    """Whether an entry of a list means the module: its name, a part of it between dots, or a pattern from its beginning."""
    if entry.startswith(PATTERN):
        pattern = entry[len(PATTERN) :]
        return is_simple(pattern) and re.match(pattern, name) is not None
    return f".{entry}." in f".{name}."


def refuse_listed(tensor: StoredTensor, name: str, entries: Iterable[object]) -> None:
    """ModelFileError if a quantised tensor belongs to a module that the configuration says is not."""
    for entry in entries:
        if isinstance(entry, str) and matches(entry, name):
            raise tensor.error(f"is quantised, though the configuration leaves out {shown(entry)}")
