"""tokenizer.json against transformers, which is the original there: ids with and without special tokens, text, streams."""

import random

import pytest
from json_models import MAKERS
from line_corpus import LINES
from transformers import AutoTokenizer

from octavo.tokenizer.detokenizer import make_detokenizer
from octavo.tokenizer.tokenizer import Tokenizer


@pytest.fixture(params=MAKERS)
def name(request) -> str:
    return request.param


def test_ids_and_text(name, json_folder):
    tokenizer, original = Tokenizer.load(json_folder(name)), AutoTokenizer.from_pretrained(json_folder(name))
    assert len(LINES) > 5000
    for special in (True, False):
        ours = tokenizer.encode_batch(LINES, add_special_tokens=special)
        theirs = original(LINES, add_special_tokens=special)["input_ids"]
        differ = [line for line, mine, other in zip(LINES, ours, theirs, strict=True) if mine != other]
        assert not differ, (len(differ), differ[:3])
    for skip in (True, False):
        text = original.batch_decode(ours, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert [tokenizer.decode(ids, skip) for ids in ours] == text


def test_streams(name, json_folder):
    """3,000 sequences for each."""
    tokenizer = Tokenizer.load(json_folder(name))
    rng = random.Random(name)
    for _ in range(3000):
        ids = [rng.randrange(rng.choice([259, tokenizer.vocab_size])) for _ in range(rng.randrange(8))]
        for skip in (True, False):
            detokenizer = make_detokenizer(tokenizer, skip_special_tokens=skip)
            assert "".join(map(detokenizer.push, [[i] for i in ids])) + detokenizer.flush() == tokenizer.decode(
                ids, skip
            )


def test_special_tokens_are_those_of_transformers(name, json_folder):
    tokenizer, original = Tokenizer.load(json_folder(name)), AutoTokenizer.from_pretrained(json_folder(name))
    assert tokenizer.bos_token_id == original.bos_token_id
    assert original.eos_token_id in tokenizer.eos_token_ids
    assert tokenizer.special_ids == set(original.all_special_ids)
    assert tokenizer.vocab_size == len(original)
