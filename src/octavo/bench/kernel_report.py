"""Kernels beside the machine's limits as tables for people and pages, JSON for scripts, and a picture. Measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from octavo.bench.costs import Cost, Limit
from octavo.bench.plot import new_figure, save
from octavo.ops.cpu.peaks import Peaks

GIGA = 1e-9
STEP_HEAD = ("", "times", "us each", "ms", "of step", "GB/s", "Gop/s", "limit by", "ms at best", "of limit")
MARKDOWN_HEAD = "| | times | ms | of step | ms at best | limit by | of limit |\n|---|--:|--:|--:|--:|---|--:|"
LEAST_SHARE = 0.001  # of a step, below which a page does not name an instruction
PRODUCT_HEAD = ("", "rows", "us", "GB/s", "Gop/s", "limit by", "us at best", "of limit")


class Part(str, Enum):
    """What a step's time goes to, roughly. REST: what no instruction accounts for, such as the start of threads and Python."""

    PRODUCTS = "products"
    ATTENTION = "attention"
    OTHER = "other instructions"
    SAMPLING = "sampling"
    REST = "rest"


@dataclass(frozen=True, slots=True)
class Figure:
    """Instructions of one name in one step: `count` of them, `seconds` and `cost` of all together."""

    name: str
    rows: int
    count: int
    seconds: float
    cost: Cost
    limit: Limit

    @property
    def share(self) -> float:
        """Of the limit that was reached."""
        return self.limit.seconds / self.seconds if self.seconds else 0.0

    @property
    def part(self) -> Part:
        if self.cost.kind is not None:
            return Part.PRODUCTS
        return {"attention": Part.ATTENTION, "sample": Part.SAMPLING}.get(self.name.split()[0].rstrip(","), Part.OTHER)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name, "rows": self.rows, "count": self.count, "seconds": self.seconds, "operations": self.cost.operations,
            "memory_bytes": self.cost.memory_bytes, "cache_bytes": self.cost.cache_bytes, "limit_seconds": self.limit.seconds,
            "bound": self.limit.bound.value, "share": self.share,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One step of `tokens` rows in sequences of `length` tokens.

    seconds: of it whole, undisturbed. figures: with a clock around each instruction; rest_seconds: what none of them accounts for, such as the
    start of threads and Python.
    """

    name: str
    tokens: int
    length: int
    seconds: float
    rest_seconds: float
    figures: tuple[Figure, ...]

    @property
    def limit_seconds(self) -> float:
        """Of one instruction after the other."""
        return sum(figure.limit.seconds for figure in self.figures)

    @property
    def parts(self) -> dict[Part, float]:
        """Seconds of each part that the step has, with a clock around each instruction."""
        seconds = dict.fromkeys(Part, 0.0)
        for figure in self.figures:
            seconds[figure.part] += figure.seconds
        seconds[Part.REST] = self.rest_seconds
        return {part: spent for part, spent in seconds.items() if spent}

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name, "tokens": self.tokens, "length": self.length, "seconds": self.seconds,
            "limit_seconds": self.limit_seconds, "rest_seconds": self.rest_seconds, "parts": {part.value: s for part, s in self.parts.items()},
            "ops": [figure.as_dict() for figure in self.figures],
        }  # fmt: skip


def peaks_text(peaks: Peaks) -> str:
    """What the machine does at most, in a few lines."""
    cache = "" if peaks.cache is None else f", L3 {peaks.cache * GIGA:.1f} GB/s"
    return (
        f"{peaks.isa}, {peaks.num_threads} threads, at most:\n"
        f"  products: fp32 {peaks.f32 * GIGA:.0f}, bf16 {peaks.bf16 * GIGA:.0f}, 4-bit {peaks.w4 * GIGA:.0f}, 8-bit {peaks.w8 * GIGA:.0f} Gop/s\n"
        f"  reading: memory {peaks.memory * GIGA:.1f} GB/s (small pages {peaks.memory_small_pages * GIGA:.1f}){cache}"
    )


def summary(step: StepFigures) -> str:
    """A step in one line: its time, where that goes, and how near the limit it is."""
    parts = step.parts
    whole = sum(parts.values())
    shares = ", ".join(f"{part.value} {spent / whole:.0%}" for part, spent in parts.items())
    took = f"{step.seconds * 1e3:.3g}" if step.seconds < 0.1 else f"{step.seconds * 1e3:,.0f}"
    return f"{took} ms: {shares}; {step.limit_seconds / step.seconds:.0%} of the limit"


def step_text(step: StepFigures) -> str:
    """A step's instructions, those that take most first."""
    rows = [
        (
            f.name, str(f.count), f"{f.seconds / f.count * 1e6:.1f}", f"{f.seconds * 1e3:.3f}", f"{f.seconds / step.seconds:.1%}",
            f"{f.cost.bytes / f.seconds * GIGA:.1f}", f"{f.cost.operations / f.seconds * GIGA:.1f}", f.limit.bound.value,
            f"{f.limit.seconds * 1e3:.3f}", f"{f.share:.0%}",
        )
        for f in step.figures
    ]  # fmt: skip
    rest = step.rest_seconds
    rows.append(("rest: start of threads, Python", "", "", f"{rest * 1e3:.3f}", f"{rest / step.seconds:.1%}", "", "", "", "", ""))
    whole = (f"{step.seconds * 1e3:.3f}", "100.0%", "", "", "", f"{step.limit_seconds * 1e3:.3f}", f"{step.limit_seconds / step.seconds:.0%}")
    rows.append(("whole step", "", "", *whole))
    return f"{step.name}: {step.tokens / step.seconds:,.0f} tokens/s, {summary(step)}\n{_aligned((STEP_HEAD, *rows))}"


def step_markdown(step: StepFigures) -> str:
    """The same for a page, what takes least in one line."""
    few = [f for f in step.figures if f.seconds < LEAST_SHARE * step.seconds]
    lines = [f"**{step.name[0].upper()}{step.name[1:]}**, {summary(step)}.", "", MARKDOWN_HEAD]
    lines += [
        _markdown_row(f.name, str(f.count), f.seconds, f.limit.seconds, f.limit.bound.value, step.seconds) for f in step.figures if f not in few
    ]
    if few:
        count, limit = sum(f.count for f in few), sum(f.limit.seconds for f in few)
        lines.append(_markdown_row(f"less than {LEAST_SHARE:.1%} each", str(count), sum(f.seconds for f in few), limit, "", step.seconds))
    lines.append(_markdown_row("rest: start of threads, Python", "", step.rest_seconds, 0.0, "", step.seconds))
    lines.append(_markdown_row("whole step", "", step.seconds, step.limit_seconds, "", step.seconds))
    return "\n".join(lines)


def _markdown_row(name: str, count: str, seconds: float, limit: float, bound: str, whole: float) -> str:
    best, share = (f"{limit * 1e3:.3f}", f"{limit / seconds:.0%}") if limit else ("", "")
    return f"| {name} | {count} | {seconds * 1e3:.3f} | {seconds / whole:.1%} | {best} | {bound} | {share} |"


def products_text(figures: Sequence[Figure]) -> str:
    """One line for each kind, shape and number of rows."""
    rows = [
        (
            f.name, str(f.rows), f"{f.seconds * 1e6:.1f}", f"{f.cost.bytes / f.seconds * GIGA:.1f}", f"{f.cost.operations / f.seconds * GIGA:.1f}",
            f.limit.bound.value, f"{f.limit.seconds * 1e6:.1f}", f"{f.share:.0%}",
        )
        for f in figures
    ]  # fmt: skip
    return _aligned((PRODUCT_HEAD, *rows))


def as_json(peaks: Peaks, steps: Sequence[StepFigures] = (), products: Sequence[Figure] = ()) -> dict[str, Any]:
    """All figures, in seconds, bytes and operations."""
    told: dict[str, Any] = {"peaks": asdict(peaks)}
    if steps:
        told["steps"] = [step.as_dict() for step in steps]
    if products:
        told["products"] = [figure.as_dict() for figure in products]
    return told


def draw_steps(path: Path, steps: Sequence[StepFigures]) -> None:
    """Bars of what each step's instructions take, the part that the limit explains darker. Raises ConfigError as plot.save does."""
    figure = new_figure(4.4 * len(steps), 4.6)
    for axes, step in zip(figure.subplots(1, len(steps), squeeze=False)[0], steps, strict=True):
        names = [f.name for f in step.figures]
        axes.barh(names, [f.seconds * 1e3 for f in step.figures], color="tab:blue", alpha=0.35, label="measured")
        axes.barh(names, [f.limit.seconds * 1e3 for f in step.figures], color="tab:blue", height=0.4, label="limit")
        axes.invert_yaxis()
        axes.set(title=f"{step.name}\n{step.limit_seconds / step.seconds:.0%} of the limit", xlabel="milliseconds")
        axes.tick_params(axis="y", labelsize="x-small")
        axes.grid(alpha=0.3, axis="x")
    figure.axes[0].legend(fontsize="small", loc="lower right")
    save(figure, path)


def draw_products(path: Path, figures: Sequence[Figure]) -> None:
    """The share of the limit over the number of rows, a line for each kind and shape. Raises ConfigError as plot.save does."""
    figure = new_figure(7, 4.6)
    axes = figure.subplots()
    for name in dict.fromkeys(f.name for f in figures):
        own = [f for f in figures if f.name == name]
        axes.plot([f.rows for f in own], [f.share for f in own], "o-", label=name)
    axes.set(title="Products beside the machine's limit", xlabel="rows", ylabel="share of the limit", xscale="log", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
    save(figure, path)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]) for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)
