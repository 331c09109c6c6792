"""tests/gpu/run.sh where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_script_says_that_there_is_no_gpu(tmp_path):
    done = subprocess.run(
        ["sh", str(Path(__file__).with_name("run.sh")), str(tmp_path / "results")],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert "no torch that sees a GPU here, so nothing was run" in done.stdout
    assert not (tmp_path / "results").exists()
