"""What a damaged model is, and how it comes onto a disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from healthy import Files, Folder, Link, Locked, Pipe, Sparse


class Must(Enum):
    """What must happen. REFUSE: one line that names the file. LOAD: nothing else than with the undamaged model. FAIL: it loads, and the request
    ends with one line, because only its numbers tell."""

    REFUSE = "refuse"
    LOAD = "load"
    FAIL = "fail"


@dataclass(frozen=True)
class Case:
    """A model of the given form with some damage. `start` is what the program is given ("" the folder); `words` must be in the message."""

    name: str
    form: str
    files: Files
    start: str
    must: Must = Must.REFUSE
    words: tuple[str, ...] = ()


def write(folder: Path, files: Files) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Link):
            path.symlink_to(content.target)
        elif isinstance(content, Folder):
            path.mkdir()
        elif isinstance(content, Pipe):
            os.mkfifo(path)
        elif isinstance(content, Sparse):
            path.write_bytes(content.head)
            os.truncate(path, content.size)
        else:
            path.write_bytes(content.data if isinstance(content, Locked) else content)
            if isinstance(content, Locked):
                path.chmod(0)
