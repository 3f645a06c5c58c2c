"""Needs Python only. The checkpoints that benchmarks/make_random.py writes are ones that the loader takes, with weights of a sane size."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.loader.hf_config import load_hf_config
from octavo.loader.load import load_weights, open_checkpoint
from octavo.loader.resolve import source_at
from octavo.models import build_model
from octavo.ops.packed import WeightKind
from octavo.tokenizer.tokenizer import Tokenizer

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def make_random() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import make_random
    finally:
        sys.path.remove(str(BENCHMARKS))
    return make_random


@pytest.mark.parametrize("shape", ["llama", "qwen2"])
@pytest.mark.parametrize("quantised", [False, True])
def test_a_random_checkpoint_loads(make_random: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shape: str, quantised: bool) -> None:
    small = make_random.SHAPES["tiny"] | {"num_hidden_layers": 2}
    if shape == "qwen2":
        small |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False}
    monkeypatch.setitem(make_random.SHAPES, "small", small)
    written = make_random.write_model(tmp_path, "small", quantised)
    assert written == (tmp_path / "model.safetensors").stat().st_size

    source = source_at(tmp_path, "small", "auto")
    hf = load_hf_config(source)
    model = build_model(hf)
    load_weights(model, open_checkpoint(source, hf))
    for linear in model.linears():
        for weight in linear.weights:
            in_layer = linear is not model.head and linear is not model.embed.table
            assert weight.kind is (WeightKind.W4 if quantised and in_layer else WeightKind.BF16)
            if in_layer:
                assert np.std(weight.dequantize()) == pytest.approx(weight.k**-0.5, rel=0.1)
        if linear.bias is not None:
            assert shape == "qwen2" and 0 < np.std(linear.bias) < 0.2


def test_its_tokenizer_decodes_every_id_but_the_special_ones_to_text(make_random: Any, tmp_path: Path) -> None:
    make_random.write_config(tmp_path, make_random.SHAPES["tiny"], False)
    make_random.write_tokenizer(tmp_path, 1000)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == 1000
    assert tokenizer.decode(tokenizer.encode("Once upon a time")) == "Once upon a time"
    assert tokenizer.decode([0, 1]) == ""
    assert len({tokenizer.decode([i]) for i in range(258, 1000)}) == 742
