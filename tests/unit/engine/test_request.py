"""Request: when a sequence ends, its hashes, the scores that it owes. Needs Python only."""

from __future__ import annotations

from typing import Any

import pytest
from engine_driver import EOS, make_request

from octavo.engine.block_pool import hash_block, hash_root
from octavo.engine.request import Request, RequestStatus
from octavo.protocol import FinishReason, TokenLogprobs


def make(prompt: list[int] | int = 5, max_model_len: int = 64, **fields: Any) -> Request:
    return Request(make_request("a", prompt, **fields), (0, 0.0, 0), max_model_len)


def score(*targets: int) -> list[TokenLogprobs]:
    return [TokenLogprobs([target], [-0.5], 1) for target in targets]


def test_a_new_request_knows_its_prompt_and_has_computed_nothing() -> None:
    request = make([5, 6, 7])
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (3, 3, 0)
    assert (request.num_computed_tokens, request.num_pending_tokens) == (0, 3)
    assert request.status is RequestStatus.WAITING and not request.is_finished
    assert request.block_tables == [[]]


def test_a_resumed_request_knows_its_output_too() -> None:
    request = make([5, 6, 7], output_token_ids=[8, 9])
    assert (request.num_tokens, request.num_output_tokens, request.num_pending_tokens) == (5, 2, 5)


def test_the_message_is_not_touched_as_the_output_grows() -> None:
    message = make_request("a", [5, 6], output_token_ids=[7])
    request = Request(message, (0, 0.0, 0), 64)
    request.token_ids.append(8)
    assert message.prompt_token_ids == [5, 6] and message.output_token_ids == [7]


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "most"), [(8, 64, 13), (8, 10, 10), (None, 30, 30), (1, 64, 6)]
)
def test_max_num_tokens(max_tokens: int | None, max_model_len: int, most: int) -> None:
    request = make(5, max_model_len, max_tokens=max_tokens)
    assert request.max_num_tokens == most
    assert request.max_num_computed_tokens == most - 1


# --- the end ---

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("output", "fields", "expected"),
    [
        ([], {}, (None, None)),
        ([7], {}, (None, None)),
        ([EOS], {}, (STOP, None)),
        ([7, EOS], {}, (STOP, None)),
        ([EOS, 7], {}, (None, None)),  # only the last one counts: an earlier one was allowed to pass
        ([9], {"stop_token_ids": [9, EOS]}, (STOP, 9)),
        ([EOS], {"stop_token_ids": [9, EOS]}, (STOP, None)),
        ([EOS], {"stop_token_ids": [], "eos_token_ids": []}, (None, None)),  # ignore_eos
        ([EOS], {"stop_token_ids": [EOS], "eos_token_ids": []}, (STOP, EOS)),  # asked for by the user
        ([7] * 8, {}, (LENGTH, None)),
        ([7] * 7, {}, (None, None)),
        ([7] * 7 + [EOS], {}, (STOP, None)),  # both: the stop is the truth
        ([EOS], {"min_tokens": 2}, (None, None)),
        ([7, EOS], {"min_tokens": 2}, (STOP, None)),
        ([7, EOS], {"min_tokens": 3}, (None, None)),
        ([EOS] * 8, {"min_tokens": 8}, (STOP, None)),
        ([7], {"max_tokens": 1}, (LENGTH, None)),
        ([EOS], {"max_tokens": 1, "min_tokens": 1}, (STOP, None)),
    ],
)
def test_end_reason(
    output: list[int], fields: dict[str, Any], expected: tuple[FinishReason | None, int | None]
) -> None:
    request = make(5, **fields)
    request.token_ids += output
    assert request.end_reason() == expected


def test_the_prompt_alone_never_ends_a_request() -> None:
    request = make([5, EOS])
    assert request.end_reason() == (None, None)


def test_the_context_ends_it_before_min_tokens() -> None:
    """Limits of length always win; otherwise it would run on for ever."""
    request = make(5, max_model_len=7, max_tokens=50, min_tokens=50)
    request.token_ids.append(EOS)
    assert request.end_reason() == (None, None)
    request.token_ids.append(EOS)
    assert request.end_reason() == (LENGTH, None)


# --- hashes ---


def test_hashes_are_the_chain_over_full_blocks() -> None:
    request = make([1, 2, 3, 4, 5], cache_salt="s")
    first = hash_block(hash_root("s"), [1, 2])
    assert request.hashes_of_full_blocks(2, 2) == [first, hash_block(first, [3, 4])]
    assert request.hashes_of_full_blocks(1, 2) == [first]
    assert request.hashes_of_full_blocks(0, 2) == []


def test_hashes_go_on_into_the_output_and_are_made_once() -> None:
    request = make([1, 2, 3])
    [first] = request.hashes_of_full_blocks(1, 2)
    request.token_ids.append(9)
    again, second = request.hashes_of_full_blocks(2, 2)
    assert again is first
    assert second == make([1, 2, 3, 9]).hashes_of_full_blocks(2, 2)[1]


# --- for the runner ---


def test_new_request_holds_all_known_tokens_and_a_copy_of_the_output() -> None:
    request = make([1, 2], output_token_ids=[3])
    request.token_ids.append(4)
    new = request.to_new_request()
    assert (new.prompt_token_ids, new.output_token_ids) == ([1, 2], [3, 4])
    assert new.stop_token_ids == [EOS] and new.sampling_params is request.message.sampling_params
    request.token_ids.append(5)
    assert new.output_token_ids == [3, 4]


# --- scores of the prompt ---


def test_without_the_wish_no_scores_are_owed() -> None:
    request = make(5)
    assert not request.owes_prompt_logprobs and request.num_prompt_logprobs_before(5) is None


@pytest.mark.parametrize(("end", "expected"), [(1, 2), (3, 2), (4, 2), (5, 2)])
def test_rows_before_the_end_owe_scores(end: int, expected: int | None) -> None:
    assert make(5, prompt_logprobs=2).num_prompt_logprobs_before(end) == expected


def test_a_prompt_of_one_token_has_no_scores() -> None:
    request = make(1, prompt_logprobs=0)
    assert not request.owes_prompt_logprobs and request.num_prompt_logprobs_before(1) is None


def test_zero_best_tokens_is_a_wish_too() -> None:
    assert make(5, prompt_logprobs=0).num_prompt_logprobs_before(3) == 0


def test_scores_are_sent_once_although_rows_are_computed_again() -> None:
    request = make([10, 11, 12, 13, 14], prompt_logprobs=1)
    sent = request.take_new_prompt_logprobs(0, score(11, 12))
    assert sent is not None and [s.token_ids[0] for s in sent] == [11, 12]
    # preempted, and computed once more in other chunks
    assert request.num_prompt_logprobs_before(1) is None
    assert request.num_prompt_logprobs_before(2) is None
    assert request.num_prompt_logprobs_before(3) == 1
    assert request.take_new_prompt_logprobs(0, score(11)) is None
    sent = request.take_new_prompt_logprobs(1, score(12, 13, 14))
    assert sent is not None and [s.token_ids[0] for s in sent] == [13, 14]
    assert not request.owes_prompt_logprobs
    assert request.num_prompt_logprobs_before(5) is None


def test_no_scores_is_none() -> None:
    request = make(5, prompt_logprobs=1)
    assert request.take_new_prompt_logprobs(0, None) is None
    assert request.take_new_prompt_logprobs(0, []) is None


def test_a_resumed_request_with_output_has_delivered_its_scores() -> None:
    assert not make(5, prompt_logprobs=1, output_token_ids=[7]).owes_prompt_logprobs
    assert make(5, prompt_logprobs=1).owes_prompt_logprobs
