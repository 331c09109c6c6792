"""What the training rows are, as a digest: the same on all ranks, and when a run goes on."""

import hashlib
from typing import Any

from accelerate.utils import gather_object

__all__ = ["check_same_data", "fingerprint"]

_ROWS = 1000  # hashed at a time


def fingerprint(dataset: Any) -> str | None:  # noqa: ANN401
    """Return the number of rows and a hash of their values in their order.

    About a second for 300,000 prompts. Where the rows come from, and how they lie in memory,
    does not count.

    Args:
        dataset: A `datasets.Dataset`; of one that is streamed nothing is known, and None returned.
    """
    if not hasattr(dataset, "__len__"):
        return None
    found = hashlib.sha256()
    for table in dataset.with_format("arrow").iter(batch_size=_ROWS):
        found.update(repr(table.to_pylist()).encode())
    return f"{len(dataset)} rows ({found.hexdigest()[:16]})"


def check_same_data(mine: str | None, accelerator: Any) -> None:  # noqa: ANN401
    """Refuse ranks that read different data: each would take its rows of another order.

    A collective.

    Args:
        mine: `fingerprint` of this rank's rows.
        accelerator: Of the trainer.

    Raises:
        ValueError: On every rank, with what each has.
    """
    if accelerator.num_processes == 1:
        return
    found = gather_object([mine])
    if len(set(found)) > 1:
        each = ", ".join(f"rank {i}: {text}" for i, text in enumerate(found))
        raise ValueError(
            f"the ranks have different training data ({each}): give all of them the same rows in "
            "the same order; TRL deals them out"
        )
