import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polopt.launch.run import Run, new_folder

HERE = Path(__file__).parent


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder, with the fake job importable."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(HERE))
    for name in ("WORLD_SIZE", "RANK", "POLOPT_RUN", "POLOPT_SPAWNED"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "fake.yaml").write_text((HERE / "fake.yaml").read_text())
    return tmp_path


def _heed_signals():
    """What runs the tests in the background ignores signals, and programs inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def start(here):
    """Start `python -m polopt …` in the folder, and end it with the test."""
    started = []

    def begin(*words, **environment):
        env = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", **environment}
        process = subprocess.Popen(
            [sys.executable, "-m", "polopt", *words],
            cwd=here,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_heed_signals,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def only_run(here):
    """The folder of the one run there is."""

    def find():
        (path,) = (here / "runs").iterdir()
        return path

    return find


@pytest.fixture
def wait_for_lines(here):
    """Wait until a run in another process has logged so many lines."""

    def wait(count):
        end = time.monotonic() + 120
        while sum(p.read_text().count("\n") for p in here.glob("runs/*/metrics.jsonl")) < count:
            assert time.monotonic() < end
            time.sleep(0.02)

    return wait


@pytest.fixture
def tree():
    """A resolved recipe."""
    return {"name": "fake", "task": {"use": "fake:task", "lr": 1e-4}, "seed": 3}


@pytest.fixture
def run(tmp_path, tree):
    """A run that has just begun."""
    return Run(new_folder(tmp_path, "fake"), tree)


@pytest.fixture
def again():
    """Open a run to go on with it, as after a kill: nothing was finished."""

    def reopen(run):
        run._lock.close()
        run._metrics.close()
        return Run(run.path)

    return reopen
