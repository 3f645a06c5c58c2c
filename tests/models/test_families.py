"""Needs transformers and the extension: a small random checkpoint of each family, saved by transformers, gives transformers' logits and tokens.

The cases are in `cases/`, which docs/models.md is made of as well. Windows of 24 positions, original contexts of 32 and sequences of 75 tokens:
every window and scaling is crossed in prefill, in chunks and in decode.
"""

from __future__ import annotations

import copy
import inspect
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from octavo import LLM, SamplingParams
from octavo.ops.cpu import program as programs

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB, LAYERS, WINDOW = 320, 3, 24
SHARED = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=2,
)  # fmt: skip
IDS = np.random.default_rng(0).integers(0, VOCAB, 75).tolist()
OTHERS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (40, 1, 17)]
GREEDY, ENOUGH = 28, 24
BOUND = 2e-5  # of the largest logit: fp32 throughout, only the order of sums differs
CLEAR = 1e-3  # of the largest logit: a margin that no order of sums bridges


@dataclass(frozen=True)
class Case:
    """See the head of cases/dense.toml."""

    family: str
    name: str
    config: dict[str, Any]
    shows: list[str]
    prompt: int = 20
    bf16: float = 0.06

    @property
    def dynamic(self) -> bool:
        return "rope dynamic" in self.shows


FOUND = [entry for path in sorted((Path(__file__).parent / "cases").glob("*.toml")) for entry in tomllib.loads(path.read_text())["case"]]
CASES = {f"{entry['family']}: {entry['name']}": Case(**entry) for entry in FOUND if "reference" not in entry}
WITH_WINDOW = [key for key, case in CASES.items() if {"sliding window", "mixed windows"} & set(case.shows)]
WITH_SCALING = [key for key, case in CASES.items() if any(what.split()[0] == "rope" and what != "rope pairs" for what in case.shows)]
every_case = pytest.mark.parametrize("key", CASES)
both_backends = pytest.mark.parametrize("backend", ["reference", "cpu"])


@dataclass
class Expected:
    """transformers' word on one case: logits float64 [T, V] of IDS; the tokens after a prompt, as far as their margins are clear."""

    folder: Path
    model: Any
    logits: np.ndarray
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def make(case: Case, dtype: str) -> Any:
    """A model whose numbers are far from the tiny default initialisation: errors must show."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    given = {key: None if value == "null" else value for key, value in case.config.items()}
    known = transformers.AutoConfig.for_model(case.family)
    shared = {key: value for key, value in SHARED.items() if hasattr(known, key)}
    config = transformers.AutoConfig.for_model(case.family, **{**shared, **given})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.config._experts_implementation = "eager"  # the others have no float64
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if parameter.ndim == 1 and not name.endswith("bias") else 0.0
            parameter.copy_(torch.randn_like(parameter) * (0.12 if parameter.ndim > 1 else 0.2) + around)
    return model.to(getattr(torch, dtype))


def exact_logits(model: Any, ids: list[int], one_by_one: bool = False) -> np.ndarray:
    """In float64 on the stored numbers: the comparison is with exact arithmetic, not with another engine's rounding."""
    exact = copy.deepcopy(model).to(torch.float64)
    with torch.no_grad():
        if not one_by_one:
            return exact(torch.tensor([ids])).logits[0].numpy()
        name = "cache" if "cache" in inspect.signature(exact.forward).parameters else "past_key_values"
        more = {name: transformers.DynamicCache(config=exact.config), "use_cache": True}
        return torch.cat([exact(torch.tensor([[i]]), **more).logits[0] for i in ids]).numpy()


def clear_run(model: Any, length: int) -> tuple[list[int], list[int]]:
    """The first prompt of so many tokens that is followed by enough tokens with clear margins, and those."""
    for start in range(20):
        prompt = IDS[start : start + length]
        tokens = clear_tokens(model, prompt)
        if len(tokens) >= ENOUGH:
            return prompt, tokens
    raise AssertionError("no prompt has clear margins")


def clear_tokens(model: Any, prompt: list[int]) -> list[int]:
    model = copy.deepcopy(model)
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=GREEDY, output_scores=True, return_dict_in_generate=True, pad_token_id=2
    )
    with torch.no_grad():
        out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long))
    top = torch.topk(torch.cat(out.scores).float(), 2).values.numpy()
    unclear = np.flatnonzero(top[:, 0] - top[:, 1] < CLEAR * np.abs(top).max())
    return out.sequences[0, len(prompt) :].tolist()[: unclear[0] if unclear.size else GREEDY]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[tuple[str, str], Expected] = {}

    def get(key: str, dtype: str = "float32") -> Expected:
        if (key, dtype) not in made:
            case, folder = CASES[key], tmp_path_factory.mktemp("checkpoint")
            model = make(case, dtype)
            model.save_pretrained(folder)
            made[key, dtype] = Expected(folder, model, exact_logits(model, IDS, case.dynamic))
            if dtype == "float32":
                made[key, dtype].prompt, made[key, dtype].tokens = clear_run(model, case.prompt)
        return made[key, dtype]

    return get


@every_case
def test_cases_show_what_they_say(expected, serve, what_it_has, key: str) -> None:
    assert what_it_has(serve(expected(key).folder, "reference", longest=75).model) == set(CASES[key].shows)


@both_backends
@every_case
def test_logits(expected, serve, key: str, backend: str) -> None:
    """A whole prompt; in chunks of seven; token by token."""
    theirs = expected(key)
    whole, bound = None, BOUND * np.abs(theirs.logits).max()
    for chunk in (75, 7, 1):
        (ours,) = serve(theirs.folder, backend, longest=75).logits([IDS], chunk)
        assert np.abs(ours - theirs.logits).max() < bound, chunk
        whole = ours if whole is None else whole
        assert backend == "reference" or np.array_equal(ours, whole), chunk


@both_backends
@every_case
def test_batches(expected, serve, key: str, backend: str) -> None:
    """Sequences of unequal lengths side by side, whole and in chunks: each as if alone, and as transformers has it."""
    theirs = expected(key)
    batch = [IDS, *OTHERS]
    bound = BOUND * np.abs(theirs.logits).max()
    for chunk in (75, 7):
        together = serve(theirs.folder, backend, longest=75, num_seqs=4).logits(batch, chunk)
        for ids, ours in zip(batch, together, strict=True):
            (alone,) = serve(theirs.folder, backend, longest=75).logits([ids])
            assert np.array_equal(ours, alone) if backend == "cpu" else np.abs(ours - alone).max() < bound
        assert np.abs(together[0] - theirs.logits).max() < bound
    if "rope longrope" not in CASES[key].shows:  # whose short sequences transformers turns by other frequencies
        last = exact_logits(theirs.model, OTHERS[0], CASES[key].dynamic)
        assert np.abs(together[1] - last).max() < bound


@every_case
def test_rows_that_are_picked_early_are_those_of_all(expected, serve, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By bits, and asked again in any order: what a head's rows need of the last layer is computed for them alone."""
    folder = expected(key).folder
    early = serve(folder, "cpu", longest=75)
    whole = early.logits([IDS])[0]
    for rows in ([74], range(30, 75), [3, 3], [74, 0]):
        assert np.array_equal(early.program.logits(np.array(rows, np.int32)), whole[list(rows)])
    monkeypatch.setattr(programs, "pick_early", lambda nodes, logits: (nodes, logits))
    late = serve(folder, "cpu", longest=75)
    assert np.array_equal(late.logits([IDS])[0], whole)
    assert late.program.shapes != early.program.shapes or "MoE" in CASES[key].shows


@both_backends
@every_case
def test_greedy_tokens(expected, serve, key: str, backend: str) -> None:
    theirs = expected(key)
    ours = serve(theirs.folder, backend, longest=len(theirs.prompt) + GREEDY).greedy(theirs.prompt, len(theirs.tokens))
    assert ours == theirs.tokens


@both_backends
@every_case
def test_bf16(expected, serve, key: str, backend: str) -> None:
    """Activations are rounded to 8 bits before each product, weights are exact; so the bound is looser."""
    theirs = expected(key, "bfloat16")
    (ours,) = serve(theirs.folder, backend, longest=75, kv_dtype="bfloat16").logits([IDS])
    error = np.abs(ours - theirs.logits)
    assert error.max() < CASES[key].bf16 * np.abs(theirs.logits).max()
    assert error.mean() < 0.02 * np.abs(theirs.logits).max()


@pytest.mark.parametrize("key", WITH_WINDOW)
def test_through_the_engine(expected, key: str) -> None:
    """Chunks of ten, three requests at once, twice, the second time from the prefix cache: each group of layers keeps its own blocks."""
    theirs = expected(key)
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")).save(str(theirs.folder / "tokenizer.json"))
    llm = LLM(model=str(theirs.folder), max_model_len=128, kv_cache_memory="4M", max_num_batched_tokens=10, num_threads=1, generation_config="vllm")
    params = SamplingParams(temperature=0.0, max_tokens=len(theirs.tokens), ignore_eos=True)
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in (theirs.prompt, IDS, theirs.prompt)], params, use_tqdm=False)
        assert [list(outputs[i].outputs[0].token_ids) for i in (0, 2)] == [theirs.tokens, theirs.tokens]
    longer = [{"prompt_token_ids": theirs.prompt + theirs.tokens[:16]}]
    rest = llm.generate(longer, params.clone(max_tokens=len(theirs.tokens) - 16), use_tqdm=False)[0]
    assert list(rest.outputs[0].token_ids) == theirs.tokens[16:]


def edited(folder: Path, target: Path, change: dict[str, Any]) -> Path:
    """The checkpoint with another configuration."""
    target.mkdir()
    (target / "model.safetensors").symlink_to(folder / "model.safetensors")
    (target / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | change))
    return target


@pytest.mark.parametrize("key", WITH_WINDOW)
def test_one_position_more_shows(expected, serve, tmp_path: Path, key: str) -> None:
    """The bound can fail: a window that is longer by one changes all rows beyond it, and none before."""
    theirs = expected(key)
    other = edited(theirs.folder, tmp_path / "other", {"sliding_window": WINDOW + 1})
    (ours,) = serve(other, "reference", longest=75).logits([IDS])
    error = np.abs(ours - theirs.logits).max(axis=1) / np.abs(theirs.logits).max()
    assert error[:WINDOW].max() < BOUND
    assert error[WINDOW:].min() > 2 * BOUND


def unscaled(rope: dict[str, Any]) -> dict[str, Any]:
    return {"rope_theta": rope["rope_theta"], "rope_type": "default", "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0)}


@pytest.mark.parametrize("key", WITH_SCALING)
def test_without_the_scaling_it_shows(expected, serve, tmp_path: Path, key: str) -> None:
    theirs = expected(key)
    rope = json.loads((theirs.folder / "config.json").read_text())["rope_parameters"]
    plain = unscaled(rope) if "rope_theta" in rope else {kind: unscaled(one) for kind, one in rope.items()}
    other = edited(theirs.folder, tmp_path / "other", {"rope_parameters": plain})
    (ours,) = serve(other, "reference", longest=75).logits([IDS])
    assert np.abs(ours - theirs.logits)[40:].max() > 20 * BOUND * np.abs(theirs.logits).max()


def test_a_short_context_turns_by_the_short_list(expected, serve) -> None:
    """LongRoPE's list is chosen by the longest sequence that is served, once."""
    theirs = expected("phi3: longrope")
    served = serve(theirs.folder, "reference", longest=30)
    assert np.abs(served.logits([IDS[:30]])[0] - exact_logits(theirs.model, IDS[:30])).max() < BOUND * np.abs(theirs.logits).max()
