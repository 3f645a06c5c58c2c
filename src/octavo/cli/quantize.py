"""`octavo quantize MODEL -o DIR`: a smaller copy of a checkpoint. Knows nothing of how numbers are rounded."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from octavo.cli.options import command as make_command
from octavo.errors import ConfigError


class Bar:
    """The layers that are done. Begins with the first of them that is told, so that a mistake is all that its user reads."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.bar: Any = None

    def show(self, done: int, total: int) -> None:
        from tqdm import tqdm

        if self.bar is None:
            self.bar = tqdm(total=total, initial=done, unit="layer", file=sys.stderr, desc=self.label)
        self.bar.update(done - self.bar.n)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


@make_command(
    "quantize",
    "Write a quantised copy of MODEL (a folder of safetensors, or a hub id) in a format that other programs read too. An interrupted run is "
    "taken up by the same command.",
)
@click.argument("model")
@click.option("--scheme", default="w4", show_default=True, metavar="[w4|w8|w8a8]", help="bits of weights, and of activations for a8")
@click.option("--output", "-o", required=True, metavar="DIR", help="the new folder")
@click.option(
    "--method", default="", metavar="[rtn|gptq|awq|smoothquant]",
    help="how weights are rounded; default: rtn, to nearest; with --calibration gptq, for w8a8 smoothquant",
)  # fmt: skip
@click.option("--calibration", default=None, metavar="FILE", help="texts to measure on: ShareGPT's JSON, JSON lines or plain text")
@click.option("--group-size", type=int, default=None, help="inputs per scale; -1: a whole row; default: of w4 the first of 128, 64, 32 that fits, else -1")
@click.option("--symmetric/--no-symmetric", default=None, help="no zero points; of w4; default: symmetric, but for awq")
@click.option("--act-order/--no-act-order", default=False, help="gptq: group inputs by importance (desc_act), which readers must undo")
@click.option("--samples", type=int, default=64, show_default=True, help="most texts to measure on")
@click.option("--sample-len", type=int, default=512, show_default=True, help="most tokens of each")
@click.option("--revision", default=None, help="branch, tag or commit of a hub id")
@click.option("--download-dir", default=None, help="where hub downloads are kept; default: the cache folder")
def command(
    model: str,
    scheme: str,
    output: str,
    method: str,
    calibration: str | None,
    group_size: int | None,
    symmetric: bool | None,
    act_order: bool,
    samples: int,
    sample_len: int,
    revision: str | None,
    download_dir: str | None,
) -> None:
    from octavo.compress import Settings, quantize
    from octavo.loader.resolve import resolve_model

    settings = Settings(scheme, method, calibration is not None, group_size, symmetric, act_order, samples, sample_len).checked()
    if "\0" in output or not output:
        raise ConfigError(f"output = {output!r}: must be the path of a folder")
    # A hub's folder may hold both kinds of files: only one of them is of use here.
    wanted = "safetensors" if "/" in model and not os.path.exists(model) else "auto"
    source = resolve_model(model, revision=revision, download_dir=download_dir, load_format=wanted)
    with closing(Bar(f"{scheme} {settings.method}")) as bar:
        result = quantize(source, Path(output).expanduser(), settings, Path(calibration).expanduser() if calibration else None, bar.show)
    group = "rows" if result.group < 0 else f"groups of {result.group}"
    click.echo(
        f"{result.folder}: {result.format}, {result.method}, {result.matrices} matrices in {group}; "
        f"{result.nbytes / 1e6:,.1f} MB of {result.source_bytes / 1e6:,.1f} MB"
    )
