"""Needs Python only: what a plan's instructions move, by hand for a small Llama."""

from __future__ import annotations

import numpy as np

from octavo.config import HFConfig
from octavo.models import build_model
from octavo.ops.cpu.plan import Planner
from octavo.ops.cpu.shapes import Shape, shape_of
from octavo.ops.cpu.trace import trace
from octavo.ops.packed import PackedWeight, WeightKind, WeightPart, merge

CONFIG = dict(
    model_type="llama", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, intermediate_size=96, vocab_size=160,
    rms_norm_eps=1e-5, tie_word_embeddings=True, max_position_embeddings=128,
)  # fmt: skip


def shapes_of(kind: WeightKind) -> list[Shape]:
    model = build_model(HFConfig(CONFIG))
    for linear in model.linears():
        linear.weights = merge([weight(kind, n, linear.k) for n in linear.n_each])
    for vector in model.vectors():
        vector.value = np.ones(vector.size, np.float32)
    nodes, _, logits = trace(model, 128)
    steps = Planner(nodes, logits).plan(16, 8).steps
    return [shape_of(step, [step.weight.nbytes] if step.weight else [], model.kv_layout, 2) for step in steps]


def weight(kind: WeightKind, n: int, k: int) -> PackedWeight:
    if kind is WeightKind.BF16:
        return PackedWeight(kind, n, k, (WeightPart(np.zeros((n, k), np.uint16)),))
    return PackedWeight(kind, n, k, (WeightPart(np.zeros((n, k // 32, 16), np.uint8), np.zeros((n, k // 32), np.float16)),))


def codes(width: int) -> int:
    """Bytes of a quantised row: codes, and a scale and a sum for each 32."""
    return width + width // 32 * 8


def test_a_layer_of_four_bits() -> None:
    embed, norm, qkv, rope, write, attention, quantize, out, norm_2, gate_up, quantize_2, down = shapes_of(WeightKind.W4)[:12]
    assert (embed.op, embed.kind, embed.n, embed.k, embed.writes) == ("embed", WeightKind.W4, 160, 64, 4 * 64)
    assert norm == Shape("norm", reads=4 * 64, writes=codes(64), elements=64, quantises=True) == norm_2
    assert (qkv.name, qkv.reads, qkv.writes, qkv.weight_bytes) == ("linear w4 128x64", codes(64), 4 * 128, 128 * 2 * 18)
    assert rope == Shape("rope", reads=4 * 96, writes=4 * 96, elements=96)
    assert write == Shape("kv_write", reads=4 * 64, kv_heads=2, head_dim=16, kv_bytes=2)
    assert attention == Shape("attention", reads=4 * 64, writes=4 * 64, heads=4, kv_heads=2, head_dim=16, kv_bytes=2)
    assert quantize == Shape("quantize", reads=4 * 64, writes=codes(64), elements=64, quantises=True)
    assert (out.reads, out.writes) == (codes(64) + 4 * 64, 4 * 64)  # the residual is read, too
    assert (gate_up.n, gate_up.reads, gate_up.writes) == (192, codes(64), 4 * 96)  # two rows make one
    assert (quantize_2.elements, down.k, down.reads) == (96, 96, codes(96) + 4 * 64)


def test_the_head_works_on_picked_rows() -> None:
    shapes = shapes_of(WeightKind.W4)
    assert [shape.op for shape in shapes if shape.picked] == ["gather", "norm", "linear"]
    assert shapes[-1].name == "linear w4 160x64"


def test_plain_weights_read_and_write_floats() -> None:
    norm, qkv = shapes_of(WeightKind.BF16)[1:3]
    assert norm == Shape("norm", reads=4 * 64, writes=4 * 64, elements=64)
    assert (norm.name, qkv.name) == ("norm 64", "linear bf16 128x64")
    assert (qkv.reads, qkv.writes) == (4 * 64, 4 * 128)
