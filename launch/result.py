"""What a command hands to the command line."""

from dataclasses import dataclass
from typing import Any

__all__ = ["SPAWNED", "Result"]

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
