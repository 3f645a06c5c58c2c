"""`tokenizer.model` files against the sentencepiece package: ids, text whole and streamed, and what is refused.

The original of a text without special tokens is `SentencePieceProcessor.encode`. Where special tokens (control pieces and the unknown one)
stand written in a text, the original is transformers' conduct: they become their ids, and each stretch between them is encoded by
sentencepiece as a text of its own (`legacy` tokenizers), or without the dummy prefix behind the first (the others); sentencepiece alone
would read them as plain text. Decoding is `SentencePieceProcessor.decode`; only the unknown piece, which it shows as a mark, is a special
token here.
"""

import json
import random
import re

import pytest
from line_corpus import LINES
from spm_models import (
    BYTE,
    CONTROL,
    IDENTITY,
    MODELS,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    message,
    original,
    trained,
    written,
)

from octavo.errors import ModelFileError
from octavo.tokenizer.decoding import DecoderKind
from octavo.tokenizer.detokenizer import make_detokenizer
from octavo.tokenizer.gguf_vocab import build_vocabulary
from octavo.tokenizer.pieces import build_backend
from octavo.tokenizer.sentencepiece_file import parse_sentencepiece
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.tokenizer.vocabulary import PieceLead

SPECIAL = re.compile("(<unk>|<s>|</s>)")
PLAIN = [line for line in LINES if not SPECIAL.search(line)]
MIXED = [line for line in LINES if SPECIAL.search(line)]


def folder(tmp_path, data: bytes, **config) -> Tokenizer:
    (tmp_path / "tokenizer.model").write_bytes(data)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **config}))
    return Tokenizer.load(tmp_path)


@pytest.fixture(params=MODELS)
def name(request) -> str:
    return request.param


class TestEncode:
    def test_ids_are_the_originals(self, name, tmp_path):
        tokenizer, reference = folder(tmp_path, trained(name)), original(trained(name))
        assert len(PLAIN) > 5000
        ours = tokenizer.encode_batch(PLAIN, add_special_tokens=False)
        differ = [line for line, ids in zip(PLAIN, ours, strict=True) if ids != reference.encode(line)]
        assert not differ, (len(differ), differ[:3])
        assert [tokenizer.encode(line, False) for line in PLAIN[:300]] == ours[:300]

    @pytest.mark.parametrize("legacy", [True, False])
    def test_special_tokens_in_text(self, name, legacy, tmp_path):
        tokenizer, reference = folder(tmp_path, trained(name), legacy=legacy), original(trained(name))
        without = original(without_prefix(trained(name)))
        every = legacy or uses_our_normaliser(name)
        lines = (
            MIXED
            + [f"<s>{a}</s>{b}" for a, b in zip(PLAIN[:200], PLAIN[200:400], strict=True)]
            + ["<s><s>", "a<s>", " <s> a"]
        )
        for line in lines:
            expected: list[int] = []
            for i, part in enumerate(SPECIAL.split(line)):
                if i % 2:
                    expected.append(reference.piece_to_id(part))
                elif part:
                    expected += (reference if every or i == 0 else without).encode(part)
            assert tokenizer.encode(line, False) == expected, line

    def test_bos_and_eos(self, tmp_path):
        data = trained("llama")
        reference = original(data)
        assert folder(tmp_path, data).encode("a b") == [1, *reference.encode("a b")]
        assert folder(tmp_path, data, add_bos_token=False, add_eos_token=True).encode("a b") == [
            *reference.encode("a b"),
            2,
        ]
        tokenizer = folder(tmp_path, data)
        assert tokenizer.encode("") == [1]
        assert tokenizer.bos_token_id == 1
        assert tokenizer.eos_token_ids == [2]
        assert tokenizer.special_ids == {0, 1, 2}
        assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        assert tokenizer.decoder_kind is DecoderKind.SENTENCEPIECE

    def test_no_prefix_if_the_folder_says_so(self, tmp_path):
        reference = original(without_prefix(trained("llama")))
        tokenizer = folder(tmp_path, trained("llama"), add_prefix_space=False)
        assert [tokenizer.encode(line, False) for line in PLAIN[:200]] == [
            reference.encode(line) for line in PLAIN[:200]
        ]
        assert all(
            tokenizer.decode(reference.encode(line)) == reference.decode(reference.encode(line)) for line in PLAIN[:200]
        )

    def test_the_file_by_itself(self, tmp_path):
        (tmp_path / "tokenizer.model").write_bytes(trained("llama"))
        tokenizer = Tokenizer.load(tmp_path / "tokenizer.model")
        assert tokenizer.encode("a b", False) == original(trained("llama")).encode("a b")

    def test_long_texts(self, tmp_path):
        for name in ("llama", "unigram"):
            tokenizer, reference = folder(tmp_path, trained(name)), original(trained(name))
            for text in ("\n".join(PLAIN[:2500]), "a" * 20_000, "ab " * 7000, "漢" * 5000):
                assert tokenizer.encode(text, False) == reference.encode(text)

    def test_the_bound_of_tokens_holds(self, name, tmp_path):
        tokenizer = folder(tmp_path, trained(name))
        for line in PLAIN[::7]:
            assert len(line.encode()) // tokenizer.max_token_bytes <= len(tokenizer.encode(line, False))


def without_prefix(data: bytes) -> bytes:
    """A later message of the same kind overrules an earlier one, field by field."""
    return data + message((3, message((3, 0))))


def uses_our_normaliser(name: str) -> bool:
    return MODELS[name].get("normalization_rule_name") != "identity"


class TestDecode:
    def test_whole_and_streamed_equal_the_original(self, name, tmp_path):
        """10,000 sequences for each model, of which a third are mostly bytes."""
        tokenizer, reference = folder(tmp_path, trained(name)), original(trained(name))
        rng = random.Random(name)
        is_byte = [i for i in range(len(reference)) if reference.is_byte(i)]
        other = [i for i in range(len(reference)) if not reference.is_byte(i) and i not in tokenizer.special_ids]
        bytes_or_other = is_byte or other
        for n in range(10_000):
            pool = bytes_or_other if n % 3 == 0 and rng.random() < 0.7 else other
            ids = [rng.choice(pool if rng.random() < 0.8 else other) for _ in range(rng.randrange(7))]
            text = tokenizer.decode(ids)
            assert text == reference.decode(ids), [reference.id_to_piece(i) for i in ids]
            detokenizer = make_detokenizer(tokenizer)
            deltas = [detokenizer.push([i]) for i in ids]
            assert "".join(deltas) + detokenizer.flush() == text

    def test_special_tokens_are_left_out_or_written(self, name, tmp_path):
        tokenizer = folder(tmp_path, trained(name))
        rng = random.Random(1)
        for _ in range(2000):
            ids = [rng.choice([0, 1, 2, rng.randrange(tokenizer.vocab_size)]) for _ in range(rng.randrange(8))]
            assert tokenizer.decode(ids) == tokenizer.decode([i for i in ids if i > 2])
            for skip in (True, False):
                detokenizer = make_detokenizer(tokenizer, skip_special_tokens=skip)
                assert "".join(map(detokenizer.push, [[i] for i in ids])) + detokenizer.flush() == tokenizer.decode(
                    ids, skip
                )

    def test_the_corpus_comes_back(self, tmp_path):
        tokenizer = folder(tmp_path, trained("llama"))
        for line in PLAIN:
            assert tokenizer.decode(tokenizer.encode(line)) == line.replace("▁", " ")

    def test_bytes_that_are_no_characters(self, tmp_path):
        tokenizer = folder(tmp_path, trained("llama"))
        byte = {b: tokenizer.token_id(f"<0x{b:02X}>") for b in range(256)}
        for data, text in [
            (b"\xf0\x9f\x98", "\ufffd" * 3), (b"\xe6\xbc\xa2", "漢"), (b"\xed\xa0\x80", "\ufffd" * 3), (b" \xff a", " \ufffd a"),
            (b"\xf0\x9f\xe6\xbc\xa2", "\ufffd\ufffd漢"),
        ]:  # fmt: skip
            ids = [byte[b] for b in data]
            assert tokenizer.decode(ids) == text == original(trained("llama")).decode(ids)

    def test_behind_a_prompt_the_first_mark_is_a_space(self, tmp_path):
        tokenizer = folder(tmp_path, trained("llama"))
        ids = tokenizer.encode("a b", False)
        detokenizer = make_detokenizer(tokenizer, prompt_token_ids=[1])
        assert "".join(map(detokenizer.push, [[i] for i in ids])) == " a b"


class TestGGUF:
    """The same vocabulary as a GGUF file's metadata gives the same ids."""

    @staticmethod
    def metadata(data: bytes, **more) -> dict:
        model = parse_sentencepiece(data, "x")
        return {
            "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": model.pieces, "tokenizer.ggml.scores": model.scores,
            "tokenizer.ggml.token_type": model.types, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.add_space_prefix": model.normalizer.add_dummy_prefix, **more,
        }  # fmt: skip

    @pytest.mark.parametrize("name", ["llama", "gemma", "bpe with symbols and a prefix"])
    def test_ids_and_text(self, name):
        tokenizer, reference = (
            Tokenizer(build_vocabulary(self.metadata(trained(name)), "x.gguf")),
            original(trained(name)),
        )
        ours = tokenizer.encode_batch(PLAIN, add_special_tokens=False)
        assert ours == [reference.encode(line) for line in PLAIN]
        assert [tokenizer.decode(ids) for ids in ours] == [reference.decode(ids) for ids in ours]
        assert tokenizer.encode("a") == [1, *reference.encode("a")]

    def test_spaces_of_user_defined_tokens_may_be_spaces(self):
        metadata = self.metadata(trained("gemma"))
        kinds = metadata["tokenizer.ggml.token_type"]
        metadata["tokenizer.ggml.tokens"] = [
            token.replace("▁", " ") if kind == USER_DEFINED else token
            for token, kind in zip(metadata["tokenizer.ggml.tokens"], kinds, strict=True)
        ]
        tokenizer, reference = Tokenizer(build_vocabulary(metadata, "x.gguf")), original(trained("gemma"))
        assert [tokenizer.encode(line, False) for line in PLAIN[:1500]] == [
            reference.encode(line) for line in PLAIN[:1500]
        ]

    def test_bos_is_the_files_choice(self):
        metadata = self.metadata(trained("llama"))
        assert Tokenizer(build_vocabulary(metadata | {"tokenizer.ggml.add_bos_token": False}, "x")).encode("a")[0] != 1
        assert Tokenizer(build_vocabulary(metadata | {"tokenizer.ggml.add_eos_token": True}, "x")).encode("a")[-1] == 2

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"tokenizer.ggml.scores": None}, "tokenizer.ggml.scores: is missing"),
            ({"tokenizer.ggml.scores": [1.0]}, "1 numbers for 900 tokens"),
            ({"tokenizer.ggml.scores": [float("nan")] * 900}, "finite"),
            ({"tokenizer.ggml.scores": ["a"] * 900}, "list of numbers"),
            ({"tokenizer.ggml.token_type": None}, "tokenizer.ggml.token_type: is missing"),
            ({"tokenizer.ggml.tokens": ["a"] * 900}, "repeated"),
            ({"tokenizer.ggml.model": "t5"}, "'t5' is not supported; supported are gpt2 and llama"),
            ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported"),
        ],
    )
    def test_what_is_wrong_is_named(self, changes, says):
        metadata = {k: v for k, v in (self.metadata(trained("llama")) | changes).items() if v is not None}
        with pytest.raises(ModelFileError, match=re.escape(says)) as caught:
            build_vocabulary(metadata, "x.gguf")
        assert str(caught.value).startswith("x.gguf: ")
        assert "\n" not in str(caught.value)


PIECES = [
    ("<unk>", 0, UNKNOWN),
    ("<s>", 0, CONTROL),
    ("</s>", 0, CONTROL),
    *((f"<0x{b:02X}>", 0, BYTE) for b in range(256)),
]
SMALL = [
    *PIECES,
    ("▁", -1, NORMAL),
    ("a", -2, NORMAL),
    ("b", -3, NORMAL),
    ("ab", -4, NORMAL),
    ("▁a", -5, NORMAL),
    ("<x>", 0, USER_DEFINED),
]


class TestByHand:
    def test_random_vocabularies(self):
        """Few letters, random pieces with random scores, user-defined ones among them: where a wrong order of merges would show."""
        rng = random.Random(11)
        for _ in range(80):
            letters = rng.choice(["a", "ab", "abc", "ab▁"])
            found = {*letters, "▁"}
            for _ in range(rng.randrange(3, 25)):
                grown = rng.choice(sorted(found)) + rng.choice(sorted(found))
                found.add(
                    grown
                    if len(grown) < 9 and rng.random() < 0.7
                    else "".join(rng.choices(letters, k=rng.randrange(2, 6)))
                )
            scores = rng.sample(range(len(found)), len(found))
            kinds = [USER_DEFINED if len(piece) > 1 and rng.random() < 0.1 else NORMAL for piece in sorted(found)]
            pieces = [
                (piece, -1.0 - score, kind) for piece, score, kind in zip(sorted(found), scores, kinds, strict=True)
            ]
            data = written([*PIECES, *pieces], **plain(add_dummy_prefix=rng.random() < 0.5))
            reference, tokenizer = original(data), build_backend(parse_sentencepiece(data, "x")).backend
            for _ in range(60):
                text = "".join(rng.choices(letters + " ", k=rng.randrange(1, 30)))
                assert tokenizer.encode(text).ids == reference.encode(text), (text, pieces)

    def test_order_of_scores_decides(self):
        for scores, pieces in (((-5, -6), ["▁a", "b"]), ((-6, -5), ["▁", "ab"])):
            data = written([*SMALL[:-3], ("▁a", scores[0], NORMAL), ("ab", scores[1], NORMAL)], **plain())
            built = build_backend(parse_sentencepiece(data, "x"))
            assert built.backend.encode("ab").tokens == pieces == original(data).encode("ab", out_type=str)

    def test_unused_pieces_are_not_made(self):
        data = written([*SMALL, ("aba", -6, UNUSED)], **plain())
        assert build_backend(parse_sentencepiece(data, "x")).backend.encode("aba").ids == original(data).encode("aba")

    def test_reserved_pieces_in_text_are_text(self):
        data = written([*SMALL, *((c, -9.0 - i, NORMAL) for i, c in enumerate("<0x41>"[:4] + ">"))], **plain())
        tokenizer = build_backend(parse_sentencepiece(data, "x")).backend
        for text in ("<0x41>", "a<x><0x41><x>", "<x>", "<x><x> <x>"):
            assert tokenizer.encode(text).ids == original(data).encode(text)

    def test_every_piece_type_is_read(self):
        model = parse_sentencepiece(written([*SMALL, ("u", 0, UNUSED)], [(41, 1), (42, 2), (43, -1)], **plain()), "x")
        assert model.types == [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 5, USER_DEFINED, UNUSED]
        assert model.special_ids == {"bos_token": 1, "eos_token": 2}
        assert model.unk_id == 0


def plain(**changes) -> dict:
    return {"add_dummy_prefix": True, "remove_extra_whitespaces": False, **changes}


GOOD = written(SMALL, **plain())


class TestDamage:
    """Damaged files are refused in one line that names the file and the fault."""

    @pytest.mark.parametrize(
        ("data", "says"),
        [
            (GOOD[:-3], "is not a SentencePiece model: field 3 needs"),
            (GOOD[: len(GOOD) // 2], "is not a SentencePiece model"),
            (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "field 1 needs 9223372036854775807 bytes"),
            (b"\x0a" + b"\xff" * 11, "longer than 64 bits"),
            (b"\x0a", "ends within a number"),
            (b"\x0b", "wire type 3"),
            (b"\x02\x00", "field number 0"),
            (b"", "it has no pieces"),
            (message((1, 5)), "should be bytes"),
            (message((1, message((1, b"\xff\xfe"), (2, 0.0)))), "piece 0: text is not valid UTF-8"),
            (message((1, message((1, b""), (2, 0.0)))), "piece 0 has 0 bytes"),
            (message((1, message((1, b"a" * 70000)))), "piece 0 has 70000 bytes"),
            (message((1, message((1, b"a"), (2, float("nan"))))), "score nan"),
            (message((1, message((1, b"a"), (2, 7)))), "should be a float"),
            (message((1, message((1, b"a"), (3, 9)))), "type 9"),
            (message((1, message((1, b"a"), (3, -1)))), "type -1"),
            (message((1, message((1, b"a")))), "0 pieces are of type UNKNOWN"),
            (written([*SMALL, ("<u>", 0, UNKNOWN)]), "2 pieces are of type UNKNOWN"),
            (written([*SMALL, ("ab", 0, NORMAL)]), "piece 265 'ab' appears twice"),
            (written(SMALL[:100]), "<0x61> is missing"),
            (written(SMALL, [(3, 3)]), "model_type WORD is not supported; BPE and UNIGRAM are"),
            (written(SMALL, [(3, 4)]), "model_type CHAR is not supported"),
            (written(SMALL, [(3, 77)]), "model_type 77 is unknown"),
            (written(SMALL, [(24, 1)]), "treat_whitespace_as_suffix"),
            (written(SMALL, precompiled_charsmap=b"\xff\xff\xff\xff"), "precompiled_charsmap"),
            (written(SMALL, precompiled_charsmap=b"\x01"), "precompiled_charsmap"),
            (GOOD + message((5, message((2, b"abcd")))), "denormaliser"),
        ],
    )  # fmt: skip
    def test_is_named(self, data, says):
        with pytest.raises(ModelFileError, match=re.escape(says)) as caught:
            build_backend(parse_sentencepiece(data, "tokenizer.model"))
        assert str(caught.value).startswith("tokenizer.model: ")
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300

    def test_any_cut_and_any_changed_byte(self):
        """Nothing but a ModelFileError comes out, and what is read is of sound sizes."""
        rng = random.Random(3)
        for n in range(3000):
            data = bytearray(GOOD)
            if n % 2:
                del data[rng.randrange(len(data)) :]
            for _ in range(rng.randrange(4)):
                if data:
                    data[rng.randrange(len(data))] = rng.randrange(256)
            try:
                model = parse_sentencepiece(bytes(data), "x")
            except ModelFileError as e:
                assert "\n" not in str(e)
            else:
                assert len(model.pieces) == len(model.scores) == len(model.types) <= len(SMALL) + 1

    def test_a_damaged_table_of_replacements_cannot_lead_out_of_it(self):
        """Whatever the trie says, a walk stays inside."""
        rng = random.Random(5)
        data = trained("bpe with nfkc, all spaces")
        charsmap = parse_sentencepiece(data, "x").normalizer.charsmap
        for _ in range(40):
            broken = bytearray(charsmap)
            for _ in range(2000):
                broken[rng.randrange(4, len(broken))] = rng.randrange(256)
            file = written(SMALL, precompiled_charsmap=bytes(broken), **plain())
            backend = build_backend(parse_sentencepiece(file, "x")).backend
            for line in PLAIN[:40]:
                backend.encode(line)

    def test_neither_kind_of_file(self, tmp_path):
        (tmp_path / "tokenizer.model").write_bytes(b"\x80\x02}q\x00.")
        with pytest.raises(ModelFileError, match="neither a SentencePiece model nor a file of tiktoken ranks"):
            Tokenizer.load(tmp_path)

    @pytest.mark.parametrize("kind", ["BertTokenizer", "InternLM2Tokenizer"])
    def test_unknown_classes(self, kind, tmp_path):
        with pytest.raises(
            ModelFileError, match=f"tokenizer_class '{kind}' is not supported; supported are .*LlamaTokenizer"
        ) as caught:
            folder(tmp_path, trained("llama"), tokenizer_class=kind)
        assert "\n" not in str(caught.value)

    def test_unknown_model_types(self, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "martian"}')
        with pytest.raises(ModelFileError, match="model_type 'martian' is not supported"):
            folder(tmp_path, trained("llama"), tokenizer_class=None)
        (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
        assert folder(tmp_path, trained("llama"), tokenizer_class=None).encode("a")[0] == 1


class TestBesideTheModel:
    """What the small files of the folder add."""

    def test_added_tokens_have_their_ids(self, tmp_path):
        decoder = {
            "903": {"content": "<|end|>", "special": True, "rstrip": True},
            "901": {"content": "<plain>", "special": False},
        }
        tokenizer = folder(tmp_path, trained("llama"), added_tokens_decoder=decoder, eos_token={"content": "<|end|>"})
        assert tokenizer.encode("<|end|> \n<plain>", False) == [903, 901]
        assert tokenizer.eos_token_ids == [903]
        assert tokenizer.decode([903, 901, 902]) == "<plain>"
        assert tokenizer.vocab_size == 904
        assert tokenizer.special_ids == {0, 1, 2, 903}

    def test_a_piece_can_get_another_name(self, tmp_path):
        tokenizer = folder(
            tmp_path, trained("llama"), added_tokens_decoder={"2": {"content": "<|done|>", "special": True}}
        )
        assert tokenizer.encode("<|done|>", False) == [2]
        assert tokenizer.token_str(2) == "<|done|>"

    def test_added_tokens_json_and_the_map(self, tmp_path):
        (tmp_path / "added_tokens.json").write_text('{"<a>": 900, "<b>": 901}')
        (tmp_path / "special_tokens_map.json").write_text(
            '{"bos_token": "<s>", "pad_token": {"content": "<a>"}, "additional_special_tokens": ["<c>", {"content": "<d>"}]}'
        )
        tokenizer = folder(tmp_path, trained("llama"))
        assert tokenizer.encode("<a><b><c><d>", False) == [900, 901, 902, 903]
        assert tokenizer.special_ids == {0, 1, 2, 900, 902, 903}
        assert tokenizer.special_tokens["pad_token"] == "<a>"

    @pytest.mark.parametrize(
        ("file", "content", "says"),
        [
            ("added_tokens.json", '{"<a>": -1}', "is no token id"),
            ("added_tokens.json", '{"<a>": "x"}', "is no token id"),
            ("added_tokens.json", '{"<a>": 900, "<b>": 900}', None),
            ("added_tokens.json", '{"ab": 900}', "its piece has"),
            ("tokenizer_config.json", '{"added_tokens_decoder": []}', "must be an object of objects"),
            ("tokenizer_config.json", '{"added_tokens_decoder": {"9999999999": {"content": "x"}}}', "is no token id"),
            ("tokenizer_config.json", '{"added_tokens_decoder": {"900": {}}}', "has no content"),
        ],
    )
    def test_wrong_files(self, file, content, says, tmp_path):
        (tmp_path / "tokenizer.model").write_bytes(trained("gemma"))
        (tmp_path / file).write_text(content)
        if says is None:
            Tokenizer.load(tmp_path)
            return
        with pytest.raises(ModelFileError, match=re.escape(says)) as caught:
            Tokenizer.load(tmp_path)
        assert "\n" not in str(caught.value)

    def test_tokenizer_json_comes_first(self, tmp_path):
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
            folder(tmp_path, trained("llama"))

    def test_leads(self, tmp_path):
        leads = {name: folder(tmp_path, trained(name))._piece_lead for name in MODELS}
        assert set(leads.values()) == set(PieceLead)
        assert MODELS["llama"].items() >= IDENTITY.items()
