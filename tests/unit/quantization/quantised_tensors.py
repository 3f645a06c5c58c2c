"""Matrices as quantisers store them, written element by element from the formats' descriptions; knows nothing of our readers.

A matrix has integer codes [N, K], scales and integer zero points [N, G] and the group of each input; its numbers are (code - zero) * scale.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from octavo.errors import ModelFileError
from octavo.quantization import StoredTensor

DTYPES = {"int8": "I8", "uint8": "U8", "int32": "I32", "int64": "I64", "float16": "F16", "float32": "F32"}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # channel of a word's nibbles, lowest first


class Store:
    """octavo.quantization.Tensors in memory. `put` takes numpy arrays; dtype for what numpy has no type for."""

    kind = "safetensors"

    def __init__(self) -> None:
        self.tensors: dict[str, StoredTensor] = {}

    def put(self, name: str, array: np.ndarray, dtype: str = "") -> None:
        dtype = dtype or DTYPES[array.dtype.name]
        self.tensors[name] = StoredTensor("model.safetensors", name, dtype, array.shape, np.frombuffer(array.tobytes(), np.uint8))

    @property
    def nbytes(self) -> int:
        return sum(t.data.nbytes for t in self.tensors.values())

    def names(self):
        return self.tensors

    def has(self, name: str) -> bool:
        return name in self.tensors

    def error(self, text: str) -> ModelFileError:
        return ModelFileError(f"folder: {text}")

    def get(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            raise self.error(f"tensor {name!r} is missing")
        return self.tensors[name]


@dataclass
class Matrix:
    """codes in 0 .. 2^bits - 1, zeros likewise. groups: int [K]."""

    bits: int
    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def numbers(self) -> np.ndarray:
        """float64 [N, K]."""
        zeros, scales = self.zeros[:, self.groups].astype(np.float64), self.scales[:, self.groups].astype(np.float64)
        return (self.codes.astype(np.float64) - zeros) * scales


def random_matrix(bits: int, n: int, k: int, group: int, *, sym: bool, ordered: bool = False, scale_dtype: type = np.float16) -> Matrix:
    """`ordered`: the inputs of a group are strewn over the channel."""
    rng = np.random.default_rng(bits * 1000 + group)
    group = k if group == -1 else group
    groups = (np.arange(k) // group).astype(np.int32)
    if ordered:
        rng.shuffle(groups)
    shape = (n, int(groups.max()) + 1)
    codes = rng.integers(0, 1 << bits, (n, k))
    zeros = np.full(shape, 1 << (bits - 1)) if sym else rng.integers(0, 1 << bits, shape)
    return Matrix(bits, codes, rng.uniform(0.001, 0.1, shape).astype(scale_dtype), zeros, groups)


def packed_words(values: np.ndarray, bits: int) -> np.ndarray:
    """[rows, M] -> int32 [rows, ceil(M * bits / 32)], the first value in the lowest bits."""
    per_word = 32 // bits
    out = np.zeros((values.shape[0], -(-values.shape[1] // per_word)), np.uint32)
    for i in range(values.shape[1]):
        out[:, i // per_word] |= values[:, i].astype(np.uint32) << np.uint32(bits * (i % per_word))
    return out.view(np.int32)


def put_gptq(store: Store, name: str, m: Matrix, *, version: int = 1, g_idx: bool = True) -> None:
    stored_zeros = (m.zeros - (1 if version == 1 else 0)) % (1 << m.bits)
    store.put(f"{name}.qweight", np.ascontiguousarray(packed_words(m.codes, m.bits).T))
    store.put(f"{name}.qzeros", packed_words(stored_zeros.T, m.bits))
    store.put(f"{name}.scales", np.ascontiguousarray(m.scales.T))
    if g_idx:
        store.put(f"{name}.g_idx", m.groups)


def awq_words(values: np.ndarray) -> np.ndarray:
    """[rows, N] -> int32 [rows, N / 8]."""
    out = np.zeros((values.shape[0], values.shape[1] // 8), np.uint32)
    for word in range(out.shape[1]):
        for nibble, channel in enumerate(AWQ_ORDER):
            out[:, word] |= values[:, 8 * word + channel].astype(np.uint32) << np.uint32(4 * nibble)
    return out.view(np.int32)


def put_awq(store: Store, name: str, m: Matrix) -> None:
    store.put(f"{name}.qweight", awq_words(m.codes.T))
    store.put(f"{name}.qzeros", awq_words(m.zeros.T))
    store.put(f"{name}.scales", np.ascontiguousarray(m.scales.T))


def put_compressed(store: Store, name: str, m: Matrix, *, packed: bool, sym: bool, ordered: bool = False) -> None:
    middle = 1 << (m.bits - 1)
    if packed:
        store.put(f"{name}.weight_packed", packed_words(m.codes, m.bits))
        store.put(f"{name}.weight_shape", np.array(m.codes.shape, np.int64))
    else:
        store.put(f"{name}.weight", (m.codes - middle).astype(np.int8))
    store.put(f"{name}.weight_scale", m.scales)
    if ordered:
        store.put(f"{name}.weight_g_idx", m.groups)
    if not sym and packed:
        store.put(f"{name}.weight_zero_point", np.ascontiguousarray(packed_words(m.zeros.T, m.bits).T))
    elif not sym:
        store.put(f"{name}.weight_zero_point", (m.zeros - middle).astype(np.int8))


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Bits of e4m3 as float64: (-1)^s 2^(e - 7) 1.m, or 2^-6 0.m for e = 0."""
    sign, exponent, mantissa = np.where(codes & 0x80, -1.0, 1.0), (codes >> 3 & 15).astype(int), (codes & 7) / 8
    return sign * np.where(exponent > 0, 2.0 ** (exponent - 7) * (1 + mantissa), 2.0**-6 * mantissa)


def random_e4m3(n: int, k: int) -> np.ndarray:
    codes = np.random.default_rng(n).integers(0, 256, (n, k), np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    return codes


def rounded(values: np.ndarray, bits: int, group: int, *, sym: bool, ordered: bool = False, scale_dtype: type = np.float16) -> Matrix:
    """The matrix nearest to float [N, K], by each group's extremes."""
    n, k = values.shape
    group = k if group == -1 else group
    groups = (np.arange(k) // group).astype(np.int32)
    if ordered:
        np.random.default_rng(k).shuffle(groups)
    top, middle = (1 << bits) - 1, 1 << (bits - 1)
    scales, zeros = np.zeros((n, groups.max() + 1), scale_dtype), np.full((n, groups.max() + 1), middle)
    codes = np.zeros((n, k), np.int64)
    for g in range(scales.shape[1]):
        some = values[:, groups == g].astype(np.float64)
        low, high = np.minimum(some.min(1), 0), np.maximum(some.max(1), 0)
        scales[:, g] = np.abs(some).max(1) / (middle - 1) if sym else (high - low) / top
        step = scales[:, g].astype(np.float64)
        if not sym:
            zeros[:, g] = np.clip(np.rint(-low / step), 0, top)
        codes[:, groups == g] = np.clip(np.rint(some / step[:, None]) + zeros[:, g, None], 0, top)
    return Matrix(bits, codes, scales, zeros, groups)


def rounded_e4m3(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Bits of the e4m3 numbers nearest to values / scales."""
    positive = e4m3(np.arange(0x7F, dtype=np.uint8))
    wanted = np.abs(values / scales)
    codes = np.searchsorted((positive[1:] + positive[:-1]) / 2, wanted).astype(np.uint8)
    return codes | np.where(values < 0, np.uint8(0x80), np.uint8(0))
