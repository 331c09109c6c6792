"""`polopt bench`: the command. `polopt.launch.bench_control` does the work."""

import argparse

from polopt.launch.result import Result

__all__ = ["EPILOG", "LIBRARIES", "TASKS", "add_arguments", "bench"]

TASKS = ("cartpole", "acrobot", "pendulum")
LIBRARIES = ("polopt", "polopt-zoo", "sb3", "cleanrl", "torchrl")

EPILOG = """\
examples:
  polopt bench control --libraries polopt
  polopt bench control --tasks cartpole --libraries polopt polopt-zoo sb3 --seeds 0 1 2

Each run is a process of its own, on one thread of one core. It ends at the first greedy mean of
100 episodes that reaches the task's bar, looked at every 2048 frames (or after the first batch
that is longer). CPU seconds are those of training: imports, set-up and evaluations are left out.

  polopt      the recipes <task>-ppo
  polopt-zoo  the recipe cartpole-ppo with rl-zoo3's values, those of sb3 (cartpole alone)
  sb3         stable-baselines3 with rl-zoo3's values: pip install stable-baselines3
  cleanrl     a script of our own with the values of CleanRL's PPO
  torchrl     TorchRL's own environment, collector, GAE and loss, with its example's values

A library that is not installed is left out, which is said. The folder of the results has a table
(Markdown), results.json and a picture of the curves for each task.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument("what", metavar="control", help="what to compare; there is one")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), metavar="TASK")
    parser.add_argument("--libraries", nargs="+", default=list(LIBRARIES), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], metavar="N")
    parser.add_argument(
        "--frames", type=int, default=300_000, help="the most frames of one run (300000)"
    )
    parser.add_argument("--runs", metavar="DIR", default="runs", help="where the folder goes")


def bench(args: argparse.Namespace, signals: object) -> Result:
    """Run what the command line names.

    Raises:
        RecipeError: If a name or a number is wrong, or a library is missing.
    """
    from polopt.launch.bench_control import compare
    from polopt.launch.recipe import RecipeError, nearest

    if args.what != "control":
        raise RecipeError(f"there is no comparison {args.what!r}: polopt bench control")
    for option, words, known in (
        ("--tasks", args.tasks, TASKS),
        ("--libraries", args.libraries, LIBRARIES),
    ):
        for word in words:
            if word not in known:
                raise RecipeError(f"{option}: there is no {word!r}, {nearest(word, known)}")
    if args.frames < 2048:
        raise RecipeError(f"--frames must be at least 2048, got {args.frames}")
    for seed in args.seeds:
        if not 0 <= seed < 2**32:
            raise RecipeError(f"--seeds must be from 0 to 4294967295, got {seed}")
    tasks, libraries, seeds = (
        list(dict.fromkeys(words)) for words in (args.tasks, args.libraries, args.seeds)
    )
    return compare(tasks, libraries, seeds, frames=args.frames, root=args.runs)
