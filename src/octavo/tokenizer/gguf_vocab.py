"""A tokenizer from a GGUF file's metadata: byte-level BPE (`tokenizer.ggml.model` = gpt2).

Tokens, merges and token types come from the file; how text is cut into words before BPE is known only by a name
(`tokenizer.ggml.pre`), so each known name has its rule here and an unknown one is refused: a wrong rule gives a model that seems to
work and is subtly worse. SentencePiece, WordPiece and Unigram vocabularies are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from octavo.errors import ModelFileError
from octavo.gguf_file import GGUFFile
from octavo.tokenizer.vocabulary import DEFAULT_TEMPLATE, MAX_VOCAB_SIZE, Vocabulary

MAX_TEMPLATES = 32


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class WordRule:
    """How text is cut into words: each of `splits` isolates its matches in what the ones before left whole.

    `gpt2_words`: cut at last by GPT-2's own expression. `digits`: every digit is a word. `nfc`: normalise the text first.
    `ignore_merges`: a word that is a token as a whole is that token. `adds_bos`: where the file does not say.
    """

    splits: tuple[str, ...] = ()
    digits: bool = False
    gpt2_words: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_MARKS = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = _CASED % ("", "") + r"|\p{N}" + _MARKS
_GPT4O = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + r"|\p{N}{1,3}" + _MARKS
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES
)

_GPT2_RULE = WordRule(gpt2_words=True)
_DIGITS_RULE = WordRule(digits=True, gpt2_words=True)
_LLAMA3_RULE = WordRule(splits=(_LLAMA3,), ignore_merges=True, adds_bos=True)
_DEEPSEEK_CODER_RULE = WordRule(splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"), digits=True)
WORD_RULES: Mapping[str, WordRule] = MappingProxyType(
    {
        "default": _GPT2_RULE,
        "gpt-2": _GPT2_RULE,
        "gpt2": _GPT2_RULE,
        "smollm": _DIGITS_RULE,
        "starcoder": _DIGITS_RULE,
        "refact": _DIGITS_RULE,
        "llama-bpe": _LLAMA3_RULE,
        "llama3": _LLAMA3_RULE,
        "llama-v3": _LLAMA3_RULE,
        "qwen2": WordRule(splits=(_QWEN2,), nfc=True),
        "tekken": WordRule(splits=(_TEKKEN,), ignore_merges=True, adds_bos=True),
        "gpt-4o": WordRule(splits=(_GPT4O,)),
        "llama4": WordRule(splits=(_GPT4O,), adds_bos=True),
        "deepseek-coder": _DEEPSEEK_CODER_RULE,
        "deepseek-v3": WordRule(splits=(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    }
)

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
    meta = _Metadata(metadata, source)
    kind = meta.text("tokenizer.ggml.model", "")
    if kind != "gpt2":
        raise meta.error("tokenizer.ggml.model", f"{kind!r} is not supported; only byte-level BPE (gpt2) is")
    pre = meta.text("tokenizer.ggml.pre", "default")
    if pre not in WORD_RULES:
        raise meta.error("tokenizer.ggml.pre", f"{pre[:80]!r} is not known; known are {', '.join(WORD_RULES)}")
    rule = WORD_RULES[pre]
    tokens = meta.strings("tokenizer.ggml.tokens")
    if not 1 <= len(tokens) <= MAX_VOCAB_SIZE:
        raise meta.error("tokenizer.ggml.tokens", f"{len(tokens)} tokens, must be 1 to {MAX_VOCAB_SIZE}")

    backend = _bpe(meta, tokens, rule)
    _add_special(meta, backend, tokens)
    special_ids = {name: meta.token_id(key, len(tokens)) for name, key in SPECIAL_KEYS.items()}
    bos, eos = special_ids["bos_token"], special_ids["eos_token"]
    ends = [meta.token_id(key, len(tokens)) for key in END_KEYS]
    vocabulary = Vocabulary(
        source=source,
        backend=backend,
        vocab_size=len(tokens),
        bos_token_id=bos,
        eos_token_ids=list(dict.fromkeys(i for i in ends if i is not None)),
        prefix_ids=[bos] if bos is not None and meta.flag("tokenizer.ggml.add_bos_token", rule.adds_bos) else [],
        suffix_ids=[eos] if eos is not None and meta.flag("tokenizer.ggml.add_eos_token", False) else [],
        special_tokens={name: tokens[i] for name, i in special_ids.items() if i is not None},
        chat_templates=_templates(meta),
    )
    vocabulary.add_turn_ends()
    return vocabulary


class _Metadata:
    """Typed reads of untrusted metadata."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self.metadata = metadata
        self.source = source

    def error(self, key: str, why: str) -> ModelFileError:
        return ModelFileError(f"{self.source}: {key}: {why}")

    def text(self, key: str, default: str) -> str:
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "must be a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "must be a boolean")
        return value

    def strings(self, key: str) -> list[str]:
        value = self.metadata.get(key)
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, list) or set(map(type, value)) - {str}:
            raise self.error(key, "must be a list of strings")
        return value

    def token_id(self, key: str, vocab_size: int) -> int | None:
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
            raise self.error(key, f"{value!r} must be a token id in 0..{vocab_size - 1}")
        return value


def _bpe(meta: _Metadata, tokens: list[str], rule: WordRule) -> tokenizers.Tokenizer:
    """The constructor from Python objects is half again as fast as parsing the same as JSON."""
    merges = meta.strings("tokenizer.ggml.merges")
    # One split of one long text; byte-level tokens hold no white-space, so a newline cannot be part of one.
    parts = "\n".join(merges).replace(" ", "\n").split("\n") if merges else []
    if len(parts) != 2 * len(merges):
        raise meta.error("tokenizer.ggml.merges", "each must be two tokens with one space between them")
    halves = iter(parts)
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    try:
        model = models.BPE(vocab, list(zip(halves, halves, strict=True)), ignore_merges=rule.ignore_merges)
    except Exception as e:  # the package raises bare Exception, here for a merge whose tokens are not in the vocabulary
        raise meta.error("tokenizer.ggml.merges", str(e)[:200]) from None
    backend = tokenizers.Tokenizer(model)
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.splits]
    if rule.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.gpt2_words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    backend.decoder = decoders.ByteLevel()
    return backend


def _add_special(meta: _Metadata, backend: tokenizers.Tokenizer, tokens: list[str]) -> None:
    """Control and user-defined tokens are found in text as a whole, before any rule of words; only the former are left out of text."""
    types = meta.metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return
    if len(types) != len(tokens):
        raise meta.error("tokenizer.ggml.token_type", f"{len(types)} types for {len(tokens)} tokens")
    special, plain = [], []
    for i, kind in enumerate(types):
        if kind == TokenType.CONTROL:
            special.append(AddedToken(tokens[i], special=True, normalized=False))
        elif kind == TokenType.USER_DEFINED:
            plain.append(AddedToken(tokens[i], special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _templates(meta: _Metadata) -> dict[str, str]:
    """`tokenizer.chat_template`, and those that `tokenizer.chat_templates` names."""
    templates: dict[str, str] = {}
    if default := meta.text("tokenizer.chat_template", ""):
        templates[DEFAULT_TEMPLATE] = default
    names = meta.metadata.get("tokenizer.chat_templates", [])
    for name in list(names)[:MAX_TEMPLATES]:
        if isinstance(name, str) and (text := meta.text(f"tokenizer.chat_template.{name}", "")):
            templates[name] = text
    return templates
