"""Generates damaged models, always the same ones: what is wrong, the files, and what must happen. `python generate.py FOLDER` writes them out."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit" / "loader")]

import binary_damage  # noqa: E402
import folder_damage  # noqa: E402
import json_damage  # noqa: E402
import quantised_damage  # noqa: E402
import tokenizer_damage  # noqa: E402
from cases import Case, Must, write  # noqa: E402
from quantised import HEALTHY  # noqa: E402


def all_cases() -> list[Case]:
    """The undamaged models first: what harmless damage is compared with."""
    cases = [Case(form, form, files(), start, Must.LOAD) for form, (files, start) in HEALTHY.items()]
    for module in (binary_damage, folder_damage, json_damage, quantised_damage, tokenizer_damage):
        cases += module.cases()
    return cases


def main(root: Path) -> None:
    for i, case in enumerate(all_cases()):
        folder = root / f"{i:04}"
        folder.mkdir(parents=True)
        write(folder, case.files)
        print(folder / case.start, case.must.value, case.name, sep="\t")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
