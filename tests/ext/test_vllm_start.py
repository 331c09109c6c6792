"""A run that is asked to end while its server starts; a small program plays vLLM."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from polopt.ext.vllm.server import _members

PROGRAM = textwrap.dedent("""
    import sys
    from polopt.ext.vllm.server import Server
    from polopt.launch.cli import main
    child = "import subprocess, sys; print('begun', flush=True);" \\
            "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    Server.command = lambda self, gpu: [sys.executable, "-c", child]  # never healthy
    sys.exit(main(sys.argv[1:]))
""")
WORDS = (
    "arithmetic-dapo task.train_size=64 task.evaluation_size=8 model.warmup_steps=0 "
    "trainer.use_vllm=true trainer.vllm_mode=server --json"
)


@pytest.mark.slow
def test_it_ends_within_seconds_with_all_its_children(tmp_path):
    run = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "train", *WORDS.split(), "--runs", str(tmp_path / "runs")],
        env={**os.environ, "POLOPT_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        end = time.monotonic() + 120
        while not any("begun" in log.read_text() for log in tmp_path.glob("runs/*/vllm.log")):
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < end
            time.sleep(0.1)
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        [guard] = [
            int(pid)
            for pid in children
            if b"polopt.ext.vllm.server" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        assert len(_members(guard)) == 3  # guard, server, child
        run.send_signal(signal.SIGTERM)
        end = time.monotonic() + 15  # of 20 that it would have to finish an update
        while _members(guard):
            assert time.monotonic() < end
            time.sleep(0.1)
        out, err = run.communicate(timeout=60)
    finally:
        run.kill()
        run.communicate()
    assert run.returncode == 143
    told = json.loads(out)
    assert (told["status"], told["signal"]) == ("stopped", "SIGTERM")
    assert "ending after this update" not in err
