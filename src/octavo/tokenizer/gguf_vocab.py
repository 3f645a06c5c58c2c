"""A tokenizer from a GGUF file's metadata, by the kind that `tokenizer.ggml.model` names: gpt2 or llama.

gpt2 is byte-level BPE: tokens, merges and token types come from the file; how text is cut into words before BPE is known only by a name
(`tokenizer.ggml.pre`), see `word_rules`. llama is a SentencePiece byte-pair model: pieces, scores and types, see `gguf_pieces`. The other kinds,
t5 (Unigram) and bert (WordPiece) among them, belong to no family of models that is served here, and are refused by name.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from octavo.gguf_file import GGUFFile
from octavo.tokenizer.builtin_templates import BY_NAME
from octavo.tokenizer.gguf_metadata import Metadata
from octavo.tokenizer.vocabulary import DEFAULT_TEMPLATE, MAX_VOCAB_SIZE, PieceType, Vocabulary
from octavo.tokenizer.word_rules import WORD_RULES, WordRule, apply_rule

MAX_TEMPLATES = 32
BYTE_LEVEL, PIECES = "gpt2", "llama"
KINDS = (BYTE_LEVEL, PIECES)


SPECIAL_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "bos_token": "tokenizer.ggml.bos_token_id",
        "eos_token": "tokenizer.ggml.eos_token_id",
        "unk_token": "tokenizer.ggml.unknown_token_id",
        "sep_token": "tokenizer.ggml.seperator_token_id",
        "pad_token": "tokenizer.ggml.padding_token_id",
    }
)
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def read_gguf(path: Path) -> Vocabulary:
    """The vocabulary of a GGUF file. Raises ModelFileError that names the file and the key."""
    return build_vocabulary(GGUFFile.open(path).metadata, str(path))


def build_vocabulary(metadata: Mapping[str, Any], source: str) -> Vocabulary:
    """The vocabulary that `metadata` describes; `source` is the file's name, for messages."""
    meta = Metadata(metadata, source)
    kind = meta.text("tokenizer.ggml.model", "")
    if kind not in KINDS:
        raise meta.error("tokenizer.ggml.model", f"{kind[:80]!r} is not supported; supported are {' and '.join(KINDS)}")
    tokens = meta.strings("tokenizer.ggml.tokens")
    if not 1 <= len(tokens) <= MAX_VOCAB_SIZE:
        raise meta.error("tokenizer.ggml.tokens", f"{len(tokens)} tokens, must be 1 to {MAX_VOCAB_SIZE}")
    special_ids = {name: meta.token_id(key, len(tokens)) for name, key in SPECIAL_KEYS.items()}
    ends = [meta.token_id(key, len(tokens)) for key in END_KEYS]
    vocabulary = Vocabulary(
        source=source,
        backend=tokenizers.Tokenizer(models.BPE()),
        vocab_size=len(tokens),
        bos_token_id=special_ids["bos_token"],
        eos_token_ids=list(dict.fromkeys(i for i in ends if i is not None)),
        special_tokens={name: tokens[i] for name, i in special_ids.items() if i is not None},
        chat_templates=_templates(meta),
    )
    if kind == BYTE_LEVEL:
        _byte_level(meta, tokens, vocabulary)
    else:
        from octavo.tokenizer.gguf_pieces import add_pieces  # noqa: PLC0415 - most vocabularies need nothing of SentencePiece

        add_pieces(meta, tokens, vocabulary)
    eos = special_ids["eos_token"]
    if eos is not None and meta.flag("tokenizer.ggml.add_eos_token", False):
        vocabulary.suffix_ids = [eos]
    vocabulary.add_turn_ends()
    return vocabulary


def _byte_level(meta: Metadata, tokens: list[str], vocabulary: Vocabulary) -> None:
    """The parts of a gpt2 vocabulary."""
    pre = meta.text("tokenizer.ggml.pre", "default")
    if pre not in WORD_RULES:
        raise meta.error("tokenizer.ggml.pre", f"{pre[:80]!r} is not known; known are {', '.join(WORD_RULES)}")
    rule = WORD_RULES[pre]
    vocabulary.backend = _bpe(meta, tokens, rule)
    _add_special(meta, vocabulary.backend, tokens)
    bos = vocabulary.bos_token_id
    prefix = [i for name in rule.prefix if (i := vocabulary.backend.token_to_id(name)) is not None]
    if prefix:
        vocabulary.prefix_ids = prefix
    elif bos is not None and meta.flag("tokenizer.ggml.add_bos_token", rule.adds_bos):
        vocabulary.prefix_ids = [bos]


def _bpe(meta: Metadata, tokens: list[str], rule: WordRule) -> tokenizers.Tokenizer:
    """The constructor from Python objects is half again as fast as parsing the same as JSON."""
    merges = meta.strings("tokenizer.ggml.merges")
    # One split of one long text; byte-level tokens hold no white-space, so a newline cannot be part of one.
    parts = "\n".join(merges).replace(" ", "\n").split("\n") if merges else []
    if len(parts) != 2 * len(merges):
        raise meta.error("tokenizer.ggml.merges", "each must be two tokens with one space between them")
    halves = iter(parts)
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(vocab) != len(tokens):
        raise meta.error("tokenizer.ggml.tokens", f"{len(tokens) - len(vocab)} of {len(tokens)} tokens are repeated")
    try:
        model = models.BPE(vocab, list(zip(halves, halves, strict=True)), ignore_merges=rule.ignore_merges)
    except Exception as e:  # the package raises bare Exception, here for a merge whose tokens are not in the vocabulary
        raise meta.error("tokenizer.ggml.merges", str(e)[:200]) from None
    backend = tokenizers.Tokenizer(model)
    apply_rule(backend, rule)
    return backend


def _add_special(meta: Metadata, backend: tokenizers.Tokenizer, tokens: list[str]) -> None:
    """Control and user-defined tokens are found in text as a whole, before any rule of words; only the former are left out of text."""
    key = "tokenizer.ggml.token_type"
    types = meta.metadata.get(key)
    if types is None:
        return
    if not isinstance(types, (array, list)):
        raise meta.error(key, "must be a list of numbers")
    if len(types) != len(tokens):
        raise meta.error(key, f"{len(types)} types for {len(tokens)} tokens")
    if unknown := set(types).difference(range(len(PieceType) + 1)):
        raise meta.error(key, f"{str(next(iter(unknown)))[:40]!r} is no type of a token")
    special, plain = [], []
    for i, kind in enumerate(types):
        if kind == PieceType.CONTROL:
            special.append(AddedToken(tokens[i], special=True, normalized=False))
        elif kind == PieceType.USER_DEFINED:
            plain.append(AddedToken(tokens[i], special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _templates(meta: Metadata) -> dict[str, str]:
    """`tokenizer.chat_template`, and those that `tokenizer.chat_templates` names."""
    templates: dict[str, str] = {}
    if default := meta.text("tokenizer.chat_template", ""):
        templates[DEFAULT_TEMPLATE] = BY_NAME.get(default.lower(), default)
    names = meta.strings("tokenizer.chat_templates") if "tokenizer.chat_templates" in meta.metadata else []
    for name in names[:MAX_TEMPLATES]:
        if text := meta.text(f"tokenizer.chat_template.{name}", ""):
            templates[name] = text
    return templates
