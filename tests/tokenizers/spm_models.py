"""Small SentencePiece models: trained when they are asked for, or written piece by piece. Knows nothing of Octavo."""

import io
import struct
from collections.abc import Iterable, Sequence
from functools import cache

import sentencepiece
from line_corpus import TRAINING

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BASIS = {"num_threads": 1, "minloglevel": 2, "hard_vocab_limit": False}
IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
MODELS = {
    "llama": {"model_type": "bpe", "vocab_size": 900, "byte_fallback": True, "split_digits": True, "allow_whitespace_only_pieces": True, **IDENTITY},
    "gemma": {
        "model_type": "bpe", "vocab_size": 900, "byte_fallback": True, "add_dummy_prefix": False, "split_digits": True, **IDENTITY,
        "user_defined_symbols": ["<sep>", "\n", "\n\n", "\n\n\n", "\t", "▁▁", "▁▁▁", "▁▁▁▁▁", "ab", "<b>"],
    },
    "bpe with symbols and a prefix": {"model_type": "bpe", "vocab_size": 800, "byte_fallback": True, "user_defined_symbols": ["<sep>", "[INST]"], **IDENTITY},
    "bpe with nmt_nfkc, no bytes": {
        "model_type": "bpe", "vocab_size": 800, "normalization_rule_name": "nmt_nfkc", "user_defined_symbols": ["<sep>", "[INST]"], "character_coverage": 0.98,
    },
    "bpe with case folding, whole lines": {"model_type": "bpe", "vocab_size": 800, "byte_fallback": True, "normalization_rule_name": "nmt_nfkc_cf", "split_by_whitespace": False},
    "bpe with nfkc, all spaces": {"model_type": "bpe", "vocab_size": 800, "byte_fallback": True, "normalization_rule_name": "nfkc", "remove_extra_whitespaces": False, "user_defined_symbols": ["<sep>"]},
    "unigram": {"model_type": "unigram", "vocab_size": 800, "byte_fallback": True, "allow_whitespace_only_pieces": True, **IDENTITY},
    "unigram with nmt_nfkc, no bytes": {
        "model_type": "unigram", "vocab_size": 800, "normalization_rule_name": "nmt_nfkc", "user_defined_symbols": ["<sep>", "[INST]"], "character_coverage": 0.98,
    },
    "unigram without prefix": {"model_type": "unigram", "vocab_size": 800, "byte_fallback": True, "normalization_rule_name": "nmt_nfkc", "add_dummy_prefix": False, "user_defined_symbols": ["<sep>", "▁▁"]},
    "unigram with case folding, whole lines": {"model_type": "unigram", "vocab_size": 700, "byte_fallback": True, "normalization_rule_name": "nmt_nfkc_cf", "split_by_whitespace": False, "split_digits": True},
}  # fmt: skip


@cache
def trained(name: str) -> bytes:
    """The file's bytes of one of MODELS."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING), model_writer=out, **BASIS, **MODELS[name]
    )
    return out.getvalue()


def original(data: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=data)


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def message(*fields: tuple[int, int | float | bytes]) -> bytes:
    """Fields by number: bytes, a number, or a float of four bytes."""
    out = b""
    for number, value in fields:
        if isinstance(value, bytes):
            out += varint(number << 3 | 2) + varint(len(value)) + value
        elif isinstance(value, float):
            out += varint(number << 3 | 5) + struct.pack("<f", value)
        else:
            out += varint(number << 3) + varint(value)
    return out


def written(
    pieces: Iterable[tuple[str, float, int]],
    trainer: Sequence[tuple[int, int | bytes]] = (),
    **normalizer: bool | bytes,
) -> bytes:
    """A byte-pair model's file with the given text, score and type of each piece."""
    numbers = {"precompiled_charsmap": 2, "add_dummy_prefix": 3, "remove_extra_whitespaces": 4, "escape_whitespaces": 5}
    spec = [(numbers[name], value if isinstance(value, bytes) else int(value)) for name, value in normalizer.items()]
    parts = [(1, message((1, text.encode()), (2, float(score)), (3, kind))) for text, score, kind in pieces]
    return message(*parts, (2, message((3, 2), (35, 1), *trainer)), (3, message((1, b"identity"), *spec)))
