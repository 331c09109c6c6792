"""Memory and use of the accelerator, as the metrics have them."""

import resource
import time

import pytest

from polopt.launch import run as run_module
from polopt.launch import usage
from polopt.launch.doctor.diagnose import diagnose
from polopt.launch.doctor.phases import questions
from polopt.launch.doctor.readers import read
from polopt.launch.run import Run
from polopt.launch.usage import Usage


def test_memory_of_the_process():
    used = Usage()
    before = used.take()["memory_host"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
    assert 0.01 < before <= 1.01 * peak
    held = bytearray(b"x" * (64 << 20))
    assert used.take()["memory_host"] - before > 0.05
    del held
    used.close()


def test_without_proc_it_is_left_out(monkeypatch):
    def missing(self):
        raise FileNotFoundError

    monkeypatch.setattr(usage.Path, "read_text", missing)
    assert Usage().take() == {}


@pytest.fixture
def device(monkeypatch):
    """A torch that says it has a CUDA device."""
    torch = pytest.importorskip("torch")
    for name, value in (
        ("is_available", True),
        ("is_initialized", True),
        ("memory_allocated", 2**30),
        ("memory_reserved", 3 * 2**30),
        ("current_device", 1),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(usage, "_EVERY", 0.01)
    return torch.cuda


def wait_for(used, name):
    for _ in range(500):
        if name in (found := used.take()):
            return found[name]
        time.sleep(0.01)
    raise AssertionError(name)


def test_the_device_is_looked_at_between_lines(device, monkeypatch):
    shares = iter([20, 40] * 1000)
    asked = set()
    monkeypatch.setattr(
        device, "utilization", lambda device: asked.add(device) or next(shares), raising=False
    )
    used = Usage()
    first = used.take()
    assert (first["memory_allocated"], first["memory_reserved"]) == (1.0, 3.0)
    assert 0.2 <= wait_for(used, "device_utilization") <= 0.4
    thread = used._thread
    used.close()
    assert not thread.is_alive()
    assert asked == {1}  # not that of the thread, which is 0


class NotSupportedError(Exception):
    """As NVML's, which have no type in common with Python's: a part of a GPU has no such number."""


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("error", [ModuleNotFoundError, RuntimeError, NotSupportedError])
def test_a_device_that_does_not_tell(device, monkeypatch, error):
    def missing(device):
        raise error

    monkeypatch.setattr(device, "utilization", missing, raising=False)
    used = Usage()
    used.take()
    used._thread.join(timeout=5)
    assert not used._thread.is_alive()
    assert "device_utilization" not in used.take()
    used.close()


@pytest.mark.parametrize(("percent", "idle"), [(4, True), (90, False)])
def test_an_idle_device_is_found_in_the_run_folder(device, monkeypatch, tmp_path, percent, idle):
    monkeypatch.setattr(device, "utilization", lambda device: percent, raising=False)
    monkeypatch.setattr(run_module, "describe", dict)  # there is no device to be named
    run = Run(tmp_path, {"collector": {"num_envs": 8}})
    seen = 0
    for step in range(2000):
        used = run.usage()
        run.log(step, {"loss": 0.5, **used})
        seen += "device_utilization" in used
        if seen == 10:
            break
        time.sleep(0.005)
    run._usage.close()
    (log,) = read(tmp_path)
    assert set(log.columns["memory_device"].values) == {1.0}
    assert ("device-idle" in [f.id for f in diagnose(log)]) == idle
    word = f"{'yes' if idle else 'no'}, it works {percent}%"
    assert questions(log, [])["accelerator idle"] == word
