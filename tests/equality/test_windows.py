"""Needs the extension. Blocks that a sliding window has left behind are given back while a request runs, and no bit of any request shows it.

Two small random models, one with a window in every layer and one with windows in three layers of four, served by `LLM` with less KV memory than
one request is long. The tokens and log-probabilities to compare with come from an engine that gives nothing back and has room for all.
"""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo import LLM, SamplingParams
from octavo.client.intake import child_seed
from octavo.config import CacheConfig
from octavo.engine.scheduler import Scheduler

VOCAB, WIDTH, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 64, 96, 4, 4, 2, 16
CONTEXT, WINDOW, BLOCK, CHUNK = 512, 40, 16, 32
MODELS = {"windows": ["sliding_attention"] * LAYERS, "mixed": ["sliding_attention"] * 3 + ["full_attention"]}
GROUPS = {"windows": (WINDOW,), "mixed": (WINDOW, WINDOW, WINDOW, 0)}
ROOM = {"max_num_batched_tokens": CONTEXT, "kv_cache_memory": "32M", "enable_prefix_caching": False}


def write_model(folder, layer_types):
    config = dict(
        architectures=["MinistralForCausalLM"], model_type="ministral", vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=INNER,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, sliding_window=WINDOW,
        layer_types=layer_types, max_position_embeddings=CONTEXT, rms_norm_eps=1e-6, rope_theta=1e4, tie_word_embeddings=False,
    )  # fmt: skip
    rng = np.random.default_rng(4)
    shapes = {"model.embed_tokens": (VOCAB, WIDTH), "lm_head": (VOCAB, WIDTH)}
    norms = ["model.norm"]
    for i in range(LAYERS):
        layer, heads, kv_heads = f"model.layers.{i}", (HEADS * HEAD_DIM, WIDTH), (KV_HEADS * HEAD_DIM, WIDTH)
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
        shapes |= {f"{layer}.self_attn.{part}_proj": shape for part, shape in zip("qkvo", (heads, kv_heads, kv_heads, heads[::-1]), strict=True)}
        shapes |= {f"{layer}.mlp.{part}_proj": (INNER, WIDTH) for part in ("gate", "up")} | {f"{layer}.mlp.down_proj": (WIDTH, INNER)}
    tensors = {f"{name}.weight": (rng.standard_normal(shape) * 0.15).astype(np.float32) for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": (1 + 0.1 * rng.standard_normal(WIDTH)).astype(np.float32) for name in norms}
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    model = {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(VOCAB)}, "unk_token": "t0"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}))


@pytest.fixture(scope="module", params=list(MODELS))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    path = tmp_path_factory.mktemp(kind)
    write_model(path, MODELS[kind])
    return path


def make(folder, **options):
    return LLM(str(folder), max_model_len=CONTEXT, block_size=BLOCK, **{"max_num_batched_tokens": CHUNK, "max_num_seqs": 16, **options})


@pytest.fixture(scope="module")
def block_bytes(folder):
    info = make(folder, **ROOM).engine_info
    return info.kv_cache_bytes // info.num_blocks


@pytest.fixture(scope="module")
def least(kind):
    """Blocks for one request of the whole context: of a window only what it sees and what a step adds."""
    blocks = CacheConfig(block_size=BLOCK, num_blocks=0, windows=GROUPS[kind]).most_blocks(CONTEXT, CHUNK)
    assert blocks * BLOCK < CONTEXT * len(GROUPS[kind]) * 0.55, "not much of a proof"
    return blocks


@pytest.fixture
def tight(folder, block_bytes, least):
    """Makes engines with that little memory, or a few blocks more."""

    def tight(more=0, **options):
        llm = make(folder, **{"kv_cache_memory": str((least + more) * block_bytes), **options})
        assert llm.engine_info.num_blocks == least + more
        return llm

    return tight


@pytest.fixture(scope="module")
def requests():
    rng = random.Random(11)
    shared = [rng.randrange(VOCAB) for _ in range(CONTEXT)]
    ways = ({"temperature": 0}, {"seed": 5}, {"seed": 6, "temperature": 0.7, "top_p": 0.9})
    cuts = [(3, 30), (WINDOW - 1, 20), (WINDOW, 20), (WINDOW + 1, 20), (100, 60), (129, 50), (250, 40), (400, 100), (60, 400), (1, 200)]
    return [
        (shared[: length // 2] + [rng.randrange(VOCAB) for _ in range(length - length // 2)], params(max_tokens=new, **ways[i % 3]))
        for i, (length, new) in enumerate(cuts)
    ]


def params(**values):
    return SamplingParams(ignore_eos=True, logprobs=2, **values)


def run(llm, requests):
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], [p for _, p in requests], use_tqdm=False)
    return [[bits(choice) for choice in output.outputs] for output in outputs]


def bits(choice):
    return choice.token_ids, [sorted((i, lp.logprob, lp.rank) for i, lp in position.items()) for position in choice.logprobs]


@pytest.fixture(scope="module")
def alone(folder, requests):
    """Each request by itself, its prompt in one step, in blocks that are all kept to its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "free_unseen", lambda self, request: None)
        llm = make(folder, **ROOM)
        return [run(llm, [request])[0] for request in requests]


def test_the_requests_are_worth_comparing(alone):
    tokens = [token for [(tokens, _)] in alone for token in tokens]
    assert len(set(tokens)) > 100
    assert sum(a == b for a, b in itertools.pairwise(tokens)) < len(tokens) / 2


def test_alone_in_less_memory_than_it_is_long(tight, requests, alone):
    llm = tight()
    assert [run(llm, [request])[0] for request in requests] == alone
    assert llm.stats.num_preemptions == 0


def test_what_is_not_given_back_does_not_fit(folder, block_bytes, least, requests, monkeypatch):
    """The other half of that proof: the same request in the same memory."""
    monkeypatch.setattr(Scheduler, "free_unseen", lambda self, request: None)
    llm = make(folder, kv_cache_memory=str(least * block_bytes))
    with pytest.raises(Exception, match="alone and does not fit"):
        run(llm, [requests[7]])


@pytest.mark.parametrize("budget", [7, 33, CONTEXT])
def test_in_a_batch_and_in_chunks(folder, requests, alone, budget):
    llm = make(folder, **{**ROOM, "max_num_batched_tokens": budget, "max_num_seqs": min(budget, 16)})
    assert run(llm, requests) == alone


@pytest.mark.parametrize("caching", [False, True])
def test_preempted(tight, requests, alone, caching):
    # Without drafts and a pace who is preempted does not depend on the clock.
    llm = tight(3, enable_prefix_caching=caching, num_speculative_tokens=0, itl_target_ms=0)
    assert run(llm, requests) == alone
    assert llm.stats.num_preemptions > 0


def test_from_cached_blocks(folder, requests, alone):
    llm = make(folder, **{**ROOM, "enable_prefix_caching": True})
    assert run(llm, requests) == alone
    hits = llm.stats.prefix_hits
    assert run(llm, requests) == alone
    assert llm.stats.prefix_hits - hits > 900, "all of each prompt but its end"


def test_from_cached_blocks_of_which_some_are_gone(tight, requests, alone):
    """Each request again and again while others take its blocks: whatever of it is found, it is right."""
    order = [random.Random(3).randrange(len(requests)) for _ in range(40)]
    llm = tight(12)
    for first in range(0, len(order), 4):
        chosen = order[first : first + 4]
        assert run(llm, [requests[i] for i in chosen]) == [alone[i] for i in chosen]
    assert llm.stats.prefix_hits > 0


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 97, 112, 200])
def test_as_forks_of_one_prompt(folder, tight, requests, length):
    prompt = requests[7][0][:length]
    sampled = params(max_tokens=30, temperature=0.9, seed=11)
    plain = make(folder, **ROOM)
    wanted = [run(plain, [(prompt, sampled.clone(seed=child_seed(11, i)))])[0][0] for i in range(4)]
    for llm in (plain, tight(6), make(folder, **{**ROOM, "max_num_seqs": 2, "enable_prefix_caching": True})):
        [choices] = run(llm, [(prompt, sampled.clone(n=4))])
        assert choices == wanted
