"""Measure how a recipe learns over seeds: the command behind the README's numbers.

    python tests/bench/learning.py cartpole-ppo --seeds 0 1 2 3 4
    python tests/bench/learning.py arithmetic-dapo --seeds 0 1 2 --runs bench-runs

Every seed is a `polopt train` of its own, one after the other, on one thread. The Markdown table
has a row per seed and every number of the summaries; below stand mean ± standard deviation
(over seeds, n − 1) and the range. Judge speed by CPU seconds: they do not depend on what else
the machine does.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path


def train(recipe, overrides, seed, runs):
    """Run one seed and return its summary; ends the program if the run fails."""
    command = [sys.executable, "-m", "polopt", "train", recipe, *overrides, f"seed={seed}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--runs", str(runs), "--json"], stdout=subprocess.PIPE, env=environment
    )
    if done.returncode:
        sys.exit(f"learning.py: seed {seed} of {recipe} failed with exit status {done.returncode}")
    return json.loads(done.stdout)


def table(summaries, columns=None):
    """Return a Markdown table of the numbers that all summaries have."""
    numbers = [_numbers(s) for s in summaries]
    shared = [k for k in numbers[0] if k != "seed" and all(k in n for n in numbers)]
    for column in columns or ():
        if column not in shared:
            raise ValueError(f"no column {column!r} in the summaries, there are {shared}")
    shared = list(columns or shared)
    rows = [["seed", *shared], ["---:"] * (len(shared) + 1)]
    rows += [
        [str(s["seed"]), *(_text(n[k]) for k in shared)]
        for s, n in zip(summaries, numbers, strict=True)
    ]
    if len(numbers) > 1:
        values = [[n[k] for n in numbers] for k in shared]
        spread = [f"{_text(statistics.mean(v))} ± {_text(statistics.stdev(v))}" for v in values]
        rows.append(["mean ± std", *spread])
        rows.append(["range", *(f"{_text(min(v))} to {_text(max(v))}" for v in values)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _numbers(summary, prefix=""):
    """Return the numbers of a summary by name, nested ones as `accuracy_after.sampled`."""
    found = {}
    for key, value in summary.items():
        if isinstance(value, dict):
            found |= _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float):
            found[prefix + key] = float(value)
    return found


def _text(value):
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def main():
    """Run the seeds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--columns", nargs="+", help="which numbers; all by default")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    args = parser.parse_args()
    summaries = [train(args.recipe, args.overrides, seed, args.runs) for seed in args.seeds]
    print(table(summaries, args.columns))
    run = Path(summaries[-1]["run"])
    session = json.loads((run / "environment.json").read_text())["sessions"][-1]
    versions = ", ".join(f"{n} {v}" for n, v in session["versions"].items())
    print(f"\n{session['cpus']} CPUs, {session['platform']}; {versions}")


if __name__ == "__main__":
    main()
