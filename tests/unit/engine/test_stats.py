"""The figures that go out with every message. Needs Python only."""

from __future__ import annotations

from engine_driver import Driver

from octavo.protocol import StepStats


def test_an_idle_engine() -> None:
    stats = Driver().report().stats
    assert stats == StepStats(0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0)


def test_a_step_with_a_running_and_a_waiting_request() -> None:
    d = Driver(max_num_seqs=1)
    d.add("a", 9, max_tokens=3)
    d.add("b", 2)
    d.step()
    assert d.last is not None
    stats = d.last.stats
    assert (stats.step, stats.num_running, stats.num_waiting) == (1, 1, 1)
    assert (stats.num_blocks, stats.num_used_blocks, stats.num_cached_blocks, stats.num_kv_tokens) == (16, 3, 0, 9)
    assert (stats.prompt_tokens, stats.generation_tokens) == (9, 1)
    assert (stats.batch_tokens, stats.step_seconds) == (9, 0.25)


def test_totals_grow_and_the_figures_of_a_step_do_not_stay() -> None:
    d = Driver()
    d.add("a", 9, max_tokens=3)
    d.run()
    stats = d.report().stats
    assert (stats.step, stats.prompt_tokens, stats.generation_tokens) == (3, 9, 3)
    assert (stats.batch_tokens, stats.step_seconds) == (0, 0.0)
    assert (stats.num_running, stats.num_used_blocks, stats.num_cached_blocks, stats.num_kv_tokens) == (0, 0, 2, 0)


def test_prefix_figures_are_in_tokens_and_count_a_request_once() -> None:
    d = Driver()
    d.add("a", 10, max_tokens=1)
    d.step()
    d.add("b", 10, max_tokens=1)
    d.step()
    stats = d.report().stats
    assert (stats.prefix_queries, stats.prefix_hits) == (20, 8)


def test_a_preempted_request_does_not_ask_again() -> None:
    d = Driver(num_blocks=12, max_num_batched_tokens=32)
    for i in range(2):
        d.add(f"r{i}", [i] * 8, max_tokens=24)
    d.run()
    stats = d.report().stats
    assert stats.num_preemptions >= 1 and stats.prefix_queries == 16


def test_a_shared_block_counts_once() -> None:
    d = Driver()
    for i in range(3):
        d.add(f"s{i}", 10, parent_id="family", seed=i, max_tokens=5)
    d.steps(2, lambda s: 100 + ord(s.request_id[1]))
    assert d.last is not None
    stats = d.last.stats
    assert stats.num_used_blocks == 2 + 3
    assert stats.num_kv_tokens == 8 + (11 - 8) + 2 * (10 - 8)


def test_most_slots_hold_a_token() -> None:
    """Paged memory wastes at most the end of one block a request: above 96 % where requests are longer than a few blocks."""
    d = Driver(block_size=16, num_blocks=4000, max_num_seqs=32, max_num_batched_tokens=4096, max_model_len=2100)
    lengths = [10, 30, 100, 300, 600, 1000, 1500, 2048] * 4
    for i, length in enumerate(lengths):
        d.add(f"r{i}", [i] * length, max_tokens=40)
    held = slots = 0
    while d.core.has_work():
        d.step()
        assert d.last is not None
        held += d.last.stats.num_kv_tokens
        slots += d.last.stats.num_used_blocks * 16
    assert held / slots > 0.96
