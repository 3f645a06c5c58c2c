"""EngineCore: what is refused, what ends how, and that no request can hurt another. Needs Python only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from engine_driver import EOS, Driver, make_request, shares

from octavo.engine.block_pool import InvariantError
from octavo.engine.request import Request
from octavo.protocol import ErrorKind, FinishReason, ModelRunnerOutput, SampledTokens
from octavo.sampling_params import SamplingParams


def only(d: Driver, request_id: str = "a") -> Any:
    """The one output that this request has had."""
    [output] = d.outputs[request_id]
    return output


def all_is_free(d: Driver) -> bool:
    d.core.check()
    left = (d.core.requests, d.scheduler.running, d.scheduler.waiting, d.scheduler.in_flight, d.scheduler.families)
    return d.pool.num_used == 0 and d.pool.num_available == d.pool.num_blocks and not any(left)


# --- refusals ---


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "prompt: must hold at least one token"),
        ({"prompt": [5, 50]}, "prompt_token_ids = 50: token ids must be in 0..49"),
        ({"prompt": [-1]}, "prompt_token_ids = -1"),
        ({"prompt": [2**31]}, "prompt_token_ids: must hold integers in 0..49"),
        ({"prompt": [1.0]}, "prompt_token_ids: must hold integers"),
        ({"prompt": ["1"]}, "prompt_token_ids: must hold integers"),
        ({"prompt": [None]}, "prompt_token_ids: must hold integers"),
        ({"output_token_ids": [50]}, "output_token_ids = 50"),
        ({"stop_token_ids": [50]}, "stop_token_ids = 50"),
        ({"eos_token_ids": [-5]}, "eos_token_ids = -5"),
        ({"arrival_time": float("nan")}, "arrival_time = nan: must be finite"),
        ({"arrival_time": float("inf")}, "arrival_time = inf: must be finite"),
        ({"logit_bias": {50: 1.0}}, "logit_bias = 50: token ids must be in 0..49"),
        ({"allowed_token_ids": [50]}, "allowed_token_ids = 50"),
    ],
)
def test_senseless_requests_are_refused_with_a_reason(fields: dict[str, Any], message: str) -> None:
    d = Driver(vocab_size=50)
    d.add("a", **{"prompt": [5, 6], **fields})
    assert d.core.has_work()
    d.report()
    output = only(d)
    assert output.finish_reason is FinishReason.ERROR and output.new_token_ids == []
    assert output.error.kind is ErrorKind.INVALID and message in output.error.message
    assert not d.core.has_work() and all_is_free(d)


def test_without_a_vocabulary_any_id_of_31_bits_goes() -> None:
    d = Driver()
    d.add("a", [2**31 - 1], max_tokens=1)
    d.add("b", [2**31])
    d.add("c", [-1])
    d.run()
    assert d.tokens("a") == [7]
    assert only(d, "b").error.kind is only(d, "c").error.kind is ErrorKind.INVALID


@pytest.mark.parametrize(("prompt", "max_model_len"), [(64, 64), (100, 64), (1, 1)])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(prompt: int, max_model_len: int) -> None:
    d = Driver(max_model_len=max_model_len)
    d.add("a", prompt)
    d.report()
    assert only(d).error.kind is ErrorKind.CONTEXT_LENGTH
    assert f"{prompt} tokens" in only(d).error.message and f"{max_model_len} tokens" in only(d).error.message


def test_the_longest_prompt_that_fits_brings_one_token() -> None:
    d = Driver()
    d.add("a", 63, max_tokens=50)
    d.run()
    assert d.tokens("a") == [7] and d.outputs["a"][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("max_tokens", "fits"), [(7, True), (8, False)])
def test_what_the_memory_can_never_hold_is_refused_with_both_numbers(max_tokens: int, fits: bool) -> None:
    """10 + 7 tokens need K and V of 16: nothing is computed from the last one."""
    d = Driver(num_blocks=4)
    d.add("a", 10, max_tokens=max_tokens)
    d.run()
    if fits:
        assert len(d.tokens("a")) == 7
    else:
        assert only(d).error.kind is ErrorKind.CONTEXT_LENGTH
        assert "17 tokens" in only(d).error.message and "16" in only(d).error.message


def test_the_limit_is_seats_and_queue() -> None:
    d = Driver(max_num_seqs=2, max_num_queued_requests=3)
    for i in range(7):
        d.add(f"r{i}", 3, max_tokens=1)
    d.report()
    refused = [name for name, outputs in d.outputs.items() if outputs[0].error]
    assert refused == ["r5", "r6"]
    assert only(d, "r5").error.kind is ErrorKind.OVERLOADED and "5" in only(d, "r5").error.message
    d.step()
    d.add("again", 3, max_tokens=1)
    d.run()
    assert d.tokens("again") == [7]


def test_what_comes_back_after_a_restart_finds_the_room_that_it_had() -> None:
    d = Driver(max_num_seqs=2, max_num_queued_requests=1)
    for i in range(3):
        d.add(f"r{i}", 3, output_token_ids=[7] if i < 2 else [])
    d.run()
    assert not any(o.error for outputs in d.outputs.values() for o in outputs)


def test_an_id_in_use_is_refused_and_its_owner_goes_on() -> None:
    d = Driver()
    d.add("a", 5, max_tokens=4)
    d.step()
    d.add("a", [9, 9], max_tokens=1)
    d.run()
    errors = [o for o in d.outputs["a"] if o.error]
    assert [e.error.kind for e in errors if e.error] == [ErrorKind.INVALID]
    assert d.tokens("a") == [7] * 4


def test_an_id_may_come_again_when_its_owner_has_ended() -> None:
    d = Driver()
    for _ in range(2):
        d.add("a", 5, max_tokens=2)
        d.run()
    assert d.tokens("a") == [7] * 4


def test_refusals_travel_with_the_outputs_of_a_step_too() -> None:
    d = Driver()
    d.add("a", 5)
    plan = d.plan()
    d.add("b", [])
    d.answer(plan)
    assert [o.request_id for o in d.last.outputs] == ["b", "a"] if d.last else False


def test_whatever_add_meets_ends_that_request_only() -> None:
    """Not a refusal, but a bug: still an answer, and nobody else notices."""
    d = Driver()
    d.add("a", 5, max_tokens=2)
    with mock.patch.object(Request, "end_reason", side_effect=ZeroDivisionError("oops")):
        d.add("b", 5)
    d.run()
    assert only(d, "b").error.kind is ErrorKind.INTERNAL and "oops" in only(d, "b").error.message
    assert d.tokens("a") == [7, 7]


# --- outputs ---


def test_the_first_output_tells_when_it_was_scheduled() -> None:
    d = Driver()
    d.add("a", 5, max_tokens=3)
    d.run()
    first, *others = d.outputs["a"]
    assert first.scheduled_time == 2.0
    assert all(o.scheduled_time == 0.0 and o.num_cached_tokens == 0 for o in others)


def test_stop_reasons() -> None:
    d = Driver()
    for name, token in (("eos", EOS), ("own", 9)):
        d.add(name, 5, stop_token_ids=[EOS, 9])
        d.run(token)
        assert d.tokens(name) == [token], "the stop token is delivered: the client decides what is shown"
    assert (only(d, "eos").finish_reason, only(d, "eos").stop_reason) == (FinishReason.STOP, None)
    assert (only(d, "own").finish_reason, only(d, "own").stop_reason) == (FinishReason.STOP, 9)


def test_blocks_are_free_in_the_step_that_ends_a_request() -> None:
    d = Driver()
    d.add("a", 9, max_tokens=1)
    d.step()
    assert all_is_free(d)
    assert d.last is not None and d.last.stats.num_used_blocks == 0 and d.last.stats.num_cached_blocks == 2


def test_logprobs_are_passed_on() -> None:
    d = Driver()
    d.add("a", 3, max_tokens=1, logprobs=1)
    plan = d.plan()
    entry: Any = object()
    sampled = SampledTokens("a", [7], [entry])
    d.keep(d.core.update(plan, ModelRunnerOutput(plan.step, [sampled]), 1.0, 0.1))
    assert only(d).logprobs == [entry]


def test_scores_of_the_prompt_come_as_they_are_computed() -> None:
    d = Driver(max_num_batched_tokens=4)
    d.add("a", [10, 11, 12, 13, 14, 15], prompt_logprobs=0, max_tokens=2)
    d.run()
    scores = [[s.token_ids[0] for s in o.prompt_logprobs or ()] for o in d.outputs["a"]]
    assert scores == [[11, 12, 13, 14], [15], []]
    assert d.outputs["a"][0].new_token_ids == [] and d.outputs["a"][0].scheduled_time > 0


def test_scores_come_once_although_a_preemption_repeats_the_rows() -> None:
    d = Driver(num_blocks=8, max_num_batched_tokens=2)
    prompt = list(range(50, 70))
    d.add("old", [9] * 4, max_tokens=24)
    d.steps(2)
    d.add("a", prompt, prompt_logprobs=0, max_tokens=2)
    while not d.core.totals.num_preemptions:
        d.step()
    assert 0 < d.request("a").num_prompt_logprobs_sent < 19, "it was preempted in the middle of its prompt"
    d.run()
    scores = [s.token_ids[0] for o in d.outputs["a"] for s in o.prompt_logprobs or ()]
    assert scores == prompt[1:]


# --- resume ---


def test_a_resumed_request_goes_on_at_its_next_token() -> None:
    d = Driver()
    d.add("a", 5, output_token_ids=[20, 21, 22], max_tokens=5)
    plan = d.step()
    assert shares(plan)["a"] == (0, 8) and plan.scheduled[0].samples
    assert plan.new_requests[0].output_token_ids == [20, 21, 22]
    d.run()
    assert d.tokens("a") == [7, 7], "two were left of five"
    assert d.outputs["a"][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("fields", "reason", "stop_reason"),
    [
        ({"output_token_ids": [7] * 5, "max_tokens": 5}, FinishReason.LENGTH, None),
        ({"output_token_ids": [7] * 9, "max_tokens": 5}, FinishReason.LENGTH, None),
        ({"output_token_ids": [7, EOS]}, FinishReason.STOP, None),
        ({"output_token_ids": [9], "stop_token_ids": [9]}, FinishReason.STOP, 9),
        ({"output_token_ids": [7] * 59, "max_tokens": 100}, FinishReason.LENGTH, None),
    ],
)
def test_what_was_complete_when_it_came_back_ends_at_once(
    fields: dict[str, Any], reason: FinishReason, stop_reason: int | None
) -> None:
    d = Driver()
    d.add("a", 5, **fields)
    assert d.core.has_work() and d.core.schedule(1.0) is None
    d.report()
    assert (only(d).finish_reason, only(d).stop_reason, only(d).new_token_ids) == (reason, stop_reason, [])
    assert only(d).error is None and all_is_free(d)


def test_min_tokens_counts_what_was_delivered_before() -> None:
    d = Driver()
    d.add("a", 5, output_token_ids=[7, 7], min_tokens=3)
    d.step(EOS)
    assert only(d).finish_reason is FinishReason.STOP


# --- abort ---


def test_abort_in_the_queue() -> None:
    d = Driver(max_num_seqs=1)
    d.add("a", 3, max_tokens=2)
    d.add("b", 3)
    d.step()
    d.core.abort(["b"])
    plans = d.run()
    assert "b" not in d.outputs and all("b" not in p.released_request_ids for p in plans), "the runner never knew it"


def test_abort_before_anything_was_scheduled() -> None:
    d = Driver()
    d.add("a")
    d.core.abort(["a"])
    assert not d.core.has_work() and d.core.schedule(1.0) is None and all_is_free(d)


def test_abort_between_steps_frees_at_once_and_the_runner_hears_of_it() -> None:
    d = Driver()
    d.add("a", 9)
    d.add("b", 3)
    d.step()
    d.core.abort(["a"])
    assert d.pool.num_used == 1
    assert d.step().released_request_ids == ["a"]


def test_abort_of_a_half_computed_prompt() -> None:
    d = Driver()
    d.add("a", 40)
    d.step()
    d.core.abort(["a"])
    assert all_is_free(d)


def test_abort_while_its_step_is_computed() -> None:
    """The device still writes into the blocks, so they stay held until the result is there; the late token is dropped."""
    d = Driver()
    d.add("a", 9)
    d.add("b", 3)
    plan = d.plan()
    held = d.pool.num_used
    d.core.abort(["a"])
    d.core.check()
    assert d.pool.num_used == held
    outputs = d.answer(plan)
    assert [o.request_id for o in outputs.outputs] == ["b"]
    assert d.pool.num_used == 1


def test_abort_while_its_step_fails() -> None:
    d = Driver()
    d.add("a", 9)
    plan = d.plan()
    d.core.abort(["a"])
    assert d.keep(d.core.fail_step(plan, "x", 1.0)).outputs == []
    assert all_is_free(d)


def test_abort_of_a_preempted_one() -> None:
    d = Driver(num_blocks=12, max_num_batched_tokens=32)
    d.add("old", [1] * 8, max_tokens=24)
    d.add("young", [2] * 8, max_tokens=24)
    while not d.core.totals.num_preemptions:
        d.step()
    d.core.abort(["young"])
    d.core.check()
    d.run()
    assert d.outputs["young"][-1].finish_reason is None and len(d.tokens("old")) == 24


@pytest.mark.parametrize("ids", [["x"], [], ["x", "x", ""], ["done"]])
def test_abort_of_what_is_not_there_does_nothing(ids: list[str]) -> None:
    d = Driver()
    d.add("done", 3, max_tokens=1)
    d.run()
    d.add("a", 3, max_tokens=2)
    d.core.abort(ids)
    d.run()
    assert d.tokens("a") == [7, 7]


def test_abort_twice_and_all_at_once() -> None:
    d = Driver(num_blocks=60)
    for i in range(10):
        d.add(f"r{i}", 10)
    d.step()
    d.core.abort([f"r{i}" for i in range(10)] * 2)
    d.core.abort(["r1"])
    assert all_is_free(d) and d.report().stats.num_running == 0


def test_abort_takes_back_a_refusal_that_waits() -> None:
    d = Driver()
    d.add("a", [])
    d.core.abort(["a"])
    assert not d.core.has_work() and d.report().outputs == []


def test_an_id_may_come_again_while_its_aborted_owner_is_still_computed() -> None:
    d = Driver()
    d.add("a", [1] * 6, max_tokens=2)
    plan = d.plan()
    d.core.abort(["a"])
    d.add("a", [2] * 6, max_tokens=3)
    d.answer(plan, 11)
    plan = d.step(22)
    assert plan.released_request_ids == ["a"] and [n.prompt_token_ids for n in plan.new_requests] == [[2] * 6]
    d.run(22)
    assert d.tokens("a") == [22] * 3


# --- failures ---


def test_a_failed_row_ends_its_request_only_and_its_blocks_cannot_be_found() -> None:
    d = Driver(vocab_size=200)
    d.add("a", 9)
    d.add("b", [5] * 3, max_tokens=3)
    d.step()
    plan = d.plan()
    result = [SampledTokens("a", error="logits are NaN"), SampledTokens("b", [7])]
    d.keep(d.core.update(plan, ModelRunnerOutput(plan.step, result), 1.0, 0.1))
    error = d.outputs["a"][-1]
    assert error.finish_reason is FinishReason.ERROR and error.error is not None
    assert (error.error.kind, error.error.message) == (ErrorKind.INTERNAL, "logits are NaN")
    assert d.pool.num_cached == 0, "what led to NaN must not be served to others"
    d.run()
    assert d.tokens("b") == [7] * 3
    d.add("c", 9)
    assert shares(d.step())["c"] == (0, 9)


@pytest.mark.parametrize("token", [None, -1, 200, 10**9])
def test_a_token_that_is_none_is_a_failure(token: int | None) -> None:
    d = Driver(vocab_size=200)
    d.add("a", 9)
    plan = d.plan()
    d.keep(d.core.update(plan, ModelRunnerOutput(plan.step, [SampledTokens("a", [token])]), 1.0, 0.1))
    assert only(d).error.kind is ErrorKind.INTERNAL and all_is_free(d)


def test_a_failed_step_ends_all_that_took_part_and_nobody_else() -> None:
    d = Driver(max_num_seqs=2)
    for name in ("a", "b", "c"):
        d.add(name, [ord(name)] * 9, max_tokens=2)
    d.step()
    plan = d.plan()
    outputs = d.keep(d.core.fail_step(plan, "out of memory", d.now))
    assert {o.request_id: o.error.message for o in outputs.outputs if o.error} == {
        "a": "out of memory",
        "b": "out of memory",
    }
    assert d.pool.num_used == 0 and d.pool.num_cached == 0
    plan = d.step()
    assert shares(plan) == {"c": (0, 9)} and set(plan.released_request_ids) == {"a", "b"}
    d.run()
    assert d.tokens("c") == [7, 7]


def test_after_a_failed_step_the_runner_is_told_again_what_to_forget() -> None:
    """It may have failed before it heard of it."""
    d = Driver()
    d.add("a", 3, max_tokens=1)
    d.step()
    d.add("b", 3)
    plan = d.plan()
    assert plan.released_request_ids == ["a"]
    d.keep(d.core.fail_step(plan, "x", d.now))
    d.add("c", 3)
    assert sorted(d.step().released_request_ids) == ["a", "b"]


@pytest.mark.parametrize(
    "mangle",
    [
        lambda r: ModelRunnerOutput(r.step + 1, r.sampled),
        lambda r: ModelRunnerOutput(r.step, r.sampled[:-1]),
        lambda r: ModelRunnerOutput(r.step, [*r.sampled, SampledTokens("x", [1])]),
        lambda r: ModelRunnerOutput(r.step, r.sampled[::-1]),
        lambda r: ModelRunnerOutput(r.step, []),
    ],
)
def test_a_result_that_does_not_answer_the_plan_fails_the_step(
    mangle: Callable[[ModelRunnerOutput], ModelRunnerOutput],
) -> None:
    d = Driver()
    d.add("a", 3)
    d.add("b", 4)
    plan = d.plan()
    result = ModelRunnerOutput(plan.step, [SampledTokens("a", [7]), SampledTokens("b", [7])])
    outputs = d.keep(d.core.update(plan, mangle(result), 1.0, 0.1))
    assert [o.error.kind for o in outputs.outputs if o.error] == [ErrorKind.INTERNAL] * 2
    assert all_is_free(d)
    d.add("c", 3, max_tokens=1)
    d.run()
    assert d.tokens("c") == [7]


def test_a_plan_that_is_not_in_flight_is_a_fault_of_the_caller_and_changes_nothing() -> None:
    d = Driver()
    d.add("a", 3, max_tokens=3)
    old = d.plan()
    result = ModelRunnerOutput(old.step, [SampledTokens("a", [7])])
    d.keep(d.core.update(old, result, 1.0, 0.1))
    with pytest.raises(InvariantError, match="not in flight"):
        d.core.update(old, result, 1.0, 0.1)
    plan = d.plan()
    with pytest.raises(InvariantError, match="not in flight"):
        d.core.fail_step(old, "late", 1.0)
    d.answer(plan)
    d.run()
    assert d.tokens("a") == [7] * 3


SITES = {
    "hashes_of_full_blocks": "schedule",
    "to_new_request": "schedule",
    "num_prompt_logprobs_before": "schedule",
    "take_new_prompt_logprobs": "update",
    "end_reason": "update",
}


@pytest.mark.parametrize("site", SITES)
def test_what_raises_for_one_request_ends_that_one_only(site: str) -> None:
    """The boundary that keeps one bad request from ending the engine, at each place that looks into a request."""
    d = Driver(max_num_batched_tokens=32)
    d.add("good", [5] * 9, max_tokens=4)
    d.add("bad", [6] * 9, max_tokens=4)
    d.add("fine", [7] * 9, max_tokens=4)
    original = getattr(Request, site)

    def raises_for_one(request: Request, *args: Any) -> Any:
        if request.request_id == "bad":
            raise KeyError("surprise")
        return original(request, *args)

    with mock.patch.object(Request, site, raises_for_one):
        d.run()
    [output] = d.outputs["bad"]
    assert output.error is not None and output.error.kind is ErrorKind.INTERNAL
    assert "KeyError" in output.error.message and "surprise" in output.error.message
    assert d.tokens("good") == d.tokens("fine") == [7] * 4
    assert all_is_free(d)


def test_all_that_could_be_planned_may_break() -> None:
    """Then there is no plan, but a report."""
    d = Driver()
    d.add("a", 3)
    with mock.patch.object(Request, "to_new_request", side_effect=RuntimeError("x")):
        assert d.core.schedule(1.0) is None
    assert d.core.has_work()
    d.report()
    assert only(d).error.kind is ErrorKind.INTERNAL and not d.core.has_work()


# --- the prefix cache ---


def test_reset_forgets_what_nobody_holds() -> None:
    d = Driver()
    d.add("done", [1] * 9, max_tokens=1)
    d.step()
    d.add("running", [2] * 9)
    d.step()
    d.core.reset_prefix_cache()
    d.core.check()
    d.add("like done", [1] * 9, max_tokens=1)
    d.add("like running", [2] * 9, max_tokens=1)
    plan = d.step()
    assert shares(plan)["like done"][0] == 0 and shares(plan)["like running"][0] == 8


def test_reset_while_a_step_is_computed() -> None:
    d = Driver()
    d.add("a", 9, max_tokens=3)
    plan = d.plan()
    d.core.reset_prefix_cache()
    d.answer(plan)
    d.run()
    assert d.tokens("a") == [7] * 3


# --- the check, and being pure ---


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d.request("a").block_tables[0].pop(),
        lambda d: d.scheduler.running.clear(),
        lambda d: d.scheduler.running.reverse(),
        lambda d: d.core.requests.pop("a"),
        lambda d: setattr(d.request("a"), "num_computed_tokens", 1),
        lambda d: setattr(d.request("a"), "num_computed_tokens", 99),
        lambda d: d.request("a").token_ids.extend([1] * 99),
    ],
)
def test_check_notices_wrong_books(spoil: Callable[[Driver], object]) -> None:
    d = Driver()
    d.add("a", 9)
    d.add("b", 3)
    d.step()
    d.core.check()
    spoil(d)
    with pytest.raises(InvariantError):
        d.core.check()


def test_equal_messages_give_equal_answers() -> None:
    def run() -> list[Any]:
        d = Driver(num_blocks=12)
        for i in range(6):
            d.add(f"r{i}", [i % 3] * 9, max_tokens=9, parent_id="p" if i % 2 else None)
        return [(p, [d.outputs[name] for name in sorted(d.outputs)]) for p in d.run()]

    assert run() == run()


def test_the_callers_message_is_not_changed() -> None:
    message = make_request("a", [5, 6, 7], max_tokens=3)
    before = make_request("a", [5, 6, 7], max_tokens=3)
    d = Driver()
    d.core.add(message, 0.0)
    d.run()
    assert message == before


def test_parameters_without_a_limit_run_to_the_end_of_the_context() -> None:
    d = Driver(max_model_len=12)
    d.core.add(make_request("a", 5, sampling_params=SamplingParams(max_tokens=None)), 0.0)
    d.run()
    assert len(d.tokens("a")) == 7
