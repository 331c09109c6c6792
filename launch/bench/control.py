"""`polopt bench control`: the command. `polopt.launch.bench.runs` does the work."""

import argparse

from polopt.launch.bench.table import ALGORITHMS, LIBRARIES, TASKS
from polopt.launch.result import Result

__all__ = ["EPILOG", "add_arguments", "bench"]

EPILOG = """\
examples:
  polopt bench control --libraries polopt
  polopt bench control --tasks cartpole --libraries polopt polopt-zoo sb3 --seeds 0 1 2

Each run is a process of its own, on one thread of one core. It ends at the first greedy mean of
100 episodes that reaches the task's bar, looked at every 2048 frames (lunarlander: 16384), or
after the first batch that is longer. CPU seconds are those of training: imports, set-up and
evaluations are left out.

  polopt      the recipes <task>-<algorithm>
  polopt-zoo  the recipe cartpole-ppo with rl-zoo3's values, those of sb3
  sb3         stable-baselines3: pip install stable-baselines3; PPO with rl-zoo3's values,
              algorithms with replay with those of our recipes
  cleanrl     a script of our own with the values of CleanRL's PPO
  torchrl     TorchRL's own environment, collector, GAE and loss, with its example's values
  torchrl-zoo the same with rl-zoo3's values (cartpole alone)

What a library does not train is left out, and so is a library that is not installed, which is
said. The folder of the results has a table (Markdown), results.json and a picture of the curves
for each task and algorithm.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument(
        "--tasks", nargs="+", default=["cartpole", "acrobot", "pendulum"], metavar="TASK",
        help=", ".join(TASKS) + " (the first three)",
    )  # fmt: skip
    parser.add_argument(
        "--algorithms", nargs="+", default=["ppo"], metavar="NAME",
        help=", ".join(ALGORITHMS) + " (ppo)",
    )  # fmt: skip
    parser.add_argument("--libraries", nargs="+", default=list(LIBRARIES), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], metavar="N")
    parser.add_argument(
        "--frames", type=int, help="the most frames of one run (ppo: 300000, on mountaincar and "
        "lunarlander 1000000; the others: the budget of our recipe)",
    )  # fmt: skip
    parser.add_argument(
        "--cpu-seconds", type=float, metavar="S",
        help="other libraries also end after so many CPU seconds of training",
    )  # fmt: skip
    parser.add_argument("--runs", metavar="DIR", default="runs", help="where the folder goes")


def bench(args: argparse.Namespace, signals: object) -> Result:
    """Train what the command line names, one run after the other.

    Raises:
        RecipeError: If a name or a number is wrong, or nothing can be run.
    """
    from polopt.launch.bench.runs import compare

    return compare(
        args.tasks,
        args.algorithms,
        args.libraries,
        args.seeds,
        frames=args.frames,
        cpu_seconds=args.cpu_seconds,
        root=args.runs,
    )
