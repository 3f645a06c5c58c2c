"""Calibration texts from the forms that such files have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.compress.texts import read_texts, sequences
from octavo.errors import ConfigError

TALKS = [
    {"id": "a", "conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]},
    {"messages": [{"role": "user", "content": "three"}, {"role": "assistant", "content": None}]},
    {"text": "four"},
    {"prompt": "five", "n_out": 3},
    "six",
    {"other": 1},
    7,
]
TEXTS = ["one\n\ntwo", "three", "four", "five", "six"]


def encode(text: str) -> list[int]:
    return [len(word) for word in text.split()]


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(TALKS),
        json.dumps(TALKS, indent=2) + "\n",
        json.dumps(TALKS)[:-1] + ', {"conversations": [{"value": "cut',
        "\n".join(map(json.dumps, TALKS[:4])) + "\n" + json.dumps({"text": "six"}),
        "\n\n".join(["one  two", *TEXTS[1:]]),
    ],
)  # fmt: skip
def test_forms(tmp_path: Path, content: str) -> None:
    (tmp_path / "f").write_text(content)
    assert [text.replace("\n\n", "  ") for text in read_texts(tmp_path / "f")] == ["one  two", *TEXTS[1:]]


@pytest.mark.parametrize("content", ["", "[]", "{}", "[1, 2", '{"text": 3}', "\n \n"])
def test_files_without_texts(tmp_path: Path, content: str) -> None:
    (tmp_path / "f").write_text(content)
    with pytest.raises(ConfigError, match="has no texts"):
        read_texts(tmp_path / "f")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="calibration = .*No such file"):
        read_texts(tmp_path / "none")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_texts(tmp_path)
    (tmp_path / "f").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="utf-8"):
        read_texts(tmp_path / "f")
    (tmp_path / "deep").write_text("[" * 200_000)
    with pytest.raises(ConfigError, match="has no texts"):
        read_texts(tmp_path / "deep")


def test_sequences_are_spread_and_cut() -> None:
    texts = [" ".join(["x" * (i + 1)] * 20) for i in range(10)]
    found = sequences(texts, encode, 5, 12)
    assert found == [[i + 1] * 12 for i in (0, 2, 4, 6, 8)]
    assert len(sequences(texts, encode, 100, 12)) == 10
    assert len(sequences(texts, encode, 3, 12)) == 3


def test_short_texts_are_joined_with_their_neighbours() -> None:
    texts = ["a b", "cc dd", "eee fff", "gggg hhhh"] * 6
    (first, *_) = sequences(texts, encode, 2, 9)
    assert first == [1, 1, 2, 2, 3, 3, 4, 4, 1]
    with pytest.raises(ConfigError, match="none of the 3 texts has 8 tokens"):
        sequences(["a", "b", "c"], encode, 3, 50)
