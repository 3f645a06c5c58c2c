"""Needs the extension and the default model. The tokens of a request, and their log-probabilities, are a function of the request alone:
the same bits alone, in a batch, in chunks, from cached blocks, after preemption, as a fork, and on any number of threads."""

import random

import pytest
from foretold import foretell

from octavo import LLM, SamplingParams
from octavo.client.intake import child_seed

MODEL = "smollm2-135m"
MAX_MODEL_LEN = 640
NEW_TOKENS = 10

TEXT = (
    "The river ran past the old mill, and the miller's daughter counted the boats that came down from the hills. Each of them carried "
    "something: barrels of apples, sacks of flour, a cage with two astonished geese. In the evening she wrote the numbers into a book. "
    "1, 2, 3, 5, 8, 13 - what comes next? def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2). Die Mühle am "
    "Bach klappert. Il était une fois une petite fille. Water boils at 100 degrees Celsius at sea level, and at less in the mountains. "
)


def make(**options):
    return LLM(MODEL, max_model_len=MAX_MODEL_LEN, **{"kv_cache_memory": "64M", "enable_prefix_caching": False, **options})


@pytest.fixture(scope="module")
def llm():
    """The plainest engine: no prefix cache, prompts whole, no drafts."""
    return make(max_num_batched_tokens=MAX_MODEL_LEN, num_speculative_tokens=0)


@pytest.fixture(scope="module")
def requests(llm):
    """32 prompts of mixed lengths and as many ways to sample."""
    rng = random.Random(5)
    ids = llm.get_tokenizer().encode(TEXT * 6)
    lengths = [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 255, 300] + [rng.randint(4, 90) for _ in range(16)]
    prompts = [ids[start : start + length] for length in lengths for start in [rng.randrange(200)]]
    return [(prompt, sampling(i)) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def alone(llm, requests):
    """What each request gives by itself."""
    return [bits(llm.generate([prompt], params, use_tqdm=False)[0]) for prompt, params in requests]


def sampling(i):
    ways = (
        {"temperature": 0},
        {"seed": i},
        {"seed": i, "temperature": 0.7, "top_p": 0.9},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"seed": -7 * i, "temperature": 1.3, "top_k": 40, "min_p": 0.01, "frequency_penalty": 0.4},
    )
    return SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=(0, 2, 5)[i % 3], **ways[i % 5])


def bits(output):
    """Everything of a one-choice output that the engine computed; floats as they are, compared exactly."""
    (choice,) = output.outputs
    return choice_bits(choice)


def choice_bits(choice):
    scores = [sorted((token_id, lp.logprob, lp.rank) for token_id, lp in position.items()) for position in choice.logprobs]
    return choice.token_ids, scores, choice.finish_reason


def run(llm, requests):
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False)
    return [bits(output) for output in outputs]


def assert_same(found, wanted):
    different = [i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
    assert not different, f"requests {different} differ, the first: {found[different[0]]} != {wanted[different[0]]}"


def test_the_requests_are_worth_comparing(requests, alone):
    sampled = [tuple(tokens) for tokens, _, _ in alone]
    assert len(set(sampled)) > 25
    assert all(len(tokens) == NEW_TOKENS for tokens in sampled)


def test_again(llm, requests, alone):
    assert_same(run(llm, requests[:4]), alone[:4])


def test_in_a_batch_of_32_of_mixed_lengths(llm, requests, alone):
    assert_same(run(llm, requests), alone)


def test_in_another_order_beside_others(llm, requests, alone):
    order = list(range(len(requests)))
    random.Random(1).shuffle(order)
    order = order[:19]
    assert_same(run(llm, [requests[i] for i in order]), [alone[i] for i in order])


@pytest.mark.parametrize(("budget", "longest"), [(1, 20), (7, 70), (64, 400)])
def test_with_prompts_in_chunks(requests, alone, budget, longest):
    chosen = [i for i, (prompt, _) in enumerate(requests) if len(prompt) <= longest][:12 if budget < 64 else 32]
    llm = make(max_num_batched_tokens=budget, max_num_seqs=min(budget, 16))
    assert_same(run(llm, [requests[i] for i in chosen]), [alone[i] for i in chosen])


@pytest.mark.parametrize(("wrong", "least", "most_held"), [(0.0, 0.9, 1.0), (0.2, 0.3, 0.9), (1.0, 0.0, 0.0)])
@pytest.mark.parametrize("most", [1, 7])
def test_with_drafts(requests, alone, monkeypatch, wrong, least, most_held, most):
    foretell(monkeypatch, [(prompt, tokens) for (prompt, _), (tokens, _, _) in zip(requests, alone, strict=True)], wrong)
    llm = make(num_speculative_tokens=most, itl_target_ms=0)
    assert_same(run(llm, requests), alone)
    stats = llm.stats
    assert stats.num_draft_tokens > 100
    assert least <= stats.num_accepted_tokens / stats.num_draft_tokens <= most_held


def test_with_drafts_of_its_own_text(llm, requests):
    """The real ones: greedy text of a small model repeats itself, and so do these prompts."""
    chosen = [(prompt, params.clone(max_tokens=60)) for prompt, params in requests[10:16]]
    wanted = run(llm, chosen)
    drafting = make()
    assert_same(run(drafting, chosen), wanted)
    assert_same([run(drafting, [request])[0] for request in chosen], wanted)
    assert drafting.stats.num_accepted_tokens > 10


@pytest.mark.parametrize("num_threads", [1, 3])
def test_on_other_numbers_of_threads(requests, alone, num_threads):
    llm = make(num_threads=num_threads)
    assert_same(run(llm, requests[9:17]), alone[9:17])


@pytest.mark.parametrize("block_size", [32, 64])
def test_in_blocks_of_other_sizes(requests, alone, block_size):
    llm = make(block_size=block_size)
    assert_same(run(llm, requests[9:17]), alone[9:17])


def test_from_cached_blocks(requests, alone):
    llm = make(enable_prefix_caching=True)
    assert_same(run(llm, requests), alone)
    hits = llm.stats.prefix_hits
    assert_same(run(llm, requests), alone)
    assert llm.stats.prefix_hits - hits > 1000
    llm.reset_prefix_cache()
    hits = llm.stats.prefix_hits
    assert_same(run(llm, requests[14:16]), alone[14:16])
    assert llm.stats.prefix_hits == hits


def test_from_a_prefix_that_another_prompt_left(llm, requests):
    params = SamplingParams(max_tokens=NEW_TOKENS, seed=3, ignore_eos=True, logprobs=2)
    ids = llm.get_tokenizer().encode(TEXT * 2)
    prompts = [ids[:150] + ids[:tail] for tail in (1, 10, 16, 40)]
    wanted = [bits(llm.generate([prompt], params, use_tqdm=False)[0]) for prompt in prompts]
    cached = make(enable_prefix_caching=True)
    cached.generate([ids[:150]], params, use_tqdm=False)
    assert_same(run(cached, [(prompt, params) for prompt in prompts]), wanted)
    assert cached.stats.prefix_hits >= 4 * 144


def test_preempted_in_a_tiny_pool(llm, requests):
    ids = llm.get_tokenizer().encode(TEXT * 2)
    wanted, asked = [], []
    for i in range(6):
        params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1, **({"seed": i} if i % 2 else {"temperature": 0}))
        asked.append((ids[i : i + 40 + i], params))
        wanted.append(bits(llm.generate([asked[-1][0]], params, use_tqdm=False)[0]))
    block_bytes = llm.engine_info.kv_cache_bytes // llm.engine_info.num_blocks
    for caching in (False, True):
        # Without drafts and a pace who is preempted does not depend on the clock.
        clockless = {"num_speculative_tokens": 0, "itl_target_ms": 0}
        tiny = LLM(MODEL, max_model_len=128, kv_cache_memory=str(16 * block_bytes), enable_prefix_caching=caching, **clockless)
        assert tiny.engine_info.num_blocks == 16
        assert_same(run(tiny, asked), wanted)
        assert tiny.stats.num_preemptions > 0


def test_as_forks_of_one_prompt(llm, requests):
    for prompt, params in (requests[6], requests[12]):
        params = params.clone(temperature=0.9, seed=11)
        wanted = [
            bits(llm.generate([prompt], params.clone(seed=child_seed(11, i)), use_tqdm=False)[0]) for i in range(4)
        ]
        for engine in (llm, make(enable_prefix_caching=True)):
            (output,) = engine.generate([prompt], params.clone(n=4), use_tqdm=False)
            assert_same([choice_bits(choice) for choice in output.outputs], wanted)


def test_scores_of_the_prompt_are_the_same_in_chunks_and_batches(llm, requests):
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2)
    chosen = [prompt for prompt, _ in requests[3:15]]

    def scores(engine, prompts):
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return [
            [position and sorted((i, lp.logprob, lp.rank) for i, lp in position.items()) for position in output.prompt_logprobs]
            for output in outputs
        ]

    wanted = [scores(llm, [prompt])[0] for prompt in chosen]
    assert [len(rows) for rows in wanted] == [len(prompt) for prompt in chosen]
    assert_same(scores(llm, chosen), wanted)
    assert_same(scores(make(max_num_batched_tokens=7, max_num_seqs=4, enable_prefix_caching=True), chosen), wanted)
