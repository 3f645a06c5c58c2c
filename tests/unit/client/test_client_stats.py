"""Needs Python only. Counters over restarts, and the line of figures: when it is written, and what it says."""

import logging

import msgspec

from octavo.client.stats import PERIOD_SECONDS, StatsLog, continued
from octavo.protocol import StepStats


def stats(step, *, running=1, waiting=0, used=10, queries=0, hits=0, prompt=0, generated=0):
    return StepStats(step, running, waiting, 40, used, 0, 0, queries, hits, 0, prompt, generated, 0, 0.0)


def test_rates_are_of_the_time_since_the_line_before(caplog):
    caplog.set_level(logging.INFO)
    now = 0.0
    log = StatsLog(lambda: now)
    log(stats(1, prompt=100, generated=10))
    now = PERIOD_SECONDS - 0.1
    log(stats(2, prompt=110, generated=20))
    assert caplog.messages == []
    now = 2 * PERIOD_SECONDS
    log(stats(3, running=3, waiting=2, prompt=300, generated=110, queries=80, hits=20))
    assert caplog.messages == [
        "prompt 10.0 tok/s, generation 5.0 tok/s, running 3, waiting 2, KV cache 25.0%, prefix hits 25.0%"
    ]
    now = 3 * PERIOD_SECONDS
    log(stats(4, prompt=300, generated=120, queries=80, hits=20))
    assert "prompt 0.0 tok/s, generation 1.0 tok/s" in caplog.messages[1]
    assert "prefix hits 0.0%" in caplog.messages[1]
    assert "drafts" not in caplog.messages[1]
    now = 4 * PERIOD_SECONDS
    log(msgspec.structs.replace(stats(5, prompt=300, generated=130), num_drafts=2, num_draft_tokens=8, num_accepted_tokens=6))
    assert caplog.messages[2].endswith(", drafts held 75.0%")


def test_an_idle_engine_is_not_worth_a_line_but_a_stuck_queue_is(caplog):
    caplog.set_level(logging.INFO)
    now = 0.0
    log = StatsLog(lambda: now)
    log(stats(5, running=0))
    now = 20.0
    log(stats(5, running=0))
    assert caplog.messages == []
    now = 40.0
    log(stats(5, running=0, waiting=1))
    assert len(caplog.messages) == 1


def test_counters_go_on_and_gauges_do_not():
    earlier = stats(7, running=5, used=30, queries=3, hits=2, prompt=100, generated=50)
    now = continued(stats(1, running=1, used=2, queries=1, hits=1, prompt=10, generated=5), earlier)
    assert (now.step, now.prefix_queries, now.prefix_hits, now.prompt_tokens, now.generation_tokens) == (8, 4, 3, 110, 55)
    assert (now.num_running, now.num_used_blocks) == (1, 2)
    drafting = msgspec.structs.replace(earlier, num_drafts=2, num_draft_tokens=9, num_accepted_tokens=5)
    now = continued(drafting, drafting)
    assert (now.num_drafts, now.num_draft_tokens, now.num_accepted_tokens) == (4, 18, 10)
    assert continued(earlier, None) is earlier
