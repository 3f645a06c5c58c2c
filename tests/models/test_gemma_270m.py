"""Needs the extension, and Gemma 3 270M where `octavo pull gemma3-270m` has put it; skipped elsewhere: 240 MB are too much to fetch for a test.

It continues what everybody can continue: within the window of its attention, and far beyond it.
"""

from __future__ import annotations

import pytest

from octavo import LLM, SamplingParams
from octavo.config import cache_dir
from octavo.loader.resolve import BUILT_IN, is_verified

SPEC = BUILT_IN["gemma3-270m"]
FILE = cache_dir() / "models" / "gemma3-270m" / SPEC.file
pytestmark = pytest.mark.skipif(not is_verified(FILE, SPEC.sha256), reason="gemma3-270m was not pulled")

CONTINUED = {
    "1, 2, 3, 4, 5, 6,": " 7, 8, 9",
    "Monday, Tuesday, Wednesday, Thursday,": " Friday, Saturday, Sunday",
    "The three primary colours are red, yellow and": " blue",
    ", ".join(map(str, range(1, 260))) + ",": " 260, 261",  # more than 1,000 tokens, where most layers see 512
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("gemma3-270m", max_model_len=2048, max_num_seqs=8)


def test_it_continues_sensibly(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    outputs = llm.generate(list(CONTINUED), greedy)
    for output, expected in zip(outputs, CONTINUED.values(), strict=True):
        assert output.outputs[0].text.startswith(expected)
    assert len(outputs[-1].prompt_token_ids) > 2 * 512


def test_alone_and_in_a_batch_it_says_the_same(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=24)
    together = [output.outputs[0].token_ids for output in llm.generate(list(CONTINUED), greedy)]
    alone = [llm.generate([prompt], greedy)[0].outputs[0].token_ids for prompt in CONTINUED]
    assert together == alone


def test_the_prompt_begins_with_its_token(llm: LLM) -> None:
    (output,) = llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=1))
    assert output.prompt_token_ids[0] == 2
