"""Stop strings in streams of tokens: what leaves is the text before the first complete one, however the tokens come in."""

import json
import random

import pytest
from byte_ranks import QWEN, lines_of, ranks
from line_corpus import LINES
from spm_models import trained

from octavo.tokenizer.detokenizer import make_detokenizer
from octavo.tokenizer.stop_strings import StopStrings
from octavo.tokenizer.tokenizer import Tokenizer


def spm(name):
    return lambda folder: (folder / "tokenizer.model").write_bytes(trained(name))


def qwen(folder):
    (folder / "qwen.tiktoken").write_bytes(lines_of(ranks(QWEN)))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen"}))


WRITERS = {"llama": spm("llama"), "gemma": spm("gemma"), "unigram": spm("unigram"), "qwen": qwen}


@pytest.mark.parametrize("name", WRITERS)
def test_any_cut(name, tmp_path):
    WRITERS[name](tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    rng = random.Random(name)
    stopped = 0
    for line in rng.sample([line for line in LINES if 3 < len(line) < 400], 400):
        ids = tokenizer.encode(line, False)
        text = tokenizer.decode(ids)
        stops = []
        for _ in range(rng.randrange(1, 4)):
            start = rng.randrange(max(1, len(text)))
            stops.append(text[start : start + rng.randrange(1, 7)] + rng.choice(["", "", "", "\x07"]))
        stops = [stop for stop in stops if stop]
        if not stops:
            continue
        for most in (1, 2, 5, len(ids)):
            stream, detokenizer = StopStrings(stops), make_detokenizer(tokenizer)
            out, found, at = "", None, 0
            while at < len(ids) and found is None:
                size = rng.randrange(1, most + 1)
                delta, found = stream.push(detokenizer.push(ids[at : at + size]))
                out += delta
                at += size
            if found is None:
                delta, found = stream.push(detokenizer.flush())
                out += delta + ("" if found else stream.flush())
            ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
            assert out == (text[: sum(min(ends))] if ends else text)
            stopped += found is not None
    assert stopped > 500
