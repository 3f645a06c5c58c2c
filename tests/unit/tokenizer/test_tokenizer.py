"""Encoding and decoding against the tokenizers and transformers packages; what is refused."""

import json
import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Reference

from octavo.errors import ConfigError, InvalidRequestError, ModelFileError
from octavo.tokenizer import vocabulary
from octavo.tokenizer.decoding import DecoderKind
from octavo.tokenizer.gguf_vocab import WORD_RULES, build_vocabulary
from octavo.tokenizer.tokenizer import Tokenizer


def small(gguf_metadata, **changes) -> Tokenizer:
    return Tokenizer(build_vocabulary(gguf_metadata(**changes), "model.gguf"))


def has_digit(text: str) -> bool:
    return any(unicodedata.category(c).startswith("N") for c in text)


class TestSmolLM2:
    def test_facts_of_the_file(self, smollm2):
        assert smollm2.vocab_size == 49152
        assert smollm2.eos_token_ids == [2]
        assert smollm2.bos_token_id == 1
        assert smollm2.special_ids == frozenset(range(17))
        assert smollm2.decoder_kind is DecoderKind.BYTE_LEVEL
        assert "<|im_start|>" in smollm2.chat_template

    def test_equals_the_original_rule_on_the_corpus(self, smollm2, smollm2_metadata, lines):
        """The original's tokenizer.json cuts each digit, then by GPT-2's words; built here from JSON, not by our constructor."""
        tokens = smollm2_metadata["tokenizer.ggml.tokens"]
        reference = Reference.from_str(json.dumps({
            "version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [
                {"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
                for i in range(17)
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": False, "byte_fallback": False, "vocab": {t: i for i, t in enumerate(tokens)},
                      "merges": list(smollm2_metadata["tokenizer.ggml.merges"])},
        }))  # fmt: skip
        ours = smollm2.encode_batch(lines)
        theirs = [e.ids for e in reference.encode_batch(lines)]
        assert ours == theirs
        assert [smollm2.encode(line) for line in lines[:200]] == theirs[:200]
        for skip in (True, False):
            assert [smollm2.decode(ids, skip) for ids in theirs] == reference.decode_batch(
                theirs, skip_special_tokens=skip
            )

    def test_equals_transformers_reading_of_the_file_where_it_keeps_the_rule(self, smollm2, smollm2_file, lines):
        """transformers forgets that digits are cut, so lines with digits are left out; everything else is equal."""
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("gguf")
        theirs = transformers.AutoTokenizer.from_pretrained(smollm2_file.parent, gguf_file=smollm2_file.name)
        plain = [line for line in lines if not has_digit(line)]
        assert len(plain) > 2000
        assert smollm2.encode_batch(plain) == theirs(plain)["input_ids"]
        assert [smollm2.decode(ids) for ids in smollm2.encode_batch(plain[:300])] == theirs.batch_decode(
            theirs(plain[:300])["input_ids"], skip_special_tokens=True
        )

    def test_digits_are_single_tokens(self, smollm2):
        assert [smollm2.token_str(i) for i in smollm2.encode("a 2048 ½")] == ["a", " ", "2", "0", "4", "8", " ", "½"]

    def test_special_tokens_in_text_are_tokens(self, smollm2):
        assert smollm2.encode("<|im_start|>user") == [1, 4093]
        assert smollm2.decode([1, 4093]) == "user"
        assert smollm2.decode([1, 4093], skip_special_tokens=False) == "<|im_start|>user"

    def test_bytes_of_tokens_are_the_text(self, smollm2):
        text = "漢字 😀👍🏽 é T\u0301 <|im_end|>"
        ids = smollm2.encode(text)
        assert b"".join(map(smollm2.token_bytes, ids)) == text.encode()
        assert any("\ufffd" in smollm2.token_str(i) for i in ids)
        assert len(text.encode()) <= len(ids) * smollm2.max_token_bytes


class TestSmallVocabulary:
    def test_round_trip_and_special(self, gguf_metadata):
        tokenizer = small(gguf_metadata)
        ids = tokenizer.encode("<s>hello world<tool></s>")
        assert [tokenizer.token_str(i) for i in ids] == ["<s>", "hello", " wo", "rl", "d", "<tool>", "</s>"]
        assert tokenizer.decode(ids) == "hello world<tool>"
        assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>hello world<tool></s>"
        assert tokenizer.eos_token_ids == [tokenizer.token_id("</s>")]
        assert tokenizer.bos_token_id == tokenizer.token_id("<s>")
        assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}

    def test_bos_and_eos_are_added_as_the_file_says(self, gguf_metadata):
        key = "tokenizer.ggml.add_bos_token"
        tokenizer = small(gguf_metadata, **{key: True, "tokenizer.ggml.add_eos_token": True})
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_ids[0]
        hello = tokenizer.token_id("hello")
        assert tokenizer.encode("hello") == [bos, hello, eos]
        assert tokenizer.encode("hello", add_special_tokens=False) == [hello]
        assert tokenizer.encode_batch(["hello", ""]) == [[bos, hello, eos], [bos, eos]]
        assert tokenizer.encode_batch(["hello"], add_special_tokens=False) == [[hello]]
        assert small(gguf_metadata, **{"tokenizer.ggml.pre": "llama-bpe"}).encode("hello") == [bos, hello]
        assert small(gguf_metadata).encode("") == []

    def test_turn_end_of_the_template_ends_a_generation(self, gguf_metadata):
        metadata = gguf_metadata()
        metadata["tokenizer.ggml.tokens"] += ["<|im_end|>", "<|eot_id|>"]
        metadata["tokenizer.ggml.token_type"] += [3, 3]
        metadata["tokenizer.chat_template"] = "{{ messages }}<|im_end|>"
        tokenizer = Tokenizer(build_vocabulary(metadata, "x"))
        assert tokenizer.eos_token_ids == [tokenizer.token_id("</s>"), tokenizer.token_id("<|im_end|>")]

    def test_named_templates(self, gguf_metadata):
        tokenizer = small(gguf_metadata, **{
            "tokenizer.chat_template": "plain", "tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools",
        })  # fmt: skip
        assert tokenizer.chat_templates == {"default": "plain", "tool_use": "tools"}

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"tokenizer.ggml.model": "bert"}, "'bert'"),
            ({"tokenizer.ggml.model": 3}, "tokenizer.ggml.model"),
            ({"tokenizer.ggml.pre": "martian"}, "'martian'"),
            ({"tokenizer.ggml.merges": ["h e", "hello"]}, "tokenizer.ggml.merges"),
            ({"tokenizer.ggml.merges": ["h e", "a b c"]}, "tokenizer.ggml.merges"),
            ({"tokenizer.ggml.merges": ["q qqqq"]}, "tokenizer.ggml.merges"),
            ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
            ({"tokenizer.ggml.merges": [1, 2]}, "tokenizer.ggml.merges"),
            ({"tokenizer.ggml.tokens": []}, "tokenizer.ggml.tokens"),
            ({"tokenizer.ggml.tokens": "abc"}, "tokenizer.ggml.tokens"),
            ({"tokenizer.ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type"),
            ({"tokenizer.ggml.eos_token_id": 10**9}, "tokenizer.ggml.eos_token_id"),
            ({"tokenizer.ggml.eos_token_id": -1}, "tokenizer.ggml.eos_token_id"),
            ({"tokenizer.ggml.bos_token_id": True}, "tokenizer.ggml.bos_token_id"),
            ({"tokenizer.ggml.add_bos_token": 1}, "tokenizer.ggml.add_bos_token"),
        ],
    )
    def test_what_is_wrong_is_named(self, gguf_metadata, changes, named):
        with pytest.raises(ModelFileError) as caught:
            build_vocabulary(gguf_metadata(**changes), "model.gguf")
        assert str(caught.value).startswith("model.gguf: ")
        assert named in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_lone_surrogates_are_refused_with_the_callers_place(self, gguf_metadata):
        tokenizer = small(gguf_metadata)
        for call in (
            lambda: tokenizer.encode("a\ud800", param="prompt"),
            lambda: tokenizer.encode_batch(["a", "\udc00"], param="prompt"),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                call()
            assert caught.value.param == "prompt"
        assert tokenizer.decode(tokenizer.encode("a\x00b")) == "a\x00b"

    @pytest.mark.parametrize("token_id", [-1, 10**6])
    def test_ids_out_of_range_are_refused(self, gguf_metadata, token_id):
        tokenizer = small(gguf_metadata)
        with pytest.raises(InvalidRequestError) as caught:
            tokenizer.decode([1, token_id], param="tokens")
        assert str(token_id) in str(caught.value)
        assert caught.value.param == "tokens"
        assert tokenizer.token_str(token_id) == ""
        assert tokenizer.token_bytes(token_id) == b""

    @given(st.lists(st.integers(0, 270), max_size=12))
    @settings(max_examples=300, deadline=None)
    def test_decode_equals_the_package(self, byte_level, ids):
        tokenizer = byte_level
        ids = [i for i in ids if i < tokenizer.vocab_size]
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == tokenizer._backend.decode(ids, skip_special_tokens=skip)


class TestWordRules:
    """Words of each rule on texts whose cut is known from the rule's own definition."""

    @pytest.mark.parametrize(
        ("pre", "text", "words"),
        [
            ("gpt-2", "I'll pay  1234!\n", ["I", "'ll", " pay", " ", " 1234", "!", "\n"]),
            ("gpt-2", "WE'LL", ["WE", "'", "LL"]),
            ("smollm", "x 123", ["x", " ", "1", "2", "3"]),
            ("starcoder", "x 12", ["x", " ", "1", "2"]),
            (
                "llama-bpe",
                "WE'LL pay 12345 (now)\n\n x",
                ["WE", "'LL", " pay", " ", "123", "45", " (", "now", ")\n\n", " x"],
            ),
            ("qwen2", "it's 123.\n", ["it", "'s", " ", "1", "2", "3", ".\n"]),
            ("tekken", "HelloWorld 12/\n", ["Hello", "World", " ", "1", "2", "/\n"]),
            ("gpt-4o", "don't HTMLParser 1234", ["don't", " HTMLParser", " ", "123", "4"]),
            ("deepseek-v3", "abc 1234漢字x!", ["abc", " ", "123", "4", "漢字", "x", "!"]),
            ("deepseek-coder", "a b\n漢字 12", ["a", " b", "\n", "漢字", " ", "1", "2"]),
        ],
    )
    def test_words(self, gguf_metadata, pre, text, words):
        backend = build_vocabulary(gguf_metadata(**{"tokenizer.ggml.pre": pre}), "x").backend
        cut = [text[a:b] for _, (a, b) in backend.pre_tokenizer.pre_tokenize_str(text)]
        assert cut == words

    def test_qwen2_normalises(self, gguf_metadata):
        tokenizer = small(gguf_metadata, **{"tokenizer.ggml.pre": "qwen2"})
        assert tokenizer.encode("e\u0301") == tokenizer.encode("é")
        plain = small(gguf_metadata)
        assert plain.encode("e\u0301") != plain.encode("é")

    def test_every_rule_builds_and_loses_nothing(self, gguf_metadata, lines):
        for pre, rule in WORD_RULES.items():
            tokenizer = small(gguf_metadata, **{"tokenizer.ggml.pre": pre})
            for line in lines[:150]:
                ids = tokenizer.encode(line, add_special_tokens=False)
                expected = unicodedata.normalize("NFC", line) if rule.nfc else line
                assert tokenizer.decode(ids, skip_special_tokens=False) == expected, pre

    def test_known_words_need_no_merges(self, gguf_metadata):
        """llama-bpe takes a word that is a token whole, although no merge leads to it."""
        metadata = gguf_metadata()
        metadata["tokenizer.ggml.tokens"].append("xyz")
        metadata["tokenizer.ggml.token_type"].append(1)
        assert len(build_vocabulary(metadata, "x").backend.encode("xyz").ids) == 3
        metadata["tokenizer.ggml.pre"] = "llama-bpe"
        assert len(build_vocabulary(metadata, "x").backend.encode("xyz").ids) == 1


class TestFolder:
    def test_facts(self, spm_folder):
        tokenizer = Tokenizer.load(spm_folder)
        assert tokenizer.decoder_kind is DecoderKind.BYTE_FALLBACK
        assert tokenizer.bos_token_id == 1
        assert tokenizer.eos_token_ids == [2, 5]
        assert tokenizer.chat_templates == {"default": "plain", "tool_use": "with tools"}
        assert tokenizer.chat_template == "plain"
        assert tokenizer.vocab_size == 3 + 256 + 11

    def test_settings_of_training_do_not_cut_prompts(self, spm_folder):
        tokenizer = Tokenizer.load(spm_folder)
        ids = tokenizer.encode("ab " * 20)
        assert len(ids) > 20
        assert ids[0] == 1
        assert tokenizer.decode(ids) == "ab " * 20

    def test_decode_equals_the_package_on_text(self, spm_folder):
        tokenizer = Tokenizer.load(spm_folder)
        reference = Reference.from_file(str(spm_folder / "tokenizer.json"))
        for text in ["ab a", "  ab", "你 é", "e\u0301x", "", " ", "😀\n\tb", "<s>ab</s> a"]:
            ids = tokenizer.encode(text)
            for skip in (True, False):
                assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip), (text, skip)

    def test_bytes_of_tokens(self, spm_folder):
        tokenizer = Tokenizer.load(spm_folder)
        ids = tokenizer.encode("a 😀", add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)) == b" a \xf0\x9f\x98\x80"

    def test_template_file_overrules_the_configuration(self, spm_folder, tmp_path):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((spm_folder / name).read_bytes())
        (tmp_path / "chat_template.jinja").write_text("from the file")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("for documents")
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.chat_templates == {
            "default": "from the file",
            "tool_use": "with tools",
            "rag": "for documents",
        }

    def test_another_tokenizer(self, spm_folder, smollm2_file, tmp_path):
        (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
        assert Tokenizer.load(tmp_path, str(spm_folder)).eos_token_ids == [2, 5, 7]
        assert Tokenizer.load(smollm2_file, str(spm_folder / "tokenizer.json")).vocab_size == 3 + 256 + 11
        with pytest.raises(ConfigError, match="tokenizer = 'nowhere'"):
            Tokenizer.load(tmp_path, "nowhere")

    @pytest.mark.parametrize(
        ("name", "content", "says"),
        [
            ("tokenizer.json", None, "not found"),
            ("tokenizer.json", "{", "tokenizer.json"),
            ("tokenizer.json", "[" * 100_000, "tokenizer.json"),
            ("tokenizer_config.json", "nope", "not valid JSON"),
            ("tokenizer_config.json", "[]", "must hold an object"),
            ("tokenizer_config.json", '{"a":' * 20_000, "nested too deeply"),
            ("generation_config.json", "\xff", "not UTF-8"),
        ],
    )
    def test_damaged_files_are_named(self, spm_folder, tmp_path, name, content, says):
        for path in spm_folder.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / name).unlink()
        if content is not None:
            (tmp_path / name).write_text(content, encoding="latin-1")
        with pytest.raises(ModelFileError, match=re.escape(says)) as caught:
            Tokenizer.load(tmp_path)
        assert name in str(caught.value)

    def test_too_large_a_file(self, spm_folder, monkeypatch):
        monkeypatch.setattr("octavo.tokenizer.folder_vocab.MAX_TOKENIZER_BYTES", 100)
        with pytest.raises(ModelFileError, match=r"tokenizer\.json: larger"):
            Tokenizer.load(spm_folder)
        assert vocabulary.MAX_TOKENIZER_BYTES == 100 << 20

    def test_eos_ids_beyond_the_vocabulary_are_passed_over(self, spm_folder, tmp_path):
        for path in spm_folder.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 2, 99999]}')
        assert Tokenizer.load(tmp_path).eos_token_ids == [2]

    @pytest.mark.parametrize("value", ["-1", '["x"]', "true", "1.5", "{}", "[[2]]", "2147483648"])
    def test_eos_ids_that_cannot_be_are_refused(self, spm_folder, tmp_path, value):
        for path in spm_folder.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
        with pytest.raises(ModelFileError, match=r"generation_config\.json: eos_token_id = "):
            Tokenizer.load(tmp_path)

    def test_other_files_are_refused(self, tmp_path):
        (tmp_path / "model.bin").write_bytes(b"x")
        with pytest.raises(ModelFileError, match="a tokenizer is"):
            Tokenizer.load(tmp_path / "model.bin")


def package_tokenizer(decoder) -> Reference:
    """Words as tokens, with two special tokens; the decoder is what differs."""
    vocab = {w: i for i, w in enumerate(["[UNK]", "▁a", "▁b", "c", "##d", "▁", "<x>", "<y>", "▁a▁b"])}
    reference = Reference(models.WordLevel(vocab, unk_token="[UNK]"))
    reference.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s"), "removed")
    reference.decoder = decoder
    reference.add_special_tokens([AddedToken("<x>", special=True), AddedToken("<y>", special=True)])
    return reference


DECODERS = [
    decoders.Metaspace(),
    decoders.Metaspace(prepend_scheme="never"),
    decoders.WordPiece(),
    decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    None,
]


@pytest.mark.parametrize("number", range(len(DECODERS)))
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_decode_of_every_decoder_equals_the_package(number, data):
    reference = package_tokenizer(DECODERS[number])
    tokenizer = Tokenizer(vocabulary.Vocabulary(source="x", backend=reference, vocab_size=9))
    ids = data.draw(st.lists(st.integers(0, 8), max_size=8))
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
