"""Needs the extension and transformers. Batch invariance for each kind of attention and feed-forward layer that families are made of.

Small random models, served whole by `LLM`: tokens and log-probabilities of a request are the same bits alone, in a batch, in chunks, on other
threads, from cached blocks, and after preemption.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from foretold import foretell

from octavo import LLM, SamplingParams

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB = 320
CONTEXT = 128
NEW_TOKENS = 12
BASE = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=CONTEXT,
            eos_token_id=None, bos_token_id=None, pad_token_id=None)  # fmt: skip
GROUPED = dict(BASE, num_key_value_heads=2, head_dim=16)
EXPERTS = dict(GROUPED, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32)
WINDOW = 24

# What is tested -> transformers' configuration class and values.
KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "grouped queries": ("LlamaConfig", GROUPED),
    "one KV head for each head": ("LlamaConfig", dict(BASE, num_key_value_heads=4)),
    "layer norm, learned positions, plain MLP": (
        "GPT2Config", dict(vocab_size=VOCAB, n_embd=64, n_inner=96, n_layer=3, n_head=4, n_positions=CONTEXT, eos_token_id=None, bos_token_id=None)),
    "window": ("MistralConfig", dict(GROUPED, sliding_window=WINDOW)),
    "window in some layers, soft caps": (
        "Gemma2Config", dict(GROUPED, num_hidden_layers=4, sliding_window=WINDOW, query_pre_attn_scalar=16, attn_logit_softcapping=2.0,
                             final_logit_softcapping=3.0)),
    "window in most layers, QK norm, two ropes": (
        "Gemma3TextConfig", dict(GROUPED, num_hidden_layers=6, sliding_window=WINDOW, query_pre_attn_scalar=16,
                                 layer_types=["sliding_attention"] * 5 + ["full_attention"])),
    "QK norm": ("Qwen3Config", GROUPED),
    "QK norm over all heads, norms after": ("Olmo2Config", dict(BASE, num_key_value_heads=2)),
    "rope of pairs on half of a head": ("GlmConfig", dict(GROUPED, partial_rotary_factor=0.5)),
    "experts": ("Qwen3MoeConfig", EXPERTS),
    "experts and a shared one": (
        "Qwen2MoeConfig", dict({k: v for k, v in EXPERTS.items() if k != "head_dim"}, shared_expert_intermediate_size=48, decoder_sparse_step=1, norm_topk_prob=False)),
    "experts, window": ("MixtralConfig", dict(GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW)),
}  # fmt: skip


def write_tokenizer(folder: Path) -> None:
    """A token for each id: requests here are token ids, but a model comes with a tokenizer."""
    model = {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(VOCAB)}, "unk_token": "t0"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}))


@pytest.fixture(scope="module", params=list(KINDS))
def folder(request, tmp_path_factory):
    name, values = KINDS[request.param]
    torch.manual_seed(3)
    config = getattr(transformers, name)(**values)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # initial weights are so small that every token would look alike
        for weight in model.parameters():
            weight.mul_(4) if weight.ndim > 1 else weight.add_(torch.randn_like(weight) * 0.1)
    path = tmp_path_factory.mktemp("kind")
    model.to(torch.bfloat16).save_pretrained(path)
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def requests():
    rng = random.Random(7)
    lengths = [1, 2, 15, 16, 17, WINDOW - 1, WINDOW, WINDOW + 1, 33, 48, 64, 65, 100]
    ways = ({"temperature": 0}, {"seed": 5}, {"seed": 6, "temperature": 0.7, "top_p": 0.9})
    return [
        ([rng.randrange(VOCAB) for _ in range(length)], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2, **ways[i % 3]))
        for i, length in enumerate(lengths)
    ]


def make(folder, **options):
    return LLM(str(folder), max_model_len=CONTEXT, **{"kv_cache_memory": "16M", "enable_prefix_caching": False, "max_num_batched_tokens": CONTEXT, **options})


def run(llm, requests):
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], [params for _, params in requests], use_tqdm=False)
    return [bits(output.outputs[0]) for output in outputs]


def bits(choice):
    return choice.token_ids, [sorted((i, lp.logprob, lp.rank) for i, lp in position.items()) for position in choice.logprobs]


@pytest.fixture(scope="module")
def alone(folder, requests):
    llm = make(folder)
    return [run(llm, [request])[0] for request in requests]


def test_the_requests_are_worth_comparing(alone):
    assert len({tuple(tokens) for tokens, _ in alone}) >= 10
    assert len({token for tokens, _ in alone for token in tokens}) > 20


@pytest.mark.parametrize(
    "options",
    [{}, {"num_threads": 3}, {"max_num_batched_tokens": 7, "max_num_seqs": 5}, {"block_size": 32}, {"isa": "portable"}],
    ids=["batch", "threads", "chunks", "block size", "portable"],
)
def test_in_a_batch(folder, requests, alone, options):
    if options.get("isa"):  # another instruction set has bits of its own, but one set of them
        wanted = [run(make(folder, **options), [request])[0] for request in requests[5:9]]
        assert run(make(folder, **options), requests)[5:9] == wanted
    else:
        order = list(range(len(requests)))
        random.Random(2).shuffle(order)
        assert run(make(folder, **options), [requests[i] for i in order]) == [alone[i] for i in order]


def test_with_drafts(folder, requests, alone, monkeypatch):
    foretell(monkeypatch, [(prompt, tokens) for (prompt, _), (tokens, _) in zip(requests, alone, strict=True)])
    llm = make(folder, num_speculative_tokens=5, max_num_seqs=4)
    assert run(llm, requests) == alone
    assert 20 < llm.stats.num_accepted_tokens < llm.stats.num_draft_tokens


def test_from_cached_blocks(folder, requests, alone):
    llm = make(folder, enable_prefix_caching=True)
    assert run(llm, requests) == alone
    hits = llm.stats.prefix_hits
    assert run(llm, requests) == alone
    assert llm.stats.prefix_hits > hits


def test_preempted(folder, requests, alone):
    info = make(folder).engine_info
    block_bytes = info.kv_cache_bytes // info.num_blocks
    needed = least_blocks(folder, block_bytes)
    # Without drafts and a pace who is preempted does not depend on the clock.
    clockless = {"num_speculative_tokens": 0, "itl_target_ms": 0}
    tiny = make(folder, kv_cache_memory=str(needed * block_bytes), enable_prefix_caching=True, **clockless)
    assert run(tiny, requests) == alone
    assert tiny.stats.num_preemptions > 0


def least_blocks(folder, block_bytes):
    """Blocks that one request of the whole context takes, and a few more."""
    for blocks in range(4, 200):
        try:
            make(folder, kv_cache_memory=str(blocks * block_bytes))
        except Exception as e:  # the message names the memory that is missing
            assert "kv_cache_memory" in str(e)
        else:
            return blocks + 1
    raise AssertionError("no pool is large enough")
