"""Train variants of a recipe on the same seeds, and draw their learning curves into one picture.

    python tests/bench/variants.py cartpole-dqn --variant uniform \\
        --variant prioritised 'replay.prioritised={}' --seeds 100 101 102 --picture per.svg

Each `--variant` is a name and any number of overrides. Every run is a `polopt train` of its
own, one after the other, on one thread. The table gives, per variant, how many seeds reached
the bar, and the interquartile mean over seeds, with its 95 % bootstrap interval, of the frames
and of the CPU seconds of training until then (or until the last frame). The picture shows the
interquartile mean of the greedy return, and as a band the middle half of the seeds; a run that
has ended keeps its last value.
"""

import argparse
import importlib.util
import statistics
from pathlib import Path

from polopt.launch.curve import write_curves
from polopt.launch.record import read_metrics
from polopt.launch.statistics import interquartile_mean, interval

_spec = importlib.util.spec_from_file_location("learning", Path(__file__).with_name("learning.py"))
_learning = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_learning)


def curve(summary):
    """Frames and greedy return of every evaluation."""
    lines = read_metrics(Path(summary["run"]) / "metrics.jsonl")
    return {m["step"]: m["greedy_return"] for m in lines if "greedy_return" in m}


def columns(curves):
    """Per evaluation the returns of all seeds, ended runs with their last one."""
    steps = sorted(set().union(*curves))
    last = [next(iter(c.values())) for c in curves]
    for step in steps:
        last = [c.get(step, value) for c, value in zip(curves, last, strict=True)]
        yield step, list(last)


def spread(values):
    low, high = interval(values) or (values[0], values[0])
    return f"{interquartile_mean(values):.4g} [{low:.4g}, {high:.4g}]"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument(
        "--variant", nargs="+", action="append", required=True, metavar=("NAME", "key=value")
    )
    parser.add_argument("--seeds", nargs="+", type=int, required=True)
    parser.add_argument("--picture", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    args = parser.parse_args()
    curves, bands = {}, {}
    print("| variant | solved | frames | train CPU seconds |\n| --- | --- | --- | --- |")
    for name, *overrides in args.variant:
        done = [_learning.train(args.recipe, overrides, seed, args.runs) for seed in args.seeds]
        solved = f"{sum(s['solved'] for s in done)}/{len(done)}"
        frames, cpu = ([float(s[key]) for s in done] for key in ("frames", "train_cpu_seconds"))
        print(f"| {name} | {solved} | {spread(frames)} | {spread(cpu)} |", flush=True)
        returns = list(columns([curve(s) for s in done]))
        curves[name] = [(step, interquartile_mean(values)) for step, values in returns]
        if len(done) > 1:
            quarters = [(s, statistics.quantiles(v, method="inclusive")) for s, v in returns]
            bands[name] = [(step, q[0], q[2]) for step, q in quarters]
    title = f"{args.recipe}, {len(args.seeds)} seeds"
    write_curves(args.picture, curves, title=title, x="frames", y="greedy return", bands=bands)


if __name__ == "__main__":
    main()
