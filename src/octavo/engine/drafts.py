"""Drafts by prompt lookup: what followed the last tokens of a sequence where they stood in it before.

A step that computes the draft's rows as well can bring several tokens for little more than the time of one, as weights and KV are read once
(speculative decoding; of its kinds this one needs no second model). The runner samples at each of these rows as it would have without a
draft, and the draft holds as far as it says the same; so it decides how fast tokens come, never which.

    sequence   ... the cat sat on | the mat ... the cat sat on |         the last NGRAM tokens were found: a match
    draft                           the mat ...                          copied from behind the match, beyond the end from itself

A match goes on while it foretells the tokens that come; when it fails, the latest other place is looked for. How often it was right lately
is the chance that a draft's next token holds, and it is learnt whether drafts are computed or not. `worth` weighs that against what a row costs.

Knows one sequence's tokens and seconds; nothing of steps, blocks or other requests.
"""

from __future__ import annotations

from array import array

NGRAM = 3  # tokens that must agree before what followed them is copied
LOOK_BACK = 4096  # tokens in which they are looked for
FIRST_CHANCE = 0.5
CHANCE_RATE = 0.15  # of the latest token in the moving average
MARGIN = 1.25
ID_BYTES = 4


class PromptLookup:
    """The matches of one sequence. `token_ids` is the sequence's own list, which grows; it is followed, never changed."""

    __slots__ = ("_bytes", "_source", "_token_ids", "chance")

    def __init__(self, token_ids: list[int]) -> None:
        self.chance = FIRST_CHANCE  # that the next token of a draft holds, if those before it do
        self._token_ids = token_ids
        self._bytes = bytearray()  # the tokens, for searching; as many as were followed
        self._source: int | None = None  # the place of the token that is foretold

    def draft(self, most: int) -> list[int]:
        """`most` tokens that may come next; none without a match."""
        source = self._source
        if source is None:
            return []
        tokens = self._token_ids[source : source + most]
        while len(tokens) < most:  # the match reaches the end, so what comes repeats what the draft itself says
            tokens += tokens[: most - len(tokens)]
        return tokens

    def follow(self) -> bool:
        """Takes in the tokens that have become known: were they foretold? Whether there is a match now."""
        known = self._token_ids
        new = known[len(self._bytes) // ID_BYTES :]
        if not new:
            return self._source is not None
        if self._source is not None:
            for token in new:
                holds = known[self._source] == token
                self.chance += CHANCE_RATE * (holds - self.chance)
                if not holds:
                    self._source = None
                    break
                self._source += 1
        self._bytes += array("i", new).tobytes()
        if self._source is None:
            self._source = self._search()
        return self._source is not None

    def _search(self) -> int | None:
        """The place behind the latest earlier occurrence of the last NGRAM tokens."""
        data, width = self._bytes, NGRAM * ID_BYTES
        key, end = data[-width:], len(data) - ID_BYTES
        start = max(0, end - LOOK_BACK * ID_BYTES)
        while len(key) == width and (at := data.rfind(key, start, end)) >= 0:
            if at % ID_BYTES == 0:
                return at // ID_BYTES + NGRAM
            end = at + width - 1
        return None


def worth(chance: float, row_seconds: float, token_seconds: float, most: int) -> int:
    """How many tokens of a draft are worth their rows, up to `most`.

    `row_seconds` is what one more row costs, `token_seconds` what a token costs without drafts. The i-th token of a draft holds with chance ** i.
    All streams of the step wait for the row, one gains: so it must pay with a MARGIN, and in a large batch, where a row costs as much as a
    token, none does.
    """
    count, holds = 0, chance
    while count < most and holds * token_seconds > MARGIN * row_seconds:
        count += 1
        holds *= chance
    return count
