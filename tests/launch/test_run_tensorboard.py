import math
import struct
import time

import pytest

from polopt.launch import tensorboard


def _records(path):
    """Read a TFRecord file, independently of the writer's bit twiddling."""
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert data[8:12] == tensorboard.checksum(data[:8])
        body = data[12 : 12 + length]
        assert data[12 + length : 16 + length] == tensorboard.checksum(body)
        data = data[16 + length :]
        yield body


def test_checksums_are_crc32c():
    """Known answers of RFC 3720, appendix B.4, masked as TFRecord does."""
    for data, crc in ((bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)):
        masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
        assert tensorboard.checksum(data) == struct.pack("<I", masked)


def test_events_are_whole_after_each_call(run):
    run.log(5, {"a": 0.5})
    (path,) = run.path.glob("events.out.tfevents.*")
    version, scalar = _records(path)
    assert version.endswith(b"brain.Event:2")
    assert b"a\x15" + struct.pack("<f", 0.5) in scalar


def test_tensorboard_reads_the_events(run):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    values = {1: 0.5, 2: -1e30, 300: 1e300, 2**40: 3.0}
    for step, value in values.items():
        run.log(step, {"loss/objective": value, "ünï code": 2.0, "n": float("nan")})
    run.finish({})
    reader = accumulator.EventAccumulator(str(run.path))
    reader.Reload()
    assert set(reader.Tags()["scalars"]) == {"loss/objective", "ünï code", "n"}
    events = reader.Scalars("loss/objective")
    assert [e.step for e in events] == list(values)
    assert [e.value for e in events] == pytest.approx([0.5, -1e30, math.inf, 3.0])
    assert abs(events[0].wall_time - time.time()) < 60


def test_tensorboard_drops_what_a_resumed_run_superseded(run, again):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for step in (1, 2, 3):
        run.log(step, {"a": float(step)})
    run.save(2, {}, {})
    time.sleep(0.01)
    resumed = again(run)
    resumed.latest()
    resumed.log(3, {"a": 30.0})
    reader = accumulator.EventAccumulator(str(run.path))
    reader.Reload()
    assert [(e.step, e.value) for e in reader.Scalars("a")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
