"""Needs Python only. The loop over the real core and a runner without a model: what each failure costs, and that it goes on."""

import importlib.util
from pathlib import Path

import pytest

from octavo.config import EngineArgs
from octavo.host.channel import ChannelClosed, InlineChannel, Undecodable
from octavo.host.loop import MAX_FAILED_STEPS, EngineBroken, Loop
from octavo.protocol import Abort, EngineCoreRequest, ErrorKind, FinishReason, ResetPrefixCache, Shutdown, Start
from octavo.sampling_params import SamplingParams

_spec = importlib.util.spec_from_file_location("fake_engine", Path(__file__).parents[2] / "e2e" / "fake_engine.py")
fake_engine = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake_engine)


class Bench:
    """A loop in this process, with a clock that ticks once per reading."""

    def __init__(self, **args):
        engine = fake_engine.build(EngineArgs(**args), "{}")
        self.core, self.runner = engine.core, engine.runner
        self.channel = InlineChannel()
        self.now = 0.0
        self.loop = Loop(self.core, self.runner, self.channel, self.tick)

    def tick(self):
        self.now += 1.0
        return self.now

    def send(self, *messages):
        self.channel.inbox.extend(messages)

    def outputs(self):
        return [output for message in self.channel.outbox for output in message.outputs]

    def finish(self, most=1000):
        """Turns until nothing is left; returns tokens and last output by request."""
        for _ in range(most):
            self.loop.turn()
            if not self.core.has_work() and not self.channel.inbox:
                break
        tokens, last = {}, {}
        for output in self.outputs():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            last[output.request_id] = output
        return tokens, last


def request(request_id, prompt, max_tokens=5, **changes):
    return EngineCoreRequest(request_id, prompt, SamplingParams(temperature=0, max_tokens=max_tokens, seed=1), [], [], 0.0, **changes)


def test_requests_run_to_their_end():
    bench = Bench()
    bench.send(*(request(f"r{i}", list(range(i + 1)), 3 + i) for i in range(8)))
    tokens, last = bench.finish()
    for i in range(8):
        assert tokens[f"r{i}"] == fake_engine.expected(list(range(i + 1)), 3 + i)
        assert last[f"r{i}"].finish_reason is FinishReason.LENGTH


def test_a_turn_without_work_sends_a_heartbeat():
    bench = Bench()
    bench.loop.turn()
    (message,) = bench.channel.outbox
    assert message.outputs == []
    assert message.stats.num_running == 0
    assert message.time > 0


def test_a_request_that_comes_while_the_device_works_is_in_the_next_step():
    bench = Bench()
    bench.send(request("a", [1], 10))
    launch = bench.runner.launch

    def launch_and_let_one_arrive(plan):
        bench.runner.launch = launch
        bench.send(request("b", [2], 10))
        return launch(plan)

    bench.runner.launch = launch_and_let_one_arrive
    bench.loop.turn()
    bench.loop.turn()
    assert {output.request_id for output in bench.outputs()} == {"a", "b"}


def test_a_request_may_be_aborted_while_its_step_runs():
    bench = Bench()
    bench.send(request("a", [1], 10), request("b", [2], 3))
    launch = bench.runner.launch

    def launch_and_abort(plan):
        bench.send(Abort(["a"]))
        return launch(plan)

    bench.runner.launch = launch_and_abort
    tokens, _ = bench.finish()
    assert "a" not in tokens
    assert tokens["b"] == fake_engine.expected([2], 3)
    assert bench.core.report(0.0).stats.num_used_blocks == 0


def test_a_step_that_raises_ends_its_requests_and_nothing_else():
    bench = Bench()
    bench.send(request("bad", [fake_engine.RAISE]))
    bench.loop.turn()
    bench.send(request("good", [5]))
    tokens, last = bench.finish()
    assert last["bad"].error.kind is ErrorKind.INTERNAL
    assert "RuntimeError" in last["bad"].error.message
    assert "was to raise" not in last["bad"].error.message  # details are for the log
    assert tokens["good"] == fake_engine.expected([5], 5)
    assert bench.core.report(0.0).stats.num_used_blocks == 0


def test_steps_that_fail_in_a_row_end_the_engine():
    bench = Bench()
    for i in range(MAX_FAILED_STEPS - 1):
        bench.send(request(f"r{i}", [fake_engine.RAISE]))
        bench.loop.turn()
    bench.send(request("good", [1], 1))
    bench.loop.turn()  # a success in between starts the count anew
    for i in range(MAX_FAILED_STEPS - 1):
        bench.send(request(f"s{i}", [fake_engine.RAISE]))
        bench.loop.turn()
    bench.send(request("last", [fake_engine.RAISE]))
    with pytest.raises(EngineBroken, match="was to raise"):
        bench.loop.turn()
    assert bench.outputs()[-1].request_id == "last"  # its error was sent first


def test_what_cannot_be_read_is_refused_by_its_id():
    bench = Bench()
    bench.send(Undecodable("Expected `int`, got `str`", "r7"), request("good", [1], 2))
    tokens, last = bench.finish()
    assert last["r7"].error.kind is ErrorKind.INVALID
    assert last["r7"].finish_reason is FinishReason.ERROR
    assert tokens["good"] == fake_engine.expected([1], 2)


@pytest.mark.parametrize("message", [Undecodable("what?"), Start(EngineArgs(), "x")])
def test_what_has_no_place_here_ends_the_connection(message):
    bench = Bench()
    bench.send(message)
    with pytest.raises(ChannelClosed):
        bench.loop.turn()


def test_a_request_that_the_core_cannot_add_is_answered():
    bench = Bench()

    def add(request, now):
        raise ZeroDivisionError

    bench.core.add = add
    bench.send(request("a", [1]))
    _, last = bench.finish(1)
    assert last["a"].error.kind is ErrorKind.INTERNAL


def test_an_error_in_the_core_is_not_hidden():
    bench = Bench()

    def update(*_):
        raise ZeroDivisionError

    bench.core.update = update
    bench.send(request("a", [1]))
    with pytest.raises(ZeroDivisionError):
        bench.loop.turn()


def test_a_resumed_request_goes_on_behind_its_tokens():
    bench = Bench()
    whole = fake_engine.expected([1, 2, 3], 10)
    bench.send(request("a", [1, 2, 3], 10, output_token_ids=whole[:4]))
    tokens, _ = bench.finish()
    assert tokens["a"] == whole[4:]


def test_messages_that_change_nothing_are_answered_too():
    bench = Bench()
    bench.send(ResetPrefixCache(), Abort(["nobody"]))
    bench.loop.turn()
    assert len(bench.channel.outbox) == 1


def test_shutdown_ends_the_run():
    bench = Bench()
    bench.send(request("a", [1], 100), Shutdown())
    bench.loop.run()
    assert bench.core.has_work()
