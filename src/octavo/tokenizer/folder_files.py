"""The small files beside a tokenizer in Hugging Face's layout: what they say of special tokens, added tokens, templates and ends.

Reads tokenizer_config.json, config.json, generation_config.json, special_tokens_map.json, added_tokens.json, chat_template.jinja and
additional_chat_templates/ where they are present. Knows nothing of the tokenizer itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from octavo.errors import ModelFileError
from octavo.json_file import read_optional_json
from octavo.tokenizer.vocabulary import DEFAULT_TEMPLATE, MAX_JSON_BYTES, MAX_VOCAB_SIZE, read_limited

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MORE_SPECIAL = ("additional_special_tokens", "extra_special_tokens")
MAX_TEMPLATES = 32


@dataclass(slots=True)
class Added:
    """A token of a file beside the vocabulary; `token_id` is None where the file does not give one."""

    token: AddedToken
    token_id: int | None = None


@dataclass
class FolderFiles:
    """The files of one folder, each read when it is asked for. Raises ModelFileError that names the file."""

    folder: Path
    _read: dict[str, dict[str, Any]] = field(default_factory=dict)

    def json(self, name: str) -> dict[str, Any]:
        """The object in a JSON file, empty if there is no such file."""
        if name not in self._read:
            self._read[name] = read_optional_json(self.folder / name, MAX_JSON_BYTES)
        return self._read[name]

    @property
    def tokenizer_config(self) -> dict[str, Any]:
        return self.json("tokenizer_config.json")

    def text(self, file: str, key: str) -> str:
        """A string in a JSON file, empty if it is absent or no string."""
        value = self.json(file).get(key)
        return value if isinstance(value, str) else ""

    def flag(self, key: str, default: bool) -> bool:
        """A boolean of tokenizer_config.json; null means that it says nothing."""
        value = self.tokenizer_config.get(key)
        return value if isinstance(value, bool) else default

    @property
    def tokenizer_class(self) -> str:
        return self.text("tokenizer_config.json", "tokenizer_class")

    @property
    def model_type(self) -> str:
        return self.text("config.json", "model_type")

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Names to contents; a token is a string or an object with `content`."""
        special: dict[str, str] = {}
        for name in SPECIAL_NAMES:
            for file in ("tokenizer_config.json", "special_tokens_map.json"):
                content = _content(self.json(file).get(name))
                if content is not None:
                    special.setdefault(name, content)
        return special

    def added_tokens(self) -> list[Added]:
        """Tokens that are no part of the vocabulary's own file, or change one of it: those with ids first, in the order of the ids."""
        named = [*self.special_tokens.values(), *self._more_special()]
        special = set(named)
        by_id: dict[int, AddedToken] = {}
        for key, value in self._objects("tokenizer_config.json", "added_tokens_decoder").items():
            by_id[self._token_id("tokenizer_config.json", key)] = _added_token(value, special)
        for content, value in self.json("added_tokens.json").items():
            token_id = self._token_id("added_tokens.json", value)
            by_id.setdefault(token_id, AddedToken(content, special=content in special, normalized=False))
        found = [Added(token, token_id) for token_id, token in sorted(by_id.items())]
        known = {added.token.content for added in found}
        return found + [
            Added(AddedToken(content, special=True, normalized=False))
            for content in dict.fromkeys(named)
            if content not in known
        ]

    def _more_special(self) -> list[str]:
        values: list[Any] = []
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            for key in MORE_SPECIAL:
                more = self.json(file).get(key)
                values += more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
        return [content for value in values if (content := _content(value)) is not None]

    def _objects(self, file: str, key: str) -> dict[str, dict[str, Any]]:
        value = self.json(file).get(key, {})
        if not isinstance(value, dict) or not all(isinstance(entry, dict) for entry in value.values()):
            raise ModelFileError(f"{self.folder / file}: {key}: must be an object of objects")
        return value

    def _token_id(self, file: str, value: object) -> int:
        number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 10 else value
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < MAX_VOCAB_SIZE:
            raise ModelFileError(f"{self.folder / file}: {str(value)[:40]!r} is no token id")
        return number

    def templates(self) -> dict[str, str]:
        """Chat templates by name: those of tokenizer_config.json, overruled by files."""
        templates: dict[str, str] = {}
        value = self.tokenizer_config.get("chat_template")
        if isinstance(value, str):
            templates[DEFAULT_TEMPLATE] = value
        for entry in value if isinstance(value, list) else []:
            if (
                isinstance(entry, dict)
                and isinstance(entry.get("name"), str)
                and isinstance(entry.get("template"), str)
            ):
                templates[entry["name"]] = entry["template"]
        files = sorted((self.folder / "additional_chat_templates").glob("*.jinja"))[:MAX_TEMPLATES]
        named = [(path.stem, path) for path in files] + [(DEFAULT_TEMPLATE, self.folder / "chat_template.jinja")]
        for name, path in named:
            if path.is_file():
                try:
                    templates[name] = read_limited(path, MAX_JSON_BYTES).decode()
                except UnicodeDecodeError:
                    raise ModelFileError(f"{path}: is not valid UTF-8") from None
        return templates

    def eos_ids(self) -> list[int]:
        """End-of-sequence ids that config.json and generation_config.json name, in that order, without repetition."""
        found: list[int] = []
        for name in ("config.json", "generation_config.json"):
            value = self.json(name).get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**31 for i in ids):
                raise ModelFileError(
                    f"{self.folder / name}: eos_token_id = {str(value)[:50]}: must be a token id or a list of them"
                )
            found += [i for i in dict.fromkeys(ids) if i not in found]
        return found


def place(added: list[Added], names: Mapping[str, int], size: int) -> list[tuple[int, AddedToken]]:
    """The tokens with their ids. One without an id has that of its name, where a vocabulary of `names` below `size` knows it, or else the
    next behind all."""
    taken = [token.token_id for token in added if token.token_id is not None]
    following = max([size, *(i + 1 for i in taken)])
    placed: list[tuple[int, AddedToken]] = []
    for token in added:
        token_id = token.token_id if token.token_id is not None else names.get(token.token.content)
        if token_id is None:
            token_id, following = following, following + 1
        placed.append((token_id, token.token))
    return placed


def _content(value: object) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) and content else None


def _added_token(entry: dict[str, Any], special: set[str]) -> AddedToken:
    content = _content(entry)
    if content is None:
        raise ModelFileError("tokenizer_config.json: added_tokens_decoder: an entry has no content")
    # Never matched in the normalised text: a normaliser that puts a mark in front would put it into the token too.
    return AddedToken(
        content,
        special=entry.get("special") is True or content in special,
        normalized=False,
        lstrip=entry.get("lstrip") is True,
        rstrip=entry.get("rstrip") is True,
        single_word=entry.get("single_word") is True,
    )
