"""Needs the extension: whole programs, fused and planned, against the numpy definition of their ops.

A product of quantised rows amplifies any last-bit difference that moves a value across a rounding edge, so a deep model drifts within the
noise of its quantisation; one layer does not, and is held tightly.
"""

from __future__ import annotations

import numpy as np
import pytest
from toy_models import random_weight

from octavo.config import HFConfig
from octavo.models import build_model
from octavo.ops.batch import Batch
from octavo.ops.cpu.program import CpuProgram
from octavo.ops.packed import PackedWeight, merge
from octavo.runner.reference import ReferenceProgram

BLOCK, VOCAB, BLOCKS = 16, 208, 16
CONFIG = dict(
    model_type="llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=1, intermediate_size=160, vocab_size=VOCAB,
    rms_norm_eps=1e-5, tie_word_embeddings=True, max_position_embeddings=256, head_dim=16,
)  # fmt: skip
MIXES = {
    "4 bit": ("w4m",), "4 bit, no minimum": ("w4",), "8 bit": ("w8",), "8 bit, groups of 16": ("w8h",), "bf16": ("bf16",), "f16": ("f16",), "f32": ("f32",),
    "mixed": ("w4m", "w8", "bf16"),
}  # fmt: skip


def model_of(mix: tuple[str, ...], seed: int = 0):
    rng = np.random.default_rng(seed)
    model = build_model(HFConfig(CONFIG))
    stored: dict[tuple[str, ...], tuple[PackedWeight, ...]] = {}
    for linear in model.linears():
        if linear.names not in stored:
            parts = [random_weight(rng, mix[i % len(mix)], n, linear.k) for i, n in enumerate(linear.n_each)]
            stored[linear.names] = merge(parts)
        linear.weights = stored[linear.names]
    for vector in model.vectors():
        vector.value = (1 + 0.2 * rng.standard_normal(vector.size)).astype(np.float32)
    return model


def mixed_batch() -> Batch:
    """A prompt of 21 from the start, a chunk of 5 at position 17, and two decodes; blocks out of order."""
    tables = [[3, 9], [5, 2], [11, 1, 7], [4]]
    spans = [(0, 21), (17, 22), (40, 41), (0, 1)]
    ids = np.random.default_rng(1).integers(0, VOCAB, sum(b - a for a, b in spans)).astype(np.int32)
    positions = np.concatenate([np.arange(a, b) for a, b in spans]).astype(np.int32)
    slots = np.concatenate([[t[p // BLOCK] * BLOCK + p % BLOCK for p in range(a, b)] for t, (a, b) in zip(tables, spans, strict=True)])
    table = np.zeros((4, 3), np.int32)
    for row, blocks in zip(table, tables, strict=True):
        row[: len(blocks)] = blocks
    starts = np.cumsum([0, *(b - a for a, b in spans)])
    return Batch(ids, positions, slots.astype(np.int32)[None], starts.astype(np.int32), np.array([b for _, b in spans], np.int32), table[None])


@pytest.mark.parametrize("isa", ["", "portable", "portable16"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mix", MIXES)
def test_one_layer_is_the_definition(mix: str, kv_dtype: str, isa: str) -> None:
    common = dict(num_blocks=BLOCKS, block_size=BLOCK, kv_dtype=kv_dtype, max_rows=32, max_positions=256)
    rows = np.array([0, 20, 25, 26, 27], np.int32)
    reference = ReferenceProgram(model_of(MIXES[mix]), **common)
    reference.forward(mixed_batch())
    expected = reference.logits(rows)
    program = CpuProgram(model_of(MIXES[mix]), max_tokens=64, isa=isa, **common)
    program.forward(mixed_batch())
    error = np.abs(program.logits(rows) - expected)
    # A value at a rounding edge may move by one step of 1/127 of its group (8 bits), or of 1/256 of itself (bf16).
    quantised = mix != "f32" and mix != "f16"
    assert error.max() < (0.03 if quantised or kv_dtype == "bfloat16" else 2e-5) * np.abs(expected).max()
    assert np.median(error) < (2e-3 if quantised or kv_dtype == "bfloat16" else 2e-6) * np.abs(expected).max()


def test_logits_can_be_asked_again() -> None:
    program = CpuProgram(model_of(("w4m",)), num_blocks=BLOCKS, block_size=BLOCK, kv_dtype="bfloat16", max_rows=4, max_positions=256, max_tokens=64)
    program.forward(mixed_batch())
    first = [program.logits(np.array(rows, np.int32)).copy() for rows in ([0, 1, 2, 3], [24, 25], [27])]
    again = [program.logits(np.array(rows, np.int32)).copy() for rows in ([27], [0, 1, 2, 3])]
    assert np.array_equal(first[2], again[0]) and np.array_equal(first[0], again[1])


def test_behind_the_last_attention_only_picked_rows_are_computed() -> None:
    program = CpuProgram(model_of(("w4m",)), num_blocks=BLOCKS, block_size=BLOCK, kv_dtype="bfloat16", max_rows=4, max_positions=256, max_tokens=64)
    assert [shape.op for shape in program.shapes if not shape.picked] == ["embed", "norm", "linear", "rope", "kv_write", "attention"]
    assert sum(shape.op == "linear" for shape in program.shapes if shape.picked) == 4


def test_weights_can_be_taken() -> None:
    common = dict(num_blocks=BLOCKS, block_size=BLOCK, kv_dtype="bfloat16", max_rows=32, max_positions=256, max_tokens=64)
    rows = np.array([0, 20, 25, 26, 27], np.int32)
    kept, taken = model_of(("w4m",)), model_of(("w4m",))
    programs = CpuProgram(kept, **common), CpuProgram(taken, takes_weights=True, **common)
    for program in programs:
        program.forward(mixed_batch())
    assert np.array_equal(programs[0].logits(rows), programs[1].logits(rows))
    assert all(weight.parts for linear in kept.linears() for weight in linear.weights)
    assert not any(weight.parts for linear in taken.linears() for weight in linear.weights)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("input_ids_T", VOCAB, "vocabulary"), ("input_ids_T", -1, "vocabulary"), ("positions_T", 256, "context"),
        ("slot_mapping_GT", BLOCKS * BLOCK, "KV pool"), ("block_table_GSB", BLOCKS, "KV pool"), ("seq_lens_S", 4, "shorter"), ("seq_lens_S", 60, "too short"),
    ],
)  # fmt: skip
def test_bad_indices_are_refused(field: str, value: int, message: str) -> None:
    program = CpuProgram(model_of(("w4m",)), num_blocks=BLOCKS, block_size=BLOCK, kv_dtype="bfloat16", max_rows=4, max_positions=256, max_tokens=64)
    batch = mixed_batch()
    getattr(batch, field).flat[0] = value
    with pytest.raises(ValueError, match=message):
        program.forward(batch)
