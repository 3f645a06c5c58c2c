"""Needs the extension, the default model and two processes. The engine is killed while it streams: every stream goes on with the tokens
and log-probabilities that an undisturbed engine gives, bit for bit."""

import asyncio
import os
import signal

import pytest

from octavo import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from octavo.sampling_params import RequestOutputKind

MODEL = "smollm2-135m"
NEW_TOKENS = 30

PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "def quicksort(items):",
    "1, 2, 3, 4,",
    "In the beginning there was a very large number of " + "small things and " * 40,
    "Water",
    "Dear Sir or Madam, I am writing to you",
    "Der schnelle braune Fuchs",
]


def params(i):
    sampling = {"temperature": 0} if i % 2 else {"seed": 1000 + i, "temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.2}
    return SamplingParams(
        max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1, output_kind=RequestOutputKind.DELTA, **sampling
    )


class Read:
    """One stream of deltas, and all that it has brought."""

    def __init__(self, engine, i, changes=None):
        self.tokens, self.text, self.scores = [], "", []
        self.task = asyncio.create_task(self.read(engine.generate(PROMPTS[i], params(i).clone(**(changes or {})))))

    async def read(self, stream):
        async for output in stream:
            (choice,) = output.outputs
            self.tokens += choice.token_ids
            self.text += choice.text
            self.scores += [[(token, lp.logprob, lp.rank) for token, lp in position.items()] for position in choice.logprobs]

    @property
    def all(self):
        return self.tokens, self.text, self.scores


async def read_all(engine):
    reads = [Read(engine, i) for i in range(len(PROMPTS))]
    await asyncio.gather(*(read.task for read in reads))
    return [read.all for read in reads]


@pytest.fixture
async def engine():
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=MODEL, max_model_len=512, kv_cache_memory="64M"))
    await engine.start()
    yield engine
    await engine.shutdown()


def kill(engine):
    os.kill(engine.engine_info.pid, signal.SIGKILL)


async def test_streams_go_on_after_sigkill_with_the_same_bits(engine):
    wanted = await read_all(engine)
    for kills in (1, 2):
        restarts = engine.num_restarts
        reads = [Read(engine, i) for i in range(len(PROMPTS))]
        for done in range(kills):
            while min(len(read.tokens) for read in reads) < 5 + 8 * done:
                assert not any(read.task.done() for read in reads)
                await asyncio.sleep(0.002)
            kill(engine)
            while engine.num_restarts == restarts + done:
                await asyncio.sleep(0.002)
        await asyncio.gather(*(read.task for read in reads))
        assert [read.all for read in reads] == wanted


async def test_killed_while_idle_it_is_back_for_the_next_request(engine):
    wanted = await read_all(engine)
    kill(engine)
    assert await read_all(engine) == wanted
    assert engine.num_restarts == 1


async def test_choices_of_one_prompt_go_on_too(engine):
    whole = params(0).clone(n=4, output_kind=RequestOutputKind.FINAL_ONLY)
    (wanted,) = [output async for output in engine.generate(PROMPTS[0], whole)]
    task = asyncio.create_task(anext(engine.generate(PROMPTS[0], whole)))
    base = engine.stats.generation_tokens
    while engine.stats.generation_tokens < base + 40:
        assert not task.done()
        await asyncio.sleep(0.002)
    kill(engine)
    found = await task
    assert [(c.token_ids, c.text, c.logprobs) for c in found.outputs] == [(c.token_ids, c.text, c.logprobs) for c in wanted.outputs]
    assert engine.num_restarts == 1
