"""`polopt bench`: which comparison the command line names."""

import argparse
from types import ModuleType

from polopt.launch.bench import control, llm
from polopt.launch.result import Result

__all__ = ["EPILOG", "add_arguments", "bench"]

_COMPARISONS: dict[str, tuple[str, ModuleType]] = {
    "control": ("control tasks, each to its bar", control),
    "llm": ("a language model, our DAPO and TRL's own", llm),
}
"""A line of help and a module with `EPILOG`, `add_arguments(parser)` and `bench(args, signals)`.

The modules import torch in `bench` alone.
"""

EPILOG = """\
examples:
  polopt bench control --help
  polopt bench control --tasks cartpole --libraries polopt sb3 --seeds 0 1 2
  polopt bench llm --seeds 0 1 2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a command for each comparison to the parser of `bench`."""
    commands = parser.add_subparsers(dest="comparison", required=True, metavar="comparison")
    for name, (text, module) in _COMPARISONS.items():
        sub = commands.add_parser(
            name,
            help=text,
            description=text[:1].upper() + text[1:] + ".",
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        # Left unset, so that `bench --json NAME` keeps what stands before the name.
        sub.add_argument(
            "--json",
            action="store_true",
            default=argparse.SUPPRESS,
            help="one JSON object on stdout",
        )
        module.add_arguments(sub)


def bench(args: argparse.Namespace, signals: object) -> Result:
    """Run the comparison that the command line names.

    Raises:
        RecipeError: If a name or a number is wrong, or a library is missing.
    """
    return _COMPARISONS[args.comparison][1].bench(args, signals)
