"""What an instruction works on, whatever the batch: sizes of a row and of weights, from which its bytes and operations follow.

Pure; knows no kernel, and nothing of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.ops.batch import KvLayout
from octavo.ops.cpu.steps import Place, QuantPlace, Step
from octavo.ops.packed import WeightKind

WRITES_CODES = ("norm", "quantize")


@dataclass(frozen=True, slots=True)
class Shape:
    """picked: its rows are those whose logits are wanted, else all tokens.

    reads, writes: bytes of activations per row. elements: results of a row, of an op without weights; quantises: they are rounded to codes too.
    kind, n, k, weight_bytes: of its weight, as the kernel reads it; of a mixture: of one expert, all its matrices. experts, top_k: of a mixture.
    heads, kv_heads, head_dim, kv_bytes, window: of attention; kv_bytes: of one number in the cache.
    """

    op: str
    picked: bool = False
    reads: int = 0
    writes: int = 0
    elements: int = 0
    quantises: bool = False
    kind: WeightKind | None = None
    n: int = 0
    k: int = 0
    weight_bytes: int = 0
    experts: int = 0
    top_k: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    kv_bytes: int = 0
    window: int = 0

    @property
    def name(self) -> str:
        """Instructions of one name do the same work."""
        if self.op == "embed":
            return self.op
        if self.kind is not None:
            return f"{self.op} {self.kind.value} {self.n}x{self.k}"
        if self.op == "attention":
            return self.op + (f", window {self.window}" if self.window else "")
        if self.op == "norm" and self.quantises:
            return f"norm + quantize {self.elements}"
        return f"{self.op} {self.elements}" if self.elements else self.op


def shape_of(step: Step, packed_bytes: Sequence[int], layout: KvLayout, kv_bytes: int) -> Shape:
    """packed_bytes: of the step's weight, or of the first expert's matrices; kv_bytes: of one number in the cache."""
    out = _codes(step.xq) if step.op in WRITES_CODES else _codes(step.yq)
    read = _floats(step.x) + _floats(step.b) + (0 if step.op in WRITES_CODES else _codes(step.xq))
    written = (_floats(step.y) if step.store else 0) + out
    moe, spec = step.node.moe, step.node.spec
    attends, plain = step.op in ("attention", "kv_write"), step.weight is None and not step.experts
    weights = step.matrices
    return Shape(
        step.op,
        picked=step.stage == 1,
        reads=read,
        writes=written,
        elements=_elements(step) if plain and not attends else 0,
        quantises=out > 0,
        kind=weights[0].kind if weights else None,
        n=sum(weight.n for weight in weights),
        k=weights[0].k if weights else 0,
        weight_bytes=sum(packed_bytes),
        experts=len(step.node.experts),
        top_k=moe.top_k if moe else 0,
        heads=spec.num_heads if spec and step.op == "attention" else 0,
        kv_heads=layout.num_kv_heads if attends else 0,
        head_dim=layout.head_dim if attends else 0,
        kv_bytes=kv_bytes if attends else 0,
        window=spec.window if spec and step.op == "attention" else 0,
    )


def _elements(step: Step) -> int:
    place = step.x if step.op in WRITES_CODES else step.y or step.x
    return place.width * step.times if place is not None else 0


def _floats(place: Place | None) -> int:
    return 4 * place.width * place.buffer.times if place is not None else 0


def _codes(place: QuantPlace | None) -> int:
    if place is None:
        return 0
    return sum(buffer.row_bytes * buffer.times for buffer in (place.q, place.scale, place.sum))
