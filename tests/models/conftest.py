"""Needs transformers and the extension. Small random checkpoints, and our logits for them on either backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.loader.hf_config import load_hf_config
from octavo.loader.load import load_weights, open_checkpoint
from octavo.loader.resolve import source_at
from octavo.models import build_model
from octavo.ops.batch import Batch
from octavo.ops.cpu.program import CpuProgram
from octavo.runner.reference import ReferenceProgram

BLOCK = 16
LogitsOf = Callable[..., np.ndarray]


def one_sequence(ids: list[int], start: int, length: int, blocks: list[int]) -> Batch:
    """Tokens start..length of one sequence whose earlier tokens are in the cache."""
    positions = np.arange(start, length, dtype=np.int32)
    table = np.array(blocks, np.int32)
    slots = table[positions // BLOCK] * BLOCK + positions % BLOCK
    return Batch(
        np.array(ids[start:length], np.int32), positions, slots.astype(np.int32)[None], np.array([0, length - start], np.int32),
        np.array([length], np.int32), table[None, None],
    )  # fmt: skip


def run_chunks(program: CpuProgram | ReferenceProgram, ids: list[int], chunk: int, blocks: list[int]) -> np.ndarray:
    """Logits [len(ids), V] of a prompt fed in chunks."""
    rows = []
    for start in range(0, len(ids), chunk):
        end = min(start + chunk, len(ids))
        program.forward(one_sequence(ids, start, end, blocks))
        rows.append(program.logits(np.arange(end - start, dtype=np.int32)).copy())
    return np.concatenate(rows)


@pytest.fixture
def logits_of() -> LogitsOf:
    def compute(folder: Path, ids: list[int], backend: str, chunk: int = 10_000, kv_dtype: str = "float32", isa: str = "") -> np.ndarray:
        source = source_at(folder, str(folder), "auto")
        hf = load_hf_config(source)
        model = build_model(hf)
        load_weights(model, open_checkpoint(source, hf))
        num_blocks = -(-len(ids) // BLOCK) + 3
        blocks = list(range(num_blocks - 1, 0, -1))  # out of order: a block table is not an offset
        common = dict(num_blocks=num_blocks, block_size=BLOCK, kv_dtype=kv_dtype, max_rows=len(ids), max_positions=len(ids) + 1)
        if backend == "reference":
            return run_chunks(ReferenceProgram(model, **common), ids, chunk, blocks)
        return run_chunks(CpuProgram(model, max_tokens=len(ids), isa=isa, **common), ids, chunk, blocks)

    return compute
