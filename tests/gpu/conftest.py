"""Devices, sizes and the report of what was measured."""

import json
import os
import platform
import time
from pathlib import Path

import pytest
import torch

BUDGET = 400.0
"""Seconds after which no further part begins: what runs then has a minute left."""

began = time.monotonic()
rows: list[dict[str, str]] = []


def pytest_runtest_setup(item):
    late = time.monotonic() - began > BUDGET
    if late and item.get_closest_marker("gpu") and "POLOPT_GPU_RESULTS" in os.environ:
        pytest.skip(f"{BUDGET:.0f} s are over")


cuda = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


@pytest.fixture(params=["cpu", cuda])
def device(request):
    """A GPU at full size, and the CPU at a small one, so that the code is known to work."""
    yield torch.device(request.param)
    if request.param == "cuda":
        torch.cuda.empty_cache()


@pytest.fixture
def record():
    """Keep a row of numbers for the report."""

    def keep(part, **numbers):
        rows.append({"part": part, **numbers})

    return keep


def pytest_terminal_summary(terminalreporter):
    if "POLOPT_GPU_RESULTS" not in os.environ:
        return
    where = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seconds": round(time.monotonic() - began, 1),
    }
    skipped = sorted(
        {f"{r.nodeid}: {r.longrepr[2]}" for r in terminalreporter.stats.get("skipped", [])}
    )
    folder = Path(os.environ["POLOPT_GPU_RESULTS"])
    content = {"where": where, "rows": rows, "skipped": skipped}
    (folder / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    lines = [", ".join(f"{name} {value}" for name, value in where.items()), ""]
    for row in rows:
        numbers = ", ".join(f"{k} {v}" for k, v in row.items() if k != "part")
        lines.append(f"- {row['part']}: {numbers}")
    lines += ["", "skipped:" if skipped else "nothing was skipped", *skipped]
    (folder / "results.md").write_text("\n".join(lines) + "\n")
    terminalreporter.write_line("\n".join(["", *lines]))
