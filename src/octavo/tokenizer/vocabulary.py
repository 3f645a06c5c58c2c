"""What any source of a tokenizer comes down to, and the checks that all sources share.

Knows the `tokenizers` package. Does not know how a folder or a GGUF file is laid out, nor what text is encoded later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path

import tokenizers

from octavo.errors import ModelFileError

MAX_TOKENIZER_BYTES = 100 << 20
MAX_JSON_BYTES = 16 << 20
MAX_VOCAB_SIZE = 1 << 22
DEFAULT_TEMPLATE = "default"

# Tokens that end a turn in the well-known chat formats. A checkpoint whose configuration names only an end of document still means
# them if its own template closes a turn with one.
TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|eom_id|>",
    "<|endofturn|>",
    "<|return|>",
    "<|call|>",
)


class PieceType(IntEnum):
    """What a piece is for; the numbers are those of the file, and of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class PieceLead(Enum):
    """Which mark of a space at the begin of a text is none, in a vocabulary of SentencePiece's own format."""

    KEPT = "kept"  # all are spaces
    FIRST = "first"  # that of the first piece was put there by the encoder
    ALL = "all"  # the encoder leaves no space at the begin of a text


@dataclass(slots=True, kw_only=True)
class Vocabulary:
    """A built tokenizer with the facts that the checkpoint's files tell beside it.

    `prefix_ids` and `suffix_ids` go around a text encoded with special tokens, on top of the backend's own post-processor.
    `special_tokens` are the names that chat templates know (`bos_token`, ...). `chat_templates` maps a name to its text.
    `opening` goes in front of a text that does not begin with a special token. `expansions` are ids of the backend that stand for
    several: words that are special only next to one another. `unwritten_ids` are special tokens that no text gives. `piece_lead` says
    that tokens are SentencePiece's pieces, decoded as SentencePiece does; None for whatever the backend's decoder says.
    """

    source: str
    backend: tokenizers.Tokenizer
    vocab_size: int
    bos_token_id: int | None = None
    eos_token_ids: list[int] = field(default_factory=list)
    prefix_ids: list[int] = field(default_factory=list)
    suffix_ids: list[int] = field(default_factory=list)
    special_tokens: dict[str, str] = field(default_factory=dict)
    chat_templates: dict[str, str] = field(default_factory=dict)
    opening: str = ""
    expansions: dict[int, list[int]] = field(default_factory=dict)
    unwritten_ids: list[int] = field(default_factory=list)
    piece_lead: PieceLead | None = None

    def add_turn_ends(self) -> None:
        """Adds to the end-of-sequence ids the special turn ends that the default template writes."""
        template = self.chat_templates.get(DEFAULT_TEMPLATE, "")
        special = {token.content: i for i, token in self.backend.get_added_tokens_decoder().items() if token.special}
        for token in TURN_ENDS:
            if token in special and token in template and special[token] not in self.eos_token_ids:
                self.eos_token_ids.append(special[token])


def read_limited(path: Path, limit: int) -> bytes:
    """The bytes of a file of at most `limit` bytes; ModelFileError if it is larger or cannot be read."""
    try:
        with path.open("rb") as f:
            data = f.read(limit + 1)
    except OSError as e:
        raise ModelFileError(f"{path}: cannot be read: {e.strerror}") from None
    if len(data) > limit:
        raise ModelFileError(f"{path}: larger than {limit >> 20} MiB")
    return data
