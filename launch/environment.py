"""What a run was made with: versions, machine, command line, git revision."""

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["describe", "versions"]

_LIBRARIES = (
    "polopt",
    "torch",
    "tensordict",
    "torchrl",
    "gymnasium",
    "trl",
    "transformers",
    "accelerate",
    "datasets",
    "reasoning-gym",
    "vllm",
    "numpy",
)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries that decide a run."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def describe() -> dict[str, Any]:
    """Return a JSON-able description of this process and its machine."""
    torch = sys.modules.get("torch")
    cuda = torch is not None and torch.cuda.is_available()
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "folder": os.getcwd(),
        "versions": versions(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads() if torch else None,
        "accelerator": torch.cuda.get_device_name() if torch and cuda else None,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "git": _git(Path.cwd()),
    }


def _git(folder: Path) -> dict[str, Any] | None:
    """The revision of the working folder, where recipes and code of the user live."""

    def ask(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments],
            check=True,
            capture_output=True,
            text=True,
            timeout=10,
        ).stdout.strip()

    try:
        return {
            "revision": ask("rev-parse", "HEAD"),
            "changed": bool(ask("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):  # no git, or not a repository
        return None
