"""SentencePiece pieces with scores, from whatever file, made into a `tokenizers.Tokenizer` that gives SentencePiece's ids.

Byte-pair models become a list of merges, see `merges`; that needs different scores for pieces of more than one character, which training
gives. Unigram models are cut by `unigram`.

Three kinds of pieces lie outside of the merging. Control pieces and the unknown piece are special tokens: they are recognised in text as
transformers does, where SentencePiece itself would read them as text. User-defined pieces of a byte-pair model are taken whole from the
normalised text before any merging. Byte pieces stand for the bytes of characters that have no piece. Unused pieces are never produced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from octavo.errors import ModelFileError
from octavo.tokenizer.decoding import MARK
from octavo.tokenizer.merges import all_merges
from octavo.tokenizer.sentencepiece_file import ModelType, NormalizerSpec, SentencePieceModel
from octavo.tokenizer.spm_normalizer import SpmNormalizer
from octavo.tokenizer.unigram import UnigramCutter
from octavo.tokenizer.vocabulary import PieceLead, PieceType


class Prefix(Enum):
    """Where the dummy prefix goes in a text with special tokens inside."""

    EVERY_STRETCH = "every"  # in front of each stretch between special tokens, as if each were a text of its own
    OPENING = "opening"  # in front of the text only, and not if it begins with a special token


@dataclass(slots=True, kw_only=True)
class BuiltPieces:
    """A backend, and the text that must be put in front of a text that does not begin with a special token."""

    backend: tokenizers.Tokenizer
    opening: str = ""


def build_backend(
    model: SentencePieceModel,
    prefix: Prefix = Prefix.EVERY_STRETCH,
    extra: Sequence[tuple[int, AddedToken]] = (),
    unwritten: Mapping[str, int] = MappingProxyType({}),
) -> BuiltPieces:
    """The tokenizer of `model`. `extra` are tokens of other files beside it, with their ids, in place of or behind the pieces;
    `unwritten` are names of ids that no text gives.

    Raises ModelFileError if the pieces cannot be a vocabulary.
    """
    vocab = _vocab(model, extra) | dict(unwritten)
    replaced = {i for i, _ in extra}
    user_defined = [model.pieces[i] for i in _ids_of(model, PieceType.USER_DEFINED) if i not in replaced]
    backend = tokenizers.Tokenizer(_model(model, vocab))
    spec = model.normalizer
    opening = ""
    ours: SpmNormalizer | None = None
    if (
        spec.charsmap
        or spec.remove_extra_whitespaces
        or (user_defined and spec.add_dummy_prefix and prefix is Prefix.EVERY_STRETCH)
    ):
        ours = SpmNormalizer(spec, user_defined, model.source)
        backend.normalizer = normalizers.Normalizer.custom(ours)
    else:
        backend.normalizer, opening = _plain_normalizer(spec, prefix)
    if model.model_type is ModelType.UNIGRAM:
        cutter = UnigramCutter(model.pieces, model.scores, model.types, model.unk_id)
        backend.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(cutter)
    backend.decoder = _decoder(spec)
    # A Unigram model weighs them like any other piece, in one sum over the whole text.
    _add_tokens(model, backend, user_defined if model.model_type is ModelType.BPE else [], extra)
    if ours is not None:
        ours.active = True
    return BuiltPieces(backend=backend, opening=opening)


def piece_lead(spec: NormalizerSpec) -> PieceLead:
    """What decoding leaves out at the begin of a text, by what encoding puts there."""
    if spec.remove_extra_whitespaces:
        return PieceLead.ALL
    return PieceLead.FIRST if spec.add_dummy_prefix else PieceLead.KEPT


def _ids_of(model: SentencePieceModel, kind: PieceType) -> list[int]:
    wanted = int(kind)
    return [i for i, found in enumerate(model.types) if found == wanted]


def _vocab(model: SentencePieceModel, extra: Sequence[tuple[int, AddedToken]]) -> dict[str, int]:
    vocab = dict(zip(model.pieces, range(len(model.pieces)), strict=True))
    for token_id, token in extra:
        if token_id < len(model.pieces):  # another name for a piece
            vocab.pop(model.pieces[token_id], None)
        if vocab.setdefault(token.content, token_id) != token_id:
            raise ModelFileError(
                f"{model.source}: the added token {token.content[:80]!r} has id {token_id}, its piece has {vocab[token.content]}"
            )
    if len(set(vocab.values())) != len(vocab):
        raise ModelFileError(f"{model.source}: two added tokens have the same id")
    return vocab


def _model(model: SentencePieceModel, vocab: dict[str, int]) -> Any:
    """The package's model. For Unigram the text comes cut into pieces already, so it only looks them up."""
    unknown = next((piece for piece, i in vocab.items() if i == model.unk_id), None)
    options: dict[str, Any] = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": model.byte_fallback}
    if model.model_type is ModelType.UNIGRAM:
        return models.BPE(vocab, [], ignore_merges=True, **options)
    return models.BPE(vocab, _merges(model, vocab), **options)


def _merges(model: SentencePieceModel, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Of normal pieces, those with the best scores first."""
    pieces = model.pieces
    normal = [i for i in _ids_of(model, PieceType.NORMAL) if vocab.get(pieces[i]) == i]
    normal.sort(key=model.scores.__getitem__, reverse=True)  # stable: of equal scores the lower id first
    return all_merges([pieces[i] for i in normal])


def _plain_normalizer(spec: NormalizerSpec, prefix: Prefix) -> tuple[Any, str]:
    """By the package's own means, and what the caller puts in front."""
    space = MARK if spec.escape_whitespaces else " "
    steps: list[Any] = []
    opening = ""
    if spec.add_dummy_prefix and prefix is Prefix.EVERY_STRETCH:
        steps.append(normalizers.Prepend(space))
    elif spec.add_dummy_prefix:
        opening = space
    if spec.escape_whitespaces:
        steps.append(normalizers.Replace(" ", MARK))
    if not steps:
        return None, opening
    return (normalizers.Sequence(steps) if len(steps) > 1 else steps[0]), opening


def _decoder(spec: NormalizerSpec) -> Any:
    """The package's decoder nearest to SentencePiece's; `tokenizer` itself decodes exactly."""
    steps: list[Any] = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix or spec.remove_extra_whitespaces:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _add_tokens(
    model: SentencePieceModel,
    backend: tokenizers.Tokenizer,
    user_defined: Sequence[str],
    extra: Sequence[tuple[int, AddedToken]],
) -> None:
    replaced = {i for i, _ in extra}
    special = [
        AddedToken(model.pieces[i], special=True, normalized=False)
        for i in sorted(_ids_of(model, PieceType.CONTROL) + _ids_of(model, PieceType.UNKNOWN))
        if i not in replaced
    ]
    special += [token for _, token in extra if token.special]
    backend.add_special_tokens(special)
    backend.add_tokens([token for _, token in extra if not token.special])
    # Found in the normalised text: a user-defined piece may hold marks, which are spaces in the text.
    backend.add_tokens([AddedToken(piece, special=False, normalized=True) for piece in user_defined])
