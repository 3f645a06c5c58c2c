"""Needs Python only: what the planner fuses, and that no two live buffers share memory."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.config import HFConfig
from octavo.models import build_model
from octavo.ops.cpu.plan import Planner
from octavo.ops.cpu.steps import Plan
from octavo.ops.cpu.trace import Rows, trace
from octavo.ops.packed import PackedWeight, WeightKind, WeightPart, merge

CONFIG = dict(
    model_type="llama", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, intermediate_size=96, vocab_size=160,
    rms_norm_eps=1e-5, tie_word_embeddings=True, max_position_embeddings=128,
)  # fmt: skip
MAX_TOKENS, MAX_ROWS = 40, 24


def weight(kind: WeightKind, n: int, k: int) -> PackedWeight:
    if kind is WeightKind.BF16:
        return PackedWeight(kind, n, k, (WeightPart(np.zeros((n, k), np.uint16)),))
    scales = np.zeros((n, k // 32), np.float16)
    codes = np.zeros((n, k // 32, 16), np.uint8) if kind is WeightKind.W4 else np.zeros((n, k // 32, 32), np.int8)
    return PackedWeight(kind, n, k, (WeightPart(codes, scales),))


def plan_of(kinds: tuple[WeightKind, ...] = (WeightKind.W4,)) -> Plan:
    """A small Llama; of a merged product, the stored matrices take the kinds in turn."""
    model = build_model(HFConfig(CONFIG))
    for linear in model.linears():
        linear.weights = merge([weight(kinds[i % len(kinds)], n, linear.k) for i, n in enumerate(linear.n_each)])
    for vector in model.vectors():
        vector.value = np.ones(vector.size, np.float32)
    nodes, _, logits = trace(model, 128)
    return Planner(nodes, logits).plan(MAX_TOKENS, MAX_ROWS)


def ops_of(plan: Plan) -> list[str]:
    return [step.op for step in plan.steps]


def test_quantised_model_is_fused() -> None:
    layer = ["norm", "linear", "rope", "kv_write", "attention", "quantize", "linear", "norm", "linear", "quantize", "linear"]
    assert ops_of(plan_of()) == ["embed", *layer, *layer, "gather", "norm", "linear"]


def test_fused_steps_say_what_they_do() -> None:
    steps = plan_of().steps
    qkv, out, gate_up, down = [s for s in steps if s.op == "linear"][:4]
    assert [s.epilogue for s in (qkv, out, gate_up, down)] == [0, 1, 2, 1]
    assert out.y == out.b == down.y == down.b  # the residual stream is changed in place
    assert gate_up.y is not None and gate_up.y.width == 96
    norms = [s for s in steps if s.op == "norm"]
    assert all(not s.store and s.xq is not None for s in norms)
    rope = next(s for s in steps if s.op == "rope")
    assert rope.heads == 6 and rope.x == rope.y  # q and k in one go


def test_plain_weights_take_floats() -> None:
    plan = plan_of((WeightKind.BF16,))
    assert "quantize" not in ops_of(plan)
    assert all(s.xq is None and s.x is not None for s in plan.steps if s.op == "linear")
    assert all(s.store for s in plan.steps if s.op == "norm")


def test_mixed_kinds_write_side_by_side() -> None:
    steps = [s for s in plan_of((WeightKind.W4, WeightKind.W4, WeightKind.W8)).steps if s.op == "linear"]
    qk, v = steps[:2]
    assert qk.weight is not None and qk.weight.n == 96 and qk.columns == (0, 96)
    assert v.weight is not None and v.weight.kind is WeightKind.W8 and v.columns == (96, 128)
    assert qk.y is not None and v.y is not None and qk.y.buffer is v.y.buffer and v.y.column == 96


@pytest.mark.parametrize("kinds", [(WeightKind.W4,), (WeightKind.BF16,), (WeightKind.W4, WeightKind.W8)])
def test_live_buffers_do_not_overlap(kinds: tuple[WeightKind, ...]) -> None:
    plan = plan_of(kinds)
    buffers = {b for step in plan.steps for b in step.buffers()}
    most = {Rows.TOKENS: MAX_TOKENS, Rows.PICKED: MAX_ROWS, Rows.ONE: 1}
    size = {b: b.nbytes(most) for b in buffers}
    for a in buffers:
        assert a.offset % 64 == 0 and a.offset + size[a] <= plan.arena_bytes
        for b in buffers - {a}:
            together = a.first <= b.last and b.first <= a.last
            apart = a.offset + size[a] <= b.offset or b.offset + size[b] <= a.offset
            assert apart or not together


def test_hidden_states_outlive_the_head() -> None:
    """Logits may be asked for several times over one batch: nothing in the head may overwrite what it gathers from."""
    plan = plan_of()
    gather = next(s for s in plan.steps if s.op == "gather")
    assert gather.x is not None and gather.x.buffer.last == len(plan.steps)
