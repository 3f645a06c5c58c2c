"""A tokenizer from a folder in Hugging Face's layout: tokenizer.json and the small files beside it.

Reads tokenizer_config.json, config.json, generation_config.json, chat_template.jinja and additional_chat_templates/ where they are
present. Knows nothing of GGUF. SentencePiece models without a tokenizer.json are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from octavo.errors import ModelFileError
from octavo.tokenizer.vocabulary import (
    DEFAULT_TEMPLATE,
    MAX_JSON_BYTES,
    MAX_TOKENIZER_BYTES,
    MAX_VOCAB_SIZE,
    Vocabulary,
    read_limited,
)

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_TEMPLATES = 32


def read_folder(folder: Path, tokenizer_file: Path | None = None) -> Vocabulary:
    """The vocabulary of `folder`, from its tokenizer.json or `tokenizer_file`.

    Raises ModelFileError that names the file and, where there is one, the key.
    """
    path = tokenizer_file or folder / "tokenizer.json"
    if not path.is_file():
        raise ModelFileError(f"{path}: not found; a tokenizer must come as tokenizer.json or in a GGUF file")
    backend = _backend(path)
    config = _read_json(folder / "tokenizer_config.json")
    special = _special_tokens(config)
    added = backend.get_added_tokens_decoder()
    vocab_size = max([backend.get_vocab_size(True), *(i + 1 for i in added)])
    if vocab_size > MAX_VOCAB_SIZE:
        raise ModelFileError(f"{path}: {vocab_size} tokens are more than {MAX_VOCAB_SIZE}")
    bos = backend.token_to_id(special["bos_token"]) if "bos_token" in special else None
    eos = [backend.token_to_id(special["eos_token"])] if "eos_token" in special else []
    vocabulary = Vocabulary(
        source=str(path),
        backend=backend,
        vocab_size=vocab_size,
        bos_token_id=bos,
        eos_token_ids=[i for i in eos if i is not None],
        special_tokens=special,
        chat_templates=_templates(folder, config),
    )
    for token_id in read_eos_ids(folder):
        if token_id < vocab_size and token_id not in vocabulary.eos_token_ids:
            vocabulary.eos_token_ids.append(token_id)
    vocabulary.add_turn_ends()
    return vocabulary


def read_eos_ids(folder: Path) -> list[int]:
    """End-of-sequence ids that config.json and generation_config.json name, in that order, without repetition."""
    found: list[int] = []
    for name in ("config.json", "generation_config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0 and token_id not in found:
                found.append(token_id)
    return found


def _backend(path: Path) -> tokenizers.Tokenizer:
    data = read_limited(path, MAX_TOKENIZER_BYTES)
    try:
        backend = tokenizers.Tokenizer.from_buffer(data)
    except Exception as e:  # the package raises bare Exception for whatever it does not like
        raise ModelFileError(f"{path}: {str(e)[:200]}") from None
    # A file may carry the settings of its training; a server must neither cut nor fill a prompt.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = msgspec.json.decode(read_limited(path, MAX_JSON_BYTES))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ModelFileError(f"{path}: is not valid JSON: {e}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: must hold a JSON object")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Names to contents; a token is a string or an object with `content`."""
    special: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            special[name] = content
    return special


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name: those of tokenizer_config.json, overruled by files."""
    templates: dict[str, str] = {}
    value = config.get("chat_template")
    if isinstance(value, str):
        templates[DEFAULT_TEMPLATE] = value
    for entry in value if isinstance(value, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str):
            templates[entry["name"]] = entry["template"]
    files = sorted((folder / "additional_chat_templates").glob("*.jinja"))[:MAX_TEMPLATES]
    named = [(path.stem, path) for path in files] + [(DEFAULT_TEMPLATE, folder / "chat_template.jinja")]
    for name, path in named:
        if path.is_file():
            try:
                templates[name] = read_limited(path, MAX_JSON_BYTES).decode()
            except UnicodeDecodeError:
                raise ModelFileError(f"{path}: is not valid UTF-8") from None
    return templates
