"""Damage of SentencePiece models."""

from __future__ import annotations

import math
from collections.abc import Iterator

from cases import Case, Must
from healthy import NORMALIZER, PIECES, TRAINER, Content, field, piece, sentencepiece_model, spm_files, varint

FILE = "tokenizer.model"


def cases() -> Iterator[Case]:
    for name, data in damage():
        yield Case(f"spm: {name}", "spm", spm_files() | {FILE: data}, "", Must.REFUSE, (FILE,))
    without: dict[str, Content] = {name: content for name, content in spm_files().items() if name != FILE}
    yield Case("spm: no tokenizer at all", "spm", without, "", Must.REFUSE, (FILE,))
    for name, data in harmless():
        yield Case(f"spm: {name}", "spm", spm_files() | {FILE: data}, "", Must.LOAD)


def harmless() -> Iterator[tuple[str, bytes]]:
    """The pieces' types tell which is the unknown one, and the folder's files which come first and last."""
    for name, number in (("unknown", 40), ("first", 41)):
        for value in (40, 2**31 - 1):
            yield f"{name} token {value}", sentencepiece_model(trainer=TRAINER + field(number, value))
    yield "a map of characters that goes in a circle", sentencepiece_model(normalizer=NORMALIZER + field(2, b"\x00\x04\x00\x00" + b"\xff" * 2048))
    yield "fields that nobody knows", sentencepiece_model() + field(9, b"junk") + field(15, 7)


def damage() -> Iterator[tuple[str, bytes]]:
    whole = sentencepiece_model()
    tail = len(field(2, TRAINER) + field(3, NORMALIZER))
    for cut in (1, 2, 3, 5, len(whole) // 2, len(whole) - tail - 1, len(whole) - len(NORMALIZER) - 1, len(whole) - 1):
        yield f"cut at {cut}", whole[:cut]
    yield "empty", b""
    yield "zeros", bytes(1000)
    yield "text", b"a b c\n" * 100
    yield "a piece of 2^63 bytes", field(1, piece("a", 0.0, 1)) + b"\x0a" + varint(2**63) + b"a"
    yield "a piece of 2^32 bytes", field(1, piece("a", 0.0, 1)) + b"\x0a" + varint(2**32) + b"a"
    yield "a number without end", whole + b"\x80" * 100
    yield "a field of an unknown kind", whole + b"\x0f\x00"
    yield "a group", whole + b"\x0b" * 5000
    yield "a field of number 0", whole + b"\x02\x01a"
    usual = [piece(text, -float(i), kind) for i, (text, kind) in enumerate(PIECES)]

    def with_piece(one: bytes, at: int = 20) -> bytes:
        return sentencepiece_model(pieces=[*usual[:at], one, *usual[at + 1 :]])

    yield "no pieces", sentencepiece_model(pieces=[])
    yield "an empty piece", with_piece(piece("", -1.0, 1))
    yield "a piece twice", with_piece(usual[10])
    yield "a piece that is not UTF-8", with_piece(piece(b"\xff\xfe", -1.0, 1))
    yield "a piece of 100 kB", with_piece(piece("x" * 100_000, -1.0, 1))
    for score in (math.nan, math.inf):
        yield f"a score of {score}", with_piece(piece("q", score, 1))
    for kind in (0, 7, 127):
        yield f"a piece of type {kind}", with_piece(field(1, "q") + field(2, -1.0) + field(3, kind))
    yield "a score that is a text", with_piece(field(1, "q") + field(2, b"abcde"))
    yield "a model of words", sentencepiece_model(trainer=TRAINER + field(3, 3))
    yield "a model of an unknown type", sentencepiece_model(trainer=TRAINER + field(3, 99))
    yield "a trainer that is none", sentencepiece_model(trainer=b"\xff\xff")
    yield "a map of characters that is junk", sentencepiece_model(normalizer=NORMALIZER + field(2, b"\x07\x00\x00\x00abc"))
    yield "a map of characters beyond its end", sentencepiece_model(normalizer=NORMALIZER + field(2, b"\xff\xff\xff\x7f" + bytes(64)))
