"""`polopt report`: the command."""

import argparse
from pathlib import Path
from typing import Any

from polopt.launch.result import Result

__all__ = ["EPILOG", "add_arguments", "report"]

EPILOG = """\
examples:
  polopt report runs/cartpole-ppo-20260131-120000   # into its folder
  polopt report runs -o report.html                 # all runs in a folder, put together by recipe
  polopt report runs/cartpole-ppo-* -o ppo.html
  polopt report sb3/seed0 sb3/seed1 -o sb3.html     # whatever `polopt doctor` reads

The page is one file that needs no network and holds no scripts. Runs whose settings differ in the
seed alone are one curve with its spread. It is written anew in place of an older report, and of
nothing else.

exit status: 0 fine, 2 input that is not understood
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument(
        "arguments", nargs="*", metavar="RUN", help="run folders, folders of runs, or logs"
    )
    parser.add_argument(
        "-o",
        "--out",
        metavar="FILE",
        help="where the page goes; by default report.html, in the folder of a single run",
    )


def report(args: argparse.Namespace, signals: object) -> Result:
    """Write the page about runs.

    Raises:
        RecipeError: If there is nothing to report, or the page cannot be written.
    """
    from polopt.launch.files import write_text
    from polopt.launch.recipe import RecipeError
    from polopt.launch.report.gather import gather
    from polopt.launch.report.page import content, render

    words: list[str] = args.arguments
    if not all(words) or not words:
        raise RecipeError("name a run, a log or a folder of runs: polopt report RUN")
    out = _target(args.out, words)
    runs, errors = gather([Path(word) for word in words])
    if not runs:
        raise RecipeError("; ".join(errors))
    try:
        write_text(out, render(runs, errors))
    except OSError as error:
        raise RecipeError(f"cannot write {out}: {error.strerror}") from error
    found: dict[str, Any] = {
        "report": str(out),
        "runs": len(runs),
        "configurations": content(runs),
        **({"errors": errors} if errors else {}),
    }
    lines = [f"{len(runs)} runs" if len(runs) > 1 else "1 run", *errors, f"written to {out}"]
    return Result(content=found, text="\n".join(lines), code=2 if errors else 0)


def _target(name: str | None, words: list[str]) -> Path:
    """Return where the page goes, before anything is read.

    Raises:
        RecipeError: If it cannot go there, or something else is there.
    """
    from polopt.launch.recipe import RecipeError
    from polopt.launch.train import is_file

    path = Path("report.html" if name is None else name)
    if name is None and len(words) == 1 and is_file(Path(words[0]) / "config.yaml"):
        path = Path(words[0]) / path
    try:
        if path.is_dir():
            raise RecipeError(f"{path} is a folder: name a file, such as {path / 'report.html'}")
        if not path.parent.is_dir():
            raise RecipeError(f"there is no folder {path.parent} for the report")
        if (path.exists() or path.is_symlink()) and not _is_report(path):
            raise RecipeError(
                f"{path} is there and is not a report of polopt: name another file with -o"
            )
    except OSError as error:
        raise RecipeError(f"cannot write {path}: {error.strerror}") from error
    return path


def _is_report(path: Path) -> bool:
    from polopt.launch.report.page import MARK

    if not path.is_file():  # a pipe, a device, a link to nothing
        return False
    with path.open("rb") as file:
        return file.read(len(MARK)) == MARK.encode()
