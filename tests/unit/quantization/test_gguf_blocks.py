"""Needs Python only. ggml's block types: equal to the gguf package's numbers, exactly or within the stated bound."""

from __future__ import annotations

import numpy as np
import pytest
from gguf_blocks import random_blocks, reference, stored

from octavo.errors import ModelFileError
from octavo.ops.packed import PackedWeight, WeightKind, codes_of
from octavo.quantization import StoredTensor
from octavo.quantization.gguf import BLOCKS, WIDTH, pack_blocks

gguf = pytest.importorskip("gguf")

EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q3_K", "IQ4_NL", "TQ1_0", "TQ2_0")
BOUNDED = ("Q2_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
TERNARY = ("TQ1_0", "TQ2_0")
LOOKED_UP = ("IQ4_NL", "IQ4_XS", "MXFP4")
VIEWS = ("Q4_1", "Q8_0", "IQ4_NL")
ALL = (*EXACT, *BOUNDED, "MXFP4")


def packed(name: str, n: int, k: int, seed: int = 0) -> tuple[PackedWeight, np.ndarray]:
    blocks = random_blocks(name, n, k, seed)
    return pack_blocks(stored(name, blocks, k), n, k), blocks


@pytest.mark.parametrize("name", [*EXACT, "MXFP4"])
@pytest.mark.parametrize(("n", "blocks"), [(1, 1), (3, 2), (7, 18), (64, 48), (700, 3)])
def test_exact_types(name: str, n: int, blocks: int) -> None:
    weight, blocks = packed(name, n, blocks * WIDTH[name])
    assert np.array_equal(weight.dequantize(), reference(name, blocks))


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize(("n", "k"), [(1, 256), (3, 512), (7, 1536), (700, 768)])
def test_bounded_types(name: str, n: int, k: int) -> None:
    weight, blocks = packed(name, n, k)
    part = weight.parts[0]
    codes = np.abs(codes_of(weight.kind, part, weight.table).astype(np.int32))
    mins = 0 if part.mins is None else np.abs(part.mins[..., None].astype(np.float64))
    products = 0 if name == "Q2_K" else codes * np.abs(part.scales[..., None].astype(np.float64))  # its scales are the file's own
    bound = (products + mins) / 2048 + (codes + 1) / 2**25
    error = np.abs(weight.dequantize().astype(np.float64) - reference(name, blocks).astype(np.float64))
    assert (error <= bound.reshape(n, k) * (1 + 1e-6)).all()
    assert error.max() > 0  # the bound is about something


@pytest.mark.parametrize("name", BOUNDED)
def test_codes_are_exact_where_scales_are(name: str) -> None:
    """With scales that are powers of two and small factors, no product is rounded: the integers themselves must be right."""
    blocks = random_blocks(name, 16, 512)
    blocks["d"] = np.float16(0.125)
    if "dmin" in blocks.dtype.names:
        blocks["dmin"] = np.float16(-0.5)
    assert np.array_equal(pack_blocks(stored(name, blocks, 512), 16, 512).dequantize(), reference(name, blocks))


@pytest.mark.parametrize("name", ALL)
def test_forms(name: str) -> None:
    weight, _ = packed(name, 4, 512)
    kind = WeightKind.W4 if name.startswith(("Q4", "TQ")) else WeightKind.T4 if name in LOOKED_UP else WeightKind.W8
    assert (weight.kind, weight.group) == (kind, {"Q2_K": 16, "Q6_K": 16, "Q3_K": 256, "TQ1_0": 256, "TQ2_0": 256}.get(name, 32))
    assert weight.has_mins is (name in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"))
    assert weight.has_zeros is (name in TERNARY)
    assert weight.parts[0].scales.dtype == np.float16


@pytest.mark.parametrize("name", ALL)
def test_memory_is_as_documented(name: str) -> None:
    weight, _ = packed(name, 4, 512)
    bits = {"Q2_K": 10, "Q4_0": 4.5, "Q5_1": 9, "Q5_K": 9, "Q6_K": 9, "Q3_K": 8.0625, "TQ1_0": 4.125, "TQ2_0": 4.125}
    bits.update(dict.fromkeys(LOOKED_UP, 4.5))
    bits.setdefault(name, 5 if weight.kind is WeightKind.W4 else 8.5)
    assert weight.nbytes * 8 == bits[name] * 4 * 512
    assert bits[name] <= 0.3 * 16 or name not in LOOKED_UP


@pytest.mark.parametrize("kind", gguf.quants._type_traits)
def test_blocks_are_as_large_as_the_package_says(kind: gguf.GGMLQuantizationType) -> None:
    width, size = gguf.GGML_QUANT_SIZES[kind]
    if kind.name in BLOCKS:
        assert (WIDTH[kind.name], BLOCKS[kind.name].itemsize) == (width, size)


def test_every_code_of_a_q3_k_block() -> None:
    """All products of a code and a scale, with the one that eight signed bits lack if the sign is not turned: -4 * -32."""
    blocks = random_blocks("Q3_K", 64, 256)
    blocks["hmask"], blocks["qs"], blocks["d"] = 0, 0, np.float16(-0.75)
    assert np.array_equal(pack_blocks(stored("Q3_K", blocks, 256), 64, 256).dequantize(), reference("Q3_K", blocks))
    blocks["scales"] = 0
    weight = pack_blocks(stored("Q3_K", blocks, 256), 64, 256)
    assert (weight.parts[0].codes == -128).all()
    assert (weight.dequantize() == -96).all()


def test_powers_of_two_beyond_float16() -> None:
    blocks = random_blocks("MXFP4", 1, 64)
    blocks["e"] = 100  # 2**-28 and less
    error = np.abs(pack_blocks(stored("MXFP4", blocks, 64), 1, 64).dequantize() - reference("MXFP4", blocks))
    assert error.max() <= 13 / 2**25
    blocks["e"] = 144
    with pytest.raises(ModelFileError, match="f.gguf: tensor 't': holds scales beyond"):
        pack_blocks(stored("MXFP4", blocks, 64), 1, 64)


@pytest.mark.parametrize("name", VIEWS)
def test_views_copy_nothing(name: str) -> None:
    blocks = random_blocks(name, 4, 64)
    tensor = stored(name, blocks, 64)
    part = pack_blocks(tensor, 4, 64).parts[0]
    for array in (part.codes, part.scales, part.mins):
        assert array is None or np.shares_memory(array, tensor.data)


@pytest.mark.parametrize("name", ALL)
def test_rows_do_not_depend_on_how_many_are_packed(name: str) -> None:
    blocks = random_blocks(name, 1500, 2048)
    whole = pack_blocks(stored(name, blocks, 2048), 1500, 2048).dequantize()
    for rows in (slice(0, 1), slice(777, 779), slice(1499, 1500)):
        some = pack_blocks(stored(name, blocks[rows], 2048), rows.stop - rows.start, 2048)
        assert np.array_equal(some.dequantize(), whole[rows])


@pytest.mark.parametrize("name", ALL)
def test_data_at_an_odd_address(name: str) -> None:
    blocks = random_blocks(name, 5, 256)
    raw = np.concatenate([np.zeros(1, np.uint8), blocks.reshape(-1).view(np.uint8)])
    tensor = StoredTensor("f", "t", name, (5, 256), raw[1:])
    assert np.array_equal(pack_blocks(tensor, 5, 256).dequantize(), pack_blocks(stored(name, blocks, 256), 5, 256).dequantize())


@pytest.mark.parametrize(("name", "key", "value"), [("Q4_K", "d", 60000.0), ("Q5_K", "dmin", 60000.0), ("Q6_K", "d", -60000.0), ("IQ4_XS", "d", 60000.0), ("Q2_K", "dmin", 60000.0)])
def test_scales_that_fp16_cannot_hold_are_refused(name: str, key: str, value: float) -> None:
    blocks = random_blocks(name, 2, 256)
    blocks[key][1, 0] = value
    for key in ("scales", "scales_h", "scales_l"):
        if key in blocks.dtype.names:
            blocks[key][1, 0] = 127
    with pytest.raises(ModelFileError, match="f.gguf: tensor 't': holds scales beyond"):
        pack_blocks(stored(name, blocks, 256), 2, 256)


@pytest.mark.parametrize("name", [*EXACT, *BOUNDED])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_scales_that_are_no_numbers_are_refused(name: str, number: float) -> None:
    blocks = random_blocks(name, 2, 256)
    for key in {"d", "m", "dmin"}.intersection(BLOCKS[name].names):
        damaged = blocks.copy()
        damaged[key][1, 0] = number
        with np.errstate(invalid="ignore"), pytest.raises(ModelFileError, match="f.gguf: tensor 't': holds a scale that is not a finite"):
            pack_blocks(stored(name, damaged, 256), 2, 256)


def test_shape_and_type_are_checked() -> None:
    tensor = stored("Q4_1", random_blocks("Q4_1", 2, 64), 64)
    with pytest.raises(ModelFileError, match=r"has shape \[2, 64\], .* \[64, 2\]"):
        pack_blocks(tensor, 64, 2)
    with pytest.raises(ModelFileError, match="type IQ2_XXS is not supported"):
        pack_blocks(StoredTensor("f", "t", "IQ2_XXS", (1, 256), np.zeros(66, np.uint8)), 1, 256)
