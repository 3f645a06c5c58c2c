"""GGUF files: header, metadata and the places of tensors, checked against the file before anything is believed.

Part of the base, without numpy, because both processes read such files: one for the tokenizer, the other for the weights.
Knows no model, no tokenizer and no arithmetic of quantised blocks.

A GGUF file is untrusted input. Every count, length and offset is compared (as Python integers, which do not overflow) with the bytes
that are left before it is used or anything is allocated. Layout, all little-endian:

    magic, version | number of tensors, of metadata entries | entries: key, type, value
    tensors: name, number of dims, dims, type, offset | padding | data, each tensor at a multiple of the alignment
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from octavo.errors import ModelFileError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MOST_ALIGNMENT = 1 << 16
MOST_DIMS = 4
MOST_KEY_BYTES = 65535
MOST_STRING_BYTES = 16 << 20
MOST_STRINGS = 1 << 21  # over all metadata: a Python string costs far more than its bytes in the file
STRINGS_AT_ONCE = 1 << 14
MOST_NESTED_ARRAYS = 1 << 14
MOST_DEPTH = 4

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")


class GGMLType(IntEnum):
    """How a tensor's numbers are stored."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41


# Elements in a block, and the block's bytes.
BLOCKS: Mapping[GGMLType, tuple[int, int]] = MappingProxyType(
    {
        GGMLType.F32: (1, 4),
        GGMLType.F16: (1, 2),
        GGMLType.BF16: (1, 2),
        GGMLType.F64: (1, 8),
        GGMLType.I8: (1, 1),
        GGMLType.I16: (1, 2),
        GGMLType.I32: (1, 4),
        GGMLType.I64: (1, 8),
        GGMLType.Q4_0: (32, 18),
        GGMLType.Q4_1: (32, 20),
        GGMLType.Q5_0: (32, 22),
        GGMLType.Q5_1: (32, 24),
        GGMLType.Q8_0: (32, 34),
        GGMLType.Q8_1: (32, 40),
        GGMLType.Q2_K: (256, 84),
        GGMLType.Q3_K: (256, 110),
        GGMLType.Q4_K: (256, 144),
        GGMLType.Q5_K: (256, 176),
        GGMLType.Q6_K: (256, 210),
        GGMLType.Q8_K: (256, 292),
        GGMLType.IQ2_XXS: (256, 66),
        GGMLType.IQ2_XS: (256, 74),
        GGMLType.IQ3_XXS: (256, 98),
        GGMLType.IQ1_S: (256, 50),
        GGMLType.IQ4_NL: (32, 18),
        GGMLType.IQ3_S: (256, 110),
        GGMLType.IQ2_S: (256, 82),
        GGMLType.IQ4_XS: (256, 136),
        GGMLType.IQ1_M: (256, 56),
        GGMLType.TQ1_0: (256, 54),
        GGMLType.TQ2_0: (256, 66),
        GGMLType.MXFP4: (32, 17),
        GGMLType.NVFP4: (64, 36),
        GGMLType.Q1_0: (128, 18),
    }
)


class ValueType(IntEnum):
    """Type of a metadata value."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


# Struct of one value, and the typecode of `array` that holds many. A bool's byte is read as a number, then checked.
SCALARS: Mapping[ValueType, tuple[struct.Struct, str]] = MappingProxyType(
    {
        ValueType.UINT8: (struct.Struct("<B"), "B"),
        ValueType.INT8: (struct.Struct("<b"), "b"),
        ValueType.UINT16: (struct.Struct("<H"), "H"),
        ValueType.INT16: (struct.Struct("<h"), "h"),
        ValueType.UINT32: (struct.Struct("<I"), "I"),
        ValueType.INT32: (struct.Struct("<i"), "i"),
        ValueType.FLOAT32: (struct.Struct("<f"), "f"),
        ValueType.BOOL: (struct.Struct("<B"), "B"),
        ValueType.UINT64: (struct.Struct("<Q"), "Q"),
        ValueType.INT64: (struct.Struct("<q"), "q"),
        ValueType.FLOAT64: (struct.Struct("<d"), "d"),
    }
)
# The fewest bytes that a value can take: an empty string is its length, an empty array its type and count.
LEAST_BYTES = {ValueType.STRING: 8, ValueType.ARRAY: 12, **{kind: s.size for kind, (s, _) in SCALARS.items()}}

# Numbers come as `array`, so that a million of them take no more memory than in the file; strings and nested arrays as lists.
Value: TypeAlias = "int | float | bool | str | array[Any] | list[str] | list[Any]"


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor's place: `shape` is row-major (the innermost dimension last), `offset` counts from the file's start."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GGUFFile:
    """A mapped GGUF file. The mapping lives as long as the object or any view of its data does."""

    def __init__(self, path: Path, buffer: mmap.mmap, header: _Header) -> None:
        self.path = path
        self.version = header.version
        self.alignment = header.alignment
        self.metadata: Mapping[str, Value] = MappingProxyType(header.metadata)
        self.skipped: Mapping[str, int] = MappingProxyType(header.skipped)
        self.tensors: Mapping[str, GGUFTensor] = MappingProxyType(header.tensors)
        self._buffer = buffer

    @staticmethod
    def open(path: str | os.PathLike[str], *, skip: tuple[str, ...] = ()) -> GGUFFile:
        """Maps and checks the file at `path`; reads no tensor's data.

        Arrays whose keys begin with one of `skip` are checked for size but not built; `skipped` tells their lengths instead.
        Raises ModelFileError with one line that names the file and the key or tensor.
        """
        path = Path(path)
        buffer = map_file(path)
        return GGUFFile(path, buffer, _Parser(path, buffer, skip).parse())

    def read_ahead(self) -> None:
        """Tells the system that all of the data will be wanted, so that a file on a disk is read in large pieces; returns at once."""
        self._buffer.madvise(mmap.MADV_WILLNEED)

    def data(self, tensor: GGUFTensor) -> memoryview:
        """The tensor's bytes, read-only, without a copy."""
        return memoryview(self._buffer)[tensor.offset : tensor.offset + tensor.nbytes]


def map_file(path: Path) -> mmap.mmap:
    """A read-only mapping of a whole regular file; ModelFileError if there is none that can be read, or if it is empty."""
    try:
        # O_NONBLOCK: opening a pipe by mistake must not wait for its other end.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as e:
        name = str(path) if str(path).isprintable() else repr(str(path))
        raise ModelFileError(f"{name}: cannot be opened: {getattr(e, 'strerror', None) or e}") from None
    try:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            raise ModelFileError(f"{path}: is not a regular file")
        if state.st_size == 0:
            raise ModelFileError(f"{path}: is empty")
        return mmap.mmap(fd, state.st_size, access=mmap.ACCESS_READ)
    except OSError as e:
        raise ModelFileError(f"{path}: cannot be mapped: {e.strerror}") from None
    finally:
        os.close(fd)


def shown(name: str) -> str:
    """A name out of a file, fit for a line of a message: escaped and of bounded length."""
    return repr(name if len(name) <= 100 else name[:97] + "...")


@dataclass(slots=True)
class _Header:
    version: int
    alignment: int
    metadata: dict[str, Value]
    skipped: dict[str, int]
    tensors: dict[str, GGUFTensor]


class _Parser:
    """Reads forwards from `at`; `what` is the part being read, for messages. Nothing before `at` is looked at again."""

    def __init__(self, path: Path, buffer: mmap.mmap, skip: tuple[str, ...]) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.skip = skip
        self.at = 0
        self.what = "header"
        self.num_strings = 0
        self.num_nested = 0

    def parse(self) -> _Header:
        self.need(24)
        if self.buffer[:4] != MAGIC:
            raise self.error("is not a GGUF file (magic missing)")
        self.at = 4
        version = self.u32()
        if version not in VERSIONS:
            order = " (big-endian)" if int.from_bytes(version.to_bytes(4, "little"), "big") in (*VERSIONS, 1) else ""
            raise self.error(f"version {version}{order} is not supported, only {' and '.join(map(str, VERSIONS))} are")
        num_tensors, num_entries = self.u64(), self.u64()
        self.need_items(num_tensors, 24, "tensors")
        self.need_items(num_entries, 13, "metadata entries")
        header = _Header(version, DEFAULT_ALIGNMENT, {}, {}, {})
        for _ in range(num_entries):
            self.entry(header)
        header.alignment = self.alignment(header.metadata)
        infos = self.tensor_infos(num_tensors)
        header.tensors = self.place(infos, header.alignment)
        return header

    # Bounds

    def error(self, text: str) -> ModelFileError:
        where = f"{self.what}: " if self.what != "header" else ""
        return ModelFileError(f"{self.path}: {where}{text}")

    def need(self, nbytes: int) -> None:
        if nbytes > self.size - self.at:
            raise self.error(f"file ends: {nbytes} bytes needed at {self.at}, file has {self.size}")

    def need_items(self, count: int, least_bytes: int, what: str) -> None:
        """Refuses a count of items that the rest of the file cannot hold, before any loop or allocation by that count."""
        if count * least_bytes > self.size - self.at:
            raise self.error(f"{count} {what} cannot fit into the {self.size - self.at} bytes that follow")

    # Parts

    def u32(self) -> int:
        self.need(4)
        self.at += 4
        return int(U32.unpack_from(self.buffer, self.at - 4)[0])

    def u64(self) -> int:
        self.need(8)
        self.at += 8
        return int(U64.unpack_from(self.buffer, self.at - 8)[0])

    def text(self, most: int) -> str:
        length = self.u64()
        if length > most:
            raise self.error(f"a string of {length} bytes is longer than {most}")
        self.need(length)
        start, self.at = self.at, self.at + length
        return self.decode(self.buffer[start : self.at])

    def decode(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.error("text is not valid UTF-8") from None

    def value_type(self) -> ValueType:
        number = self.u32()
        try:
            return ValueType(number)
        except ValueError:
            raise self.error(f"metadata type {number} is unknown") from None

    # Metadata

    def entry(self, header: _Header) -> None:
        self.what = f"metadata entry {len(header.metadata) + len(header.skipped)}"
        key = self.text(MOST_KEY_BYTES)
        self.what = f"key {shown(key)}"
        if key in header.metadata or key in header.skipped:
            raise self.error("appears twice")
        kind = self.value_type()
        if kind is not ValueType.ARRAY:
            header.metadata[key] = self.scalar(kind)
        elif self.skip and key.startswith(self.skip):
            header.skipped[key] = self.skip_array()
        else:
            header.metadata[key] = self.array(0)

    def scalar(self, kind: ValueType) -> Value:
        if kind is ValueType.STRING:
            return self.text(MOST_STRING_BYTES)
        form, _ = SCALARS[kind]
        self.need(form.size)
        value: Value = form.unpack_from(self.buffer, self.at)[0]
        self.at += form.size
        if kind is ValueType.BOOL:
            if value not in (0, 1):
                raise self.error(f"a boolean is {value}, not 0 or 1")
            return bool(value)
        return value

    def array_head(self) -> tuple[ValueType, int]:
        kind = self.value_type()
        count = self.u64()
        self.need_items(count, LEAST_BYTES[kind], "array elements")
        return kind, count

    def array(self, depth: int) -> Value:
        kind, count = self.array_head()
        if kind is ValueType.STRING:
            return self.strings(count)
        if kind is ValueType.ARRAY:
            self.check_nesting(count, depth)
            return [self.array(depth + 1) for _ in range(count)]
        form, code = SCALARS[kind]
        start, self.at = self.at, self.at + count * form.size
        values = array(code, self.buffer[start : self.at])
        if sys.byteorder == "big":
            values.byteswap()
        if kind is ValueType.BOOL and count and max(values) > 1:
            raise self.error(f"a boolean is {max(values)}, not 0 or 1")
        return values

    def check_nesting(self, count: int, depth: int) -> None:
        self.num_nested += count
        if depth + 1 > MOST_DEPTH or self.num_nested > MOST_NESTED_ARRAYS:
            raise self.error(f"arrays are nested deeper than {MOST_DEPTH}, or more than {MOST_NESTED_ARRAYS} in all")

    def strings(self, count: int) -> list[str]:
        """Vocabularies come through here, a hundred thousand strings: a lean loop, and one decoding of thousands of them."""
        self.count_strings(count)
        texts: list[str] = []
        while len(texts) < count:
            texts += self.some_strings(min(STRINGS_AT_ONCE, count - len(texts)), len(texts), count)
        return texts

    def some_strings(self, number: int, first: int, count: int) -> list[str]:
        buffer, at, size = self.buffer, self.at, self.size
        unpack = U64.unpack_from
        parts = []
        try:
            for _ in range(number):
                start = at + 8
                at = start + unpack(buffer, at)[0]
                if at > size:
                    break
                parts.append(buffer[start:at])
        except struct.error:
            at = size + 1
        if at > size:
            raise self.error(f"file ends within string {first + len(parts)} of {count}")
        self.at = at
        joined = b"\0".join(parts)
        if joined.count(b"\0") == number - 1:
            return self.decode(joined).split("\0")
        return [self.decode(part) for part in parts]  # one has a NUL inside

    def skip_array(self, depth: int = 0) -> int:
        """Steps over an array with the same checks of size; its length."""
        kind, count = self.array_head()
        if kind is ValueType.STRING:
            self.skip_strings(count)
        elif kind is ValueType.ARRAY:
            self.check_nesting(count, depth)
            for _ in range(count):
                self.skip_array(depth + 1)
        else:
            self.at += count * SCALARS[kind][0].size
        return count

    def count_strings(self, count: int) -> None:
        self.num_strings += count
        if self.num_strings > MOST_STRINGS:
            raise self.error(f"{self.num_strings} strings are more than {MOST_STRINGS}")

    def skip_strings(self, count: int) -> None:
        self.count_strings(count)
        buffer, at = self.buffer, self.at
        unpack = U64.unpack_from
        try:
            for _ in range(count):
                at += 8 + unpack(buffer, at)[0]
        except (struct.error, OverflowError):
            at = self.size + 1
        if at > self.size:
            raise self.error(f"file ends within one of {count} strings")
        self.at = at

    def alignment(self, metadata: dict[str, Value]) -> int:
        self.what = "key 'general.alignment'"
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error("must be an integer")
        if not 8 <= value <= MOST_ALIGNMENT or value & (value - 1):
            raise self.error(f"{value} is not a power of two in 8..{MOST_ALIGNMENT}")
        return value

    # Tensors

    def tensor_infos(self, count: int) -> list[GGUFTensor]:
        """Tensors in the file's order; their offsets still count from the start of the data."""
        tensors: dict[str, GGUFTensor] = {}
        self.what = "tensors"
        self.need_items(count, 24, "tensors")
        for i in range(count):
            self.what = f"tensor {i}"
            name = self.text(MOST_KEY_BYTES)
            self.what = f"tensor {shown(name)}"
            if name in tensors:
                raise self.error("appears twice")
            num_dims = self.u32()
            if not 1 <= num_dims <= MOST_DIMS:
                raise self.error(f"has {num_dims} dimensions, not 1 to {MOST_DIMS}")
            dims = [self.u64() for _ in range(num_dims)]
            number = self.u32()
            tensors[name] = self.tensor(name, dims, number, self.u64())
        return list(tensors.values())

    def tensor(self, name: str, dims: list[int], number: int, offset: int) -> GGUFTensor:
        try:
            kind = GGMLType(number)
        except ValueError:
            raise self.error(f"ggml type {number} is unknown") from None
        width, block_bytes = BLOCKS[kind]
        elements = 1
        for dim in dims:
            elements *= dim
        if min(dims) < 1 or elements * block_bytes > self.size * width:
            raise self.error(f"dimensions {dims} of {kind.name} cannot fit into a file of {self.size} bytes")
        if dims[0] % width:
            raise self.error(f"rows of {dims[0]} elements do not divide into {kind.name} blocks of {width}")
        return GGUFTensor(name, kind, tuple(reversed(dims)), offset, elements // width * block_bytes)

    def place(self, infos: list[GGUFTensor], alignment: int) -> dict[str, GGUFTensor]:
        """Absolute offsets. Tensors must lie one after the other, each padded to the alignment: with a gap or an overlap some
        offset is not what the writer meant, and the weights would be read from the wrong place."""
        data_start = -(-self.at // alignment) * alignment
        expected = 0
        for info in sorted(infos, key=lambda info: info.offset):
            self.what = f"tensor {shown(info.name)}"
            if info.offset != expected:
                fault = "overlaps the tensor before it" if info.offset < expected else "leaves a gap before it"
                raise self.error(f"offset {info.offset} {fault}; {expected} was expected")
            end = data_start + info.offset + info.nbytes
            if end > self.size:
                raise self.error(f"data ends at {end}, beyond the file's {self.size} bytes")
            expected = -(-(info.offset + info.nbytes) // alignment) * alignment
        self.what = "data"
        if self.size - data_start - expected >= alignment:
            raise self.error(f"{self.size - data_start - expected} bytes follow the last tensor")
        return {
            info.name: GGUFTensor(info.name, info.type, info.shape, data_start + info.offset, info.nbytes) for info in infos
        }
