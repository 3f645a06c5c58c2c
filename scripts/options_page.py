"""Prints docs/options.md: every option as config.py states it. usage: options_page.py > docs/options.md"""

import dataclasses

from octavo.cli.options import describe
from octavo.config import AsyncEngineArgs, EngineArgs, ServerArgs

HEAD = """# Options

Generated from `octavo/config.py` by `make docs`. On the command line an option is written with dashes or underscores, a switch as
`--name` or `--no-name`. `LLM(...)` and `EngineArgs(...)` take the engine's options under the names given here; `AsyncEngineArgs` also those of
the asynchronous engine. A wrong value ends in one line that names the option, the value and what is allowed, and exit code 2.
"""


def section(title: str, cls: type, known: set[str]) -> set[str]:
    rows = [describe(cls, field) for field in dataclasses.fields(cls) if field.name not in known]
    print(f"\n## {title}\n\n| option | values | default | what it does |\n|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return known | {field.name for field in dataclasses.fields(cls)}


print(HEAD, end="")
names = section("Engine", EngineArgs, set())
section("Asynchronous engine", AsyncEngineArgs, names)
section("Server", ServerArgs, set())
