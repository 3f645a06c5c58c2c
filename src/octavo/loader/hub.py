"""Models from the Hugging Face hub, through its own client; files that are on this machine already are used without asking the network.

Imported only for a hub id. Fetches configuration, tokenizer and weights, never code.
"""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.utils.tqdm import disable_progress_bars

from octavo.config import cache_dir
from octavo.errors import ConfigError
from octavo.loader.resolve import INDEX, part_names, whole_models

COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


def hub_path(model: str, revision: str | None, download_dir: str | None, load_format: str, progress: bool) -> Path:
    """The folder of `org/name`, or the file of `org/name/FILE.gguf`, on this machine.

    Looks into `download_dir` if given, else into the hub client's own cache and then into ours, which is where it fetches to.
    Raises ConfigError with the client's reason.
    """
    if not progress:
        disable_progress_bars()
    kept = [Path(download_dir).expanduser()] if download_dir else [Path(constants.HF_HUB_CACHE), cache_dir() / "hub"]
    org, name, *rest = model.split("/")
    repo = f"{org}/{name}"
    for cache in kept:
        if (found := local(repo, rest, revision, cache, load_format)) is not None:
            return found
    try:
        return fetch(repo, rest, revision, kept[-1], load_format)
    except ConfigError:
        raise
    except Exception as e:  # the client's own, its HTTP library's, or whatever an odd answer makes of either: they change with its versions
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise ConfigError(f"model = {model!r}: is not on this machine and could not be fetched from the hub: {reason}") from None


def local(repo: str, rest: list[str], revision: str | None, cache: Path, load_format: str) -> Path | None:
    """What is here, if it is all here: the client also answers with the folder of a download that was cut off."""
    try:
        if rest:
            return file_of(repo, rest[0], revision, cache, local_only=True)
        folder = Path(snapshot_download(repo, revision=revision, cache_dir=cache, local_files_only=True))
    except Exception:  # as above; whatever the reason, it is not here
        return None
    has_weights = is_complete(folder) or (load_format != "safetensors" and any(folder.glob("*.gguf")))
    return folder if has_weights else None


def file_of(repo: str, name: str, revision: str | None, cache: Path, *, local_only: bool) -> Path:
    """The file, or the first part of a split model with all others beside it."""
    files = [
        hf_hub_download(repo, part, revision=revision, cache_dir=cache, local_files_only=local_only) for part in part_names(name)
    ]
    return Path(files[0])


def is_complete(folder: Path) -> bool:
    """Whether the configuration and all safetensors that the index names are in the folder."""
    if not (folder / "config.json").exists():
        return False
    try:
        shards = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    except OSError:
        return any(folder.glob("*.safetensors"))
    except (ValueError, KeyError, AttributeError, TypeError):
        return False
    return all((folder / str(shard)).exists() for shard in shards)


def fetch(repo: str, rest: list[str], revision: str | None, cache: Path, load_format: str) -> Path:
    if rest:
        return file_of(repo, rest[0], revision, cache, local_only=False)
    files = HfApi().list_repo_files(repo, revision=revision)
    ggufs = [file for file in files if file.endswith(".gguf")]
    if load_format != "gguf" and any(file.endswith(".safetensors") for file in files):
        weights = ["*.safetensors"]
    elif load_format != "safetensors" and len(whole_models(ggufs)) == 1:
        weights = ggufs
    elif ggufs and load_format != "safetensors":
        raise ConfigError(f"model = {repo!r}: holds {len(whole_models(ggufs))} gguf models; give one of them: {repo}/{ggufs[0]}, ...")
    else:
        wanted = ".safetensors or .gguf" if load_format == "auto" else f".{load_format}"
        raise ConfigError(f"model = {repo!r}: has no {wanted} file on the hub")
    return Path(snapshot_download(repo, revision=revision, cache_dir=cache, allow_patterns=[*COMPANIONS, *weights]))
