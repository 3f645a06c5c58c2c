"""Small vocabularies of byte-level tokens with ranks, trained when they are asked for. Takes nothing from Octavo but the alphabet of bytes."""

import base64
from collections import Counter
from functools import cache

import regex
from line_corpus import TRAINING

from octavo.tokenizer.decoding import BYTE_OF_CHARACTER

# The families' published expressions.
QWEN = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
LLAMA = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDINGS}?|\p{{N}}{{1,3}}|{REST}"
TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}|{REST}"
QWEN35 = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
NUM_RANKS = 256 + 350


@cache
def ranks(pattern: str) -> dict[bytes, int]:
    """Byte-pair training on the words that `pattern` cuts."""
    words = Counter(word for line in TRAINING[::3] for word in regex.findall(pattern, line))
    split = {word: [bytes([b]) for b in word.encode()] for word in words}
    # Ids of single bytes in an order of their own, as in every published file.
    found = {bytes([b]): i for i, b in enumerate([*range(33, 256), *range(33)])}
    while len(found) < NUM_RANKS:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, count in words.items():
            for pair in zip(split[word], split[word][1:], strict=False):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        found.setdefault(best[0] + best[1], len(found))
        for word, parts in split.items():
            if best[0] in parts:
                split[word] = joined(parts, best)
    return found


def joined(parts: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    out: list[bytes] = []
    for part in parts:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return out


def as_characters(token: bytes) -> str:
    return "".join(CHARACTER_OF_BYTE[b] for b in token)


def lines_of(found: dict[bytes, int]) -> bytes:
    """A rank file's bytes."""
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in found.items())
