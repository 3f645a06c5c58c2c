"""EngineConfig.resolve: what the KV memory holds, and what is said when that is too little. Needs Python only."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config import EngineArgs, EngineConfig
from octavo.errors import ConfigError

BLOCK_BYTES = 16 * 100


def resolve(num_blocks: int, windows: tuple[int, ...] = (0,), context: int = 4096, **options: Any) -> EngineConfig:
    """With memory for so many blocks of 16 tokens of 100 bytes."""
    args = EngineArgs(kv_cache_memory=str(num_blocks * BLOCK_BYTES), **options)
    return EngineConfig.resolve(
        args, context_length=context, kv_bytes_per_token=100, kv_dtype="bfloat16", num_cpus=2, windows=windows
    )


def test_the_memory_is_cut_into_blocks() -> None:
    config = resolve(300)
    assert (config.cache.num_blocks, config.cache.block_size, config.cache.windows) == (300, 16, (0,))
    assert config.scheduler.max_model_len == 4096


@pytest.mark.parametrize(
    ("windows", "needed"),
    [
        ((0,), 256),
        ((0, 0), 512),
        ((128,), 41),  # 128 and a step of 512 tokens, lying across one block more
        ((0, 128), 256 + 41),
        ((128, 128, 0), 256 + 2 * 41),
        ((8192,), 256),
    ],
)
def test_one_request_of_the_longest_length_must_fit(windows: tuple[int, ...], needed: int) -> None:
    assert resolve(needed, windows).scheduler.max_model_len == 4096
    with pytest.raises(ConfigError, match=rf"max_model_len = 4096 needs {needed * BLOCK_BYTES} bytes"):
        resolve(needed - 1, windows)


def test_the_refusal_says_what_would_fit() -> None:
    with pytest.raises(ConfigError, match="holds 944 tokens"):
        resolve(100, (0, 128))


def test_a_smaller_step_makes_a_window_smaller() -> None:
    assert resolve(10, (128,), max_num_batched_tokens=16, max_num_seqs=16).scheduler.max_model_len == 4096


def test_more_than_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len = 5000: the model's context is 4096 tokens"):
        resolve(300, max_model_len=5000)


def test_with_memory_left_to_us_the_length_is_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.config.free_memory", lambda: 2 * 100 * BLOCK_BYTES)

    def longest(windows: tuple[int, ...]) -> int:
        config = EngineConfig.resolve(
            EngineArgs(), context_length=4096, kv_bytes_per_token=100, kv_dtype="bfloat16", num_cpus=2, windows=windows
        )
        assert config.cache.num_blocks == 100
        return config.scheduler.max_model_len

    assert longest((0,)) == 1600
    assert longest((0, 0)) == 800
    assert longest((0, 128)) == (100 - 41) * 16
    assert longest((128, 128)) == 4096


def test_the_target_for_streams_reaches_the_scheduler() -> None:
    assert resolve(300).scheduler.itl_target_ms is None
    assert resolve(300, itl_target_ms=40).scheduler.itl_target_ms == 40.0
    assert resolve(300, itl_target_ms=0).scheduler.itl_target_ms == 0.0


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "40"])
def test_a_target_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="itl_target_ms = "):
        EngineArgs(itl_target_ms=value)


def test_drafts_reach_the_scheduler_with_rows_for_them() -> None:
    assert resolve(300).scheduler.num_speculative_tokens == 8
    assert resolve(300, num_speculative_tokens=0).scheduler.num_speculative_tokens == 0
    assert resolve(300, max_num_seqs=2).scheduler.max_num_rows == 32
    assert resolve(300, max_num_seqs=100).scheduler.max_num_rows == 100


@pytest.mark.parametrize(
    "value",
    [
        {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        {"model": "[ngram]", "num_speculative_tokens": 5},
        '{"method": "ngram", "num_speculative_tokens": 5}',
        '{"num_speculative_tokens": 5}',
    ],
)
def test_speculation_as_in_vllm(value: Any) -> None:
    assert resolve(300, speculative_config=value).scheduler.num_speculative_tokens == 5


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("ngram", "not JSON"),
        ("[5]", "must be a JSON object"),
        ({"method": "eagle", "num_speculative_tokens": 5}, "method = 'eagle': only ngram"),
        ({"model": "org/draft", "num_speculative_tokens": 5}, "model = 'org/draft': only ngram"),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "must be an integer in 1..64"),
        ({"method": "ngram", "num_speculative_tokens": True}, "must be an integer in 1..64"),
        ({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": "4"}, "prompt_lookup_max = '4': must be an integer"),
        ({"draft_tensor_parallel_size": 1, "num_speculative_tokens": 5}, "draft_tensor_parallel_size = 1: Octavo does not do this"),
        (5, "speculative_config = 5: must be str"),
    ],
)
def test_speculation_of_another_kind_is_refused(value: Any, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        EngineArgs(speculative_config=value)
    assert told in str(raised.value) and "speculative_config" in str(raised.value)
