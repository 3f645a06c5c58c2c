"""What a backend does to bytes and text, read off its parts: how tokens become text, and how much a normaliser can shorten a text.

Knows the parts of the `tokenizers` package by their names. Decodes nothing itself.
"""

from __future__ import annotations

import codecs
from enum import Enum
from typing import Any

import msgspec

# Stands for a space in SentencePiece's pieces.
MARK = "\N{LOWER ONE EIGHTH BLOCK}"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# How bytes that are no UTF-8 become text: one U+FFFD for each invalid sequence, or, as SentencePiece does, for each byte of it.
EACH_SEQUENCE = "replace"
EACH_BYTE = "octavo.each_byte"


class DecoderKind(Enum):
    """How tokens become text."""

    BYTE_LEVEL = "byte_level"  # every character of a token stands for a byte
    BYTE_FALLBACK = "byte_fallback"  # a mark stands for a space, <0x0A> for a byte
    METASPACE = "metaspace"  # a mark stands for a space
    SENTENCEPIECE = (
        "sentencepiece"  # as BYTE_FALLBACK, but it is the first token that loses its mark, not the text its space
    )
    OTHER = "other"  # only the package knows


BY_BYTE_TOKENS = (DecoderKind.BYTE_FALLBACK, DecoderKind.SENTENCEPIECE)
# Kinds of vocabularies in which a run of characters without a token is not one unknown token.
WITHOUT_UNKNOWN = (DecoderKind.BYTE_LEVEL, *BY_BYTE_TOKENS)


def strip_lead(text: str, most: int) -> str:
    """`text` without its first spaces, at most `most` of them."""
    count = min(most, len(text) - len(text.lstrip(" ")))
    return text[count:]


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    """A codec error handler: one U+FFFD for each byte that is not part of a character."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _each_byte)


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes of Latin-1 stand for themselves, the others, in order, for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {**{chr(b): b for b in printable}, **{chr(0x100 + i): b for i, b in enumerate(others)}}


BYTE_OF_CHARACTER = _byte_characters()


def decoder_of(backend: Any) -> tuple[DecoderKind, str, int]:
    """The kind, the mark that stands for a space, and how many leading spaces are no text (any number above 0 for METASPACE)."""
    if backend.decoder is None:
        return DecoderKind.OTHER, "", 0
    state = msgspec.json.decode(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return DecoderKind.BYTE_LEVEL, "", 0
    if kinds == ["Metaspace"]:
        return (
            DecoderKind.METASPACE,
            str(steps[0]["replacement"]),
            0 if steps[0].get("prepend_scheme") == "never" else 1,
        )
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
        replace, strip = steps[0], steps[3] if len(steps) > 3 else {"content": " ", "start": 0, "stop": 0}
        mark = replace["pattern"].get("String")
        if mark and replace["content"] == " " and strip["content"] == " " and strip["stop"] == 0:
            return DecoderKind.BYTE_FALLBACK, str(mark), int(str(strip["start"]))
    return DecoderKind.OTHER, "", 0


def most_shrink(backend: Any) -> int | None:
    """How many times shorter, in UTF-8, a text can become before it is cut into tokens; None if there is no such number."""
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    if getattr(backend.model, "unk_token", None) is not None and not getattr(backend.model, "byte_fallback", False):
        return None
    if backend.normalizer is None:
        return 1
    try:
        state = msgspec.json.decode(backend.normalizer.__getstate__())
    except Exception:  # one of ours, which the package cannot describe
        return None
    shrink = 1
    for step in state["normalizers"] if state["type"] == "Sequence" else [state]:
        if step["type"] == "NFC":
            shrink *= 3  # three letters of Hangul make one syllable
        elif step["type"] == "Replace":
            found = step["pattern"].get("String")
            if found is None or len(found.encode()) > len(step["content"].encode()):
                return None
        elif step["type"] != "Prepend":
            return None
    return shrink
