"""The best cut of a text under a Unigram model: the pieces whose scores add up to most.

SentencePiece's arithmetic to the last bit (sums are rounded to float32 where it rounds them), because equal sums are common and the
rounding decides between them; the `tokenizers` package sums in float64 and differs. In Python, a few microseconds for each character.
Knows nothing of ids: it cuts, the model behind it looks up.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from octavo.tokenizer.vocabulary import PieceType

UNKNOWN_PENALTY = 10.0
RESET_ABOVE = 100_000.0
USER_DEFINED_SCORE = 0.1  # for each byte but the first: better than any normal piece, the longest best


class UnigramCutter:
    """A pre-tokenizer of the package: splits each text into pieces, and runs of characters that no piece covers.

    `_scores` maps a piece to its score, and the beginning of a piece that is none itself to None.
    """

    def __init__(self, pieces: Sequence[str], scores: Sequence[float], types: Sequence[int], unk_id: int) -> None:
        normal = [score for score, kind in zip(scores, types, strict=True) if kind == PieceType.NORMAL]
        worst = min(normal, default=0.0)
        self._scores: dict[str, float | None] = {}
        for piece, score, kind in zip(pieces, scores, types, strict=True):
            if kind == PieceType.NORMAL:
                self._scores[piece] = score
            elif kind == PieceType.USER_DEFINED:
                self._scores[piece] = _rounded(USER_DEFINED_SCORE * (len(piece.encode()) - 1))
        for piece in [piece for piece, score in self._scores.items() if score is not None]:
            for end in range(len(piece) - 1, 0, -1):
                if piece[:end] in self._scores:
                    break
                self._scores[piece[:end]] = None
        self._unknown = _rounded(worst - UNKNOWN_PENALTY)

    def pre_tokenize(self, text: Any) -> None:
        """Splits a `tokenizers.PreTokenizedString` in place."""
        text.split(self._split)

    def _split(self, _index: int, stretch: Any) -> list[Any]:
        return [stretch[start:end] for start, end in self.cut(str(stretch.normalized))]

    def cut(self, text: str) -> list[tuple[int, int]]:
        """Start and end of each piece of `text`, in order; characters without a piece, in a row, are one."""
        starts, known = self._best(text)
        cuts: list[tuple[int, int]] = []
        end = len(text)
        while end > 0:
            start = starts[end]
            if not known[end] and cuts and not known[cuts[-1][1]]:
                cuts[-1] = (start, cuts[-1][1])
            else:
                cuts.append((start, end))
            end = start
        return cuts[::-1]

    def _best(self, text: str) -> tuple[list[int], bytearray]:
        """For each end: where the last piece of the best cut up to there begins, and whether it is a piece at all."""
        size = len(text)
        best = array("f", bytes(4 * (size + 1)))
        cell = array("f", (0.0,))  # what is stored in it is rounded to float32
        starts = [-1] * (size + 1)
        known = bytearray(size + 1)
        scores = self._scores
        farthest = 0
        for start in range(size):
            before = best[start]
            if abs(before) > RESET_ABOVE:
                _count_from(start, farthest, best, starts)
                before = 0.0
            single = False
            for end in range(start + 1, size + 1):
                piece = text[start:end]
                if piece not in scores:
                    break
                score = scores[piece]
                if score is None:
                    continue
                cell[0] = score + before
                if starts[end] < 0 or cell[0] > best[end]:
                    best[end], starts[end], known[end] = cell[0], start, 1
                farthest = max(farthest, end)
                single = single or end == start + 1
            if not single:
                end = start + 1
                farthest = max(farthest, end)
                cell[0] = self._unknown + before
                if starts[end] < 0 or cell[0] > best[end]:
                    best[end], starts[end], known[end] = cell[0], start, 0
        return starts, known


def _count_from(start: int, farthest: int, best: array[float], starts: list[int]) -> None:
    """Takes the sum at `start` from all sums there and behind it: far from zero float32 could not tell small differences any more."""
    offset = best[start]
    for i in range(start, farthest + 1):
        if i == start or starts[i] >= 0:
            best[i] = best[i] - offset


def _rounded(value: float) -> float:
    """To the nearest float32."""
    return array("f", (value,))[0]
