"""Measure advice on replay with DQN on CartPole: a figure and a table of each question.

    python tests/bench/replay_notes.py per --seeds 20 21 22 23 24 25 26 27 28 29
    python tests/bench/replay_notes.py buffer double epsilon

Questions: `buffer` (10k, 50k, 100k transitions kept), `double` (double against single
Q-learning), `per` (prioritised against uniform replay), `epsilon` (linear, exponential and
constant ε). Each setting is the recipe `cartpole-dqn` with what its name says changed and half the
optimizer steps, for 24,576 frames without a stop at the bar; `buffer` takes a quarter of the steps
and goes on to 81,920 frames, where 50k are full. Runs follow each other on one thread; what is
done is kept in `--runs` as JSON, so that a second call goes on and more seeds add to it. Figures
(mean of the greedy return over seeds, and its range) go to `--figures`.

Columns: seeds that reached 475 at some evaluation, frames of the first such evaluation (median,
those that never did count as never), the mean return over all evaluations after the first (± its
standard deviation over seeds), and by how much it differs from the first row's with the same seed
(interquartile mean and its 95 % bootstrap interval).
"""

import argparse
import json
import logging
import statistics
import sys
import tempfile
import warnings
from pathlib import Path

from polopt.launch.curve import write_curves
from polopt.launch.files import write_json
from polopt.launch.job import prepare
from polopt.launch.recipe import load
from polopt.launch.record import read_metrics
from polopt.launch.run import Run
from polopt.launch.statistics import interquartile_mean, interval
from polopt.launch.train import find_recipe

BAR = 475
RAMP = "start: 1.0, end: 0.05, steps: 10000"
QUESTIONS = {
    "buffer": {
        f"{size // 1000}k": [f"replay.capacity={size}", "update.steps_per_batch=8"]
        for size in (10_000, 50_000, 100_000)
    },
    "double": {"single": [], "double": ["algorithm={use: double_dqn, target_every: 100}"]},
    "per": {
        "uniform": [],
        "prioritised": [
            "replay.prioritised={alpha: 0.6, beta: {use: Linear, start: 0.4, end: 1.0, "
            "steps: 24576}}"
        ],
    },
    "epsilon": {
        "linear": [],
        "exponential": [f"exploration.epsilon={{use: Exponential, {RAMP}}}"],
        "constant 0.1": ["exploration.epsilon=0.1"],
    },
}
FRAMES = {question: 81_920 if question == "buffer" else 24_576 for question in QUESTIONS}
TITLES = {
    "buffer": "transitions kept",
    "double": "double against single Q-learning",
    "per": "prioritised against uniform replay",
    "epsilon": "schedules of ε",
}


def curve(settings, seed, frames):
    """Train one seed, and return its evaluations as pairs of frames and greedy return."""
    recipe = find_recipe("cartpole-dqn")
    fixed = (f"seed={seed}", f"collector.total_frames={frames}", "evaluation.stop_at=null")
    job = prepare(load(recipe, ("update.steps_per_batch=16", *settings, *fixed)), name=recipe.stem)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), job.tree)
        run.finish(job.train(run))
        lines = read_metrics(run.path / "metrics.jsonl")
    return [(m["step"], m["greedy_return"]) for m in lines if "greedy_return" in m]


def row(label, curves, first_row):
    """Return a row of the table; the curves of the first row have the same seeds."""
    first = [next((f for f, v in c if f and v >= BAR), None) for c in curves]
    reached = sum(f is not None for f in first)
    median = statistics.median(float("inf") if f is None else f for f in first)
    means, others = map(_means, (curves, first_row))
    spread = f" ± {statistics.stdev(means):.0f}" if len(means) > 1 else ""
    when = "never" if median == float("inf") else f"{median:,.0f}"
    mean = f"{statistics.mean(means):.0f}{spread}"
    differences = [a - b for a, b in zip(means, others, strict=True)]
    between = interval(differences)
    apart = ""
    if curves is not first_row and between:
        apart = "{:+.0f} ({:+.0f} to {:+.0f})".format(interquartile_mean(differences), *between)
    return f"| {label} | {reached} of {len(curves)} | {when} | {mean} | {apart} |"


def _means(curves):
    return [statistics.mean(value for frames, value in curve if frames) for curve in curves]


def main():
    """Answer the questions that are asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("questions", nargs="+", choices=list(QUESTIONS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[20, 21, 22, 23, 24])
    parser.add_argument("--frames", type=int, help="instead of the question's")
    parser.add_argument("--runs", type=Path, default=Path("runs/replay-notes"))
    parser.add_argument("--figures", type=Path, default=Path("docs/figures"))
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    args.runs.mkdir(parents=True, exist_ok=True)
    args.figures.mkdir(parents=True, exist_ok=True)
    for question in args.questions:
        found, frames = {}, args.frames or FRAMES[question]
        for seed in args.seeds:  # settings side by side: an early end leaves pairs
            for label, settings in QUESTIONS[question].items():
                # The recipe as it is answers several questions.
                name = label.replace(" ", "-") if settings else "recipe"
                path = args.runs / f"{name}-{frames}-{seed}.json"
                if not path.exists():
                    write_json(path, {"curve": curve(settings, seed, frames)})
                    sys.stderr.write(f"{question}, {label}, seed {seed}: done\n")
                points = json.loads(path.read_text())["curve"]
                found.setdefault(label, []).append([tuple(p) for p in points])
        print(f"\n{TITLES[question]}, seeds {' '.join(map(str, args.seeds))}\n")
        print("| | reached 475 | frames | mean return | difference |")
        print("| --- | ---: | ---: | ---: | ---: |")
        first_row = next(iter(found.values()))
        print("\n".join(row(label, c, first_row) for label, c in found.items()), flush=True)
        columns = {label: list(zip(*curves, strict=True)) for label, curves in found.items()}
        write_curves(
            args.figures / f"replay-{question}.svg",
            {
                label: [(points[0][0], statistics.mean(v for _, v in points)) for points in c]
                for label, c in columns.items()
            },
            title=f"DQN on CartPole: {TITLES[question]} ({len(args.seeds)} seeds)",
            x="frames",
            y="greedy return",
            bands={
                label: [
                    (points[0][0], min(v for _, v in points), max(v for _, v in points))
                    for points in c
                ]
                for label, c in columns.items()
            },
        )


if __name__ == "__main__":
    main()
