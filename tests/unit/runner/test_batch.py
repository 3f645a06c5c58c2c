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


def test_each_group_has_its_slots_and_its_table() -> None:
    a = ScheduledRequest("a", [7, 8], 31, [[5, 9, 2], [0, 4, 6]], True)
    b = ScheduledRequest("b", [1], 0, [[3], [1]], True)
    batch = build_batch([a, b], 16)
    assert batch.slot_mapping_GT.tolist() == [[9 * 16 + 15, 2 * 16, 3 * 16], [4 * 16 + 15, 6 * 16, 16]]
    assert batch.block_table_GSB.tolist() == [[[5, 9, 2], [3, 0, 0]], [[0, 4, 6], [1, 0, 0]]]
    assert batch.positions_T.tolist() == [31, 32, 0] and batch.seq_lens_S.tolist() == [33, 1]
