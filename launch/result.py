"""What a command hands to the command line, and which rank answers."""

import os
import re
from dataclasses import dataclass
from typing import Any

__all__ = ["CONTROL", "SPAWNED", "Result", "printable", "rank"]

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


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters but tab and newline, and what turns the direction of the text after it."""


def printable(text: str) -> str:
    """Return a text that does nothing to a terminal: what it quotes may come from anywhere."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def rank() -> int:
    """Return this process's rank under a launcher, 0 without one."""
    text = os.environ.get("RANK", "")
    return int(text) if "WORLD_SIZE" in os.environ and text.isdecimal() else 0
