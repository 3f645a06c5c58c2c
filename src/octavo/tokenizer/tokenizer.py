"""Text to token ids and back.

`Tokenizer` wraps the `tokenizers` package for encoding. Decoding is done here, from the true bytes of each token, wherever the decoder
is one of the usual kinds (byte-level, or SentencePiece's), so that streaming and one-shot decoding are the same arithmetic; see
`detokenizer` for streams and `chat_template` for conversations. Knows no model and no request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from octavo.errors import ConfigError, InvalidRequestError, ModelFileError
from octavo.tokenizer.folder_vocab import read_eos_ids, read_folder
from octavo.tokenizer.gguf_vocab import read_gguf
from octavo.tokenizer.vocabulary import DEFAULT_TEMPLATE, Vocabulary

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class DecoderKind(Enum):
    """How tokens become text."""

    BYTE_LEVEL = "byte_level"  # every character of a token stands for a byte
    BYTE_FALLBACK = "byte_fallback"  # a mark stands for a space, <0x0A> for a byte
    METASPACE = "metaspace"  # a mark stands for a space
    OTHER = "other"  # only the package knows


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
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.decoder_kind, self._mark, self.lead = _decoder_kind(self._backend)
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
        own = read_eos_ids(path) if path.is_dir() else []
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
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, *, param: str | None = None
    ) -> list[list[int]]:
        """`encode` of many texts, in parallel."""
        for text in texts:
            check_text(text, param)
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        if not add_special_tokens:
            return [encoding.ids for encoding in encodings]
        return [[*self._prefix, *encoding.ids, *self._suffix] for encoding in encodings]

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
        gives up the whole run of them, which no stream could do; here each invalid sequence is one U+FFFD.

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
        data = (
            b"".join([self.first_bytes(ids[0]), *(table[i] for i in ids[1:])])
            if self.lead
            else b"".join([table[i] for i in ids])
        )
        text = data.decode("utf-8", "replace")
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
        return piece if isinstance(piece, str) else piece.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token contributes to the text, b"" for an id beyond the vocabulary."""
        value: bytes = self._bytes[token_id]
        return value

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary, such as `<|im_end|>`."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def first_bytes(self, token_id: int) -> bytes:
        """The bytes of a token that opens a text: SentencePiece's mark of a word's begin is no space there."""
        if self.decoder_kind is not DecoderKind.METASPACE:
            return self.token_bytes(token_id)
        return (self._name(token_id)).replace(self._mark, "").encode()

    @cached_property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token: n bytes of text are at least n / max_token_bytes tokens, known without encoding."""
        return max(len(self._token_bytes(i)) for i in range(self.vocab_size))

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
        if self.decoder_kind is DecoderKind.BYTE_FALLBACK and (byte := _BYTE_TOKEN.fullmatch(name)):
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


def strip_lead(text: str, most: int) -> str:
    """`text` without its first spaces, at most `most` of them."""
    count = min(most, len(text) - len(text.lstrip(" ")))
    return text[count:]


def _read(path: Path) -> Vocabulary:
    if path.is_dir():
        return read_folder(path)
    if path.suffix == ".gguf":
        return read_gguf(path)
    if path.name.endswith(".json"):
        return read_folder(path.parent, path)
    raise ModelFileError(f"{path}: a tokenizer is a folder with tokenizer.json, or a .gguf file")


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes of Latin-1 stand for themselves, the others, in order, for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {**{chr(b): b for b in printable}, **{chr(0x100 + i): b for i, b in enumerate(others)}}


BYTE_OF_CHARACTER = _byte_characters()


def _decoder_kind(backend: Any) -> tuple[DecoderKind, str, int]:
    """The kind, the mark that stands for a space, and how many leading spaces are no text (any number above 0 for METASPACE)."""
    if backend.decoder is None:
        return DecoderKind.OTHER, "", 0
    state = msgspec.json.decode(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return DecoderKind.BYTE_LEVEL, "", 0
    if kinds == ["Metaspace"]:
        return (
            DecoderKind.METASPACE,
            str(steps[0]["replacement"]),
            0 if steps[0].get("prepend_scheme") == "never" else 1,
        )
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
        replace, strip = steps[0], steps[3] if len(steps) > 3 else {"content": " ", "start": 0, "stop": 0}
        mark = replace["pattern"].get("String")
        if mark and replace["content"] == " " and strip["content"] == " " and strip["stop"] == 0:
            return DecoderKind.BYTE_FALLBACK, str(mark), int(str(strip["start"]))
    return DecoderKind.OTHER, "", 0
