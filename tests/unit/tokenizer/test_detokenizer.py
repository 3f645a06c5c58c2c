"""Streams of text: deltas add up to the full decode, characters stay whole, nothing is lost at the end."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Reference

from octavo.tokenizer.decoding import DecoderKind
from octavo.tokenizer.detokenizer import ByteDetokenizer, PackageDetokenizer, make_detokenizer
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.tokenizer.vocabulary import Vocabulary


def stream(tokenizer, ids, chunks=None, **options) -> list[str]:
    detokenizer = make_detokenizer(tokenizer, **options)
    deltas, at = [], 0
    for size in chunks or [1] * len(ids):
        deltas.append(detokenizer.push(ids[at : at + size]))
        at += size
    deltas.append(detokenizer.push(ids[at:]))
    return [*deltas, detokenizer.flush()]


def assert_streams(tokenizer, ids, **options):
    full = tokenizer.decode(ids, options.get("skip_special_tokens", True))
    deltas = stream(tokenizer, ids, **options)
    assert "".join(deltas) == full
    assert sum(delta.count("\ufffd") for delta in deltas) == full.count("\ufffd")
    assert "".join(stream(tokenizer, ids, [3, 0, 2, 1], **options)) == full


@pytest.fixture(scope="session")
def spm(spm_folder):
    return Tokenizer.load(spm_folder)


@pytest.fixture(scope="session")
def fragments(smollm2):
    """Ids whose bytes are not whole characters."""
    return [i for i in range(smollm2.vocab_size) if isinstance(smollm2.pieces[False][i], bytes)]


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_any_tokens(smollm2, fragments, data):
    token = st.one_of(st.sampled_from(fragments), st.integers(0, 16), st.integers(0, smollm2.vocab_size - 1))
    ids = data.draw(st.lists(token, max_size=24))
    for skip in (True, False):
        assert_streams(smollm2, ids, skip_special_tokens=skip)
        assert_streams(smollm2, ids, skip_special_tokens=skip, prompt_token_ids=[1, 2, 3])


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=400, deadline=None)
def test_any_text(smollm2, text):
    assert_streams(smollm2, smollm2.encode(text))


def test_corpus(smollm2, lines):
    for line in lines[:1500]:
        ids = smollm2.encode(line)
        deltas = stream(smollm2, ids)
        assert "".join(deltas) == smollm2.decode(ids)
        assert all("\ufffd" not in delta for delta in deltas) or "\ufffd" in smollm2.decode(ids)


def test_characters_come_whole_and_as_soon_as_they_are(smollm2):
    text = "😀👍🏽 漢字 T\u0301 x"
    ids = smollm2.encode(text)
    detokenizer = make_detokenizer(smollm2)
    seen, data = "", b""
    for token_id in ids:
        seen += detokenizer.push([token_id])
        data += smollm2.token_bytes(token_id)
        assert seen == data.decode("utf-8", "ignore")  # all complete characters, no other
    assert seen == text
    assert detokenizer.flush() == ""
    assert any(isinstance(smollm2.pieces[True][i], bytes) for i in ids)
    assert unicodedata.normalize("NFC", seen) == unicodedata.normalize("NFC", text)


def test_an_end_inside_a_character_is_one_replacement(smollm2):
    ids = smollm2.encode("a😀")
    deltas = stream(smollm2, ids[:-1])
    assert "".join(deltas) == "a\ufffd"
    assert deltas[-1] == "\ufffd"


def test_special_tokens_between_the_bytes_of_a_character(smollm2):
    first, *rest = smollm2.encode("漢")
    assert rest
    ids = [first, 2, *rest]
    assert "".join(stream(smollm2, ids)) == "漢" == smollm2.decode(ids)
    assert_streams(smollm2, ids, skip_special_tokens=False)


def test_rows_beyond_the_vocabulary_are_nothing(smollm2):
    assert "".join(stream(smollm2, [*smollm2.encode("a"), smollm2.vocab_size + 5, *smollm2.encode("b")])) == "ab"


@given(ids=st.lists(st.integers(0, 269), max_size=20))
@settings(max_examples=400, deadline=None)
def test_byte_fallback(spm, ids):
    tokenizer = spm
    assert isinstance(make_detokenizer(tokenizer), ByteDetokenizer)
    for skip in (True, False):
        assert_streams(tokenizer, ids, skip_special_tokens=skip)


def test_a_leading_space_behind_a_prompt_stays(spm_folder):
    tokenizer = Tokenizer.load(spm_folder)
    prompt, ids = tokenizer.encode("ab"), [tokenizer.token_id("▁a"), tokenizer.token_id("b")]
    assert "".join(stream(tokenizer, ids)) == "ab"
    assert "".join(stream(tokenizer, ids, prompt_token_ids=prompt)) == " ab"
    assert tokenizer.decode(prompt) + " ab" == tokenizer.decode(prompt + ids)


WORDS = ["[UNK]", "▁a", "▁b", "c", "##d", "▁", "<x>", "<y>", "##'", "."]


def word_tokenizer(decoder) -> Tokenizer:
    reference = Reference(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    reference.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s"), "removed")
    reference.normalizer = normalizers.NFC()
    reference.decoder = decoder
    reference.add_special_tokens([AddedToken("<x>", special=True), AddedToken("<y>", special=True)])
    return Tokenizer(Vocabulary(source="x", backend=reference, vocab_size=len(WORDS)))


@pytest.mark.parametrize(
    ("decoder", "kind"),
    [
        (decoders.Metaspace(), DecoderKind.METASPACE),
        (decoders.Metaspace(prepend_scheme="never"), DecoderKind.METASPACE),
        (decoders.WordPiece(cleanup=False), DecoderKind.OTHER),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]), DecoderKind.OTHER),
    ],
)
@given(ids=st.lists(st.integers(0, len(WORDS) - 1), max_size=12))
@settings(max_examples=100, deadline=None)
def test_other_decoders(decoder, kind, ids):
    tokenizer = word_tokenizer(decoder)
    assert tokenizer.decoder_kind is kind
    for skip in (True, False):
        assert_streams(tokenizer, ids, skip_special_tokens=skip)


def test_spaces_between_special_tokens():
    tokenizer = word_tokenizer(decoders.WordPiece(cleanup=False))
    ids = [WORDS.index(w) for w in ("c", "<x>", "<y>", "c")]
    assert isinstance(make_detokenizer(tokenizer), PackageDetokenizer)
    for spaces, text in ((True, "c <x> <y> c"), (False, "c <x><y> c")):
        options = {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}
        assert tokenizer.decode(ids, **options) == text
        assert "".join(stream(tokenizer, ids, **options)) == text
        assert "".join(stream(tokenizer, ids, [2, 2], **options)) == text


def test_work_per_token_does_not_grow(smollm2):
    """The window of the package's decoders stays short, whatever was pushed before."""
    tokenizer = word_tokenizer(decoders.WordPiece(cleanup=False))
    detokenizer = make_detokenizer(tokenizer)
    for _ in range(500):
        detokenizer.push([3])
        assert len(detokenizer._ids) <= 8
