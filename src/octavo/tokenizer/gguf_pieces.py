"""The llama kind of a GGUF file's vocabulary: a SentencePiece byte-pair model whose normaliser only marks spaces. Knows no files."""

from __future__ import annotations

import math

from octavo.tokenizer.gguf_metadata import Metadata
from octavo.tokenizer.pieces import build_backend, piece_lead
from octavo.tokenizer.sentencepiece_file import ModelType, NormalizerSpec, SentencePieceModel
from octavo.tokenizer.vocabulary import PieceType, Vocabulary


def add_pieces(meta: Metadata, tokens: list[str], vocabulary: Vocabulary) -> None:
    """Fills in the parts of `vocabulary` that this kind decides. Raises ModelFileError that names the key."""
    types = meta.numbers("tokenizer.ggml.token_type", len(tokens))
    scores = meta.numbers("tokenizer.ggml.scores", len(tokens))
    if len(set(tokens)) < len(tokens):
        raise meta.error(
            "tokenizer.ggml.tokens", f"{len(tokens) - len(set(tokens))} of {len(tokens)} tokens are repeated"
        )
    if not math.isfinite(sum(scores)):
        raise meta.error("tokenizer.ggml.scores", "a score is not a finite number")
    model = SentencePieceModel(
        meta.source,
        pieces=tokens,
        scores=scores,
        types=types,
        model_type=ModelType.BPE,
        byte_fallback=int(PieceType.BYTE) in types,
        unk_id=meta.token_id("tokenizer.ggml.unknown_token_id", len(tokens)) or 0,
        normalizer=NormalizerSpec(
            add_dummy_prefix=meta.flag("tokenizer.ggml.add_space_prefix", True),
            remove_extra_whitespaces=meta.flag("tokenizer.ggml.remove_extra_whitespaces", False),
        ),
    )
    built = build_backend(model)
    vocabulary.backend = built.backend
    vocabulary.piece_lead = piece_lead(model.normalizer)
    bos = vocabulary.bos_token_id
    if bos is not None and meta.flag("tokenizer.ggml.add_bos_token", True):
        vocabulary.prefix_ids = [bos]
