"""Needs Python only. Unquantised tensors: kept as stored, or converted with the rounding that the option asks for."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.errors import ModelFileError
from octavo.ops.packed import WeightKind
from octavo.quantization import StoredTensor, pack_plain, plain_values

VALUES = np.array([[1.0, -2.5, 0.1, 65504.0], [0.0, -0.0, 3.14159, 1e-8]], np.float32)
BF16 = (VALUES.view(np.uint32) >> 16).astype(np.uint16)


def stored(dtype: str, array: np.ndarray) -> StoredTensor:
    return StoredTensor("f", "t", dtype, array.shape, np.frombuffer(array.tobytes(), np.uint8))


@pytest.mark.parametrize(("dtype", "array"), [("F32", VALUES), ("F16", VALUES.astype(np.float16)), ("BF16", BF16)])
def test_as_stored(dtype: str, array: np.ndarray) -> None:
    tensor = stored(dtype, array)
    for option in ("auto", {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype]):
        weight = pack_plain(tensor, 2, 4, option)
        assert weight.kind is WeightKind[dtype]
        assert np.shares_memory(weight.parts[0].codes, tensor.data)
        assert weight.parts[0].codes.tobytes() == array.tobytes()


def test_conversions_round_to_nearest_even() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.standard_normal(1000), [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 1e-7, -1e-7]]).astype(np.float32)[None]
    for option, kind in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        weight = pack_plain(stored("F32", values), 1, values.size, option)
        assert np.array_equal(weight.dequantize(), torch.from_numpy(values).to(kind).float().numpy())


def test_widening_is_exact() -> None:
    for dtype, array in (("F16", VALUES.astype(np.float16)), ("BF16", BF16)):
        weight = pack_plain(stored(dtype, array), 2, 4, "float32")
        assert weight.kind is WeightKind.F32
        expected = array.astype(np.float32) if dtype == "F16" else (array.astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(weight.dequantize(), expected)


def test_numbers_beyond_float16_are_refused() -> None:
    big = np.array([[1.0, 70000.0]], np.float32)
    with pytest.raises(ModelFileError, match="f: tensor 't': .*float16"):
        pack_plain(stored("F32", big), 1, 2, "float16")
    pack_plain(stored("F32", big), 1, 2, "bfloat16")
    infinite = np.array([[1.0, np.inf]], np.float32)
    assert np.isinf(pack_plain(stored("F32", infinite), 1, 2, "float16").dequantize()[0, 1])


def test_values_are_contiguous_float32() -> None:
    for dtype, array in (("F32", VALUES), ("F16", VALUES.astype(np.float16)), ("BF16", BF16)):
        values = plain_values(stored(dtype, array))
        assert values.dtype == np.float32
        assert values.flags.c_contiguous


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ModelFileError, match="dtype I8 is not supported here; supported: F32, F16, BF16"):
        pack_plain(stored("I8", np.zeros((1, 4), np.int8)), 1, 4, "auto")
