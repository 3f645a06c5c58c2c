"""The order of service and the queue. Needs Python only."""

from __future__ import annotations

from engine_driver import make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.policy import WaitingQueue, order_key
from octavo.engine.request import Request, RequestStatus


def make(sequence: int, arrival_time: float = 0.0, priority: int = 0, policy: str = "fcfs") -> Request:
    message = make_request(f"r{sequence}", 3, arrival_time=arrival_time, priority=priority)
    return Request(message, order_key(policy, message, sequence), 64)


def finish(queue: WaitingQueue, request: Request) -> None:
    request.status = RequestStatus.FINISHED
    queue.note_finished()


def pop(queue: WaitingQueue) -> Request:
    first = queue.peek()
    queue.take(first)
    return first


def drain(queue: WaitingQueue) -> list[str]:
    return [pop(queue).request_id for _ in range(len(queue))]


def test_first_come_first_served_ignores_priority() -> None:
    queue = WaitingQueue()
    for request in (make(1, 5.0, priority=-9), make(2, 3.0), make(3, 4.0, priority=9)):
        queue.push(request)
    assert drain(queue) == ["r2", "r3", "r1"]


def test_priority_then_arrival() -> None:
    queue = WaitingQueue()
    for sequence, arrival_time, priority in ((1, 1.0, 1), (2, 2.0, 0), (3, 3.0, -1), (4, 0.5, 1)):
        queue.push(make(sequence, arrival_time, priority, policy="priority"))
    assert drain(queue) == ["r3", "r2", "r4", "r1"]


def test_equal_times_keep_the_order_of_adding() -> None:
    queue = WaitingQueue()
    for sequence in (3, 1, 2):
        queue.push(make(sequence, 7.0))
    assert drain(queue) == ["r1", "r2", "r3"]


def test_who_comes_back_takes_the_old_place() -> None:
    queue = WaitingQueue()
    first, second = make(1), make(2)
    queue.push(first)
    queue.push(second)
    assert pop(queue) is first
    queue.push(first)
    assert queue.peek() is first and len(queue) == 2


def test_finished_ones_are_skipped_wherever_they_are() -> None:
    queue = WaitingQueue()
    requests = [make(i) for i in range(5)]
    for request in requests:
        queue.push(request)
    finish(queue, requests[0])
    finish(queue, requests[3])
    assert len(queue) == 3
    assert queue.peek() is requests[1]
    assert drain(queue) == ["r1", "r2", "r4"]
    assert not queue


def test_the_last_one_may_finish() -> None:
    queue = WaitingQueue()
    request = make(1)
    queue.push(request)
    finish(queue, request)
    assert len(queue) == 0 and not queue


def test_what_has_finished_does_not_pile_up() -> None:
    """Behind a front that cannot be admitted, clients may come and go for days."""
    queue = WaitingQueue()
    queue.push(make(0))
    for sequence in range(1, 2000):
        request = make(sequence)
        queue.push(request)
        finish(queue, request)
        assert len(queue._heap) <= 4
    assert drain(queue) == ["r0"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "finish"]), st.integers(0, 9)), max_size=60))
def test_queue_equals_a_sorted_list(operations: list[tuple[str, int]]) -> None:
    queue, model = WaitingQueue(), []
    for sequence, (operation, number) in enumerate(operations):
        if operation == "push":
            request = make(sequence, arrival_time=float(number))
            queue.push(request)
            model.append(request)
            model.sort(key=lambda r: r.key)
        elif model and operation == "pop":
            assert pop(queue) is model.pop(0)
        elif model:
            finish(queue, model.pop(number % len(model)))
        assert len(queue) == len(model)
        if model:
            assert queue.peek() is model[0]
