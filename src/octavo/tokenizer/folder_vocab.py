"""A tokenizer from a folder in Hugging Face's layout: which of its files holds the vocabulary, and who reads it.

tokenizer.json comes before any other, as in transformers; then `tokenizer.model`, which is a SentencePiece model or tiktoken ranks, and
Qwen's `qwen.tiktoken`. Knows nothing of GGUF.
"""

from __future__ import annotations

from pathlib import Path

import tokenizers

from octavo.errors import ModelFileError
from octavo.tokenizer.folder_files import FolderFiles
from octavo.tokenizer.folder_ranks import QWEN_FILE, read_rank_folder
from octavo.tokenizer.folder_spm import read_spm
from octavo.tokenizer.sentencepiece_file import looks_like_sentencepiece
from octavo.tokenizer.tiktoken_file import looks_like_ranks
from octavo.tokenizer.vocabulary import MAX_TOKENIZER_BYTES, MAX_VOCAB_SIZE, Vocabulary, read_limited

FILES = ("tokenizer.json", "tokenizer.model", QWEN_FILE)
UNREAD = ("vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def read_folder(folder: Path, tokenizer_file: Path | None = None) -> Vocabulary:
    """The vocabulary of `folder`, or of `tokenizer_file` with the small files of `folder`.

    Raises ModelFileError that names the file and, where there is one, the key.
    """
    path = tokenizer_file or next((folder / name for name in FILES if (folder / name).is_file()), None)
    if path is None or not path.is_file():
        raise ModelFileError(
            f"{path or folder / FILES[0]}: not found{_what_is_there(folder)}; a tokenizer is {' or '.join(FILES)}"
        )
    files = FolderFiles(folder)
    vocabulary = _read(path, files)
    for token_id in files.eos_ids():
        if token_id < vocabulary.vocab_size and token_id not in vocabulary.eos_token_ids:
            vocabulary.eos_token_ids.append(token_id)
    vocabulary.add_turn_ends()
    return vocabulary


def _read(path: Path, files: FolderFiles) -> Vocabulary:
    if path.suffix == ".json":
        return _read_json_tokenizer(path, files)
    data = read_limited(path, MAX_TOKENIZER_BYTES)
    if looks_like_sentencepiece(data):
        return read_spm(path, data, files)
    if looks_like_ranks(data):
        return read_rank_folder(path, data, files)
    raise ModelFileError(f"{path}: is neither a SentencePiece model nor a file of tiktoken ranks")


def _what_is_there(folder: Path) -> str:
    found = [name for name in UNREAD if (folder / name).is_file()]
    return f", only {', '.join(found)}" if found else ""


def _read_json_tokenizer(path: Path, files: FolderFiles) -> Vocabulary:
    backend = _backend(path)
    special = files.special_tokens
    added = backend.get_added_tokens_decoder()
    vocab_size = max([backend.get_vocab_size(True), *(i + 1 for i in added)])
    if vocab_size > MAX_VOCAB_SIZE:
        raise ModelFileError(f"{path}: {vocab_size} tokens are more than {MAX_VOCAB_SIZE}")
    bos = backend.token_to_id(special["bos_token"]) if "bos_token" in special else None
    eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return Vocabulary(
        source=str(path),
        backend=backend,
        vocab_size=vocab_size,
        bos_token_id=bos,
        eos_token_ids=[eos] if eos is not None else [],
        special_tokens=special,
        chat_templates=files.templates(),
    )


def _backend(path: Path) -> tokenizers.Tokenizer:
    data = read_limited(path, MAX_TOKENIZER_BYTES)
    try:
        backend = tokenizers.Tokenizer.from_buffer(data)
        # A file may carry the settings of its training; a server must neither cut nor fill a prompt.
        backend.no_truncation()
        backend.no_padding()
        backend.encode("a")  # some faults of a file show only here
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except (
        BaseException
    ) as e:  # the package raises bare Exception for whatever it does not like, and a panic is not even that
        raise ModelFileError(f"{path}: {' '.join(str(e).split())[:200]}") from None
    return backend
