"""Needs Python only. Figures from records whose answers are known by hand, and requests from files and seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.datasets import (
    BenchRequest,
    Lengths,
    file_requests,
    random_requests,
    shared_prefix_requests,
    sharegpt_requests,
)
from octavo.bench.latency import measure_latency
from octavo.bench.load import Record, Run, Sample
from octavo.bench.plot import draw
from octavo.bench.report import Slo, Spread, kv_figures, percentile, summarise, table
from octavo.bench.static import measure_static, padded
from octavo.bench.throughput import measure
from octavo.errors import ConfigError


def test_figures_of_a_run() -> None:
    run = Run(
        seconds=2.0,
        records=[
            Record(began=0.0, ended=1.0, stamps=[0.1, 0.3, 0.7], num_prompt=10, num_output=3),
            Record(began=1.0, ended=2.0, stamps=[1.3, 1.4], num_prompt=20, num_output=5),
            Record(began=0.0, ended=0.1, error="status 503"),
        ],
        samples=[],
    )
    summary = summarise("x", run)
    assert (summary.num_requests, summary.num_failed, summary.errors) == (3, 1, ["status 503"])
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (30, 8)
    assert (summary.requests_per_second, summary.output_tokens_per_second, summary.total_tokens_per_second) == (1.0, 4.0, 19.0)
    assert summary.ttft_ms == Spread(mean=200.0, p50=100.0, p90=300.0, p99=300.0)
    assert summary.itl_ms.mean == pytest.approx(statistics.mean([200, 400, 100]), abs=0.01)
    assert summary.tpot_ms.mean == pytest.approx((600 / 2 + 100 / 4) / 2)
    assert summary.e2e_ms.p50 == 1000.0
    assert json.loads(json.dumps(summary.as_dict()))["ttft_ms"]["p99"] == 300.0


def test_a_run_in_which_all_failed() -> None:
    summary = summarise("x", Run(1.0, [Record(0.0, 1.0, error="no")], []))
    assert summary.output_tokens_per_second == 0
    assert summary.ttft_ms == Spread()
    assert "x: no" in table([summary])


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_percentile_is_the_least_value_that_covers_its_share(values: list[float], share: float) -> None:
    values.sort()
    found = percentile(values, share)
    covers = sum(value <= found for value in values)
    below = sum(value < found for value in values)
    assert covers >= share * len(values) - 1e-9
    assert below < share * len(values) + 1e-9


def test_kv_figures_weigh_by_what_is_allocated() -> None:
    samples = [
        Sample(0, slots=0.0, usage=0.0, preemptions=4),  # idle: no slots to waste
        Sample(1, slots=0.9, usage=0.1, preemptions=4),
        Sample(2, slots=1.0, usage=0.3, preemptions=9),
        Sample(3),
    ]
    assert kv_figures(samples) == {"kv_slots_used": 0.975, "kv_usage_peak": 0.3, "num_preemptions": 5}
    assert kv_figures([Sample(0)]) == {"kv_slots_used": None, "kv_usage_peak": None, "num_preemptions": None}


def test_a_table_has_a_column_per_run() -> None:
    runs = [Run(1.0, [Record(0.0, 1.0, [0.5], 1, 1)], [Sample(0, slots=0.97, usage=0.5)])] * 2
    text = table([summarise("concurrency 1", runs[0]), summarise("concurrency 32", runs[1])])
    head, rule, *rows = text.splitlines()
    assert head.split() == ["concurrency", "1", "concurrency", "32"]
    assert set(rule) == {"-"}
    assert len({len(row) for row in [head, rule, *rows]}) == 1
    assert next(row for row in rows if row.startswith("KV slots")).split()[-2:] == ["97.00%", "97.00%"]


def test_throughput_counts_what_came_back() -> None:
    def generate(prompts: Sequence[str | list[int]], lengths: Sequence[int]) -> list[tuple[int, int]]:
        return [(len(prompt), length) for prompt, length in zip(prompts, lengths, strict=True)]

    summary = measure([BenchRequest("abc", 4), BenchRequest([1, 2], 6)], generate)
    assert (summary.num_prompt_tokens, summary.num_output_tokens, summary.num_requests) == (5, 10, 2)


def test_static_batches_are_padded_and_run_to_the_longest() -> None:
    asked: list[tuple[list[list[int]], list[int]]] = []

    def generate(prompts: Sequence[str | list[int]], lengths: Sequence[int]) -> list[tuple[int, int]]:
        asked.append(([list(p) for p in prompts if not isinstance(p, str)], list(lengths)))
        return [(len(prompt), length) for prompt, length in zip(prompts, lengths, strict=True)]

    ended: list[int] = []
    requests = [BenchRequest([1, 2], 4), BenchRequest("abc", 6), BenchRequest([7], 1)]
    summary = measure_static(requests, generate, lambda p: [ord(c) for c in p] if isinstance(p, str) else p, 2, ended.append)
    assert asked == [([[1, 1, 2], [97, 98, 99]], [6, 6]), ([[7]], [1])]
    assert (summary.num_prompt_tokens, summary.num_output_tokens, ended) == (6, 11, [2, 1])
    assert padded([1, 2, 3], 8) == [1, 2, 3, 1, 2, 1, 2, 3]


def test_latency_tells_the_first_token_from_the_others() -> None:
    calls: list[list[int]] = []

    def generate(prompts: Sequence[str | list[int]], lengths: Sequence[int]) -> list[tuple[int, int]]:
        calls.append(list(lengths))
        return [(len(prompt), length) for prompt, length in zip(prompts, lengths, strict=True)]

    summary = measure_latency([[1, 2], [3, 4]], 5, generate, 3, lambda: None)
    assert calls == [[1, 1], [5, 5]] * 3
    assert (summary.num_requests, summary.num_prompt_tokens, summary.num_output_tokens) == (6, 12, 30)
    assert summary.ttft_ms.p50 is not None and summary.tpot_ms.p50 is not None and summary.itl_ms == Spread()
    assert measure_latency([[1]], 1, generate, 1, lambda: None).tpot_ms == Spread()


# Latencies of this record: TTFT 100 ms, gaps 200 and 400 ms, 300 ms per token, 1 s in all.
KEPT = Record(began=0.0, ended=1.0, stamps=[0.1, 0.3, 0.7], num_prompt=10, num_output=3)


@pytest.mark.parametrize(
    ("words", "met"),
    [
        (["ttft:100.1"], True), (["ttft:99"], False), (["itl:401"], True), (["itl:399"], False), (["tpot:301"], True), (["tpot:299"], False),
        (["e2e:1001"], True), (["e2e:999"], False), (["ttft:500", "itl:500"], True), (["ttft:500", "itl:50"], False),
    ],
)  # fmt: skip
def test_goodput_counts_requests_that_keep_every_limit(words: list[str], met: bool) -> None:
    slo = Slo.parse(words)
    assert slo.met(KEPT) is met
    failed = Record(began=0.0, ended=0.1, error="status 503")
    summary = summarise("x", Run(2.0, [KEPT, failed], []), slo)
    assert summary.goodput == (0.5 if met else 0)
    assert "within the SLO" in table([summary])
    assert summarise("x", Run(2.0, [KEPT], [])).goodput is None


@pytest.mark.parametrize("word", ["", "ttft", "ttft:", "ttft:-1", "ttft:nan", "latency:5", "itl:0"])
def test_what_is_no_slo(word: str) -> None:
    with pytest.raises(ConfigError, match="slo"):
        Slo.parse([word])


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    samples = [Sample(1.0, usage=0.1, running=2), Sample(1.5, usage=0.2, running=4), Sample(2.0)]
    runs = [Run(2.0, [KEPT], samples), Run(1.0, [KEPT, KEPT], [])]
    measured = [(summarise(f"concurrency {i}", run), run) for i, run in enumerate(runs)]
    draw(tmp_path / "p.png", measured)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="plot"):
        draw(tmp_path / "none" / "p.png", measured)
    with pytest.raises(ConfigError, match="plot"):
        draw(tmp_path / "p.unknown", measured)


# --- requests ---


@pytest.mark.parametrize(("text", "low", "high"), [("7", 7, 7), ("10:1024", 10, 1024)])
def test_lengths(text: str, low: int, high: int) -> None:
    assert Lengths.parse("input_len", text) == Lengths(low, high)


@pytest.mark.parametrize("text", ["", "0", "5:4", "a:b", "1:9999999999"])
def test_what_are_no_lengths(text: str) -> None:
    with pytest.raises(ConfigError, match="input_len"):
        Lengths.parse("input_len", text)


def test_random_requests_keep_to_their_lengths_and_their_seed() -> None:
    made = random_requests(200, Lengths(10, 1024), Lengths(16, 256), 1)
    assert made == random_requests(200, Lengths(10, 1024), Lengths(16, 256), 1)
    assert made != random_requests(200, Lengths(10, 1024), Lengths(16, 256), 2)
    lengths = [len(request.prompt.split()) for request in made if isinstance(request.prompt, str)]
    assert min(lengths) >= 10
    assert max(lengths) <= 1024
    assert all(16 <= request.num_output <= 256 for request in made)
    # Each doubling is equally likely: the median is near the geometric mean, 101.
    assert 60 < statistics.median(lengths) < 170


def test_shared_prefixes_are_shared() -> None:
    made = shared_prefix_requests(40, 50, 3, Lengths(5, 5), Lengths(1, 1), 0)
    heads = {tuple(str(request.prompt).split()[:50]) for request in made}
    assert len(heads) == 3
    assert all(len(str(request.prompt).split()) == 55 for request in made)


def test_a_file_of_requests(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps({"a": [{"prompt": "x", "n_out": 3}, {"ids": [1, 2], "n_out": 4}], "b": []}))
    assert file_requests(path, None, "a") == [BenchRequest("x", 3), BenchRequest([1, 2], 4)]
    assert file_requests(path, 1, "a") == [BenchRequest("x", 3)]
    with pytest.raises(ConfigError, match="has a, b"):
        file_requests(path, None, None)
    path.write_text('[{"n_out": 1}]')
    with pytest.raises(ConfigError, match="must have prompt"):
        file_requests(path, None, None)
    with pytest.raises(ConfigError, match="dataset_path"):
        file_requests(tmp_path / "none.json", None, None)


def test_conversations_of_sharegpt(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    turns = [{"from": "human", "value": "question"}, {"from": "gpt", "value": "x" * 80}]
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}, {"conversations": []}]))
    assert sharegpt_requests(path, 3, None, 0) == [BenchRequest("question", 20)] * 3
    assert sharegpt_requests(path, 1, Lengths(5, 5), 0) == [BenchRequest("question", 5)]
    path.write_text("[]")
    with pytest.raises(ConfigError, match="no conversation"):
        sharegpt_requests(path, 1, None, 0)
