"""Prints docs/models.md: docs/models.md.in with a table of the families and what their tests show. usage: models_page.py > docs/models.md"""

import re
import tomllib
from pathlib import Path

from octavo.loader.gguf_names import ARCHITECTURES
from octavo.models import SAME_AS, files, load

ROOT = Path(__file__).parents[1]
FILES = [*sorted((ROOT / "tests/models/cases").glob("*.toml")), ROOT / "tests/models/written_anew.toml"]
CASES = [case for path in FILES for case in tomllib.loads(path.read_text())["case"]]
GGUF = re.findall(r'Case\("(\w+)", "(\w+)"', (ROOT / "tests/models/test_gguf_families.py").read_text())
HEADS = ("MHA", "GQA", "MQA", "QK norm", "q, k, v biases", "soft cap")
WINDOWS = {"sliding window": "all layers", "mixed windows": "some layers"}
FURTHER = ("MoE", "LayerNorm", "learned positions", "multipliers", "tied head")


def row(name: str) -> str:
    types = [name, *(alias for alias, of in SAME_AS.items() if of == name)]
    shown = sorted({what for case in CASES if case["family"] in types for what in case["shows"]})
    gguf = any({family, ARCHITECTURES[arch]} & set(types) for family, arch in GGUF)
    columns = [[f"`{word}`" for word in types], [f"`{word}`" for word in load(name).ARCHITECTURES], [w for w in HEADS if w in shown]]
    columns += [[said for what, said in WINDOWS.items() if what in shown], [what.removeprefix("rope ") for what in shown if "rope" in what]]
    columns += [[what for what in FURTHER if what in shown], ["safetensors"] * bool(shown) + ["GGUF"] * gguf]
    return f"| {' | '.join(', '.join(words) or '-' for words in columns)} |"


template = (ROOT / "docs/models.md.in").read_text().replace("{table}", "\n".join(map(row, sorted(files()))))
print(template.replace("{llama}", (ROOT / "src/octavo/models/llama.py").read_text().strip()), end="")
