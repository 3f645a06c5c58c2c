"""Needs Python only. `import octavo` costs nothing until a name is used, and every name is where it says."""

import importlib
import subprocess
import sys

import pytest

import octavo

NEEDS_EXTENSION = {"LLM"}


def test_all_names_have_a_home():
    assert set(octavo.__all__) == {*octavo._HOMES, "__version__"}
    assert set(octavo.__all__) <= set(dir(octavo))


@pytest.mark.parametrize("name", sorted(set(octavo._HOMES) - NEEDS_EXTENSION))
def test_names_are_the_ones_at_home(name):
    assert getattr(octavo, name) is getattr(importlib.import_module(octavo._HOMES[name]), name)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_thing"):
        octavo.no_such_thing  # noqa: B018


def loaded(code):
    script = f"import sys\n{code}\nprint(*sorted(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_package_imports_nothing_else():
    bare = loaded("import importlib, typing")
    assert loaded("import octavo") - bare == {"octavo"}


def test_the_asynchronous_engine_needs_no_numpy_in_this_process():
    modules = loaded("from octavo import AsyncLLMEngine, AsyncEngineArgs, SamplingParams")
    assert not modules & {"numpy", "torch", "octavo.engine", "octavo.host", "octavo.ops", "octavo.runner"}
