"""Prints docs/models.md: the families, and what the cases in tests/models/cases show of each; the text around them is docs/models.md.in. usage: models_page.py > docs/models.md"""

import tomllib
from pathlib import Path

from octavo.models import SAME_AS, files, load

ROOT = Path(__file__).parents[1]
CASES = [case for path in sorted((ROOT / "tests/models/cases").glob("*.toml")) for case in tomllib.loads(path.read_text())["case"]]
HEADS = ("MHA", "GQA", "MQA", "QK norm", "q, k, v biases", "soft cap")
WINDOWS = {"sliding window": "all layers", "mixed windows": "some layers"}
FURTHER = ("MoE", "LayerNorm", "learned positions", "multipliers", "tied head")


def row(name: str) -> str:
    types = [name, *(alias for alias, of in SAME_AS.items() if of == name)]
    cases = [case for case in CASES if case["family"] in types]
    shown = {what for case in cases for what in case["shows"]}
    rope = [what.removeprefix("rope ").replace(" rope", "") for what in sorted(shown) if "rope" in what]
    cells = [", ".join(f"`{word}`" for word in types), ", ".join(f"`{word}`" for word in load(name).ARCHITECTURES)]
    cells += [", ".join(what for what in HEADS if what in shown), ", ".join(said for what, said in WINDOWS.items() if what in shown)]
    cells += [", ".join(rope), ", ".join(what for what in FURTHER if what in shown)]
    cells += [", ".join(sorted({case.get("files", "safetensors") for case in cases})), str(len(cases))]
    return f"| {' | '.join(cell or '-' for cell in cells)} |"


template = (ROOT / "docs/models.md.in").read_text()
table = "\n".join(map(row, sorted(files())))
print(template.replace("{table}", table).replace("{llama}", (ROOT / "src/octavo/models/llama.py").read_text().strip()), end="")
