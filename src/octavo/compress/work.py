"""The folder in which a run keeps what is finished, so that an interrupted one goes on where it was. Knows no model.

OUT.partial/ holds state.json (what the run was asked for, how many layers are done), a file of tensors for each finished layer, and what goes into
the next one. `final/` in it becomes OUT by one rename.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.compress.stored import write_atomically, write_json, write_tensors
from octavo.errors import ConfigError
from octavo.json_file import read_json
from octavo.loader.safetensors import SafetensorsFile
from octavo.quantization import StoredTensor

F32 = NDArray[np.float32]
STATE = "state.json"


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """A full or read-only disk is the user's to mend: one line, and what is finished stays."""
    try:
        yield
    except OSError as e:
        where = e.filename or out
        raise ConfigError(f"output = {str(out)!r}: {where}: {e.strerror or e}; finished layers are kept beside it") from None


def check_output(out: Path) -> None:
    """Raises ConfigError unless there is nothing at the path but, at most, an empty folder, and its parent is there.

    What the rename at the end of a long run would fail on is found here.
    """
    try:
        if out.is_dir() and not out.is_symlink() and not out.is_mount() and not any(out.iterdir()):
            return
    except OSError as e:
        raise ConfigError(f"output = {str(out)!r}: {e.strerror}") from None
    if os.path.lexists(out):
        raise ConfigError(f"output = {str(out)!r}: is there already, and nothing is overwritten; give a new folder")
    if not out.parent.is_dir():
        raise ConfigError(f"output = {str(out)!r}: there is no folder {out.parent}")


@dataclass(slots=True)
class Work:
    """One run's folder. asked: what tells this run from others, as JSON; done: finished layers."""

    out: Path
    folder: Path
    asked: dict[str, Any]
    done: int

    @staticmethod
    @contextmanager
    def open(out: Path, asked: dict[str, Any]) -> Iterator[Work]:
        """The folder of a run, begun or taken up again; held against other runs. Raises ConfigError if it belongs to another run."""
        folder = out.with_name(out.name + ".partial")
        with writing(out):
            folder.mkdir(exist_ok=True)
            lock = (folder / "lock").open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(f"output = {str(out)!r}: another run is writing it") from None
            state = read_json(folder / STATE) if (folder / STATE).exists() else None
            if state is None:
                with writing(out):
                    write_json(folder / STATE, {"asked": asked, "done": 0})
            elif state.get("asked") != asked:
                raise ConfigError(
                    f"output = {str(out)!r}: {folder} holds an interrupted run of another model or with other settings; remove it, or give another folder"
                )
            done = 0 if state is None else state.get("done")
            if not isinstance(done, int) or done < 0:
                raise ConfigError(f"output = {str(out)!r}: {folder / STATE} is damaged; remove the folder")
            yield Work(out, folder, asked, done)

    def finish_layer(self, tensors: Sequence[StoredTensor], hidden: Sequence[F32]) -> None:
        """Keeps a layer's tensors and what goes into the next one; only then does it count as done."""
        with writing(self.out):
            write_tensors(self._layer(self.done), tensors)
            if hidden:
                write_atomically(self._hidden(self.done + 1), (np.ascontiguousarray(x).data for x in hidden))
            write_json(self.folder / STATE, {"asked": self.asked, "done": self.done + 1})
            self._hidden(self.done).unlink(missing_ok=True)
        self.done += 1

    def hidden(self, lengths: Sequence[int], width: int) -> list[F32]:
        """What goes into the next layer, [T, D] of each sequence. Raises ConfigError if the file is damaged."""
        path = self._hidden(self.done)
        size = sum(lengths) * width
        try:
            flat = np.fromfile(path, np.float32)
        except OSError as e:
            raise ConfigError(f"{path}: {e.strerror}; remove the folder to begin again") from None
        if flat.size != size:
            raise ConfigError(f"{path}: has {flat.size} numbers instead of {size}; remove the folder to begin again")
        return [part.reshape(-1, width) for part in np.split(flat, np.cumsum(lengths)[:-1] * width)]

    def finished(self) -> list[StoredTensor]:
        """The tensors of all layers, mapped."""
        files = [SafetensorsFile(self._layer(layer)) for layer in range(self.done)]
        return [file.get(name) for file in files for name in file.places]

    def final(self) -> Path:
        """The folder that will be the output, empty."""
        path = self.folder / "final"
        with writing(self.out):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        return path

    def deliver(self) -> None:
        """Puts the finished folder in its place and removes the rest."""
        with writing(self.out):
            os.rename(self.folder / "final", self.out)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _layer(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:05}.safetensors"

    def _hidden(self, layer: int) -> Path:
        return self.folder / f"into-{layer:05}.f32"
