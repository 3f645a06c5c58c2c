"""What to ask: lists of requests with given lengths, from files or a seed. Knows no server and no tokenizer.

Random prompts are made of common short English words: with a space before it, each is one token in practically every
vocabulary, so that a prompt of N words has about N tokens; the server's own count is what reports use.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.json_file import whole_values

_TEXT = (
    "the of and to in is that for it as was with be by on not he this are at from but have an they which one you were all her she there "
    "would their we him been has when who will no more if out so up said what its about than into them can only other time new some could "
    "these two may first then do any like my now over such our man me even most made after also did many off before must well back through "
    "years much where your way down should because long each just state those people too how little good world make very year still see own "
    "work men day get here between both life being under three never know same last another while us might great old go come since against "
    "right came take used himself few house use place during high without again home around small however found part school every place"
)
WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request. `prompt` is text or token ids; `num_output` tokens are asked for, of forced length unless `may_stop`."""

    prompt: str | list[int]
    num_output: int
    may_stop: bool = False


@dataclass(frozen=True, slots=True)
class Lengths:
    """A range of lengths, both ends included, drawn so that each doubling is equally likely (as real lengths are)."""

    low: int
    high: int

    @staticmethod
    def parse(name: str, text: str) -> Lengths:
        """`128` or `10:1024`. Raises ConfigError."""
        first, _, last = text.partition(":")
        try:
            lengths = Lengths(int(first), int(last or first))
        except ValueError:
            lengths = Lengths(0, 0)
        if not 1 <= lengths.low <= lengths.high <= 1 << 20:
            raise ConfigError(f"{name} = {text!r}: must be a number of tokens or LOW:HIGH")
        return lengths

    def draw(self, rng: random.Random) -> int:
        return round(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))


def random_requests(count: int, prompt: Lengths, output: Lengths, seed: int) -> list[BenchRequest]:
    """Prompts without anything in common."""
    rng = random.Random(seed)
    return [BenchRequest(_words(rng, prompt.draw(rng)), output.draw(rng)) for _ in range(count)]


def shared_prefix_requests(
    count: int, prefix: int, groups: int, prompt: Lengths, output: Lengths, seed: int
) -> list[BenchRequest]:
    """Each prompt begins with one of `groups` texts of `prefix` words, as a system prompt or a document would be."""
    rng = random.Random(seed)
    heads = [_words(rng, prefix) for _ in range(groups)]
    return [BenchRequest(rng.choice(heads) + _words(rng, prompt.draw(rng)), output.draw(rng)) for _ in range(count)]


def sharegpt_requests(path: Path, count: int, output: Lengths | None, seed: int) -> list[BenchRequest]:
    """First turns of conversations in ShareGPT's JSON form; output as long as the answer there was, or as `output` says."""
    rng = random.Random(seed)
    pairs = []
    for entry in _entries(path):
        turns = entry.get("conversations", []) if isinstance(entry, dict) else []
        if len(turns) >= 2 and turns[0].get("value") and turns[1].get("value"):
            pairs.append((turns[0]["value"], turns[1]["value"]))
    if not pairs:
        raise ConfigError(f"dataset_path = {str(path)!r}: holds no conversation of two turns")
    rng.shuffle(pairs)
    pairs = (pairs * (count // len(pairs) + 1))[:count]
    # About four characters to a token: close enough to choose a length by.
    return [BenchRequest(text, output.draw(rng) if output else max(1, min(len(answer) // 4, 1024))) for text, answer in pairs]


def file_requests(path: Path, count: int | None, key: str | None) -> list[BenchRequest]:
    """Requests of a JSON file: a list of {"prompt" or "ids", "n_out"}, or an object of such lists of which `key` names one."""
    data: Any = _load(path)
    if isinstance(data, dict):
        lists = [name for name, value in data.items() if isinstance(value, list)]
        if key not in lists:
            raise ConfigError(f"dataset_key = {key!r}: {path.name} has {', '.join(lists)}")
        data = data[key]
    try:
        requests = [BenchRequest(entry["prompt"] if "prompt" in entry else entry["ids"], int(entry["n_out"])) for entry in data]
    except (TypeError, KeyError, ValueError):
        raise ConfigError(f"dataset_path = {str(path)!r}: each entry must have prompt (or ids) and n_out") from None
    return requests[:count]


def _words(rng: random.Random, count: int) -> str:
    return "".join(" " + word for word in rng.choices(WORDS, k=count))


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"dataset_path = {str(path)!r}: {error}") from None


def _entries(path: Path) -> list[Any]:
    """The whole elements of a JSON array: files of this kind are handed around cut off in the middle of one."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"dataset_path = {str(path)!r}: {error}") from None
    at = text.find("[") + 1
    return list(whole_values(text, at)) if at else []
