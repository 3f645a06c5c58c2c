"""Entry point of the command `octavo`.

Turns errors into exit codes: 2 and one line on stderr for a user's mistake, 1 for a failure of ours that was foreseen, 130 for
Ctrl-C; a bug keeps its traceback. Knows the names of the subcommands and nothing of what they do: a command's module is imported
when it is called, so that `octavo version` loads neither numpy nor fastapi.
"""

from __future__ import annotations

import importlib
import sys

import click

from octavo.errors import ConfigError, InvalidRequestError, ModelFileError, OctavoError

COMMANDS = {
    "serve": "Serve a model over HTTP, with OpenAI's API.",
    "generate": "Complete one or more prompts and print the text.",
    "chat": "Talk with a model in the terminal.",
    "bench": "Measure a server, or the engine in this process.",
    "quantize": "Write a 4-bit or 8-bit copy of a model's folder.",
    "pull": "Fetch a model into the cache and print its path.",
    "version": "Print the version.",
}

USER_MISTAKE = 2
INTERRUPTED = 130


class LazyGroup(click.Group):
    """A group whose commands are functions `command` in modules of this package, imported on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"octavo.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=False)
def group() -> None:
    """Octavo serves large language models on CPUs.

    `octavo COMMAND --help` lists a command's options.
    """


def main(argv: list[str] | None = None) -> None:
    """Runs the command line `argv` (default: the process's) and leaves the process with its exit code."""
    sys.exit(run(argv))


def run(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code. Errors of known kinds end in one line on stderr."""
    try:
        result = group.main(argv, prog_name="octavo", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else str(error))
        return USER_MISTAKE
    except click.ClickException as error:
        return _complain(error.format_message(), USER_MISTAKE)
    except (ConfigError, ModelFileError, InvalidRequestError) as error:
        return _complain(str(error), USER_MISTAKE)
    except OctavoError as error:
        return _complain(str(error), 1)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (`octavo ... | head`); silence the interpreter's own flush at exit.
        sys.stdout = None  # type: ignore[assignment]
        return 0


def _complain(message: str, code: int) -> int:
    click.echo(f"octavo: error: {' '.join(message.split())}", err=True)
    return code


if __name__ == "__main__":
    main()
