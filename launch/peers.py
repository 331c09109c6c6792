"""The ranks of a run: how long they wait for each other, and what is said when one is gone."""

import os
import re
from datetime import timedelta
from pathlib import Path

__all__ = ["PeersError", "lost", "make_group"]


class PeersError(RuntimeError):
    """Other ranks do not answer; the message says why, and how to go on.

    Args:
        rank: That noticed.
        reason: From `lost`.
        run: The run folder.
        checkpoint: The newest whole one, or None.
    """

    def __init__(self, rank: int, reason: str, run: Path, checkpoint: Path | None) -> None:
        kept = (
            f"{checkpoint} is whole: start the run again as before, with --resume {run}"
            if checkpoint
            else f"there is no checkpoint in {run} yet: start anew"
        )
        super().__init__(
            f"rank {rank} lost another one, which ended, whose host did, or to which the link is "
            f"cut ({reason}); {kept}"
        )


def make_group(seconds: object) -> None:
    """Make the process group of ranks on CPUs, if a launcher started them.

    transformers' arguments make it otherwise, and on CPUs without their `ddp_timeout`: a rank
    would wait half an hour for one that is gone.

    Args:
        seconds: The longest that one operation of the group may take.
    """
    if "WORLD_SIZE" in os.environ and isinstance(seconds, int | float) and seconds > 0:
        from accelerate import PartialState

        PartialState(cpu=True, timeout=timedelta(seconds=seconds))


def lost(error: BaseException | None) -> str | None:
    """Return why an error says that another rank does not answer, or None if it says no such thing.

    Args:
        error: What was raised, maybe from another.
    """
    import torch.distributed as dist

    while error is not None:
        text = str(error).partition("\n")[0]
        # Gloo's own errors have no type, but the place in its source.
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and re.match(r"\[\S*/gloo/\S+\] ", text)
        ):
            said = re.sub(r"^\[\S+\] ", "", text)
            return said.partition(". This is typically")[0].strip()
        error = error.__cause__
    return None
