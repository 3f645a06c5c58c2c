"""The native program of a model: traced, planned, its weights re-laid for this machine's kernels; and the KV pool beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo.errors import ConfigError
from octavo.ops.batch import Batch, KvLayout
from octavo.ops.cpu.pick import pick_early
from octavo.ops.cpu.plan import Planner
from octavo.ops.cpu.shapes import Shape, shape_of
from octavo.ops.cpu.steps import Place, Plan, QuantPlace, Routing, Step
from octavo.ops.cpu.trace import Kind, trace
from octavo.ops.packed import PackedWeight

F32 = NDArray[np.float32]
_NONE: F32 = np.zeros(0, np.float32)
_IN_ORDER: NDArray[np.int32] = np.zeros(0, np.int32)
_ABSENT = (-1, 0)
_NO_QUANT = (-1, 0, 0)
_UNARY = {Kind.GELU: 0, Kind.SCALE: 1, Kind.SOFT_CAP: 2}


class CpuProgram:
    """Runs a model on the CPU kernels: `forward(batch)`, then `logits(rows)`.

    max_tokens: rows of a batch at most. max_rows: rows of one logits call at most. isa: a variant's name, "" for the best. Raises
    ConfigError for a variant that does not run here. takes_weights: the model's own are let go one after the other as they are re-laid, so that a
    large model is never in memory twice.
    """

    def __init__(
        self, model: Any, *, num_blocks: int, block_size: int, kv_dtype: str, max_tokens: int, max_rows: int, max_positions: int, isa: str = "",
        takes_weights: bool = False,
    ) -> None:  # fmt: skip
        check_isa(isa)
        layout: KvLayout = model.kv_layout
        self.kv = _native.KvPool(layout.num_layers, num_blocks, block_size, layout.num_kv_heads, layout.head_dim, kv_dtype)
        self.max_rows = max_rows
        self._keep: list[object] = []
        self._packed: dict[int, Any] = {}
        self._isa = isa
        self._takes_weights = takes_weights
        nodes, _, logits = trace(model, max_positions)
        plan = Planner(*pick_early(nodes, logits)).plan(max_tokens, max_rows)
        self.kv_layout = layout
        self.kv_bytes = 4 if kv_dtype == "float32" else 2  # of a number in the cache
        self.block_size, self.num_blocks, self.vocab_size = block_size, num_blocks, model.vocab_size
        self.shapes: tuple[Shape, ...] = ()  # of its instructions, in order
        self._native = self._assemble(plan, max_tokens, max_rows, model.vocab_size, len(layout.windows))
        self._packed.clear()  # keyed by the identity of weights that may be gone from now on
        self.isa: str = self._native.isa

    def forward(self, batch: Batch) -> None:
        """All layers over one batch of int32 arrays. Raises ValueError for an index outside its range."""
        self._native.forward(
            batch.input_ids_T, batch.positions_T, batch.slot_mapping_GT, batch.query_start_S, batch.seq_lens_S, batch.block_table_GSB
        )

    def logits(self, rows_R: NDArray[np.int32]) -> F32:
        """float32 [R, V] of rows of the last batch, R <= max_rows; a view that the next call overwrites."""
        return self._native.logits(rows_R)  # type: ignore[no-any-return]

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copies whole blocks, all layers."""
        self.kv.copy_blocks(np.asarray(source, np.int32), np.asarray(target, np.int32))

    def profile(self, on: bool) -> None:
        """Times each instruction from now on, waiting included; costs a little."""
        self._native.profile(on)

    def take_profile(self) -> list[tuple[str, float]]:
        """(instruction, seconds since the last call) in order of execution, one for each of `shapes`."""
        return list(self._native.take_profile())

    def _assemble(self, plan: Plan, max_tokens: int, max_rows: int, vocab: int, groups: int) -> Any:
        native = _native.Program(self.kv, plan.arena_bytes, max_tokens, max_rows, vocab, groups, plan.logits.ref, self._keep, self._isa)
        for step in plan.steps:
            getattr(self, f"_{step.op}")(native, step)
        native.finish()
        self.shapes = tuple(shape_of(step, self._packed_bytes(step), self.kv_layout, self.kv_bytes) for step in plan.steps)
        return native

    def _weight(self, weight: PackedWeight) -> Any:
        """The weight in the kernels' layout, made once: a tied head shares the embedding's."""
        if id(weight) not in self._packed:
            self._packed[id(weight)] = native_weight(weight, self._isa)
            self._keep.append(self._packed[id(weight)])
            if self._takes_weights:
                weight.release()
        return self._packed[id(weight)]

    def _packed_bytes(self, step: Step) -> list[int]:
        return [self._weight(weight).nbytes for weight in step.matrices]

    def _array(self, array: NDArray[np.float32] | None) -> F32:
        """A copy that lives as long as the program: a view would keep the whole mapped file."""
        if array is None:
            return _NONE
        kept = np.array(array, np.float32)
        self._keep.append(kept)
        return kept

    def _embed(self, native: Any, step: Step) -> None:
        native.embed(self._weight(_made(step.weight)), _ref(step.y), *_embedding(step.node.numbers))

    def _norm(self, native: Any, step: Step) -> None:
        weight, bias = step.node.arrays
        assert weight is not None and step.x is not None
        head_dim = weight.shape[0] if step.node.kind is Kind.HEAD_NORM else 0
        layer_norm = step.node.kind is Kind.LAYER_NORM
        native.norm(
            step.stage, _ref(step.x), _ref(step.y), self._array(weight), self._array(bias), step.x.width, step.node.numbers[0], layer_norm,
            _quant(step.xq), step.store, head_dim,
        )  # fmt: skip

    def _quantize(self, native: Any, step: Step) -> None:
        assert step.x is not None and step.xq is not None
        native.quantize(step.stage, _ref(step.x), step.x.width, step.xq.ref, step.times, self._order(step.order))

    def _order(self, order: NDArray[np.int32] | None) -> NDArray[np.int32]:
        if order is None:
            return _IN_ORDER
        self._keep.append(order)
        return order

    def _linear(self, native: Any, step: Step) -> None:
        bias = step.node.arrays[0]
        part = None if bias is None else bias[slice(*step.columns)]
        weight = self._weight(_made(step.weight))
        native.linear(step.stage, _ref(step.x), _quant(step.xq), weight, self._array(part), _ref(step.y), _ref(step.b), step.epilogue, step.scale)

    def _rope(self, native: Any, step: Step) -> None:
        head_dim, pairs = step.node.numbers
        native.rope(_ref(step.x), _ref(step.y), self._table(step), step.heads, int(head_dim), bool(pairs))

    def _table(self, step: Step) -> F32:
        table = step.node.arrays[0]
        assert table is not None
        self._keep.append(table)
        return table

    def _act(self, native: Any, step: Step) -> None:
        assert step.y is not None
        gelu = step.node.moe.gelu if step.node.moe else step.node.kind is Kind.GELU_MUL
        native.act(step.stage, _ref(step.x), _ref(step.y), step.y.width, int(gelu), step.times)

    def _unary(self, native: Any, step: Step) -> None:
        assert step.y is not None
        factor = step.node.numbers[0] if step.node.numbers else 1.0
        native.unary(step.stage, _ref(step.x), _ref(step.y), step.y.width, _UNARY[step.node.kind], factor)

    def _gate_rows(self, native: Any, step: Step) -> None:
        assert step.y is not None
        native.gate_rows(step.stage, _ref(step.x), _ref(step.b), _ref(step.y), step.y.width)

    def _add(self, native: Any, step: Step) -> None:
        assert step.y is not None
        native.add(step.stage, _ref(step.x), _ref(step.b), _ref(step.y), step.y.width)

    def _gather(self, native: Any, step: Step) -> None:
        assert step.y is not None
        native.gather(_ref(step.x), _ref(step.y), step.y.width)

    def _kv_write(self, native: Any, step: Step) -> None:
        assert step.node.spec is not None
        native.kv_write(_ref(step.x), _ref(step.b), step.node.spec.layer_id, step.node.spec.group)

    def _attention(self, native: Any, step: Step) -> None:
        spec = step.node.spec
        assert spec is not None
        native.attention(_ref(step.x), _ref(step.y), spec.num_heads, spec.layer_id, spec.group, spec.scale, spec.soft_cap, spec.window)

    def _route(self, native: Any, step: Step) -> None:
        moe = step.node.moe
        assert moe is not None
        native.route(_ref(step.x), len(step.node.experts), moe.top_k, moe.renormalise, _routing(step.routing))

    def _dispatch(self, native: Any, step: Step) -> None:
        moe, width = step.node.moe, step.node.inputs[0].width
        assert moe is not None
        places = _ref(step.x), _quant(step.xq), _ref(step.y), _quant(step.yq)
        native.dispatch(*places, width, len(step.node.experts), moe.top_k, _routing(step.routing))

    def _experts(self, native: Any, step: Step) -> None:
        weights = [[self._weight(weight) for weight in expert] for expert in step.experts]
        native.experts(_ref(step.x), _quant(step.xq), _ref(step.y), weights, step.epilogue, step.times, _routing(step.routing))

    def _combine(self, native: Any, step: Step) -> None:
        moe = step.node.moe
        assert moe is not None and step.y is not None
        native.combine(_ref(step.x), _ref(step.y), _ref(step.b), step.y.width, moe.top_k, _routing(step.routing))


def native_weight(weight: PackedWeight, isa: str) -> Any:
    """A copy of the weight in the layout of a variant's kernels."""
    sources = [(part.codes, part.scales, part.mins, part.zeros) for part in weight.parts]
    return _native.pack(weight.kind.value, weight.n, weight.k, sources, isa, weight.table)


def check_isa(isa: str) -> None:
    """Raises ConfigError for a variant that does not run here; "" is the best that does."""
    runs_here = {*_native.isa_names(), "portable16"}  # the last is for tests: never chosen, never faster
    if isa and isa not in runs_here:
        raise ConfigError(f"isa = {isa!r}: this machine runs {', '.join(sorted(runs_here))}")


def _ref(place: Place | None) -> tuple[int, int]:
    return place.ref if place is not None else _ABSENT


def _quant(place: QuantPlace | None) -> tuple[int, int, int]:
    return place.ref if place is not None else _NO_QUANT


def _routing(routing: Routing | None) -> tuple[int, int, int, int]:
    assert routing is not None
    return routing.ref


def _embedding(numbers: tuple[float, ...]) -> tuple[float, bool]:
    """Scale, and whether the ids are positions."""
    return numbers[0], bool(numbers[1])


def _made(weight: PackedWeight | None) -> PackedWeight:
    assert weight is not None
    return weight
