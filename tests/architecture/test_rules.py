"""Needs Python only. The rules of the house that a machine can hold: who imports whom, what never appears, how long things get."""

from __future__ import annotations

import ast
import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.config import AsyncEngineArgs, EngineArgs, ServerArgs

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "octavo"
FILES = sorted(SOURCE.rglob("*.py"))
TREES = {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in FILES}

# Files that find a module by a name of their own: a model by its architecture, a format, a command, a public name.
MAY_IMPORT_BY_NAME = {"__init__.py", "models/__init__.py", "quantization/__init__.py", "ops/__init__.py", "cli/__main__.py"}
LONGEST_FUNCTION = 60


def lint_imports(source: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    env = {**os.environ, "PYTHONPATH": str(source)}
    return subprocess.run(command, cwd=source, env=env, capture_output=True, text=True, timeout=120)


def test_imports_follow_the_contracts() -> None:
    result = lint_imports(ROOT / "src")
    assert result.returncode == 0, result.stdout


def test_the_contracts_catch_what_they_are_for(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "octavo", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    planted = {
        "engine/planted.py": "import time\n",
        "server/planted.py": "def later():\n    from octavo.runner import batch\n",
        "client/planted.py": "import numpy\n",
        "models/planted.py": "from octavo.models import llama\n",
        "quantization/planted.py": "from octavo.quantization import gguf\n",
        "ops/planted.py": "import torch\n",
        "homeless/__init__.py": "",
    }
    for name, text in planted.items():
        (tmp_path / "octavo" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "octavo" / name).write_text(text)
    result = lint_imports(tmp_path)
    broken = {line.split()[0] for line in result.stdout.splitlines() if line.partition(" (")[0].endswith("BROKEN")}
    assert broken >= {"2", "3", "4", "5", "6"}, result.stdout
    assert "homeless" in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("octavo", ["numpy", "msgspec", "asyncio", "octavo.config"]),
        ("octavo.cli.__main__", ["numpy", "msgspec", "asyncio", "uvicorn", "tokenizers", "octavo.engine", "octavo.server"]),
        ("octavo.server.app", ["numpy", "torch", "octavo.engine", "octavo.ops", "octavo.runner", "octavo.loader", "fastapi"]),
        ("octavo.client.client", ["numpy", "torch", "octavo.engine", "octavo.ops", "octavo.runner", "octavo.loader"]),
        ("octavo.client.supervisor", ["numpy", "tokenizers", "uvicorn"]),
        ("octavo.engine.core", ["numpy", "asyncio", "octavo.ops"]),
        ("octavo.loader.resolve", ["numpy", "huggingface_hub", "tqdm"]),
    ],
)
def test_an_import_loads_no_more_than_it_needs(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_module_can_unpickle() -> None:
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    found = {(name, module) for name, tree in TREES.items() for module in imported_modules(tree) if module.split(".")[0] in banned}
    assert not found


def test_no_text_becomes_code() -> None:
    found = [
        (name, node.lineno)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec", "compile", "__import__")
    ]
    assert not found


def test_remote_code_is_never_trusted() -> None:
    found = [
        (name, node.value.lineno)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and getattr(node.value, "value", None) is True
    ]
    assert not found


def test_only_config_reads_the_environment() -> None:
    found = [
        (name, node.lineno)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb") and name != "config.py"
    ]
    assert not found


def test_modules_are_imported_by_name_in_few_files() -> None:
    found = {
        name for name, tree in TREES.items() if any(m in ("importlib", "importlib.import_module", "runpy") for m in imported_modules(tree))
    }
    assert found <= MAY_IMPORT_BY_NAME


def test_only_ops_cpu_touches_the_extension() -> None:
    found = {name for name, tree in TREES.items() if any(m.startswith("octavo._native") for m in imported_modules(tree))}
    assert found
    assert all(name.startswith("ops/cpu/") for name in found), found


def test_no_check_is_lost_under_python_o() -> None:
    """Security never rests on `assert`: none of them may test a value that comes from outside, which in server/ all do."""
    found = [
        (name, node.lineno)
        for name, tree in TREES.items()
        if name.startswith(("server/", "loader/", "gguf_file"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert) and not _narrows_a_type(node.test)
    ]
    assert not found


def _narrows_a_type(test: ast.expr) -> bool:
    """`assert isinstance(...)` and `assert x is not None` talk to the type checker."""
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Name):
        return test.func.id == "isinstance"
    return isinstance(test, ast.Compare) and all(isinstance(op, ast.IsNot) for op in test.ops)


def test_functions_stay_short() -> None:
    lengths = {
        f"{name}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FUNCTION} == {}


def test_every_module_says_what_it_does() -> None:
    silent = [name for name, tree in TREES.items() if ast.get_docstring(tree) is None and tree.body]
    assert not silent


def test_every_option_has_help_and_a_default() -> None:
    for cls in (EngineArgs, AsyncEngineArgs, ServerArgs):
        cls()
        for field in dataclasses.fields(cls):
            text = field.metadata.get("help", "")
            assert len(text) > 5, f"{cls.__name__}.{field.name} has no help"
            assert not text.endswith("."), f"{cls.__name__}.{field.name}: help is no sentence"


def test_the_tree_does_not_tell_where_it_was_made() -> None:
    said = ["/work/", "/tmp/", "/root/"]
    paths = [*FILES, *(ROOT / "csrc").rglob("*.*"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    found = [(path.name, word) for path in paths for word in said if word in path.read_text()]
    assert not found
