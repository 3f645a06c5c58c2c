"""Needs Python only. What the pages say of the tree is what the tree holds."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

import octavo
from octavo.cli.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "octavo"
NAMES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "docs/options.md", "docs/models.md", "docs/quantization.md")
PAGES = [ROOT / name for name in NAMES]


def rooms_on_the_page() -> dict[str, set[str]]:
    """Of ARCHITECTURE.md's table: folder -> the files named there."""
    rows = re.findall(r"^\| (`[\w/]+`|the package|the base) \| ([^|]+) \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    rooms: dict[str, set[str]] = {}
    for room, files in rows:
        folder = room.strip("`").rstrip("/") if room.startswith("`") else "."
        rooms.setdefault(folder, set()).update(re.findall(r"`(\w+)`", files))
    return rooms


def rooms_in_the_tree() -> dict[str, set[str]]:
    rooms: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        if path.name != "__init__.py":
            rooms.setdefault(path.parent.relative_to(SOURCE).as_posix(), set()).add(path.stem)
    return rooms


def test_the_rooms_on_the_page_are_those_of_the_tree() -> None:
    """But for the models, of which the page names an example: a new family is one file, and docs/models.md is generated."""
    page, tree = rooms_on_the_page(), rooms_in_the_tree()
    assert page.pop("models") <= tree.pop("models")
    assert page == tree


def test_the_page_stays_a_page() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 170


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target
    for path in re.findall(r"`((?:src|csrc|tests|scripts|docs|benchmarks)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_commands_on_the_pages_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["make"]:
                    assert words[1] in targets, line
                elif words and words[0].endswith("octavo"):
                    assert words[1] in COMMANDS, line


def test_the_version_is_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"]
    assert f"## {octavo.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_dependencies_are_lower_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        assert re.fullmatch(r"[\w-]+>=[\d.]+", requirement), requirement


def test_scripts_are_short() -> None:
    for path in (ROOT / "scripts").iterdir():
        if path.is_file():
            assert len(path.read_text().splitlines()) <= 30, path.name
