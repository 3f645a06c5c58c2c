"""Needs transformers and the extension. Small random checkpoints, and our logits for them on either backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.layers import Attention, Decoder, LayerNorm, MoE
from octavo.loader.hf_config import load_hf_config
from octavo.loader.load import load_weights, open_checkpoint
from octavo.loader.resolve import source_at
from octavo.models import build_model
from octavo.ops.batch import Batch
from octavo.ops.cpu.program import CpuProgram
from octavo.runner.reference import ReferenceProgram

BLOCK = 16
LogitsOf = Callable[..., np.ndarray]


class Served:
    """A checkpoint on one backend, with room for `num_seqs` sequences of up to `longest` tokens, each with blocks of its own in every group."""

    def __init__(
        self, path: Path, backend: str, *, longest: int, num_seqs: int = 1, kv_dtype: str = "float32", isa: str = "", max_positions: int = 0
    ) -> None:
        source = source_at(path, str(path), "auto")
        hf = load_hf_config(source)
        self.model = build_model(hf)
        load_weights(self.model, open_checkpoint(source, hf))
        self.windows = self.model.kv_layout.windows
        per_seq = -(-longest // BLOCK)
        num_blocks = per_seq * num_seqs * len(self.windows) + 3
        blocks = np.arange(num_blocks - 1, 2, -1, dtype=np.int32)  # out of order: a block table is not an offset
        self.blocks_GSB = blocks.reshape(len(self.windows), num_seqs, per_seq)
        common = dict(num_blocks=num_blocks, block_size=BLOCK, kv_dtype=kv_dtype, max_rows=longest * num_seqs)
        common["max_positions"] = max_positions or longest + 1
        self.program: CpuProgram | ReferenceProgram
        if backend == "reference":
            self.program = ReferenceProgram(self.model, **common)
        else:
            self.program = CpuProgram(self.model, max_tokens=longest * num_seqs, isa=isa, **common)

    def step(self, rows: dict[int, tuple[list[int], int, int]]) -> list[np.ndarray]:
        """Logits [end - start, V] of each sequence's tokens start..end, all in one batch. `rows`: of a sequence, its tokens, start and end."""
        ids = [i for tokens, start, end in rows.values() for i in tokens[start:end]]
        positions = np.concatenate([np.arange(start, end) for _, start, end in rows.values()]).astype(np.int32)
        seqs = np.repeat(list(rows), [end - start for _, start, end in rows.values()])
        slots_GT = self.blocks_GSB[:, seqs, positions // BLOCK] * BLOCK + positions % BLOCK
        starts = np.cumsum([0, *(end - start for _, start, end in rows.values())]).astype(np.int32)
        table_GSB = self.blocks_GSB[:, list(rows)].copy()
        for group, window in enumerate(self.windows):
            for i, (_, start, _) in enumerate(rows.values()):
                if window:
                    table_GSB[group, i, : max(0, start - window + 1) // BLOCK] = 0  # what the window has left behind
        ends = np.array([end for _, _, end in rows.values()], np.int32)
        self.program.forward(Batch(np.array(ids, np.int32), positions, slots_GT.astype(np.int32), starts, ends, table_GSB))
        logits = self.program.logits(np.arange(len(ids), dtype=np.int32)).copy()
        return np.split(logits, starts[1:-1])

    def logits(self, sequences: list[list[int]], chunk: int = 10_000) -> list[np.ndarray]:
        """Of each sequence, logits [T, V], fed in chunks, all sequences side by side."""
        done: list[list[np.ndarray]] = [[] for _ in sequences]
        for start in range(0, max(map(len, sequences)), chunk):
            rows = {s: (ids, start, min(start + chunk, len(ids))) for s, ids in enumerate(sequences) if start < len(ids)}
            for s, part in zip(rows, self.step(rows), strict=True):
                done[s].append(part)
        return [np.concatenate(parts) for parts in done]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The likeliest `count` tokens after a prompt, one by one."""
        ids, start = list(prompt), 0
        while len(ids) < len(prompt) + count:
            (logits,) = self.step({0: (ids, start, len(ids))})
            start = len(ids)
            ids.append(int(logits[-1].argmax()))
        return ids[len(prompt) :]


def shown_by(model: Decoder) -> set[str]:
    """What a model has of that which families differ in: the words of `shows`."""
    attentions = [m for m in model.walk() if isinstance(m, Attention)]
    first, windows = attentions[0], {bool(a.scores.window) for a in attentions}
    ropes = [a.rope for a in attentions if a.rope]
    heads = "MHA" if first.num_heads == first.num_kv_heads else "MQA" if first.num_kv_heads == 1 else "GQA"
    flags = {
        "q, k, v biases": first.qkv.bias_names is not None,
        "sliding window": windows == {True},
        "mixed windows": windows == {True, False},
        "soft cap": bool(first.scores.soft_cap),
        "QK norm": first.q_norm is not None,
        "tied head": model.head.names == model.embed.table.names,
        "LayerNorm": isinstance(model.norm, LayerNorm),
        "MoE": any(isinstance(m, MoE) for m in model.walk()),
        "multipliers": model.scales.logits != 1.0,
        "learned positions": model.positions is not None,
        "layers without rope": 0 < len(ropes) < len(attentions),
        "rope pairs": any(rope.pairs for rope in ropes),
        "rope log n": any(rope.log_n for rope in ropes),
        "partial rope": any(rope.rot < first.head_dim for rope in ropes),
    }
    kinds = {f"rope {type(rope.scaling).__name__.lower()}" for rope in ropes} - {"rope plain"}
    return {heads, *kinds, *(what for what, has in flags.items() if has)}


@pytest.fixture
def what_it_has() -> Callable[[Decoder], set[str]]:
    return shown_by


@pytest.fixture
def serve() -> type[Served]:
    return Served


@pytest.fixture
def logits_of() -> LogitsOf:
    def compute(folder: Path, ids: list[int], backend: str, chunk: int = 10_000, kv_dtype: str = "float32", isa: str = "") -> np.ndarray:
        return Served(folder, backend, longest=len(ids), kv_dtype=kv_dtype, isa=isa).logits([ids], chunk)[0]

    return compute
