"""Rank files of the tiktoken package: one token a line, as base64 of its bytes, with its rank, which is its id.

Checks the file and makes a backend of it; which rule cuts the words and which special tokens there are, the file does not tell: see
`folder_ranks`.
"""

from __future__ import annotations

import binascii
from typing import Any

import tokenizers
from tokenizers import models

from octavo.errors import ModelFileError
from octavo.tokenizer.decoding import BYTE_OF_CHARACTER
from octavo.tokenizer.merges import all_merges
from octavo.tokenizer.vocabulary import MAX_VOCAB_SIZE
from octavo.tokenizer.word_rules import WordRule, apply_rule

MAX_TOKEN_BYTES = 1 << 12
_CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


def looks_like_ranks(data: bytes) -> bool:
    """Whether the file can be one of ranks, by its first line."""
    try:
        _line(data[: 2 * MAX_TOKEN_BYTES].split(b"\n", 1)[0])
    except ValueError:
        return False
    return True


def read_ranks(data: bytes, source: str) -> dict[str, int]:
    """Ranks by token, each byte of a token written as GPT-2's character for it, best rank first. `source` is the file's name.

    Raises ModelFileError that names the file and the line.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line:
            continue
        try:
            token, rank = _line(line)
        except ValueError as e:
            raise ModelFileError(f"{source}: line {number}: {e}") from None
        if token in ranks:
            raise ModelFileError(f"{source}: line {number}: the token {token[:40]!r} appears twice")
        ranks[token] = rank
    _check(ranks, source)
    in_order = sorted(ranks.items(), key=lambda item: item[1])
    return {token.decode("latin-1").translate(_CHARACTER_OF_BYTE): rank for token, rank in in_order}


def _line(line: bytes) -> tuple[bytes, int]:
    """Token and rank. Raises ValueError with what is wrong."""
    parts = line.split()
    if len(parts) != 2:
        raise ValueError("must be a token in base64 and a rank")
    try:
        token = binascii.a2b_base64(parts[0], strict_mode=True)
    except binascii.Error as e:
        raise ValueError(f"is not base64: {e}") from None
    if not parts[1].isdigit() or len(parts[1]) > 9:
        raise ValueError(f"{parts[1][:40]!r} is no rank")
    if not 0 < len(token) <= MAX_TOKEN_BYTES:
        raise ValueError(f"a token of {len(token)} bytes, must be 1 to {MAX_TOKEN_BYTES}")
    return token, int(parts[1])


def _check(ranks: dict[bytes, int], source: str) -> None:
    if len(set(ranks.values())) != len(ranks):
        by_rank: dict[int, bytes] = {}
        for token, rank in ranks.items():
            if by_rank.setdefault(rank, token) is not token:
                raise ModelFileError(f"{source}: rank {rank} appears twice")
    if ranks and max(ranks.values()) >= MAX_VOCAB_SIZE:
        raise ModelFileError(f"{source}: rank {max(ranks.values())} is not below {MAX_VOCAB_SIZE}")
    if lacking := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ModelFileError(
            f"{source}: {len(lacking)} of 256 single bytes have no rank, such as {bytes(lacking[:1])!r}"
        )


def rank_backend(ranks: dict[str, int], extra: dict[str, int], rule: WordRule) -> tokenizers.Tokenizer:
    """A backend of ranks, best first, that knows the names of `extra` too. tiktoken takes a word that is a token whole."""
    model: Any = models.BPE({**ranks, **extra}, all_merges(list(ranks)), ignore_merges=True)
    backend = tokenizers.Tokenizer(model)
    apply_rule(backend, rule)
    return backend
