"""The order of service: who is admitted first, and who is preempted last; and the queue in that order.

Within one engine the order is total and never changes: a preempted request goes back to its old place, before all that came
after it. Admission departs from it in one way: among the first WINDOW of the queue a shorter prompt may pass longer ones. A request
lets others pass until these have brought, all together, as many tokens to compute as it has itself: so what others' prompts cost it is at most its
own prompt once more, and after that nobody passes it. Knows nothing of blocks, budgets or steps.
"""

from __future__ import annotations

from bisect import insort
from heapq import heapify, heappop, heappush
from itertools import pairwise

from octavo.engine.request import Request
from octavo.protocol import EngineCoreRequest

WINDOW = 32  # requests at the front of the queue among which a shorter one may pass a longer one


def order_key(policy: str, message: EngineCoreRequest, sequence: int) -> tuple[int, float, int]:
    """Sorts requests by arrival ("fcfs"), or by priority and then arrival ("priority"; a smaller number is served first).

    `sequence` is a running number: it decides between equal times, and keeps the siblings of a family together.
    """
    priority = message.priority if policy == "priority" else 0
    return priority, message.arrival_time, sequence


class WaitingQueue:
    """Requests by key. Adding and taking cost O(log n + WINDOW); a request that ends while it waits costs O(1), amortised.

    The first WINDOW are at hand in order, the rest is a heap: no entry of the heap is before one of the window.
    """

    def __init__(self) -> None:
        self._window: list[Request] = []
        self._heap: list[tuple[tuple[int, float, int], Request]] = []
        self._num_finished = 0  # still in here

    def __len__(self) -> int:
        return len(self._window) + len(self._heap) - self._num_finished

    def push(self, request: Request) -> None:
        window = self._window
        if (len(window) < WINDOW and not self._heap) or (window and request.key < window[-1].key):
            insort(window, request, key=_key)
            if len(window) > WINDOW:
                last = window.pop()
                heappush(self._heap, (last.key, last))
        else:
            heappush(self._heap, (request.key, request))

    def window(self) -> list[Request]:
        """The first ones, WINDOW if there are so many, in order. Not to be changed."""
        window = self._window
        if any(request.is_finished for request in window):
            num_before = len(window)
            window[:] = [request for request in window if not request.is_finished]
            self._num_finished -= num_before - len(window)
        while len(window) < WINDOW and self._heap:
            request = heappop(self._heap)[1]
            if request.is_finished:
                self._num_finished -= 1
            else:
                window.append(request)
        return window

    def peek(self) -> Request:
        """The first one. The queue must not be empty."""
        return self.window()[0]

    def take(self, request: Request) -> None:
        """Take one of the window out. Those before it have been passed."""
        window = self._window
        place = window.index(request)
        for earlier in window[:place]:
            earlier.num_passed_tokens += request.num_tokens
        del window[place]

    def note_finished(self) -> None:
        """To be told each time that a request in here has finished. It is dropped when it comes to the front, or by a sweep."""
        self._num_finished += 1
        if self._num_finished * 2 > len(self._window) + len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[1].is_finished]
            heapify(self._heap)
            self._window = [request for request in self._window if not request.is_finished]
            self._num_finished = 0


def shortest_that_may_pass(window: list[Request]) -> Request:
    """Of the first waiting ones, at least one, the shortest that may be admitted before those that came earlier; of equal ones the first.

    All that it passes must have the patience for it, and the same priority. One that was preempted passes nobody and is passed by nobody.
    """
    best, slack = window[0], window[0].patience
    for earlier, request in pairwise(window):
        slack = min(slack, earlier.patience)
        if request.num_preemptions or request.key[0] != best.key[0]:
            break
        if request.num_tokens <= slack and request.num_tokens < best.num_tokens:
            best = request
    return best


def _key(request: Request) -> tuple[int, float, int]:
    return request.key
