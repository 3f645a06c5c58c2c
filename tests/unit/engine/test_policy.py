"""The order of service and the queue. Needs Python only."""

from __future__ import annotations

from engine_driver import make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.policy import WINDOW, WaitingQueue, order_key, shortest_that_may_pass
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


# --- passing ---


def sized(sequence: int, num_tokens: int, priority: int = 0) -> Request:
    message = make_request(f"r{sequence}", num_tokens, arrival_time=float(sequence), priority=priority)
    return Request(message, order_key("priority", message, sequence), 10_000)


def test_the_shortest_of_the_window_passes() -> None:
    window = [sized(0, 50), sized(1, 20), sized(2, 20), sized(3, 60)]
    assert shortest_that_may_pass(window) is window[1], "of equal ones the first"


def test_only_as_far_as_all_that_it_passes_have_patience() -> None:
    window = [sized(0, 100), sized(1, 40), sized(2, 10)]
    window[1].num_passed_tokens = 31
    assert shortest_that_may_pass(window) is window[1], "r1 has patience for 9 tokens more, r2 brings 10"
    window[0].num_passed_tokens = 61
    assert shortest_that_may_pass(window) is window[0]


def test_rank_and_preemption_are_not_passed() -> None:
    assert shortest_that_may_pass(both := [sized(0, 100, -1), sized(1, 5)]) is both[0]
    both = [sized(0, 100), sized(1, 5)]
    both[0].num_preemptions = 1
    assert shortest_that_may_pass(both) is both[0]
    both[0].num_preemptions, both[1].num_preemptions = 0, 1
    assert shortest_that_may_pass(both) is both[0]


def test_taking_charges_those_who_were_passed() -> None:
    queue = WaitingQueue()
    requests = [sized(i, 10 * (i + 1)) for i in range(3)]
    for request in requests:
        queue.push(request)
    queue.take(requests[1])
    assert [r.num_passed_tokens for r in requests] == [20, 0, 0]
    assert queue.window() == [requests[0], requests[2]]


def test_the_window_is_the_front_whatever_comes_when() -> None:
    queue = WaitingQueue()
    requests = [sized(i, 5) for i in range(3 * WINDOW)]
    for request in requests[::-1]:
        queue.push(request)
    assert queue.window() == requests[:WINDOW]
    for request in requests[:WINDOW:2]:
        finish(queue, request)
    assert queue.window() == requests[1:WINDOW:2] + requests[WINDOW : WINDOW + WINDOW // 2]
    assert drain(queue) == [r.request_id for r in requests[1:WINDOW:2] + requests[WINDOW:]]
