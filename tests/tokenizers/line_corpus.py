"""A corpus that is the same at every run: lines of every sort that trips a tokenizer.

Code comes from Python's own library, scripts and symbols from ranges of Unicode, the rest is written by hand. `LINES` has well over 5,000
lines; `TRAINING` is what small vocabularies are trained on.
"""

import random
import sysconfig
import unicodedata
from pathlib import Path

MODULES = (
    "argparse",
    "ast",
    "difflib",
    "textwrap",
    "tarfile",
    "locale",
    "json/decoder",
    "email/charset",
    "html/entities",
    "calendar",
)

HAND_WRITTEN = [
    "", " ", "  ", "\t", "\n", "\r\n", "\n\n\n", " \n \n ", "\t\t\tif x:\r\n", "a" * 300, " " * 300, "\n" * 130, "-" * 257, "=" * 64, "ab" * 200,
    "aaa aa a aaaa", "hahahahaha", "......", ". . . . .", "((()))", "\\\\\\n\\t", "don't we'll I'VE they'd IT'S 'tis ’s", "naïve café Ångström ﬁ ﬂ ﬃ",
    "x = {'a': [1, 2.5e-10, 0x1F], \"b\": None}  # note", "SELECT * FROM t WHERE id = 42;", "<div class=\"x\">&nbsp;</div>", "https://example.org/a?b=c&d=%20e#f",
    "漢字かな交じり文。", "你好，世界！我们正在测试分词器。", "안녕하세요 세계", "안녕", "Привет, мир", "Γειά σου Κόσμε", "مرحبا بالعالم", "שלום עולם",
    "नमस्ते दुनिया", "สวัสดีชาวโลก", "ﷺ ﷽", "ｆｕｌｌｗｉｄｔｈ １２３ ！", "①②③ ½ ²³ Ⅷ ٣٤ 一二三 ㍿ ㎏", "e\u0301 e\u0323\u0302 o\u031b\u0301 \u0301x", "Z\u0351\u036b\u0343\u036a", "A\u030a Å Å",
    "😀", "👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 ❤️ ☺", "🧑‍🚀🧑🏿‍🦱", "\u200b\u200c\u200d\u2060\ufeff", "\u00a0\u2003\u3000 \u2028\u2029 \x85", "\x00", "a\x00b\x01\x1f\x7f\x80\x9f", "▁", "▁▁a ▁b", "a▁ b",
    "\ufffd\ufffe\uffff", "\U0010ffff\U000e0001", "<s>", "</s>", "<unk>", "<0x41>", "<0x0A>x", "[INST] hi [/INST]", "<|im_start|>user\nhi<|im_end|>", "<|endoftext|>",
    "<|im_start", "|im_end|>", "<mask>", "<sep>", "<sep><sep> <sep>", "a<sep>b", "[gMASK]<sop>", "[gMASK]sop", "sop eop sophisticated", "1234567890 12 345 6,789.01", "v2.0.1-rc3", "2026-11-30T12:00:00Z",
    "CamelCaseWords snake_case_words SCREAMING_CASE", "…—“quoted”‘x’ «y» „z“", "  leading", "trailing  ", " both ", "two  spaces   three    four", "tab\tin\tside", "line\nbreak\n\nand more\n",
]  # fmt: skip

RANGES = [
    (0x20, 0x7F), (0x80, 0x180), (0x180, 0x250), (0x300, 0x370), (0x370, 0x400), (0x400, 0x530), (0x590, 0x600), (0x600, 0x700), (0x900, 0x980), (0xE00, 0xE60),
    (0x1100, 0x1200), (0x1E00, 0x1F00), (0x2000, 0x2070), (0x2070, 0x20A0), (0x2100, 0x2200), (0x2460, 0x2500), (0x3000, 0x3040), (0x3040, 0x3100), (0x3130, 0x3190),
    (0x3200, 0x3400), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0xF900, 0xFB00), (0xFB00, 0xFB50), (0xFE00, 0xFE10), (0xFF00, 0xFFF0), (0x1D400, 0x1D500), (0x1F300, 0x1F650), (0x1F900, 0x1FA00), (0x20000, 0x20100), (0xE0020, 0xE0080),
]  # fmt: skip
JOINERS = ["\u200d", "\ufe0f", "\u0301", "\u0308", "\u0323", "\u0300\u0301", " ", "  ", "\n", "\t"]


def code_lines() -> list[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    lines: list[str] = []
    for module in MODULES:
        lines += (library / f"{module}.py").read_text(encoding="utf-8").splitlines()[:400]
    return lines


def from_ranges(rng: random.Random, count: int) -> list[str]:
    lines = []
    for _ in range(count):
        parts: list[str] = []
        for _ in range(rng.randrange(1, 6)):
            low, high = rng.choice(RANGES)
            parts += [chr(rng.randrange(low, high)) for _ in range(rng.randrange(1, 7))]
            if rng.random() < 0.4:
                parts.append(rng.choice(JOINERS))
        lines.append("".join(parts))
    return lines


def mixtures(rng: random.Random, count: int) -> list[str]:
    """Hand-written lines behind one another, with runs of spaces between, decomposed now and then."""
    lines = []
    for _ in range(count):
        line = (" " * rng.choice([0, 1, 1, 2, 5])).join(rng.choices(HAND_WRITTEN, k=rng.randrange(2, 5)))
        lines.append(unicodedata.normalize("NFD", line) if rng.random() < 0.1 else line)
    return lines


def runs(rng: random.Random, count: int) -> list[str]:
    """Few characters in many orders: where several ways to join are open."""
    return [
        "".join(rng.choices(rng.choice(["ab", "a ", "- ", "ha", "aab ", "\n ", "123", "▁ a"]), k=rng.randrange(1, 40)))
        for _ in range(count)
    ]


def make() -> list[str]:
    rng = random.Random(4)
    lines = HAND_WRITTEN + code_lines() + from_ranges(rng, 1500) + mixtures(rng, 700) + runs(rng, 500)
    long = [" ".join(rng.choices(lines, k=120)) for _ in range(6)]
    return lines + long


LINES = make()
TRAINING = [line for line in code_lines() if line.strip()][:1500] + [
    line for line in HAND_WRITTEN if line.strip() and "\x00" not in line
] * 3
