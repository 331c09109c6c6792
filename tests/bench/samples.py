"""Compare how many frames control recipes need to reach the bar, over seeds.

    python tests/bench/samples.py cartpole-dapo cartpole-ppo --seeds 20 21 22 23 24
    python tests/bench/samples.py pendulum-dapo groups.segment=null --seeds 0 1

One process trains all, one after the other, on one thread. The table has a row per recipe: mean
± standard deviation (over seeds, n − 1) of frames and of CPU seconds of training. With two
recipes for one task follows how many times the frames of the first the second needs: the ratio of
their means, with the 95 % percentile bootstrap interval over seeds. A run that does not reach the
bar counts with all its frames, which is less than it would need.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import torch

from polopt.launch.job import prepare
from polopt.launch.recipe import load
from polopt.launch.run import Run
from polopt.launch.train import find_recipe


def train(recipe, overrides, seed, root):
    """Run one seed and return its summary."""
    tree = {**load(find_recipe(recipe), overrides), "seed": seed}
    job = prepare(tree, name=recipe)
    folder = root / f"{recipe}-{seed}"
    folder.mkdir(parents=True)
    run = Run(folder, job.tree)
    return run.finish(job.train(run))


def row(recipe, summaries):
    """Return one row of the table."""
    cells = [recipe, f"{sum(s['solved'] for s in summaries)} of {len(summaries)}"]
    for name, text in (("frames", "{:,.0f}"), ("train_cpu_seconds", "{:.2f}")):
        values = [s[name] for s in summaries]
        spread = f" ± {text.format(statistics.stdev(values))}" if len(values) > 1 else ""
        cells.append(text.format(statistics.mean(values)) + spread)
    cells.append(f"{max(s['frames'] for s in summaries):,}")
    return f"| {' | '.join(cells)} |"


def ratio(ours, others, samples=10_000):
    """Return mean(others) / mean(ours), and its 95 % interval."""
    generator = torch.Generator().manual_seed(0)

    def means(values):
        index = torch.randint(len(values), (samples, len(values)), generator=generator)
        return torch.tensor(values, dtype=torch.float64)[index].mean(1)

    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = (means(others) / means(ours)).quantile(ends).tolist()
    return statistics.mean(others) / statistics.mean(ours), low, high


def main():
    """Run all recipes and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arguments", nargs="+", metavar="recipe | key=value")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    overrides = [word for word in args.arguments if "=" in word]
    recipes = [word for word in args.arguments if "=" not in word]
    print("| recipe | solved | frames | CPU seconds | most frames |")
    print("| --- | ---: | ---: | ---: | ---: |")
    frames, tasks = [], set()
    with tempfile.TemporaryDirectory() as root:
        for recipe in recipes:
            summaries = [train(recipe, overrides, seed, Path(root)) for seed in args.seeds]
            frames.append([s["frames"] for s in summaries])
            tasks |= {s["task"] for s in summaries}
            print(row(recipe, summaries), flush=True)
    if len(recipes) == 2 and len(tasks) == 1:
        times, low, high = ratio(*frames)
        print(
            f"\n{recipes[1]} needs {times:.2f} times the frames of {recipes[0]}, "
            f"95 % interval {low:.2f} to {high:.2f}"
        )


if __name__ == "__main__":
    main()
