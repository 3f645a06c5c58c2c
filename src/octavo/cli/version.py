"""`octavo version`: what is installed. Loads nothing but the package's own number, unless asked for more."""

from __future__ import annotations

import platform

import click

import octavo


@click.command("version", help="Print the version; with --verbose also the interpreter, the machine and the packages in use.")
@click.option("--verbose", "-v", is_flag=True, help="also the interpreter, the machine and the packages in use")
def command(verbose: bool) -> None:
    click.echo(f"octavo {octavo.__version__}")
    if verbose:
        from importlib.metadata import PackageNotFoundError, version

        click.echo(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
        for name in ("numpy", "msgspec", "tokenizers", "jinja2", "uvicorn", "uvloop", "huggingface_hub"):
            try:
                click.echo(f"{name} {version(name)}")
            except PackageNotFoundError:
                click.echo(f"{name} missing")
