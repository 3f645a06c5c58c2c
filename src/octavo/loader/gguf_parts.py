"""A GGUF model as one, whether it is one file or several: NAME-00001-of-00003.gguf holds the metadata, and each part some of the tensors.

Knows how parts are named and numbered, and no architecture. The parts say how many they are and how many tensors they hold together, and all of
that must hold: a part too few would be a model with layers missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from octavo.errors import ModelFileError
from octavo.gguf_file import GGUFFile, GGUFTensor, Value, shown
from octavo.loader.resolve import part_names


class GGUFModel:
    """Metadata (of the first part) and tensors (of all parts). `path` is the first part's; `skipped` as in GGUFFile."""

    def __init__(self, parts: list[GGUFFile]) -> None:
        self.parts = parts
        self.path = parts[0].path
        self.metadata: Mapping[str, Value] = parts[0].metadata
        self.skipped: Mapping[str, int] = parts[0].skipped
        self.tensors: Mapping[str, GGUFTensor] = MappingProxyType({name: t for part in parts for name, t in part.tensors.items()})
        self._part_of = {name: part for part in parts for name in part.tensors}

    @staticmethod
    def open(path: Path, *, skip: tuple[str, ...] = ()) -> GGUFModel:
        """Maps and checks the file at `path` and, if it is the first part of several, those beside it.

        Raises ModelFileError with one line that names the file, and the part that is missing or the key or tensor that is at odds.
        """
        first = GGUFFile.open(path, skip=skip)
        count = number(first, "split.count", 1)
        if count <= 1:
            return GGUFModel([first])
        if number(first, "split.no", 0) != 0:
            raise error(first, "split.no", f"{first.metadata['split.no']}: not the first part; give that one")
        parts = [first, *(open_part(first, name, i, count) for i, name in enumerate(names_of_parts(first, count)) if i)]
        check_tensors(parts)
        return GGUFModel(parts)

    def file_of(self, name: str) -> Path:
        return self._part_of[name].path

    def data(self, name: str) -> memoryview:
        """A tensor's bytes, read-only, without a copy."""
        return self._part_of[name].data(self.tensors[name])

    def read_ahead(self) -> None:
        for part in self.parts:
            part.read_ahead()


def names_of_parts(first: GGUFFile, count: int) -> list[str]:
    names = part_names(first.path.name)
    if len(names) != count or first.path.name != names[0]:
        raise error(first, "split.count", f"{count}: the file's name must end in -00001-of-{count:05}.gguf for the other parts to be found")
    return names


def open_part(first: GGUFFile, name: str, index: int, count: int) -> GGUFFile:
    path = first.path.with_name(name)
    if not path.exists():
        raise ModelFileError(f"{path}: is missing: part {index + 1} of {count} of the model")
    part = GGUFFile.open(path)
    for key, expected in (("split.no", index), ("split.count", count)):
        if (found := number(part, key, -1)) != expected:
            raise error(part, key, f"{found}, but {expected} was expected from its name" if found >= 0 else "is missing")
    return part


def check_tensors(parts: list[GGUFFile]) -> None:
    """Each tensor must be in one part, and there must be as many as each part says that there are in all."""
    home: dict[str, GGUFFile] = {}
    for part in parts:
        for name in part.tensors:
            if name in home:
                raise ModelFileError(f"{part.path}: tensor {shown(name)}: is in {home[name].path.name} too")
            home[name] = part
    for part in parts:
        if (claimed := number(part, "split.tensors.count", len(home))) != len(home):
            raise error(part, "split.tensors.count", f"{claimed}, but the parts hold {len(home)} tensors")


def number(file: GGUFFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise error(file, key, f"must be int, not {type(value).__name__}")
    return value


def error(file: GGUFFile, key: str, text: str) -> ModelFileError:
    return ModelFileError(f"{file.path}: key {key!r}: {text}")
