"""Needs Python only: the arrays of a step."""

from __future__ import annotations

from octavo.protocol import ScheduledRequest
from octavo.runner.batch import build_batch


def test_decode_and_chunk_side_by_side() -> None:
    decode = ScheduledRequest("a", [7], 33, [[5, 9, 2]], True)
    chunk = ScheduledRequest("b", [1, 2, 3, 4], 14, [[8, 3]], False)
    batch = build_batch([decode, chunk], 16)
    assert batch.input_ids_T.tolist() == [7, 1, 2, 3, 4]
    assert batch.positions_T.tolist() == [33, 14, 15, 16, 17]
    assert batch.slot_mapping_GT[0].tolist() == [2 * 16 + 1, 8 * 16 + 14, 8 * 16 + 15, 3 * 16, 3 * 16 + 1]
    assert batch.query_start_S.tolist() == [0, 1, 5]
    assert batch.seq_lens_S.tolist() == [34, 18]
    assert batch.block_table_GSB[0].tolist() == [[5, 9, 2], [8, 3, 0]]
    assert {str(a.dtype) for a in (batch.input_ids_T, batch.slot_mapping_GT, batch.block_table_GSB)} == {"int32"}
