"""A SentencePiece model's file (`tokenizer.model`): pieces, scores and the rules of its normaliser, checked.

Reads the file's own format and no other. What the pieces are used for is `pieces`'s and `unigram`'s business. Models of whole words or of
characters, and models that put the mark of a space behind a word, are refused: no language model that we know has one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum

from octavo.errors import ModelFileError
from octavo.tokenizer import wire
from octavo.tokenizer.vocabulary import MAX_VOCAB_SIZE, PieceType

MAX_PIECE_BYTES = 1 << 16


class ModelType(IntEnum):
    """How text becomes pieces."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


LAST_TYPE = int(PieceType.BYTE)
_NORMAL = int(PieceType.NORMAL)


@dataclass(slots=True)
class NormalizerSpec:
    """How text is changed first. `charsmap` is the compiled table of replacements, empty for none."""

    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True


@dataclass(slots=True)
class SentencePieceModel:
    """Pieces by id, with a score and a type each.

    `unk_surface` is what an unknown piece decodes to. `special_ids` are bos, eos, pad: None where the model has none.
    """

    source: str
    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    model_type: ModelType = ModelType.UNIGRAM
    byte_fallback: bool = False
    unk_id: int = 0
    special_ids: dict[str, int] = field(default_factory=lambda: {"bos_token": 1, "eos_token": 2, "pad_token": -1})
    normalizer: NormalizerSpec = field(default_factory=NormalizerSpec)


def looks_like_sentencepiece(data: bytes) -> bool:
    """Whether the file can be a SentencePiece model: it begins with a piece, which no line of base64 does."""
    return data[:1] == b"\n" and data[2:3] == b"\n"


def parse_sentencepiece(data: bytes, source: str) -> SentencePieceModel:
    """The model that the bytes hold; `source` is the file's name, for messages."""
    model = SentencePieceModel(source)
    try:
        for number, kind, value in wire.fields(data):
            if number == 1:
                _piece(model, wire.octets(value, kind))
            elif number == 2:
                _trainer(model, wire.octets(value, kind))
            elif number == 3:
                _normalizer(model.normalizer, wire.octets(value, kind))
            elif number == 5:
                _denormalizer(model, wire.octets(value, kind))
    except (wire.WireError, UnicodeDecodeError) as e:
        where = f"piece {len(model.pieces)}: " if isinstance(e, UnicodeDecodeError) else ""
        why = "text is not valid UTF-8" if isinstance(e, UnicodeDecodeError) else str(e)
        raise ModelFileError(f"{source}: is not a SentencePiece model: {where}{why}") from None
    _check(model)
    return model


def _piece(model: SentencePieceModel, data: bytes) -> None:
    if len(model.pieces) >= MAX_VOCAB_SIZE:
        raise ModelFileError(f"{model.source}: more than {MAX_VOCAB_SIZE} pieces")
    text, score, kind = _usual_piece(data) or _any_piece(data)
    if not 0 < len(text) <= MAX_PIECE_BYTES:
        raise ModelFileError(
            f"{model.source}: piece {len(model.pieces)} has {len(text)} bytes, must be 1 to {MAX_PIECE_BYTES}"
        )
    if not math.isfinite(score) or not 1 <= kind <= LAST_TYPE:
        raise ModelFileError(f"{model.source}: piece {len(model.pieces)} has score {score} and type {kind}")
    model.pieces.append(text.decode())
    model.scores.append(score)
    model.types.append(kind)


def _usual_piece(data: bytes) -> tuple[bytes, float, int] | None:
    """A piece as every writer lays it out: text, score, and a type if it is not normal. None if it is not laid out so.

    A vocabulary has up to a quarter of a million of them, and this takes a third of the time.
    """
    if len(data) < 7 or data[0] != 0x0A or data[1] >= 0x80:
        return None
    end = 2 + data[1]
    rest = len(data) - end
    if rest not in (5, 7) or data[end] != 0x15 or (rest == 7 and data[end + 5] != 0x18):
        return None
    score: float = wire.FLOAT.unpack_from(data, end + 1)[0]
    return data[2:end], score, data[end + 6] if rest == 7 else _NORMAL


def _any_piece(data: bytes) -> tuple[bytes, float, int]:
    text, score, piece_type = b"", 0.0, _NORMAL
    for number, kind, value in wire.fields(data):
        if number == 1:
            text = wire.octets(value, kind)
        elif number == 2:
            score = wire.float32(value)
        elif number == 3:
            piece_type = wire.integer(value)
    return text, score, piece_type


def _trainer(model: SentencePieceModel, data: bytes) -> None:
    names = {41: "bos_token", 42: "eos_token", 43: "pad_token"}
    for number, _, value in wire.fields(data):
        if number == 3:
            model.model_type = _model_type(model, wire.integer(value))
        elif number == 24 and wire.integer(value):
            raise ModelFileError(f"{model.source}: treat_whitespace_as_suffix is not supported")
        elif number == 35:
            model.byte_fallback = bool(wire.integer(value))
        elif number == 40:
            model.unk_id = wire.integer(value)
        elif number in names:
            model.special_ids[names[number]] = wire.integer(value)


def _model_type(model: SentencePieceModel, number: int) -> ModelType:
    supported = "BPE and UNIGRAM are supported"
    try:
        found = ModelType(number)
    except ValueError:
        raise ModelFileError(f"{model.source}: model_type {number} is unknown; {supported}") from None
    if found in (ModelType.WORD, ModelType.CHAR):
        raise ModelFileError(f"{model.source}: model_type {found.name} is not supported; {supported}")
    return found


def _normalizer(spec: NormalizerSpec, data: bytes) -> None:
    for number, kind, value in wire.fields(data):
        if number == 2:
            spec.charsmap = wire.octets(value, kind)
        elif number == 3:
            spec.add_dummy_prefix = bool(wire.integer(value))
        elif number == 4:
            spec.remove_extra_whitespaces = bool(wire.integer(value))
        elif number == 5:
            spec.escape_whitespaces = bool(wire.integer(value))


def _denormalizer(model: SentencePieceModel, data: bytes) -> None:
    spec = NormalizerSpec()
    _normalizer(spec, data)
    if spec.charsmap:
        raise ModelFileError(f"{model.source}: a denormaliser with replacements is not supported")


def _check(model: SentencePieceModel) -> None:
    """What must hold between the parts."""
    count = len(model.pieces)
    if count == 0:
        raise ModelFileError(f"{model.source}: is not a SentencePiece model: it has no pieces")
    if len(set(model.pieces)) < count:
        first = dict(zip(reversed(model.pieces), range(count - 1, -1, -1), strict=True))
        again = next(i for i, piece in enumerate(model.pieces) if first[piece] != i)
        raise ModelFileError(f"{model.source}: piece {again} {model.pieces[again][:80]!r} appears twice")
    unknown = [i for i, kind in enumerate(model.types) if kind == PieceType.UNKNOWN]
    if len(unknown) != 1:
        raise ModelFileError(f"{model.source}: {len(unknown)} pieces are of type UNKNOWN, must be one")
    model.unk_id = unknown[0]
    model.special_ids = {
        name: i for name, i in model.special_ids.items() if 0 <= i < count and model.types[i] == PieceType.CONTROL
    }
    if model.byte_fallback:
        names = {piece for piece, kind in zip(model.pieces, model.types, strict=True) if kind == PieceType.BYTE}
        if lacking := [b for b in range(256) if f"<0x{b:02X}>" not in names]:
            raise ModelFileError(
                f"{model.source}: byte_fallback needs 256 byte pieces, <0x{lacking[0]:02X}> is missing"
            )
