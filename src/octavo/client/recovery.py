"""Which requests a fresh engine is given after a crash, and when. Pure: told of crashes and outputs, it answers with requests.

A crash may be nobody's fault (the kernel was short of memory), or one request's, and then it will happen again. The rule finds that
request and lets no other pay for it:

    A request's *strikes* are the crashes in a row in which the engine held it, with no output for it since.
    After a crash, all are resent together, as long as nobody has more than one strike.
    Otherwise those with two or more are sent one by one, most strikes first: the next one when the one before has brought an
    output or has ended. All others, new ones too, wait until the last of them has.
    A request is given up only when the engine dies while it holds that request alone, for its third time or more.

So an innocent request is never given up, whatever the guilty one does; a guilty one costs at most a few restarts. A request that kills the
engine only in company is never alone when it does: the limit on restarts ends that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")

STRIKES_FOR_TRIAL = 2
STRIKES_TO_GIVE_UP = 3


class Recovery(Generic[T]):
    """Holds requests back while an engine restarts and while suspects are tried. Ids are those of engine requests; T is what is sent."""

    def __init__(self) -> None:
        self._strikes: dict[str, int] = {}
        self._held: dict[str, T] = {}  # not yet sent to this engine, in the order in which they will be
        self._trial: str | None = None
        self._restarting = False

    @property
    def active(self) -> bool:
        """Whether outputs and ends must be told here, and new requests must ask."""
        return bool(self._restarting or self._held or self._strikes or self._trial)

    @property
    def num_held(self) -> int:
        """Requests that wait for an engine."""
        return len(self._held)

    def crashed(self, in_flight: Mapping[str, T]) -> str | None:
        """The engine died with these requests unfinished (sent or held). Returns the id of the one to give up, if there is one."""
        sent = [id_ for id_ in in_flight if id_ not in self._held]
        strikes = {id_: self._strikes.get(id_, 0) + (id_ not in self._held) for id_ in in_flight}
        guilty = sent[0] if len(sent) == 1 and strikes[sent[0]] >= STRIKES_TO_GIVE_UP else None
        if guilty is not None:
            del strikes[guilty]
        self._strikes = {id_: count for id_, count in strikes.items() if count}
        self._held = {id_: in_flight[id_] for id_ in sorted(strikes, key=self._trial_order)}
        self._trial = None
        self._restarting = True
        return guilty

    def restarted(self) -> list[T]:
        """A fresh engine is ready. Returns what to send to it now, in order."""
        self._restarting = False
        return self._release()

    def hold(self, id_: str, request: T) -> bool:
        """Whether a new request must wait; it then comes with a later answer."""
        if not (self._restarting or self._held or self._trial):
            return False
        self._held[id_] = request
        return True

    def news(self, ids: Iterable[str]) -> list[T]:
        """These requests had an output or have ended. Returns what to send now."""
        for id_ in ids:
            self._strikes.pop(id_, None)
            self._held.pop(id_, None)
            if id_ == self._trial:
                self._trial = None
        return self._release()

    def _release(self) -> list[T]:
        if self._restarting or self._trial is not None or not self._held:
            return []
        first = next(iter(self._held))
        if self._strikes.get(first, 0) >= STRIKES_FOR_TRIAL:
            self._trial = first
            return [self._held.pop(first)]
        released, self._held = list(self._held.values()), {}
        return released

    def _trial_order(self, id_: str) -> int:
        count = self._strikes.get(id_, 0)
        return -count if count >= STRIKES_FOR_TRIAL else 0
