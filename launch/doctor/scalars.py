"""What TorchRL's `CSVLogger` leaves: a folder `scalars`, with a file of `step,value` by metric."""

from pathlib import Path

from polopt.launch.doctor.lines import Reading, lines, number
from polopt.launch.doctor.log import Series

__all__ = ["read_scalars"]

_FILES = 1000


def read_scalars(folder: Path, reading: Reading) -> dict[str, Series]:
    """Read the files of one run; what has no two numbers on a line is counted as damaged.

    Args:
        folder: The folder `scalars`.
        reading: Takes up what could not be read.
    """
    found: dict[str, Series] = {}
    for path in sorted(folder.rglob("*.csv"))[:_FILES]:
        name = path.relative_to(folder).with_suffix("").as_posix()
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            for _, text in lines(file, reading):
                step, comma, value = text.strip().partition(",")
                pair = number(step), number(value)
                if comma and pair[0] is not None and pair[1] is not None:
                    found.setdefault(name, Series()).add(pair[0], pair[1])
                elif text.strip():
                    reading.damaged += 1
    return found
