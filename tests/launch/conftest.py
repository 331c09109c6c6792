import os
import subprocess
import sys
from pathlib import Path

import pytest

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
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
