"""TensorBoard event files, written without the `tensorboard` package.

Every run can be looked at with TensorBoard, and no run needs it: its writer would bring grpcio,
protobuf and pillow, and a thread that a kill signal cuts off. A scalar event is a few bytes:
records of the TFRecord format
(https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details) that hold an
`Event` message (tensorflow/core/util/event.proto) in the protobuf wire format.
"""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

__all__ = ["EventWriter", "checksum"]


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC32C = _table()


def checksum(data: bytes) -> bytes:
    """Return the masked CRC-32C that stands behind lengths and records, four bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC32C[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*result, value])


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


class EventWriter:
    """Appends scalars to a new event file; each call leaves whole records behind.

    Args:
        folder: An existing folder.
        purge: Points of earlier files in the folder from this step on are no longer shown;
            for a run that goes on from a checkpoint.
    """

    def __init__(self, folder: Path, purge: int | None = None) -> None:
        stem = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / stem).open("xb", buffering=0)
        self._write(_bytes(3, b"brain.Event:2"))
        if purge is not None:
            start = _bytes(7, b"\x08\x01")  # SessionLog{status: START}
            self._write(b"\x10" + _varint(purge) + start)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Append one point for each tag."""
        summary = b"".join(
            _bytes(1, _bytes(1, tag.encode()) + b"\x15" + _float32(value))
            for tag, value in values.items()
        )
        self._write(b"\x10" + _varint(step) + _bytes(5, summary))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, body: bytes) -> None:
        event = b"\x09" + struct.pack("<d", time.time()) + body
        length = struct.pack("<Q", len(event))
        self._file.write(length + checksum(length) + event + checksum(event))


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:  # beyond float32
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))
