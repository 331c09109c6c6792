"""The ranks of a run: how long they wait for each other, and what is said when one is gone."""

import gc
import os
import re
import sys
from datetime import timedelta
from pathlib import Path

__all__ = ["PeersError", "kept", "leave_group", "lost", "make_group", "newest"]


class PeersError(RuntimeError):
    """Other ranks do not answer; the message says why, and how to go on.

    Args:
        rank: That noticed.
        reason: From `lost`.
        run: The run folder.
    """

    def __init__(self, rank: int, reason: str, run: Path) -> None:
        super().__init__(
            f"rank {rank} gets no answer from another, which ended, or to which the link is cut "
            f"({reason}); {kept(run)}"
        )


def newest(run: Path) -> Path | None:
    """Return the newest checkpoint of a text task's run that was written to its end, or None."""
    whole = [path.parent for path in run.glob("checkpoints/checkpoint-*/polopt.json")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def kept(run: Path) -> str:
    """Return how to go on with a text task's run that failed."""
    checkpoint = newest(run)
    if checkpoint is None:
        return f"there is no checkpoint in {run} yet: start anew"
    return f"{checkpoint} is whole: start the command again with --resume {run}"


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


def leave_group() -> None:
    """Close the process group, if there is one; no variable may hold what was trained in it.

    A rank that exits with the threads of its group running may be aborted. A model's reducer that
    outlives the group is worse: it takes the group down while it holds Python's lock, waits for
    those threads, and they for the lock, to free their last tensors. The rank never ends (torch
    2.13, gloo), and no timeout counts there. So models, which are parts of cycles, go first.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        gc.collect()
        distributed.destroy_process_group()


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
