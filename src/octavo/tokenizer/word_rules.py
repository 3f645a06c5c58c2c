"""How text is cut into words before byte-level BPE, by the names that GGUF files give the rules (`tokenizer.ggml.pre`).

A wrong rule gives a model that seems to work and is subtly worse, so a name that is not here is refused by whoever looks it up. Knows the
rules and the parts of the `tokenizers` package that carry them out; no vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tokenizers import Regex, decoders, normalizers, pre_tokenizers


@dataclass(frozen=True, slots=True, kw_only=True)
class WordRule:
    """How text is cut into words: each of `splits` isolates its matches in what the ones before left whole.

    `gpt2_words`: cut at last by GPT-2's own expression. `digits`: every digit is a word. `nfc`: normalise the text first.
    `ignore_merges`: a word that is a token as a whole is that token. `adds_bos`: where the file does not say.
    `prefix`: tokens in front of every text.
    """

    splits: tuple[str, ...] = ()
    digits: bool = False
    gpt2_words: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False
    prefix: tuple[str, ...] = ()


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_MARKS = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = _CASED % ("", "") + r"|\p{N}" + _MARKS
_GPT4O = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + r"|\p{N}{1,3}" + _MARKS
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES
)

_GPT2_RULE = WordRule(gpt2_words=True)
_DIGITS_RULE = WordRule(digits=True, gpt2_words=True)
LLAMA3_RULE = WordRule(splits=(LLAMA3,), ignore_merges=True, adds_bos=True)
_LLAMA3_WORDS_RULE = WordRule(splits=(LLAMA3,))
_GLM4_RULE = WordRule(splits=(LLAMA3,), prefix=("[gMASK]", "<sop>"))
_DEEPSEEK_CODER_RULE = WordRule(splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"), digits=True)
WORD_RULES: Mapping[str, WordRule] = MappingProxyType(
    {
        "default": _GPT2_RULE,
        "gpt-2": _GPT2_RULE,
        "gpt2": _GPT2_RULE,
        "phi-2": _GPT2_RULE,
        "smollm": _DIGITS_RULE,
        "starcoder": _DIGITS_RULE,
        "refact": _DIGITS_RULE,
        "llama-bpe": LLAMA3_RULE,
        "llama3": LLAMA3_RULE,
        "llama-v3": LLAMA3_RULE,
        "dbrx": _LLAMA3_WORDS_RULE,
        "smaug-bpe": _LLAMA3_WORDS_RULE,
        "glm4": _GLM4_RULE,
        "chatglm-bpe": _GLM4_RULE,
        "deepseek-r1-qwen": WordRule(splits=(QWEN2,)),
        "qwen35": WordRule(splits=(_QWEN35,), nfc=True),
        "qwen2": WordRule(splits=(QWEN2,), nfc=True),
        "tekken": WordRule(splits=(_TEKKEN,), ignore_merges=True, adds_bos=True),
        "gpt-4o": WordRule(splits=(_GPT4O,)),
        "llama4": WordRule(splits=(_GPT4O,), adds_bos=True),
        "deepseek-coder": _DEEPSEEK_CODER_RULE,
        "deepseek-v3": WordRule(splits=(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    }
)


def apply_rule(backend: Any, rule: WordRule) -> None:
    """Gives a backend of byte-level tokens the rule's normaliser, its cuts and the decoder of bytes."""
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.splits]
    if rule.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.gpt2_words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    backend.decoder = decoders.ByteLevel()
