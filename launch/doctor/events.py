"""TensorBoard event files, read as a stream; `polopt.launch.tensorboard` describes the format.

Only scalars are read, from `simple_value` or from a float tensor of one element. Nothing is
unpickled, and a record is skipped unless its length carries the right checksum.
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO

from polopt.launch.doctor.lines import Reading, Row
from polopt.launch.tensorboard import checksum

__all__ = ["event_rows", "is_event_file"]

RECORD = 64 << 20
"""Bytes of the longest record that is read."""


def is_event_file(head: bytes) -> bool:
    """Whether the first bytes are those of a TFRecord."""
    return len(head) >= 12 and checksum(head[:8]) == head[8:12]


def event_rows(file: BinaryIO, reading: Reading) -> Iterator[Row]:
    """Yield one row for each event with scalars."""
    while header := file.read(12):
        if len(header) < 12:
            reading.cut = True
            return
        if checksum(header[:8]) != header[8:]:
            reading.damaged += 1  # where the next record begins cannot be known
            return
        (length,) = struct.unpack("<Q", header[:8])
        if length > RECORD:
            reading.damaged += 1
            return
        body = file.read(length + 4)
        if len(body) < length + 4:
            reading.cut = True
            return
        try:
            row = _event(memoryview(body)[:-4])
        except (ValueError, IndexError, struct.error):
            reading.damaged += 1
            continue
        if row is not None:
            yield row


def _event(message: memoryview) -> Row | None:
    step, values, purge = 0.0, {}, False
    for field, wire, content in _fields(message):
        if field == 2 and wire == 0:
            step = float(content)  # type: ignore[arg-type]
        elif field == 5 and wire == 2:
            values |= _summary(content)  # type: ignore[arg-type]
        elif field == 7 and wire == 2:
            purge = True  # SessionLog: points from here on are written anew
    if purge:
        return Row(step, {}, step - 1)
    return Row(step, values) if values else None


def _summary(message: memoryview) -> dict[str, float]:
    found: dict[str, float] = {}
    for field, wire, content in _fields(message):
        if field != 1 or wire != 2:
            continue
        tag, value = "", None
        for inner, kind, part in _fields(content):  # type: ignore[arg-type]
            if inner == 1 and kind == 2:
                tag = bytes(part).decode("utf-8", "replace")  # type: ignore[arg-type]
            elif inner == 2 and kind == 5:
                (value,) = struct.unpack("<f", part)  # type: ignore[arg-type]
            elif inner == 8 and kind == 2:
                value = _tensor(part)  # type: ignore[arg-type]
        if tag and value is not None:
            found[tag] = value
    return found


def _tensor(message: memoryview) -> float | None:
    """Return a TensorProto of one float (dtype 1) or double (dtype 2)."""
    kind, raw = 0, b""
    for field, wire, content in _fields(message):
        if field == 1 and wire == 0:
            kind = content
        elif field in (4, 5, 6) and wire in (1, 2, 5):  # tensor_content, float_val, double_val
            raw = bytes(content)  # type: ignore[arg-type]
    sizes = {1: "<f", 2: "<d"}
    if kind in sizes and len(raw) == struct.calcsize(sizes[kind]):  # type: ignore[index]
        return struct.unpack(sizes[kind], raw)[0]  # type: ignore[index]
    return None


def _fields(message: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """Yield (field, wire type, content) of a protobuf message."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire = key & 7
        if wire == 0:
            content, at = _varint(message, at)
            yield key >> 3, wire, content
            continue
        if wire == 2:
            size, at = _varint(message, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + size > len(message):
            raise ValueError("a field reaches beyond its message")
        yield key >> 3, wire, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number of more than ten bytes")
