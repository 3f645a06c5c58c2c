"""The order of service: who is admitted first, and therefore who is preempted last; and the queue in that order.

Within one engine the order is total and never changes: a preempted request goes back to its old place, before all that came
after it. Knows nothing of blocks, budgets or steps.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from octavo.engine.request import Request
from octavo.protocol import EngineCoreRequest


def order_key(policy: str, message: EngineCoreRequest, sequence: int) -> tuple[int, float, int]:
    """Sorts requests by arrival ("fcfs"), or by priority and then arrival ("priority"; a smaller number is served first).

    `sequence` is a running number: it decides between equal times, and keeps the siblings of a family together.
    """
    priority = message.priority if policy == "priority" else 0
    return priority, message.arrival_time, sequence


class WaitingQueue:
    """Requests by key. Adding and taking cost O(log n); a request that ends while it waits costs O(1), amortised."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Request]] = []
        self._num_finished = 0  # still in the heap

    def __len__(self) -> int:
        return len(self._heap) - self._num_finished

    def push(self, request: Request) -> None:
        heappush(self._heap, (request.key, request))

    def peek(self) -> Request:
        """The first one. The queue must not be empty."""
        while self._heap[0][1].is_finished:
            heappop(self._heap)
            self._num_finished -= 1
        return self._heap[0][1]

    def pop(self) -> Request:
        """Take the first one out."""
        request = self.peek()
        heappop(self._heap)
        return request

    def note_finished(self) -> None:
        """To be told each time that a request in here has finished. It is dropped when it comes to the front, or by a sweep."""
        self._num_finished += 1
        if self._num_finished * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[1].is_finished]
            heapify(self._heap)
            self._num_finished = 0
