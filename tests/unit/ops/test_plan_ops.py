"""Needs Python only: what the planner makes of single ops: places taken over, codes shared, experts, ropes joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from octavo import ops
from octavo.ops.batch import AttentionSpec, Batch, MoeSpec
from octavo.ops.cpu.plan import Planner
from octavo.ops.cpu.steps import Plan, Step
from octavo.ops.cpu.trace import Rows, trace
from octavo.ops.packed import PackedWeight, WeightKind, WeightPart

WIDTH, MAX_TOKENS, MAX_ROWS = 64, 40, 24
ONES = np.ones(WIDTH, np.float32)
W4, W8, F32 = WeightKind.W4, WeightKind.W8, WeightKind.F32


def weight(kind: WeightKind, n: int, k: int = WIDTH) -> PackedWeight:
    if kind is F32:
        return PackedWeight(kind, n, k, (WeightPart(np.zeros((n, k), np.float32)),))
    scales = np.zeros((n, k // 32), np.float16)
    codes = np.zeros((n, k // 32, 16), np.uint8) if kind is W4 else np.zeros((n, k // 32, 32), np.int8)
    return PackedWeight(kind, n, k, (WeightPart(codes, scales),))


class Model:
    """embedding -> `body` -> head."""

    def __init__(self, body: Callable[[ops.Value, Batch], ops.Value], head: Callable[[ops.Value], ops.Value] = lambda x: x) -> None:
        self.body, self.head, self.table = body, head, weight(F32, 100)

    def forward(self, batch: Batch) -> ops.Value:
        return self.body(ops.embed(batch.input_ids_T, self.table), batch)

    def logits(self, x: ops.Value, rows: ops.Value) -> ops.Value:
        return self.head(ops.linear(ops.gather_rows(x, rows), (self.table,)))


def plan_of(body: Callable[[ops.Value, Batch], ops.Value], head: Callable[[ops.Value], ops.Value] = lambda x: x) -> Plan:
    nodes, _, logits = trace(Model(body, head), 128)
    plan = Planner(nodes, logits).plan(MAX_TOKENS, MAX_ROWS)
    check_lifetimes(plan)
    return plan


def check_lifetimes(plan: Plan) -> None:
    most = {Rows.TOKENS: MAX_TOKENS, Rows.PICKED: MAX_ROWS, Rows.ONE: 1}
    buffers = {b for step in plan.steps for b in step.buffers()}
    for a in buffers:
        assert a.offset >= 0 and a.offset + a.nbytes(most) <= plan.arena_bytes
        for b in buffers - {a}:
            apart = a.offset + a.nbytes(most) <= b.offset or b.offset + b.nbytes(most) <= a.offset
            assert apart or a.last < b.first or b.last < a.first


def body_steps(plan: Plan) -> list[Step]:
    """Without embedding, gather and head."""
    names = [step.op for step in plan.steps]
    return plan.steps[1 : names.index("gather")]


def test_a_residual_that_is_read_after_the_product_keeps_its_place() -> None:
    """x + f(x) + g(x), in parallel: the first sum is made where the product is, before g reads x."""

    def body(x: ops.Value, batch: Batch) -> ops.Value:
        out = ops.linear(ops.rms_norm(x, ONES, 1e-5), (weight(W4, WIDTH),))
        other = ops.linear(ops.layer_norm(x, ONES, None, 1e-5), (weight(W4, WIDTH),))
        return ops.add(ops.add(x, out), other)

    norm, out, second, other = body_steps(plan_of(body))
    assert [s.op for s in (norm, out, second, other)] == ["norm", "linear", "norm", "linear"]
    assert out.epilogue == 1 and out.b == norm.x == second.x and out.y != out.b
    assert other.epilogue == 1 and other.y == other.b == out.y


def test_a_product_of_the_residual_itself_does_not_write_over_its_operand() -> None:
    (step,) = body_steps(plan_of(lambda x, _: ops.add(x, ops.linear(x, (weight(F32, WIDTH),)))))
    assert step.epilogue == 1 and step.x == step.b and step.y is not None and step.y.buffer is not step.x.buffer


def test_results_take_the_place_of_operands_that_nobody_reads_later() -> None:
    def body(x: ops.Value, batch: Batch) -> ops.Value:
        y = ops.rms_norm(ops.linear(x, (weight(F32, WIDTH),)), ONES, 1e-5)
        return ops.add(x, ops.scale(y, 0.5))

    product, norm, scale, add = body_steps(plan_of(body))
    assert product.epilogue == 0 and product.scale == 1.0
    assert product.y == norm.x == norm.y == scale.x == scale.y == add.b
    assert add.y == add.x == product.x


def test_a_sum_takes_the_place_of_whichever_operand_is_free() -> None:
    def body(x: ops.Value, batch: Batch) -> ops.Value:
        y = ops.add(x, ops.soft_cap(ops.scale(x, 2.0), 3.0))
        return ops.add(x, y)

    scale, cap, first, second = body_steps(plan_of(body))
    assert scale.y is not None and scale.y != scale.x and cap.y == scale.y
    assert first.y == first.b == cap.y and second.y == second.x


def test_a_slice_is_changed_in_place_unless_the_whole_is_read() -> None:
    scaled = body_steps(plan_of(lambda x, b: in_place_slice(x, False)))[1]
    assert scaled.op == "unary" and scaled.y == scaled.x and scaled.y is not None and scaled.y.column == WIDTH
    scaled = body_steps(plan_of(lambda x, b: in_place_slice(x, True)))[1]
    assert scaled.op == "unary" and scaled.y != scaled.x


def test_a_slice_is_normalised_and_quantised() -> None:
    def body(x: ops.Value, batch: Batch) -> ops.Value:
        a, b = ops.split(ops.linear(x, (weight(F32, 2 * WIDTH),)), [WIDTH, WIDTH])
        y = ops.linear(ops.rms_norm(b, ONES, 1e-5), (weight(W8, WIDTH),))
        return ops.add(y, ops.linear(a, (weight(W4, WIDTH),)))

    _, norm, first, quantize, second = body_steps(plan_of(body))
    assert norm.op == "norm" and norm.x is not None and norm.x.column == WIDTH and not norm.store and norm.xq is first.xq
    assert quantize.op == "quantize" and quantize.x is not None and quantize.x.column == 0 and second.xq is quantize.xq


def in_place_slice(x: ops.Value, whole: bool) -> ops.Value:
    both = ops.linear(x, (weight(F32, 2 * WIDTH),))
    a, b = ops.split(both, [WIDTH, WIDTH])
    y = ops.add(ops.scale(b, 2.0), a)
    return ops.add(y, ops.silu_mul(both)) if whole else y


def test_a_norm_that_codes_and_floats_are_read_of_makes_both() -> None:
    def body(x: ops.Value, batch: Batch) -> ops.Value:
        h = ops.rms_norm(x, ONES, 1e-5)
        return ops.add(ops.linear(h, (weight(W4, WIDTH),)), ops.linear(h, (weight(F32, WIDTH),)))

    norm, codes, floats = body_steps(plan_of(body))
    assert norm.store and norm.xq is not None and norm.xq is codes.xq and floats.x == norm.y


def test_gelu_is_done_by_the_product() -> None:
    def body(x: ops.Value, batch: Batch) -> ops.Value:
        h = ops.gelu(ops.linear(x, (weight(W4, 32), weight(F32, 64))))
        return ops.linear(h, (weight(F32, WIDTH, 96),))

    steps = body_steps(plan_of(body))
    assert [s.op for s in steps] == ["quantize", "linear", "linear", "linear"]
    assert [s.epilogue for s in steps[1:]] == [4, 4, 0]
    assert steps[1].y is not None and steps[1].y.width == 32 and steps[3].x is not None and steps[3].x.width == 96


def test_a_product_scales_its_sums_itself() -> None:
    def body(x: ops.Value, batch: Batch) -> ops.Value:
        x = ops.add(x, ops.scale(ops.linear(ops.rms_norm(x, ONES, 1e-5), (weight(W4, WIDTH),)), 0.22))
        gated = ops.silu_mul(ops.scale(ops.linear(x, (weight(F32, 2 * WIDTH),)), 0.5))
        return ops.gelu(ops.scale(ops.linear(gated, (weight(F32, WIDTH),)), 3.0))

    norm, first, gate_up, act, last = body_steps(plan_of(body))
    assert (first.epilogue, first.scale) == (1, 0.22) and first.y == first.b == norm.x
    assert (gate_up.epilogue, gate_up.scale) == (0, 0.5) and act.op == "act"
    assert (last.epilogue, last.scale) == (4, 3.0)


def test_a_scaled_product_keeps_its_hands_off_what_is_read_before_the_sum() -> None:
    def body(x: ops.Value, batch: Batch) -> ops.Value:
        scaled = ops.scale(ops.linear(ops.rms_norm(x, ONES, 1e-5), (weight(W4, WIDTH),)), 0.22)
        other = ops.linear(ops.layer_norm(x, ONES, None, 1e-5), (weight(W4, WIDTH),))
        return ops.add(ops.add(x, scaled), other)

    norm, first, second, other = body_steps(plan_of(body))
    assert first.scale == 0.22 and first.b == norm.x == second.x and first.y != first.b and other.b == first.y


def test_logits_are_scaled_and_capped_where_they_are() -> None:
    plan = plan_of(lambda x, _: x, lambda y: ops.soft_cap(ops.scale(y, 0.5), 30.0))
    head, cap = plan.steps[-2:]
    assert [s.stage for s in (head, cap)] == [1, 1] and head.scale == 0.5
    assert head.y == cap.y == plan.logits and plan.logits.buffer.last == len(plan.steps)


@pytest.mark.parametrize(("q_table", "pairs", "joined"), [(0, (False, False), True), (0, (True, True), True), (1, (True, True), False),
                                                          (0, (True, False), False)])  # fmt: skip
def test_only_equal_ropes_of_neighbours_are_joined(q_table: int, pairs: tuple[bool, bool], joined: bool) -> None:
    tables = [np.ones((128, 16), np.float32), np.ones((128, 16), np.float32)]

    def body(x: ops.Value, batch: Batch) -> ops.Value:
        q, k, v = ops.split(ops.linear(x, (weight(F32, 128),)), [64, 32, 32])
        q, k = ops.rms_norm(q, ONES, 1e-5), ops.rms_norm(k, ONES[:32], 1e-5)
        q = ops.rope(q, batch.positions_T, tables[q_table], 16, pairs[0])
        k = ops.rope(k, batch.positions_T, tables[0], 16, pairs[1])
        return ops.attention(q, k, v, batch, AttentionSpec(0, 4, 2, 16, 0.25))

    ropes = [s for s in body_steps(plan_of(body)) if s.op == "rope"]
    assert [s.heads for s in ropes] == ([6] if joined else [4, 2])
    assert all(s.x == s.y for s in ropes)


def experts(kinds: Sequence[WeightKind], parted: bool) -> tuple[list[list[PackedWeight]], list[list[PackedWeight]]]:
    """Of four experts of inner width 96; the kinds in turn."""
    sizes = [96, 96] if parted else [192]
    gate_up = [[weight(kinds[(e + i) % len(kinds)], n) for i, n in enumerate(sizes)] for e in range(4)]
    return gate_up, [[weight(kinds[e % len(kinds)], WIDTH, 96)] for e in range(4)]


def mixture(kinds: Sequence[WeightKind], parted: bool = False) -> list[Step]:
    gate_up, down = experts(kinds, parted)

    def body(x: ops.Value, batch: Batch) -> ops.Value:
        h = ops.rms_norm(x, ONES, 1e-5)
        return ops.add(x, ops.moe(h, ops.linear(h, (weight(F32, 4),)), gate_up, down, MoeSpec(2, True)))

    return body_steps(plan_of(body))


def test_quantised_experts() -> None:
    steps = mixture([W4])
    assert [s.op for s in steps] == ["norm", "linear", "route", "dispatch", "experts", "quantize", "experts", "combine"]
    norm, _, _, dispatch, gate_up, quantize, down, combine = steps
    assert norm.store and dispatch.xq is norm.xq and dispatch.x is None and dispatch.y is None
    assert gate_up.xq is dispatch.yq and gate_up.epilogue == 2 and gate_up.y is not None and gate_up.y.width == 96
    assert quantize.times == gate_up.times == 2 and gate_up.y.buffer.times == 2 and down.xq is quantize.xq
    assert combine.b == combine.y == norm.x  # the residual is added, and changed in place


def test_plain_experts_take_floats() -> None:
    steps = mixture([F32])
    assert [s.op for s in steps] == ["norm", "linear", "route", "dispatch", "experts", "experts", "combine"]
    dispatch, gate_up, down = steps[3:6]
    assert dispatch.xq is None and dispatch.yq is None and gate_up.x == dispatch.y and down.x == gate_up.y and down.xq is None


def test_experts_of_several_kinds_take_both() -> None:
    steps = mixture([W4, F32], parted=True)
    assert [s.op for s in steps] == ["norm", "linear", "route", "dispatch", "experts", "act", "quantize", "experts", "combine"]
    dispatch, gate_up, act, quantize, down = steps[3:8]
    assert dispatch.x is not None and dispatch.y is not None and dispatch.xq is not None and dispatch.yq is not None
    assert gate_up.epilogue == 0 and gate_up.y is not None and gate_up.y.width == 192
    assert act.times == 2 and act.y is not None and act.y.width == 96 and down.x == quantize.x == act.y and down.xq is quantize.xq
