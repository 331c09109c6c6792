"""What a command hands to the command line, and which rank answers."""

import os
from dataclasses import dataclass
from typing import Any

__all__ = ["SPAWNED", "Result", "rank"]

SPAWNED = "POLOPT_SPAWNED"
"""Set in the ranks that `polopt train` starts itself: their parent answers for them."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a command answers.

    Attributes:
        content: The object that `--json` prints.
        text: What is printed otherwise.
        code: The exit status.
    """

    content: dict[str, Any]
    text: str
    code: int = 0


def rank() -> int:
    """Return this process's rank under a launcher, 0 without one."""
    text = os.environ.get("RANK", "")
    return int(text) if "WORLD_SIZE" in os.environ and text.isdecimal() else 0
