"""Measured rows as a table in Markdown, a JSON file and a picture. Knows nothing of what was measured. Pictures need matplotlib."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DOTS_PER_INCH = 100


@dataclass(frozen=True, slots=True)
class Curve:
    """`y` over `x`, names of columns; `only` picks the rows in which these columns have these values."""

    y: str
    label: str
    only: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Figures:
    """`columns`: of each key of a row its heading and how its value is written. `name` is that of the files."""

    name: str
    title: str
    columns: dict[str, tuple[str, str]]
    rows: Sequence[dict[str, Any]]
    x: str
    curves: Sequence[Curve]
    y_label: str
    logarithmic: str = "x"  # of "x", "y", "xy", ""

    def table(self) -> str:
        lines = ["| " + " | ".join(heading for heading, _ in self.columns.values()) + " |", "|" + "--:|" * len(self.columns)]
        for row in self.rows:
            cells = ["-" if row.get(key) is None else format(row[key], style) for key, (_, style) in self.columns.items()]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def save(self, folder: Path, picture: bool = True) -> None:
        """NAME.json and, if asked for, NAME.png."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(json.dumps({"title": self.title, "rows": list(self.rows)}, indent=1) + "\n")
        if picture:
            self.draw(folder / f"{self.name}.png")

    def draw(self, path: Path) -> None:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter

        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        axes = figure.subplots()
        for curve in self.curves:
            rows = [row for row in self.rows if curve.only.items() <= row.items() and row.get(curve.y) is not None]
            axes.plot([row[self.x] for row in rows], [row[curve.y] for row in rows], "o-", label=curve.label)
        if "x" in self.logarithmic:
            axes.set_xscale("log", base=2 if max(row[self.x] for row in self.rows) < 1e5 else 10)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        if "y" in self.logarithmic:
            axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.set(title=self.title, xlabel=self.columns[self.x][0], ylabel=self.y_label)
        if "y" not in self.logarithmic:
            axes.set_ylim(0, None)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        figure.savefig(path, dpi=DOTS_PER_INCH)
