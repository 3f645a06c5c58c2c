"""Needs sentencepiece, tiktoken and transformers, the originals that ids are compared with. Puts this folder's modules on the path."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

for package in ("sentencepiece", "tiktoken"):
    pytest.importorskip(package)


@pytest.fixture(scope="session")
def json_folder(tmp_path_factory):
    """`json_folder(name)`: the folder of one of the tokenizers of `json_models`, saved by transformers."""
    from json_models import MAKERS

    made = {}

    def folder(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("json")
            MAKERS[name]().save_pretrained(made[name])
        return made[name]

    return folder
