"""Needs Python only: which operations are done on picked rows alone, and that what is asked of one batch again finds its inputs untouched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from octavo import ops
from octavo.config import HFConfig
from octavo.models import build_model
from octavo.ops.batch import AttentionSpec, Batch, MoeSpec
from octavo.ops.cpu.pick import ROW_WISE, moved_nodes, pick_early
from octavo.ops.cpu.plan import Planner
from octavo.ops.cpu.steps import Plan
from octavo.ops.cpu.trace import Kind, Node, Rows, Traced, trace
from octavo.ops.packed import PackedWeight, WeightKind, WeightPart, merge

WIDTH, HEADS, MAX_TOKENS, MAX_ROWS = 64, 4, 40, 24
ONES = np.ones(WIDTH, np.float32)
SIZES = dict(
    hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=2, num_hidden_layers=2, intermediate_size=96, vocab_size=160,
    max_position_embeddings=128,
)  # fmt: skip
SPARSE = dict(moe_intermediate_size=32, num_experts=4, num_local_experts=4, num_experts_per_tok=2, shared_expert_intermediate_size=96)
DENSE = ("llama", "gemma2", "gemma3_text", "glm4", "olmo2", "gpt2", "granite", "phi3", "starcoder2", "chatglm", "qwen3")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
GATED = Counter({Kind.LINEAR: 3, Kind.NORM: 1, Kind.SILU_MUL: 1, Kind.ADD: 2})  # a block behind its attention
Body = Callable[[ops.Value, Batch], ops.Value]


def weight(n: int, k: int = WIDTH, kind: WeightKind = WeightKind.W4) -> PackedWeight:
    if kind is WeightKind.F32:
        return PackedWeight(kind, n, k, (WeightPart(np.zeros((n, k), np.float32)),))
    return PackedWeight(kind, n, k, (WeightPart(np.zeros((n, k // 32, 16), np.uint8), np.zeros((n, k // 32), np.float16)),))


def traced(family: str) -> tuple[list[Node], Traced]:
    """A small model of two layers."""
    model = build_model(HFConfig(SIZES | (SPARSE if family in MIXTURES else {}) | {"model_type": family}))
    for linear in model.linears():
        linear.weights = merge([weight(n, linear.k) for n in linear.n_each])
    for vector in model.vectors():
        vector.value = np.ones(vector.size, np.float32)
    nodes, _, logits = trace(model, 128)
    return nodes, logits


class Model:
    """embedding -> `body` -> head."""

    def __init__(self, body: Body) -> None:
        self.body, self.table = body, weight(100, kind=WeightKind.F32)

    def forward(self, batch: Batch) -> ops.Value:
        return self.body(ops.embed(batch.input_ids_T, self.table), batch)

    def logits(self, x: ops.Value, rows: ops.Value) -> ops.Value:
        return ops.linear(ops.gather_rows(x, rows), (self.table,))


def traced_body(body: Body) -> tuple[list[Node], Traced]:
    nodes, _, logits = trace(Model(body), 128)
    return nodes, logits


def attend(h: ops.Value, batch: Batch) -> ops.Value:
    q, k, v = ops.split(ops.linear(h, (weight(2 * WIDTH),)), [WIDTH, WIDTH // 2, WIDTH // 2])
    return ops.linear(ops.attention(q, k, v, batch, AttentionSpec(0, HEADS, 2, 16, 0.25)), (weight(WIDTH),))


def feed(h: ops.Value) -> ops.Value:
    return ops.linear(ops.silu_mul(ops.linear(h, (weight(2 * WIDTH),))), (weight(WIDTH),))


def moved(nodes: list[Node]) -> Counter[Kind]:
    return Counter(node.kind for node in moved_nodes(nodes))


def gathered(nodes: list[Node], logits: Traced) -> list[Kind]:
    """What rows are picked of, in the order of execution."""
    return [node.inputs[0].node.kind for node in pick_early(nodes, logits)[0] if node.kind is Kind.GATHER]


# --- what moves ---


def test_all_behind_the_last_attention_moves() -> None:
    nodes, logits = traced("llama")
    assert moved(nodes) == GATED
    assert moved_nodes(nodes) == set(nodes[-10:-3])  # those of the last layer, before gather, norm and head
    assert gathered(nodes, logits) == [Kind.ATTENTION, Kind.ADD]  # the stream as the layer before has left it


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("gemma2", Counter({Kind.NORM: 2, Kind.GELU_MUL: 1, Kind.SILU_MUL: -1})),
        ("glm4", Counter({Kind.NORM: 2})),
        ("olmo2", Counter({Kind.NORM: 1})),
        ("granite", Counter({Kind.SCALE: 2})),
        ("gpt2", Counter({Kind.LAYER_NORM: 1, Kind.NORM: -1, Kind.GELU: 1, Kind.SILU_MUL: -1})),
    ],
)  # fmt: skip
def test_norms_behind_products_and_scaled_residuals_move_too(family: str, more: Counter[Kind]) -> None:
    nodes, logits = traced(family)
    expected = GATED.copy()
    expected.update(more)
    assert moved(nodes) == +expected
    assert gathered(nodes, logits) == [Kind.ATTENTION, Kind.ADD]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_nothing_moves_past_a_mixture(family: str) -> None:
    """The sum with the residual stays as well: two gathers would cost more than it saves."""
    nodes, logits = traced(family)
    assert not moved_nodes(nodes)
    assert gathered(nodes, logits) == [Kind.ADD]
    assert [node.kind for node in pick_early(nodes, logits)[0]] == [node.kind for node in nodes]


def test_an_expert_that_all_tokens_share_moves_and_the_mixture_beside_it_does_not() -> None:
    nodes, logits = traced("qwen2_moe")
    assert moved(nodes) == Counter({Kind.LINEAR: 3, Kind.SILU_MUL: 1, Kind.SIGMOID_ROWS: 1, Kind.ADD: 2})
    assert sorted(kind.name for kind in gathered(nodes, logits)) == ["ADD", "MOE", "NORM"]


def test_a_norm_behind_a_mixture_does_not_move() -> None:
    def body(x: ops.Value, batch: Batch) -> ops.Value:
        mixed = ops.moe(x, ops.linear(x, (weight(2),)), [[weight(64)]] * 2, [[weight(WIDTH, 32)]] * 2, MoeSpec(1, True))
        return ops.add(x, ops.rms_norm(mixed, ONES, 1e-5))

    nodes, logits = traced_body(body)
    assert not moved_nodes(nodes) and gathered(nodes, logits) == [Kind.ADD]


def test_of_parallel_branches_what_attention_reads_stays() -> None:
    def body(x: ops.Value, batch: Batch) -> ops.Value:
        h = ops.rms_norm(x, ONES, 1e-5)
        return ops.add(ops.add(x, attend(h, batch)), feed(h))

    nodes, logits = traced_body(body)
    assert moved(nodes) == Counter({Kind.LINEAR: 3, Kind.SILU_MUL: 1, Kind.ADD: 2})
    assert sorted(kind.name for kind in gathered(nodes, logits)) == ["ATTENTION", "EMBED", "NORM"]


def test_a_branch_with_a_norm_of_its_own_moves_with_it() -> None:
    def body(x: ops.Value, batch: Batch) -> ops.Value:
        return ops.add(ops.add(x, attend(ops.rms_norm(x, ONES, 1e-5), batch)), feed(ops.layer_norm(x, ONES, None, 1e-5)))

    nodes, logits = traced_body(body)
    assert moved(nodes)[Kind.LAYER_NORM] == 1 and moved(nodes)[Kind.NORM] == 0
    assert sorted(kind.name for kind in gathered(nodes, logits)) == ["ATTENTION", "EMBED"]


def test_columns_move_only_if_all_of_them_do() -> None:
    """Of one product, some columns go to attention: what is made of the others is computed on their picked rows."""

    def body(x: ops.Value, batch: Batch) -> ops.Value:
        q, k, v, other = ops.split(ops.linear(x, (weight(3 * WIDTH),)), [WIDTH, WIDTH // 2, WIDTH // 2, WIDTH])
        attended = ops.attention(q, k, v, batch, AttentionSpec(0, HEADS, 2, 16, 0.25))
        a, b = ops.split(ops.linear(ops.gelu(other), (weight(2 * WIDTH),)), [WIDTH, WIDTH])
        return ops.add(ops.add(a, b), attended)

    nodes, logits = traced_body(body)
    assert moved(nodes) == Counter({Kind.GELU: 1, Kind.LINEAR: 1, Kind.SPLIT: 1, Kind.ADD: 2})
    of_columns = next(node.inputs[0] for node in pick_early(nodes, logits)[0] if node.kind is Kind.GATHER and node.inputs[0].node.kind is Kind.SPLIT)
    assert (of_columns.column, of_columns.width) == (2 * WIDTH, WIDTH)


def test_a_result_that_nobody_reads_stays() -> None:
    def body(x: ops.Value, batch: Batch) -> ops.Value:
        ops.linear(x, (weight(WIDTH),))
        return x

    nodes, logits = traced_body(body)
    assert not moved_nodes(nodes) and len(pick_early(nodes, logits)[0]) == len(nodes)


# --- what holds of every model ---


@pytest.mark.parametrize("family", [*DENSE, *MIXTURES])
def test_stages_are_apart(family: str) -> None:
    nodes, logits = traced(family)
    early, result = pick_early(nodes, logits)
    assert result.rows is Rows.PICKED and result.node is early[-1] and result.width == logits.width
    first = next(i for i, node in enumerate(early) if node.kind is Kind.GATHER)
    assert all(value.rows is Rows.TOKENS for node in early[:first] for value in node.inputs)
    for i, node in enumerate(early[first:], first):
        expected = Rows.TOKENS if node.kind is Kind.GATHER else Rows.PICKED
        assert node.kind is Kind.GATHER or node.kind in ROW_WISE
        assert all(value.rows is expected and value.node in early[:i] for value in node.inputs)
    counts, before = Counter(node.kind for node in early), Counter(node.kind for node in nodes)
    assert counts - Counter({Kind.GATHER: counts[Kind.GATHER]}) == before - Counter({Kind.GATHER: 1})


@pytest.mark.parametrize("family", [*DENSE, *MIXTURES])
def test_the_head_writes_into_memory_of_its_own(family: str) -> None:
    """Logits may be asked for several times over one batch: what the second stage reads of the first is written by the first alone."""
    plan = plan_of(family)
    last = len(plan.steps)
    of_tokens = [step for step in plan.steps if step.stage == 0]
    of_picked = [step for step in plan.steps if step.stage == 1]
    assert plan.steps == of_tokens + of_picked
    read = {step.x.buffer for step in of_picked if step.op == "gather" and step.x is not None}
    assert all(buffer.rows is Rows.TOKENS and buffer.last == last for buffer in read)
    most = {Rows.TOKENS: MAX_TOKENS, Rows.PICKED: MAX_ROWS, Rows.ONE: 1}
    for step in of_picked:
        own = [buffer for buffer in step.buffers() if not (step.op == "gather" and buffer in read)]
        assert all(buffer.rows is Rows.PICKED for buffer in own)
        for a in own:
            assert all(a.offset + a.nbytes(most) <= b.offset or b.offset + b.nbytes(most) <= a.offset for b in read)


@pytest.mark.parametrize("family", [*DENSE, *MIXTURES])
def test_memory_grows_by_rows_and_by_no_tokens_but_what_is_picked_of(family: str) -> None:
    """At most by the residual stream that waits for the head, beside the attention's output."""
    nodes, logits = traced(family)
    late = Planner(nodes, logits).plan(MAX_TOKENS, MAX_ROWS).arena_bytes
    gathers = len(gathered(nodes, logits))
    assert plan_of(family).arena_bytes <= late + 4 * WIDTH * MAX_TOKENS * gathers


def plan_of(family: str) -> Plan:
    return Planner(*pick_early(*traced(family))).plan(MAX_TOKENS, MAX_ROWS)
