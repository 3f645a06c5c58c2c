"""What the quantiser writes is what the program reads: the same numbers, bit for bit, in the packed form of their format."""

from __future__ import annotations

from pathlib import Path

import independent
import numpy as np
import pytest
from plain_models import FAMILIES, write_model, write_texts
from test_runs import KINDS, run

from octavo.loader.hf_config import load_hf_config
from octavo.loader.load import load_weights, open_checkpoint
from octavo.loader.resolve import source_at
from octavo.models import build_model
from octavo.ops.packed import WeightKind

FORMATS = {"w4 awq": "awq", "w8 rtn": "compressed_tensors", "w8 gptq, groups": "compressed_tensors", "w8a8 rtn": "compressed_tensors",
           "w8a8 smoothquant": "compressed_tensors"}  # fmt: skip


@pytest.mark.parametrize(("family", "dtype"), [*((family, "BF16") for family in FAMILIES), ("llama", "F32"), ("phi3", "F16")])
def test_numbers_and_forms(tmp_path: Path, family: str, dtype: str) -> None:
    """Every kind of every family opens as a whole, with no tensor missing and none left over."""
    model, texts = write_model(tmp_path / "m", family, dtype), write_texts(tmp_path / "t.jsonl", 4)
    for number, (kind, asked) in enumerate(KINDS.items()):
        if family == "gpt2" and asked["scheme"] == "w8a8":
            continue
        folder = run(model, tmp_path / str(number), texts, **asked)
        source = source_at(folder, "m", "auto")
        hf = load_hf_config(source)
        read, checkpoint = build_model(hf), open_checkpoint(source, hf)
        report = load_weights(read, checkpoint)
        assert checkpoint.format_name == FORMATS.get(kind, "gptq")
        expected = independent.matrices(folder)
        seen = set()
        for linear in read.linears():
            for name, n in zip(linear.names, linear.n_each, strict=True):
                if name in expected:
                    packed = checkpoint.packed(name, n, linear.k, linear.transposed)
                    assert packed.kind is (WeightKind.W4 if asked["scheme"] == "w4" else WeightKind.W8)
                    assert np.array_equal(packed.dequantize(), expected[name].astype(np.float32)), f"{kind}: {name}"
                    seen.add(name)
        assert seen == expected.keys()
        assert report.weights_bytes < report.fp16_bytes
