"""What the clocks of phases cost, as a share of what they measure.

    OMP_NUM_THREADS=1 python tests/bench/phases.py

For a control run and one of a language model: how many times a clock is read in an iteration, what
one reading costs, and what share of the iteration's CPU time that is. The iterations are those of
`cartpole-ppo`, `pendulum-sac` and `arithmetic-dapo`, after one to warm up, and those of a plain
`GRPOTrainer` with the doctor's callback, whose hook sees every forward pass. The last line is the
sample of memory that each line of the metrics takes. Readings are counted and priced apart from
the runs: a difference of two runs would be noise.
"""

import argparse
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from polopt.envs.finite import FiniteEnv
from polopt.ext.metrics import PhaseClock, Stopwatch
from polopt.launch.job import prepare
from polopt.launch.recipe import load
from polopt.launch.train import find_recipe
from polopt.launch.usage import Usage

REPEATS = 20_000


def cost(function):
    """Return the CPU seconds of one call."""
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        for _ in range(REPEATS):
            function()
        best = min(best, (time.process_time() - began) / REPEATS)
    return best


class Count:
    """Counts the calls of methods while it is entered."""

    def __init__(self, *methods):
        self.calls = 0
        self._patches = [self._patch(owner, name) for owner, name in methods]

    def _patch(self, owner, name):
        method = getattr(owner, name)

        def counted(*args, **kwargs):
            self.calls += 1
            return method(*args, **kwargs)

        return mock.patch.object(owner, name, counted)

    def __enter__(self):
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self._patches:
            patch.stop()


def control(name, *settings, iterations):
    """Return laps, steps of environments and CPU seconds of an iteration."""
    learner = prepare(load(find_recipe(name), settings), name=name).learner()
    frames, _ = learner.iterate(0)
    while not any("loss" in key for key in learner.iterate(frames)[1]):
        frames += learner.job.collector.frames_per_batch
    with Count((Stopwatch, "lap")) as laps, Count((FiniteEnv, "advance")) as steps:
        for _ in range(iterations):
            frames, _ = learner.iterate(frames)
    began = time.process_time()
    for _ in range(iterations):
        frames, _ = learner.iterate(frames)
    spent = (time.process_time() - began) / iterations
    return laps.calls / iterations, steps.calls / iterations, spent


def language_model(steps):
    """Return marks and CPU seconds of an optimizer step."""
    from polopt.launch.run import Run

    settings = [f"trainer.max_steps={steps}", "evaluation.every=null", "evaluation.problems=1",
                "trainer.save_strategy='no'"]  # fmt: skip
    job = prepare(load(find_recipe("arithmetic-dapo"), settings), name="arithmetic-dapo")
    with tempfile.TemporaryDirectory() as folder, Count((PhaseClock, "_mark")) as marks:
        run = Run(Path(folder), job.tree)
        summary = job.train(run)
    return marks.calls / steps, summary["train_cpu_seconds"] / steps


def plain_trl(steps):
    """Return of an optimizer step of `GRPOTrainer`: marks, calls of the hook, CPU seconds.

    And the CPU seconds of one call.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from polopt.envs.text import arithmetic
    from polopt.ext.trl.models import TinyQwen3
    from polopt.launch.doctor.callback import DoctorCallback, _Phases

    task = arithmetic(train_size=256)
    source = TinyQwen3().make(task)
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            folder, use_cpu=True, bf16=False, max_steps=steps, max_completion_length=4,
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
            dataloader_pin_memory=False, per_device_train_batch_size=128,
        )  # fmt: skip
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(source), list(task.rewards), args,
            train_dataset=Dataset.from_list([dict(row) for row in task.train]),
            processing_class=AutoTokenizer.from_pretrained(source, padding_side="left"),
            callbacks=[DoctorCallback()],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        with Count((PhaseClock, "_mark")) as marks, Count((_Phases, "_pass")) as passes:
            began = time.process_time()
            trainer.train()
            spent = time.process_time() - began
    return marks.calls / steps, passes.calls / steps, spent / steps, cost(_Phases()._pass)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of the model (30)")
    steps = parser.parse_args().steps
    watch, clock, usage = Stopwatch(), PhaseClock(), Usage()
    lap = cost(lambda: watch.lap("loss"))
    seen = SimpleNamespace(seconds=0.0)

    def timed():
        began = time.perf_counter()
        seen.seconds += time.perf_counter() - began

    def block():
        with clock.phase("loss"):
            pass

    pair, mark = cost(timed), cost(block) / 2
    print("run                 readings    each, µs    iteration, ms    share")
    for name, settings, count in (
        ("cartpole-ppo", ["collector.use=BatchedCollector"], 5),
        ("pendulum-sac", [], 50),
    ):
        laps, envs, spent = control(name, *settings, iterations=count)
        _row(name, laps + envs, (laps * lap + envs * pair) / (laps + envs), spent)
    marks, spent = language_model(steps)
    _row("arithmetic-dapo", marks, mark, spent)
    marks, passes, spent, call = plain_trl(steps)
    _row(
        "plain GRPOTrainer",
        marks + passes,
        (marks * mark + passes * call) / (marks + passes),
        spent,
    )
    print(f"memory sample: {cost(usage.take) * 1e6:.1f} µs a line")


def _row(name, readings, each, spent):
    share = readings * each / spent
    print(f"{name:18}{readings:10.1f}{each * 1e6:12.2f}{spent * 1e3:17.2f}{share:9.3%}")


if __name__ == "__main__":
    main()
