"""Log-probabilities in the shapes of the two routes.

All values are finite: what cannot happen has FLOOR, since JSON has no -Infinity. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from octavo.server.answers import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
)

if TYPE_CHECKING:
    from octavo.client.outputs import Logprob
    from octavo.tokenizer.tokenizer import Tokenizer

FLOOR = -9999.0

Position = Mapping[int, "Logprob"]  # token id -> Logprob: the token itself, and the best ones


class LogprobWriter:
    """Writes positions for one request. `top`: how many of the best tokens it asked for; `as_ids`: name tokens `token_id:N`."""

    def __init__(self, tokenizer: Tokenizer, top: int, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._as_ids = as_ids

    def chat(self, token_ids: Sequence[int], positions: Sequence[Position]) -> ChatLogprobs:
        """OpenAI's chat shape."""
        content = []
        for token_id, position in zip(token_ids, positions, strict=True):
            own = self._entry(token_id, position[token_id])
            best = [self._entry(other, logprob) for other, logprob in self._best(position)]
            content.append(ChatTokenLogprob(own.token, own.logprob, own.bytes, best))
        return ChatLogprobs(content)

    def completion(
        self, token_ids: Sequence[int], positions: Sequence[Position | None], offset: int
    ) -> tuple[CompletionLogprobs, int]:
        """OpenAI's older shape, for tokens whose text begins `offset` characters into the choice's; and where the next one begins."""
        result = CompletionLogprobs([], [], [], [])
        for token_id, position in zip(token_ids, positions, strict=True):
            result.tokens.append(self._name(token_id))
            result.text_offset.append(offset)
            offset += len(self._tokenizer.token_str(token_id))
            if position is None:
                result.token_logprobs.append(None)
                result.top_logprobs.append(None)
                continue
            own = max(position[token_id].logprob, FLOOR)
            result.token_logprobs.append(own)
            top = {self._name(token_id): own}
            for other, logprob in self._best(position):
                top.setdefault(self._name(other), max(logprob.logprob, FLOOR))
            result.top_logprobs.append(top)
        return result, offset

    def _best(self, position: Position) -> list[tuple[int, Logprob]]:
        ranked = [
            (token_id, entry)
            for token_id, entry in position.items()
            if entry.rank is not None and entry.rank <= self._top
        ]
        return sorted(ranked, key=lambda item: item[1].rank or 0)

    def _entry(self, token_id: int, logprob: Logprob) -> TokenLogprob:
        return TokenLogprob(
            self._name(token_id), max(logprob.logprob, FLOOR), list(self._tokenizer.token_bytes(token_id))
        )

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_str(token_id)


def prompt_logprobs(positions: Sequence[Position | None] | None) -> PromptLogprobs | None:
    """vLLM's shape: for each prompt token null or a map by token id."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            i: PromptLogprob(max(entry.logprob, FLOOR), entry.rank, entry.decoded_token)
            for i, entry in position.items()
        }
        for position in positions
    ]
