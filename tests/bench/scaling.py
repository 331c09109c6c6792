"""Measure a recipe on one process and on two: the command behind the table of docs/multi_gpu.md.

    python tests/bench/scaling.py
    python tests/bench/scaling.py arithmetic-grpo --strategies ddp fsdp2 --repeats 5

Every run has the same answers in an optimizer step. Runs take turns, and each process has one
thread. Tokens are those of prompts and answers. What a wall clock says depends on what else
the cores do; CPU seconds, summed over the processes, do not. On a CPU fsdp2 needs
tests/ext/fsdp_cpu.py, which the command uses.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from polopt.launch.record import read_metrics

PATCH = Path(__file__).parents[1] / "ext"
SETTINGS = (
    "task.use=fsdp_cpu:arithmetic",
    "task.train_size=256",
    "model.hidden_size=256",
    "model.layers=4",
    "model.warmup_steps=50",
    "trainer.save_strategy=no",
    "trainer.logging_steps=1",
    "evaluation.every=null",
)


def run(recipe, strategy, processes, batch, steps, folder):
    """Train, and return tokens, wall and CPU seconds."""
    words = [recipe, *SETTINGS, f"trainer.max_steps={steps}", f"launch.processes={processes}"]
    words += [f"trainer.per_device_train_batch_size={batch // processes}"]
    words += [f"launch.strategy={strategy}"] if processes > 1 else []
    command = [sys.executable, "-m", "polopt", "train", *words, "--runs", folder, "--json"]
    path = os.pathsep.join([str(PATCH), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, stdout=subprocess.PIPE, env=env)
    if done.returncode:
        sys.exit(f"scaling.py: {strategy} on {processes} failed with status {done.returncode}")
    summary = json.loads(done.stdout)
    lines = read_metrics(Path(summary["run"]) / "metrics.jsonl")
    tokens = max(line["num_tokens"] for line in lines if "num_tokens" in line)
    return tokens, summary["train_wall_seconds"], summary["train_cpu_seconds"]


def main():
    """Print a Markdown table: medians, and ratios to one process within each repeat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="?", default="arithmetic-grpo")
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp2"])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    kinds = [("ddp", 1), *((strategy, 2) for strategy in args.strategies)]
    found = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.repeats):
            for kind in kinds:
                found[kind].append(run(args.recipe, *kind, args.batch, args.steps, folder))
    print("| | wall s | tokens/s | against 1 process | CPU s | tokens per CPU s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for (strategy, processes), rows in found.items():
        rates = [tokens / wall for tokens, wall, _ in rows]
        ratios = [r * w1 / t1 for r, (t1, w1, _) in zip(rates, found[kinds[0]], strict=True)]
        cpu = statistics.median(c for *_, c in rows)
        spent = statistics.median(t / c for t, _, c in rows)
        name = "1 process" if processes == 1 else f"2, {strategy}"
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        wall = statistics.median(w for _, w, _ in rows)
        rate = statistics.median(rates)
        print(f"| {name} | {wall:.1f} | {rate:,.0f} | {spread} | {cpu:.1f} | {spent:,.0f} |")


if __name__ == "__main__":
    main()
