"""From a run's records to figures, a table for people and JSON for scripts. Knows no server.

TTFT: from sending a request to its first text. ITL: between two chunks of a stream. TPOT: a request's mean time per token behind the
first. E2E: from sending to the end. All in milliseconds. Percentiles are nearest-rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from octavo.bench.load import Record, Run, Sample
from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, median, 90th and 99th percentile of some measured values; None where there were none."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None

    @staticmethod
    def of(seconds: Iterable[float]) -> Spread:
        """In milliseconds."""
        values = sorted(value * 1000 for value in seconds)
        if not values:
            return Spread()
        return Spread(
            round(sum(values) / len(values), 2), *(round(percentile(values, share), 2) for share in (0.5, 0.9, 0.99))
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the ascending values do not exceed."""
    rank = max(1, -(-share * len(ordered) // 1))
    return ordered[min(int(rank), len(ordered)) - 1]


@dataclass(frozen=True, slots=True)
class Slo:
    """Latencies that a request must keep to be of use, in milliseconds; None where anything will do. `itl`: its 99th percentile."""

    ttft: float | None = None
    itl: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @staticmethod
    def parse(words: Iterable[str]) -> Slo:
        """`ttft:500`, `itl:50` and so on. Raises ConfigError."""
        limits: dict[str, float] = {}
        for word in words:
            name, _, number = word.partition(":")
            try:
                limits[name] = float(number)
            except ValueError:
                limits[name] = -1
            if name not in Slo.__slots__ or not limits[name] > 0:
                raise ConfigError(f"slo = {word!r}: must be NAME:MILLISECONDS, with a name of {', '.join(Slo.__slots__)}")
        return Slo(**limits)

    def met(self, record: Record) -> bool:
        """Whether a request kept all of them; one that failed did not."""
        if record.error is not None:
            return False
        found = {
            "ttft": record.stamps[0] - record.began if record.stamps else None,
            "itl": percentile(sorted(_gaps(record)), 0.99) if len(record.stamps) > 1 else None,
            "tpot": _per_token(record),
            "e2e": record.ended - record.began,
        }
        limits = {name: getattr(self, name) for name in found}
        return all(limit is None or (value := found[name]) is None or value * 1000 <= limit for name, limit in limits.items())


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run."""

    label: str
    seconds: float
    num_requests: int
    num_failed: int
    num_prompt_tokens: int
    num_output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft_ms: Spread = Spread()
    itl_ms: Spread = Spread()
    tpot_ms: Spread = Spread()
    e2e_ms: Spread = Spread()
    kv_slots_used: float | None = None  # share of allocated KV slots that held a token
    kv_usage_peak: float | None = None  # largest share of the pool that was allocated
    num_preemptions: int | None = None
    goodput: float | None = None  # requests/s that kept the limits which were asked for
    errors: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def totalled(label: str, seconds: float, requests: int, prompt: int, output: int, **more: Any) -> Summary:
    """A summary whose rates follow from its totals: `requests` that ended well in so many seconds, with their prompt and output tokens."""
    seconds = max(seconds, 1e-9)
    figures = {
        "num_requests": requests,
        "num_failed": 0,
        "seconds": round(seconds, 3),
        "num_prompt_tokens": prompt,
        "num_output_tokens": output,
        "requests_per_second": round(requests / seconds, 3),
        "output_tokens_per_second": round(output / seconds, 1),
        "total_tokens_per_second": round((prompt + output) / seconds, 1),
    }
    return Summary(label=label, **{**figures, **more})


def summarise(label: str, run: Run, slo: Slo = Slo()) -> Summary:
    done = [record for record in run.records if record.error is None]
    return totalled(
        label,
        run.seconds,
        len(done),
        sum(record.num_prompt for record in done),
        sum(record.num_output for record in done),
        num_requests=len(run.records),
        num_failed=len(run.records) - len(done),
        ttft_ms=Spread.of(record.stamps[0] - record.began for record in done if record.stamps),
        itl_ms=Spread.of(gap for record in done for gap in _gaps(record)),
        tpot_ms=Spread.of(each for record in done if (each := _per_token(record)) is not None),
        e2e_ms=Spread.of(record.ended - record.began for record in done),
        goodput=round(sum(slo.met(record) for record in run.records) / max(run.seconds, 1e-9), 3) if slo != Slo() else None,
        errors=list(dict.fromkeys(record.error for record in run.records if record.error))[:3],
        **kv_figures(run.samples),
    )


def kv_figures(samples: Sequence[Sample]) -> dict[str, Any]:
    """KV figures over a run: the share of used slots is weighted by how much of the pool was allocated at each moment."""
    weighted = [(s.slots, s.usage) for s in samples if s.slots is not None and s.usage]
    weight = sum(usage for _, usage in weighted)
    usages = [s.usage for s in samples if s.usage is not None]
    preemptions = [s.preemptions for s in samples if s.preemptions is not None]
    return {
        "kv_slots_used": round(sum(slots * usage for slots, usage in weighted) / weight, 4) if weight else None,
        "kv_usage_peak": round(max(usages), 4) if usages else None,
        "num_preemptions": int(preemptions[-1] - preemptions[0]) if preemptions else None,
    }


def table(summaries: Sequence[Summary]) -> str:
    """A table with one column per run."""
    rows: list[tuple[str, list[str]]] = [
        ("", [s.label for s in summaries]),
        ("requests (failed)", [f"{s.num_requests} ({s.num_failed})" for s in summaries]),
        ("seconds", [_figure(s.seconds, 2) for s in summaries]),
        ("requests/s", [_figure(s.requests_per_second, 2) for s in summaries]),
        ("output tokens/s", [_figure(s.output_tokens_per_second) for s in summaries]),
        ("total tokens/s", [_figure(s.total_tokens_per_second) for s in summaries]),
    ]
    if any(s.goodput is not None for s in summaries):
        rows.append(("requests/s within the SLO", [_figure(s.goodput, 2) for s in summaries]))
    for name, attribute in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("TPOT", "tpot_ms"), ("E2E", "e2e_ms")):
        spreads = [getattr(s, attribute) for s in summaries]
        if any(spread.mean is not None for spread in spreads):
            rows += [
                (f"{name} {what} ms", [_figure(getattr(spread, what)) for spread in spreads]) for what in ("mean", "p50", "p99")
            ]
    rows += [
        ("KV slots that hold a token", [_share(s.kv_slots_used) for s in summaries]),
        ("KV pool in use, peak", [_share(s.kv_usage_peak) for s in summaries]),
        ("preemptions", ["-" if s.num_preemptions is None else str(s.num_preemptions) for s in summaries]),
    ]
    first = max(len(name) for name, _ in rows)
    widths = [max(len(cells[column]) for _, cells in rows) for column in range(len(summaries))]
    lines = [
        "  ".join([name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))]) for name, cells in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    lines += [f"{s.label}: {error}" for s in summaries for error in s.errors]
    return "\n".join(lines)


def _gaps(record: Record) -> Iterable[float]:
    return (later - earlier for earlier, later in zip(record.stamps, record.stamps[1:], strict=False))


def _per_token(record: Record) -> float | None:
    if record.num_output < 2 or len(record.stamps) < 2:
        return None
    return (record.stamps[-1] - record.stamps[0]) / (record.num_output - 1)


def _figure(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"
