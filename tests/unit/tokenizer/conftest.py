"""A corpus of awkward lines, the built-in model's tokenizer, and small vocabularies of other kinds."""

import json
import random

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from octavo.errors import OctavoError
from octavo.gguf_file import GGUFFile
from octavo.loader.resolve import resolve_model
from octavo.tokenizer.gguf_vocab import build_vocabulary
from octavo.tokenizer.tokenizer import Tokenizer

FRAGMENTS = [
    "def f(x):\n    return x ** 2  # squares\n", "for (int i = 0; i < n; ++i) { a[i] += b[i]; }", "SELECT * FROM t WHERE id = 42;",
    "<div class=\"x\">&nbsp;</div>", "\t\t\tif x:\r\n", "\n\n\n", "   ", "        ", " \t \n ", "don't we'll I'VE they'd it's", "naïve café Ångström",
    "漢字かな交じり文。", "你好，世界！", "안녕하세요", "Привет, мир", "مرحبا بالعالم", "नमस्ते दुनिया", "สวัสดี", "😀👍🏽👨‍👩‍👧‍👦🇩🇪", "é ạ̈ Z͑ͫ̓ͪ̂ͫ̽", "①②③ ½ ²³ Ⅷ ٣٤ 一二三",
    "1234567890", "3.14159", "0x1F", "v2.0.1", "2026-11-30", "…—“quoted”‘x’", "\u200b\u00a0\u3000\ufeff", "\x00\x01\x1f\x7f", "<|im_start|>", "<|im_end|>",
    "<|endoftext|>", "<|im_start", "|im_end|>", "<repo_name>", " hello", "Hello", "HELLO", "supercalifragilistic", "!!!???", "(((", "\\frac{a}{b}",
]  # fmt: skip
SCRIPTS = [
    (0x20, 0x7F),
    (0xA0, 0x250),
    (0x370, 0x530),
    (0x900, 0x980),
    (0x3040, 0x30FF),
    (0x4E00, 0x9FFF),
    (0x1F300, 0x1F650),
    (0x300, 0x370),
    (0x20000, 0x20100),
]


def make_lines(count: int) -> list[str]:
    rng = random.Random(20261130)
    lines = []
    for _ in range(count):
        parts = []
        for _ in range(rng.randrange(1, 9)):
            if rng.random() < 0.6:
                parts.append(rng.choice(FRAGMENTS))
            else:
                low, high = rng.choice(SCRIPTS)
                parts.append("".join(chr(rng.randrange(low, high)) for _ in range(rng.randrange(1, 9))))
            if rng.random() < 0.5:
                parts.append(" " * rng.randrange(1, 4))
        lines.append("".join(parts))
    return lines


@pytest.fixture(scope="session")
def lines() -> list[str]:
    return make_lines(6000)


@pytest.fixture(scope="session")
def smollm2_file():
    """The built-in model's GGUF file; skipped where it cannot be had."""
    try:
        return resolve_model("smollm2-135m").path
    except OctavoError as e:
        pytest.skip(f"the built-in model is not at hand: {e}")


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_file):
    return GGUFFile.open(smollm2_file).metadata


@pytest.fixture(scope="session")
def smollm2(smollm2_file) -> Tokenizer:
    return Tokenizer.load(smollm2_file)


def byte_level_metadata(**changes) -> dict:
    """Metadata of a small byte-level vocabulary: 256 bytes, a few merges, two control tokens and a user-defined one."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "r l", "Ġ Ġ", "1 2", "Ã ©", "ð Ł", "ðŁ ĺ"]
    tokens = [*sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in merges), "<s>", "</s>", "<tool>"]
    types = [1] * (len(tokens) - 3) + [3, 3, 4]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
    }
    metadata.update({key.replace("__", "."): value for key, value in changes.items()})
    return metadata


@pytest.fixture(scope="session")
def gguf_metadata():
    return byte_level_metadata


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer(build_vocabulary(byte_level_metadata(), "model.gguf"))


SPM_PIECES = ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "你", "▁▁", "e", "\u0301"]


@pytest.fixture(scope="session")
def spm_folder(tmp_path_factory):
    """A tokenizer.json of Llama 2's kind: marks for spaces, bytes for what is not in the vocabulary, a BOS in the post-processor."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *SPM_PIECES]
    merges = [["▁", "a"], ["▁", "b"], ["a", "b"], ["▁a", "b"], ["▁", "▁"]]
    content = {
        "version": "1.0", "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}, "padding": None,
        "added_tokens": [
            {"id": i, "content": c, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            for i, c in enumerate(tokens[:3])
        ],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": None,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": True, "byte_fallback": True, "ignore_merges": False, "vocab": {t: i for i, t in enumerate(tokens)}, "merges": merges},
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("spm")
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": [
            {"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]})
    )  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    return folder
