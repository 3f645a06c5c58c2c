"""`octavo pull MODEL`: fetch a model into the cache. Knows nothing of what is in it."""

from __future__ import annotations

import click

from octavo.cli.options import command as make_command
from octavo.config import DEFAULT_MODEL


@make_command("pull", "Fetch MODEL (a hub id org/name, or a built-in name) into the cache and print its path.")
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--revision", default=None, help="branch, tag or commit of a hub id")
@click.option("--download-dir", default=None, help="where hub downloads are kept; default: the cache folder")
def command(model: str, revision: str | None, download_dir: str | None) -> None:
    from octavo.loader.resolve import resolve_model

    source = resolve_model(model, revision=revision, download_dir=download_dir, load_format="auto")
    click.echo(source.path)
