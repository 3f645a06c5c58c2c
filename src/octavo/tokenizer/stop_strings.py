"""Stop strings in a stream of text.

A stop string ends the text at the first place where one is complete, wherever the stream happened to be cut. Text that could still
become a stop string is held back, no more of it than that; so nothing of a stop string, and nothing behind it, ever leaves. Knows no
tokens and no requests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


class StopStrings:
    """The filter of one stream.

    Of several stop strings the one that is complete first wins, and of those that end at the same character the longest: the answer
    is a function of the text alone, not of its pieces. Invariant: `_held` is a proper beginning of some stop string.
    """

    __slots__ = ("_first", "_held", "_include", "_longest", "_stops")

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include_in_output
        self._longest = max(map(len, self._stops))
        self._first = re.compile("[" + "".join(re.escape(c) for c in sorted({s[0] for s in self._stops})) + "]")
        self._held = ""

    def push(self, delta: str, active: bool = True) -> tuple[str, str | None]:
        """The text that may leave, and the stop string that `delta` completes, behind which nothing more may be pushed.

        While not `active` a complete stop string is text like any other.
        """
        if not self._held and not self._first.search(delta):
            return delta, None
        text = self._held + delta
        if active and (match := self._match(text)):
            start, end, stop = match
            self._held = ""
            return text[: end if self._include else start], stop
        keep = self._num_open(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What is held, at a stream's end without a stop string."""
        held, self._held = self._held, ""
        return held

    def _match(self, text: str) -> tuple[int, int, str] | None:
        """Start, end and stop string of the match that ends first, of those that end in the new part of `text`."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < (best[1], best[0])):
                best = start, start + len(stop), stop
        return best

    def _num_open(self, text: str) -> int:
        """How many characters at the end of `text` begin a stop string that is not complete."""
        for found in self._first.finditer(text, max(0, len(text) - self._longest + 1)):
            tail = text[found.start() :]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                return len(tail)
        return 0
