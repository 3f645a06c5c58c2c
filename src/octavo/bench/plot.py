"""Figures of runs as a picture: latency over throughput, and the batch and the KV pool over time. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.bench.load import Run, Sample
from octavo.bench.report import Summary
from octavo.errors import ConfigError

DOTS_PER_INCH = 110


def new_figure(width: float, height: float) -> Any:
    """An empty picture, in inches. Raises ConfigError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra: nobody else should pay for its import
    except ImportError:
        raise ConfigError("plot: needs matplotlib: pip install 'octavo[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Its kind is by the file's ending. Raises ConfigError if it cannot be written."""
    try:
        figure.savefig(path, dpi=DOTS_PER_INCH)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot = {str(path)!r}: {error}") from None


def draw(path: Path, runs: Sequence[tuple[Summary, Run]]) -> None:
    """Writes the picture of some runs. Raises ConfigError as `save` does."""
    figure = new_figure(13, 4.2)
    latency, batch, pool = figure.subplots(1, 3)
    _latency(latency, [summary for summary, _ in runs])
    for summary, run in runs:
        _over_time(batch, summary.label, run.samples, "running")
        _over_time(pool, summary.label, run.samples, "usage")
    batch.set(title="Requests in the batch", xlabel="seconds", ylabel="requests", ylim=(0, None))
    pool.set(title="KV pool", xlabel="seconds", ylabel="share of blocks in use", ylim=(0, 1))
    for axes in (latency, batch, pool):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    save(figure, path)


def _latency(axes: Any, summaries: Sequence[Summary]) -> None:
    ordered = sorted(summaries, key=lambda s: s.output_tokens_per_second)
    for name, attribute in (("TTFT", "ttft_ms"), ("ITL", "itl_ms")):
        for what, style in (("p50", "o-"), ("p99", "o--")):
            points = [(s.output_tokens_per_second, getattr(getattr(s, attribute), what)) for s in ordered]
            points = [(x, y) for x, y in points if y is not None]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=f"{name} {what}", color={"TTFT": "tab:blue", "ITL": "tab:orange"}[name])
    for s in ordered:
        if s.itl_ms.p50 is not None:
            axes.annotate(s.label, (s.output_tokens_per_second, s.itl_ms.p50), fontsize="x-small", xytext=(3, 4), textcoords="offset points")
    axes.set(title="Latency over throughput", xlabel="output tokens/s", ylabel="milliseconds", yscale="log")


def _over_time(axes: Any, label: str, samples: Sequence[Sample], attribute: str) -> None:
    points = [(s.time - samples[0].time, getattr(s, attribute)) for s in samples if getattr(s, attribute) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), label=label)
