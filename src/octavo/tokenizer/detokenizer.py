"""Token ids to text, as they come: what is emitted is final, whole characters only, and adds up to the full decode.

A detokenizer belongs to one stream. Most tokens are whole characters and cost one look-up; bytes of a character that is not complete
are held back. Knows no stop strings and no requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from octavo.tokenizer.decoding import REPLACEMENT, DecoderKind, strip_lead
from octavo.tokenizer.tokenizer import Tokenizer

# Tokens of the prompt that the package's decoders may need to see before the first new one.
CONTEXT_TOKENS = 6
# A character is at most four bytes. What has not become whole after this many tokens never will.
MAX_HELD_TOKENS = 16

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """One stream's decoder."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens make final; may be empty."""
        ...

    def flush(self) -> str:
        """The rest at the end of the stream: what is held, with U+FFFD for what is no whole character."""
        ...


def make_detokenizer(
    tokenizer: Tokenizer,
    *,
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
    prompt_token_ids: Sequence[int] | None = None,
) -> Detokenizer:
    """A detokenizer for one stream.

    With `prompt_token_ids` the text goes on behind that prompt, so that a leading space is kept; without, the deltas add up to
    `tokenizer.decode` of the pushed ids.
    """
    if tokenizer.decoder_kind is DecoderKind.OTHER:
        return PackageDetokenizer(tokenizer, skip_special_tokens, spaces_between_special_tokens, prompt_token_ids or [])
    return ByteDetokenizer(tokenizer, skip_special_tokens, opens_text=prompt_token_ids is None)


class ByteDetokenizer:
    """For decoders that give each token its own bytes.

    Invariant: `_plain` is true unless bytes of an incomplete character are held, or nothing was emitted yet and a leading space must go.
    """

    __slots__ = ("_lead", "_pieces", "_plain", "_tokenizer", "_utf8")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, *, opens_text: bool) -> None:
        self._tokenizer = tokenizer
        self._pieces = tokenizer.pieces[skip_special_tokens]
        self._lead = tokenizer.lead if opens_text else 0
        self._plain = not self._lead
        self._utf8 = _utf8_decoder(tokenizer.errors)

    def push(self, token_ids: Sequence[int]) -> str:
        if self._plain and len(token_ids) == 1:
            piece = self._pieces[token_ids[0]]
            if type(piece) is str:
                return piece
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def flush(self) -> str:
        text = self._utf8.decode(b"", True)
        return strip_lead(text, self._lead)

    def _push_one(self, token_id: int) -> str:
        piece: str | bytes = self._pieces[token_id]
        if self._plain and isinstance(piece, str):
            return piece
        if not piece:  # a special token, left out: it neither completes nor opens anything
            return ""
        if self._lead and self._tokenizer.lead_is_in_tokens:
            piece = self._tokenizer.first_bytes(token_id)
            if not self._tokenizer.still_opens(token_id):
                self._lead = 0
            elif not piece:
                return ""
        text = self._utf8.decode(piece.encode() if isinstance(piece, str) else piece)
        if self._lead and text:
            stripped = strip_lead(text, self._lead)
            self._lead = 0 if stripped else self._lead - len(text)
            text = stripped
        self._plain = not self._lead and not self._utf8.getstate()[0]
        return text


class PackageDetokenizer:
    """For any other decoder: decodes a short window again with each token and emits what grew.

    The window opens at the last token but one that was emitted, so that decoders which look at a neighbour see it.
    """

    __slots__ = ("_ids", "_num_emitted", "_skip", "_spaces", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, spaces: bool, prompt_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._spaces = spaces
        self._ids = list(prompt_token_ids[-CONTEXT_TOKENS:])
        self._num_emitted = len(self._ids)

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def flush(self) -> str:
        return self._grown(final=True)

    def _push_one(self, token_id: int) -> str:
        if self._skip and token_id in self._tokenizer.special_ids:
            return ""
        self._ids.append(token_id)
        return self._grown(final=len(self._ids) - self._num_emitted > MAX_HELD_TOKENS)

    def _grown(self, final: bool) -> str:
        before, after = self._decode(self._ids[: self._num_emitted]), self._decode(self._ids)
        if len(after) <= len(before) or (after.endswith(REPLACEMENT) and not final):
            return ""
        self._ids = self._ids[max(0, self._num_emitted - 1) :]
        self._num_emitted = len(self._ids)
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode_other(ids, self._skip, self._spaces)
