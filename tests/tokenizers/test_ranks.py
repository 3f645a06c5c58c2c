"""tiktoken rank files against the tiktoken package, and byte-level vocabularies of GGUF files against the same ranks.

The original of a text is `Encoding.encode` with all special tokens allowed, which is transformers' conduct too: a special token written in a
text becomes its id. Qwen's own tokenizer composes characters (NFC) first. Small ranks are made here by byte-pair training, with each
family's own expression for words.
"""

import base64
import json
import random
import re
import unicodedata

import pytest
import regex
import tiktoken
from byte_ranks import GPT2, GPT4O, LLAMA, NUM_RANKS, QWEN, QWEN35, TEKKEN, as_characters, lines_of, ranks
from line_corpus import LINES

from octavo.errors import ModelFileError
from octavo.tokenizer.chat_template import ChatTemplate
from octavo.tokenizer.decoding import DecoderKind
from octavo.tokenizer.detokenizer import make_detokenizer
from octavo.tokenizer.gguf_vocab import build_vocabulary
from octavo.tokenizer.merges import all_merges
from octavo.tokenizer.tokenizer import Tokenizer

DIGITS = r"\p{N}"

FAMILIES = {
    "qwen": (QWEN, "qwen.tiktoken", {"tokenizer_class": "QWenTokenizer"}, {}),
    "glm4": (LLAMA, "tokenizer.model", {"tokenizer_class": "ChatGLM4Tokenizer"}, {}),
    "llama3": (LLAMA, "tokenizer.model", {}, {"model_type": "llama"}),
}


def folder(tmp_path, family: str, data: bytes | None = None, **generation) -> Tokenizer:
    pattern, file, tokenizer_config, config = FAMILIES[family]
    (tmp_path / file).write_bytes(lines_of(ranks(pattern)) if data is None else data)
    for name, content in (
        ("tokenizer_config", tokenizer_config),
        ("config", config),
        ("generation_config", generation),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return Tokenizer.load(tmp_path)


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


def reference(family: str, tokenizer: Tokenizer) -> tiktoken.Encoding:
    special = {content: i for i, content in tokenizer.added_tokens.items()}
    return tiktoken.Encoding(
        family, pat_str=FAMILIES[family][0], mergeable_ranks=ranks(FAMILIES[family][0]), special_tokens=special
    )


class TestFolder:
    def test_ids_and_text_are_the_originals(self, family, tmp_path):
        tokenizer = folder(tmp_path, family)
        encoding = reference(family, tokenizer)
        lines = LINES + [
            f"{special}{line}" for special, line in zip(encoding.special_tokens_set, LINES[300:900], strict=False)
        ]
        texts = [unicodedata.normalize("NFC", line) for line in lines] if family == "qwen" else lines
        ours = tokenizer.encode_batch(lines, add_special_tokens=False)
        differ = [
            line
            for line, text, ids in zip(lines, texts, ours, strict=True)
            if ids != encoding.encode(text, allowed_special="all")
        ]
        assert not differ, (len(differ), differ[:3])
        assert [tokenizer.decode(ids, False) for ids in ours] == texts
        assert tokenizer.decoder_kind is DecoderKind.BYTE_LEVEL

    def test_streamed_text_is_the_originals(self, family, tmp_path):
        """10,000 sequences, most of them not whole characters."""
        tokenizer = folder(tmp_path, family)
        encoding = reference(family, tokenizer)
        rng = random.Random(family)
        special = sorted(tokenizer.special_ids)
        for _ in range(10_000):
            ids = [
                rng.choice(special) if rng.random() < 0.1 else rng.randrange(NUM_RANKS) for _ in range(rng.randrange(8))
            ]
            detokenizer = make_detokenizer(tokenizer, skip_special_tokens=False)
            text = "".join(map(detokenizer.push, [[i] for i in ids])) + detokenizer.flush()
            assert text == encoding.decode(ids, errors="replace") == tokenizer.decode(ids, False)

    def test_what_opens_and_ends_a_text(self, family, tmp_path):
        tokenizer = folder(tmp_path, family)
        names = [tokenizer.token_str(i) for i in tokenizer.encode("")]
        assert names == {"qwen": [], "glm4": ["[gMASK]", "<sop>"], "llama3": ["<|begin_of_text|>"]}[family]
        ends = [tokenizer.token_str(i) for i in tokenizer.eos_token_ids]
        assert (
            ends
            == {
                "qwen": ["<|endoftext|>"],
                "glm4": ["<|endoftext|>", "<|user|>", "<|observation|>"],
                "llama3": ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"],
            }[family]
        )
        assert len(tokenizer.special_ids) == {"qwen": 208, "glm4": 14, "llama3": 256}[family]
        assert tokenizer.vocab_size == NUM_RANKS + len(tokenizer.special_ids)

    def test_ids_of_special_tokens(self, tmp_path):
        for family, known in {
            "qwen": {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<|extra_0|>": 3, "<|extra_204|>": 207},
            "glm4": {"<|endoftext|>": 0, "[gMASK]": 2, "<sop>": 4, "<|user|>": 7, "<|observation|>": 9},
            "llama3": {
                "<|begin_of_text|>": 0, "<|reserved_special_token_0|>": 2, "<|start_header_id|>": 6, "<|eot_id|>": 9,
                "<|reserved_special_token_2|>": 11, "<|reserved_special_token_246|>": 255,
            },
        }.items():  # fmt: skip
            (tmp_path / family).mkdir()
            tokenizer = folder(tmp_path / family, family)
            assert {name: tokenizer.token_id(name) for name in known} == {
                name: NUM_RANKS + i for name, i in known.items()
            }

    def test_the_files_may_name_other_special_tokens(self, tmp_path):
        folder(tmp_path, "llama3")
        decoder = {
            str(NUM_RANKS + 9): {"content": "<|done|>", "special": True},
            str(NUM_RANKS + 300): {"content": "<more>", "special": False},
        }
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"added_tokens_decoder": decoder, "eos_token": "<|done|>"})
        )
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.encode("<|done|><more>", False) == [NUM_RANKS + 9, NUM_RANKS + 300]
        assert tokenizer.token_id("<|eot_id|>") is None
        assert tokenizer.vocab_size == NUM_RANKS + 301

    def test_chat_formats(self, tmp_path):
        for family, generation, has in [
            ("qwen", {}, False),
            ("qwen", {"chat_format": "chatml"}, True),
            ("glm4", {}, True),
            ("llama3", {}, False),
        ]:
            assert (folder(tmp_path, family, **generation).chat_template is not None) == has
            for file in tmp_path.iterdir():
                file.unlink()
        qwen = folder(tmp_path, "qwen", chat_format="chatml")
        assert qwen.token_str(qwen.eos_token_ids[-1]) == "<|im_end|>"

    @pytest.mark.parametrize(
        "config", [{"tokenizer_class": "BaichuanTokenizer"}, {"tokenizer_class": "GemmaTokenizer"}]
    )
    def test_unknown_classes(self, config, tmp_path):
        folder(tmp_path, "glm4")
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        says = f"tokenizer_class '{config['tokenizer_class']}' are not supported; supported are Qwen (QWenTokenizer, qwen); GLM-4"
        with pytest.raises(ModelFileError, match=re.escape(says)) as caught:
            Tokenizer.load(tmp_path)
        assert "\n" not in str(caught.value)

    def test_no_class_at_all(self, tmp_path):
        (tmp_path / "tokenizer.model").write_bytes(lines_of(ranks(LLAMA)))
        with pytest.raises(ModelFileError, match="model_type '' are not supported"):
            Tokenizer.load(tmp_path)
        (tmp_path / "qwen.tiktoken").write_bytes(lines_of(ranks(QWEN)))
        assert Tokenizer.load(tmp_path / "qwen.tiktoken").token_id("<|im_end|>") == NUM_RANKS + 2


BYTES = lines_of({bytes([b]): b for b in range(256)})


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (BYTES[:-5] + b"\n", "line 256: must be"),
        (BYTES + b"YWI=\n", "line 257: must be a token in base64 and a rank"),
        (BYTES + b"YW*= 256\n", "line 257: is not base64"),
        (BYTES + b"YWI 256\n", "line 257: is not base64"),
        (BYTES + b"YWI= -1\n", "line 257: b'-1' is no rank"),
        (BYTES + b"YWI= 99999999999\n", "is no rank"),
        (BYTES + b"YWI= 99999999\n", "rank 99999999 is not below"),
        (BYTES + b"YWI= 256\nYWI= 257\n", "line 258: the token b'ab' appears twice"),
        (BYTES + b"YWI= 7\n", "rank 7 appears twice"),
        (BYTES + b"YWI= x\xff\n", "is no rank"),
        (BYTES + b"\xff\xfe 256\n", "line 257: is not base64"),
        (BYTES[7:], "1 of 256 single bytes have no rank, such as b'\\x00'"),
        (BYTES + base64.b64encode(b"a" * 5000) + b" 256\n", "a token of 5000 bytes"),
    ],
)  # fmt: skip
def test_damaged_files_are_named(data, says, tmp_path):
    with pytest.raises(ModelFileError, match=re.escape(says)) as caught:
        folder(tmp_path, "glm4", data)
    assert "tokenizer.model: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_id_in_use_cannot_be_a_special_token(tmp_path):
    folder(tmp_path, "llama3")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"added_tokens_decoder": {"5": {"content": "<|x|>", "special": true}}}'
    )
    with pytest.raises(ModelFileError, match="id 5 of '<|x|>' is taken"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("pre", "pattern", "composes"),
    [
        ("gpt-2", GPT2, False), ("phi-2", GPT2, False), ("llama-bpe", LLAMA, False), ("dbrx", LLAMA, False), ("smaug-bpe", LLAMA, False), ("glm4", LLAMA, False), ("qwen2", QWEN, True), ("qwen35", QWEN35, True),
        ("gpt-4o", GPT4O, False), ("llama4", GPT4O, False), ("tekken", TEKKEN, False),
    ],
)  # fmt: skip
def test_gguf_words_are_the_originals(pre, pattern, composes):
    """A rule of words by its name in a GGUF file gives the ids of the published expression."""
    found = ranks(LLAMA)
    tokens = [as_characters(token) for token in sorted(found, key=found.get)]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in all_merges(tokens)],
    }  # fmt: skip
    tokenizer = Tokenizer(build_vocabulary(metadata, "x.gguf"))
    encoding = tiktoken.Encoding(pre, pat_str=pattern, mergeable_ranks=found, special_tokens={})
    texts = [unicodedata.normalize("NFC", line) for line in LINES] if composes else LINES
    ours = tokenizer.encode_batch(LINES, add_special_tokens=False)
    differ = [
        text for text, ids in zip(texts, ours, strict=True) if ids != encoding.encode(text, disallowed_special=())
    ]
    assert not differ, (len(differ), differ[:3])


def test_digits_rule():
    """Each digit first, then GPT-2's words of what is left between."""
    found = ranks(LLAMA)
    tokens = [as_characters(token) for token in sorted(found, key=found.get)]
    encoding = tiktoken.Encoding("digits", pat_str=GPT2, mergeable_ranks=found, special_tokens={})
    for pre in ("smollm", "starcoder", "refact"):
        metadata = {
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": [" ".join(pair) for pair in all_merges(tokens)],
        }  # fmt: skip
        tokenizer = Tokenizer(build_vocabulary(metadata, "x.gguf"))
        for line, ids in zip(LINES, tokenizer.encode_batch(LINES, add_special_tokens=False), strict=True):
            parts = [part for part in regex.split(f"({DIGITS})", line) if part]
            assert ids == [i for part in parts for i in encoding.encode(part, disallowed_special=())], line


def test_gguf_files_of_glm4():
    """Two special tokens open every text; the chat format may be a name."""
    tokens = [as_characters(token) for token in sorted(ranks(LLAMA), key=ranks(LLAMA).get)]
    special = ["<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "glm4",
        "tokenizer.ggml.tokens": tokens + special,
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3] * len(special),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in all_merges(tokens)],
        "tokenizer.chat_template": "chatglm4",
    }
    tokenizer = Tokenizer(build_vocabulary(metadata, "x.gguf"))
    assert [tokenizer.token_str(i) for i in tokenizer.encode("a")] == ["[gMASK]", "<sop>", "a"]
    text = ChatTemplate.load(tokenizer).render([{"role": "user", "content": "a"}])
    names = [tokenizer.token_str(i) for i in tokenizer.encode(text, False)]
    assert names == ["[gMASK]", "<sop>", "<|user|>", "\n", "a", "<|assistant|>"]
