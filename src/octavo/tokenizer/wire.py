"""Protocol Buffers' wire format, read with bounds: the fields of one message, one after the other.

Knows no schema and no file. Every length is compared with the bytes that are left before it is used; a message is never nested here,
so nothing recurses.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

FLOAT = struct.Struct("<f")


class WireType(IntEnum):
    """How a field's value is laid out."""

    VARINT = 0
    FIXED64 = 1
    BYTES = 2
    FIXED32 = 5


BYTES = WireType.BYTES
_KINDS = {int(kind): kind for kind in WireType}


class WireError(ValueError):
    """The bytes are no message."""


def fields(data: bytes) -> Iterator[tuple[int, WireType, int | bytes]]:
    """Number, type and value of each field: bytes for BYTES and the fixed types, an unsigned integer for VARINT.

    Raises WireError where the message is cut off, or a field has a type that is not used any more.
    """
    at, size = 0, len(data)
    kinds = _KINDS
    while at < size:
        tag, at = varint(data, at)
        kind = kinds.get(tag & 7)
        if tag < 8:
            raise WireError(f"field number 0 at byte {at}")
        if kind is BYTES:
            length, at = varint(data, at)
        elif kind is WireType.VARINT:
            value, at = varint(data, at)
            yield tag >> 3, kind, value
            continue
        elif kind is None:
            raise WireError(f"wire type {tag & 7} at byte {at} is unknown")
        else:
            length = 4 if kind is WireType.FIXED32 else 8
        if length > size - at:
            raise WireError(f"field {tag >> 3} needs {length} bytes at {at}, {size - at} are left")
        yield tag >> 3, kind, data[at : at + length]
        at += length


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at `at`, of at most 64 bits, and where it ends."""
    if at < len(data) and data[at] < 0x80:  # nearly all of them
        return data[at], at + 1
    value = shift = 0
    while shift < 70:
        if at >= len(data):
            raise WireError("it ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, at
        shift += 7
    raise WireError(f"a number at byte {at} is longer than 64 bits")


def float32(value: int | bytes) -> float:
    """The value of a field of four bytes. Raises WireError for any other field."""
    if not isinstance(value, bytes) or len(value) != FLOAT.size:
        raise WireError("a field that should be a float is not")
    return float(FLOAT.unpack(value)[0])


def integer(value: int | bytes) -> int:
    """The value of a field that holds a signed number or a boolean. Raises WireError for any other field."""
    if not isinstance(value, int):
        raise WireError("a field that should be a number is not")
    return value - (1 << 64) if value >> 63 else value


def octets(value: int | bytes, kind: WireType) -> bytes:
    """The bytes of a text or of a message in a message. Raises WireError for any other field."""
    if not isinstance(value, bytes) or kind is not WireType.BYTES:
        raise WireError("a field that should be bytes is not")
    return value
