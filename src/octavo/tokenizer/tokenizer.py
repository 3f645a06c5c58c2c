"""Text to token ids and back.

`Tokenizer` wraps the `tokenizers` package for encoding. Decoding is done here, from the true bytes of each token, wherever the decoder
is one of the usual kinds (byte-level, or SentencePiece's), so that streaming and one-shot decoding are the same arithmetic; see
`detokenizer` for streams and `chat_template` for conversations. Knows no model and no request.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, InvalidRequestError, ModelFileError
from octavo.tokenizer.decoding import (
    BY_BYTE_TOKENS,
    BYTE_OF_CHARACTER,
    EACH_BYTE,
    EACH_SEQUENCE,
    MARK,
    WITHOUT_UNKNOWN,
    DecoderKind,
    decoder_of,
    most_shrink,
    strip_lead,
)
from octavo.tokenizer.gguf_vocab import read_gguf
from octavo.tokenizer.vocabulary import DEFAULT_TEMPLATE, PieceLead, Vocabulary

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTable(dict[int, Any]):
    """A fact about each token, computed when it is first asked for: a start must not pay for a whole vocabulary."""

    def __init__(self, compute: Callable[[int], Any]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> Any:
        value = self[token_id] = self._compute(token_id)
        return value


class Tokenizer:
    """A model's vocabulary at work. Thread-safe once built.

    Attributes:
        vocab_size: ids are 0..vocab_size-1; a model may have more rows, which decode to nothing.
        bos_token_id: None if the checkpoint names none.
        eos_token_ids: ids that end a generation, the checkpoint's main one first.
        special_ids: ids that `skip_special_tokens` leaves out of text.
        errors: name of the codec error handler by which bytes become text.
        special_tokens: `bos_token` etc. and their text, as chat templates name them.
        chat_templates: by name; `chat_template` is the default one or None.
        pieces: for each choice of skip_special_tokens, id -> text, or bytes where a token is not whole characters.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.source = vocabulary.source
        self.vocab_size = vocabulary.vocab_size
        self.bos_token_id = vocabulary.bos_token_id
        self.eos_token_ids = vocabulary.eos_token_ids
        self.special_tokens = vocabulary.special_tokens
        self.chat_templates = vocabulary.chat_templates
        self._backend = vocabulary.backend
        self._prefix = vocabulary.prefix_ids
        self._suffix = vocabulary.suffix_ids
        added = self._backend.get_added_tokens_decoder()
        self.added_tokens: Mapping[int, str] = {i: token.content for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special).union(vocabulary.unwritten_ids)
        self.decoder_kind, self._mark, self.lead = decoder_of(self._backend)
        self._piece_lead = vocabulary.piece_lead
        if self._piece_lead is not None:
            self.decoder_kind, self._mark = DecoderKind.SENTENCEPIECE, MARK
            self.lead = 0 if self._piece_lead is PieceLead.KEPT else 1
        self.errors = EACH_BYTE if self.decoder_kind in BY_BYTE_TOKENS else EACH_SEQUENCE
        self._opening = vocabulary.opening
        self._special_texts = tuple(token.content for token in added.values() if not token.normalized)
        self._expansions = vocabulary.expansions
        self._bytes = TokenTable(self._token_bytes)
        self.pieces = {False: TokenTable(self._piece), True: TokenTable(self._visible_piece)}

    @staticmethod
    def load(path: Path, tokenizer: str | None = None) -> Tokenizer:
        """The tokenizer of the checkpoint at `path`, a folder or a .gguf file, or the one at `tokenizer` in its place.

        With `tokenizer` the end-of-sequence ids of the checkpoint itself still hold. Raises ModelFileError or ConfigError.
        """
        if tokenizer is None:
            return Tokenizer(_read(path))
        other = Path(tokenizer).expanduser()
        if not other.exists():
            raise ConfigError(f"tokenizer = {tokenizer!r}: no such file or folder")
        vocabulary = _read(other)
        own = _eos_ids(path) if path.is_dir() else []
        vocabulary.eos_token_ids.extend(
            i for i in own if i not in vocabulary.eos_token_ids and i < vocabulary.vocab_size
        )
        return Tokenizer(vocabulary)

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    # Encoding

    def encode(self, text: str, add_special_tokens: bool = True, *, param: str | None = None) -> list[int]:
        """Token ids of `text`. Special tokens written out in the text become their ids.

        Raises InvalidRequestError (with `param`) for lone surrogates, which no UTF-8 can hold.
        """
        check_text(text, param)
        ids = self._expanded(self._backend.encode(self._opened(text), add_special_tokens=add_special_tokens).ids)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, *, param: str | None = None
    ) -> list[list[int]]:
        """`encode` of many texts, in parallel."""
        for text in texts:
            check_text(text, param)
        opened = [self._opened(text) for text in texts]
        encodings = self._backend.encode_batch_fast(opened, add_special_tokens=add_special_tokens)
        if not add_special_tokens:
            return [self._expanded(encoding.ids) for encoding in encodings]
        return [[*self._prefix, *self._expanded(encoding.ids), *self._suffix] for encoding in encodings]

    def _opened(self, text: str) -> str:
        if not self._opening or not text or text.startswith(self._special_texts):
            return text
        return self._opening + text

    def _expanded(self, ids: list[int]) -> list[int]:
        if not self._expansions or self._expansions.keys().isdisjoint(ids):
            return ids
        return [part for i in ids for part in self._expansions.get(i, (i,))]

    # Decoding

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        *,
        param: str | None = None,
    ) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Equal to the package's decoding but for one thing: where byte tokens of a SentencePiece vocabulary are not all valid, the package
        gives up the whole run of them, which no stream could do; here, as in SentencePiece itself, each byte that is not part of a
        character is one U+FFFD. Of a vocabulary in SentencePiece's own format (`tokenizer.model`, GGUF) the text is SentencePiece's, but
        that its unknown piece is a special token like any other.

        Raises InvalidRequestError (with `param`) for an id that is not in the vocabulary.
        """
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(f"token id {token_id}: must be in 0..{self.vocab_size - 1}", param)
        if self.decoder_kind is DecoderKind.OTHER:
            return self.decode_other(ids, skip_special_tokens, spaces_between_special_tokens)
        if skip_special_tokens:
            special = self.special_ids
            ids = [i for i in ids if i not in special]
        if not ids:
            return ""
        table = self._bytes
        parts = self._leading_parts(ids) if self.lead else []
        text = b"".join([*parts, *(table[i] for i in ids[len(parts) :])]).decode("utf-8", self.errors)
        return strip_lead(text, self.lead) if self.decoder_kind is DecoderKind.BYTE_FALLBACK else text

    def decode_other(self, ids: Sequence[int], skip_special_tokens: bool, spaces_between_special_tokens: bool) -> str:
        """By the package's decoder. Without spaces between special tokens, an added token behind another is its bare content."""
        if spaces_between_special_tokens or skip_special_tokens:
            return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        parts: list[str] = []
        run: list[int] = []  # with the token before it in front, for decoders that look at a neighbour
        num_context = 0
        for before, token_id in zip([None, *ids], ids, strict=False):
            if before in self.added_tokens and token_id in self.added_tokens:
                parts += [self._decode_behind(run, num_context), self.added_tokens[token_id]]
                run, num_context = [token_id], 1
            else:
                run.append(token_id)
        return "".join([*parts, self._decode_behind(run, num_context)])

    def _decode_behind(self, ids: list[int], num_context: int) -> str:
        """The text that the ids behind the first `num_context` add to it."""
        decode = self._backend.decode
        before: str = decode(ids[:num_context], skip_special_tokens=False)
        text: str = decode(ids, skip_special_tokens=False)
        return text[len(before) :]

    def token_str(self, token_id: int) -> str:
        """The text of one token by itself: U+FFFD for bytes that are not whole characters, "" for an id beyond the vocabulary."""
        piece = self.pieces[False][token_id]
        return piece if isinstance(piece, str) else piece.decode("utf-8", self.errors)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token contributes to the text, b"" for an id beyond the vocabulary."""
        value: bytes = self._bytes[token_id]
        return value

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary, such as `<|im_end|>`."""
        found: int | None = self._backend.token_to_id(token)
        return found

    @property
    def lead_is_in_tokens(self) -> bool:
        """Whether the token that opens a text must be taken by `first_bytes`."""
        return self.lead > 0 and self.decoder_kind in (DecoderKind.METASPACE, DecoderKind.SENTENCEPIECE)

    def first_bytes(self, token_id: int) -> bytes:
        """The bytes of a token that opens a text: SentencePiece's mark of a word's begin is no space there."""
        if self.decoder_kind is DecoderKind.METASPACE:
            return self._name(token_id).replace(self._mark, "").encode()
        data = self.token_bytes(token_id)
        if self.decoder_kind is DecoderKind.SENTENCEPIECE and self._name(token_id).startswith(self._mark):
            return data[1:]
        return data

    def still_opens(self, token_id: int) -> bool:
        """Whether the token behind this one, which opened a text, opens it as well."""
        if self._piece_lead is PieceLead.ALL:
            return not self.first_bytes(token_id)
        return not self.token_bytes(token_id)

    def _leading_parts(self, ids: Sequence[int]) -> list[bytes]:
        parts = []
        for token_id in ids:
            parts.append(self.first_bytes(token_id))
            if not self.still_opens(token_id):
                break
        return parts

    @cached_property
    def max_token_bytes(self) -> int:
        """The most bytes of text that one token can stand for: n bytes are at least n / max_token_bytes tokens, known without encoding.

        Where a normaliser may leave out any amount of text there is no such number, and this is larger than any text.
        """
        shrink = most_shrink(self._backend) if self.decoder_kind in WITHOUT_UNKNOWN else None
        if shrink is None:
            return sys.maxsize
        return max(len(self._token_bytes(i)) for i in range(self.vocab_size)) * shrink

    # Tables

    def _name(self, token_id: int) -> str:
        return (self._backend.id_to_token(token_id) if token_id >= 0 else None) or ""

    def _token_bytes(self, token_id: int) -> bytes:
        name = self._name(token_id)
        if self.decoder_kind is DecoderKind.BYTE_LEVEL:
            if token_id in self.added_tokens:
                return name.encode()
            try:
                return bytes([BYTE_OF_CHARACTER[c] for c in name])
            except KeyError:  # not made of byte characters, so it is text as it stands
                return name.encode()
        if self.decoder_kind is DecoderKind.OTHER:
            return str(self._backend.decode([token_id], skip_special_tokens=False)).encode() if name else b""
        if self.decoder_kind in BY_BYTE_TOKENS and (byte := _BYTE_TOKEN.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        return name.replace(self._mark, " ").encode()

    def _piece(self, token_id: int) -> str | bytes:
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    def _visible_piece(self, token_id: int) -> str | bytes:
        return "" if token_id in self.special_ids else self._piece(token_id)


def check_text(text: str, param: str | None = None) -> None:
    """Raises InvalidRequestError for lone surrogates, which are no characters."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise InvalidRequestError(
            f"character {e.start} is a lone surrogate, which is not valid Unicode text", param
        ) from None


def _read(path: Path) -> Vocabulary:
    if path.suffix == ".gguf":
        return read_gguf(path)
    if path.is_dir() or path.suffix in (".json", ".tiktoken") or ".model" in path.suffixes:
        from octavo.tokenizer.folder_vocab import read_folder  # noqa: PLC0415 - a start from a GGUF file needs none of it

        return read_folder(path) if path.is_dir() else read_folder(path.parent, path)
    raise ModelFileError(
        f"{path}: a tokenizer is a folder with one, a .json, .model or .tiktoken file of one, or a .gguf file"
    )


def _eos_ids(folder: Path) -> list[int]:
    from octavo.tokenizer.folder_files import FolderFiles  # noqa: PLC0415 - as above

    return FolderFiles(folder).eos_ids()
