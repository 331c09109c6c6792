"""An optimizer step of a language model by phases, in CPU seconds.

    OMP_NUM_THREADS=1 python tests/bench/llm_step.py smollm2-arithmetic [key=value …]

Any recipe whose generation, if it is vLLM's, is colocated. The first step is not counted.
"""

import argparse
import contextlib
import functools
import os
import tempfile
import time
from collections import defaultdict
from unittest import mock

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

from polopt.ext.trl.trainer import PolicyTrainer
from polopt.launch import recipe
from polopt.launch.job import prepare
from polopt.launch.llm_data import close_rewards, training_rows
from polopt.launch.train import find_recipe


class Phases:
    """CPU seconds by phase; one that begins in another pauses it."""

    def __init__(self):
        self.seconds = defaultdict(float)
        self._open, self._since = [], 0.0

    def _book(self):
        now = time.process_time()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def timed(self, name, function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            self._book()
            self._open.append(name)
            try:
                return function(*args, **kwargs)
            finally:
                self._book()
                self._open.pop()

        return run


class Warm(TrainerCallback):
    """Leaves the first optimizer step out."""

    def __init__(self, phases):
        self._phases = phases

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self._phases.seconds.clear()
            self.began = time.process_time()
        self.ended = time.process_time()


def colocated(engine, phases):
    """The context in which a trainer is made whose vLLM is in this process."""
    from polopt.ext.vllm.generation import Generation, installed

    stack = contextlib.ExitStack()
    synced = phases.timed("sync", Generation.sync_weights)
    stack.enter_context(mock.patch.object(Generation, "sync_weights", synced))
    stack.enter_context(installed(engine=engine.arguments(gpu=False)))
    return stack


def step(name, overrides, steps):
    """CPU seconds of an optimizer step by phase and in all, the mean of `steps`."""
    fixed = [f"trainer.max_steps={steps + 1}", "trainer.save_strategy=no"]
    tree = recipe.load(find_recipe(name), [*overrides, *fixed])
    job = prepare(tree, name="bench")
    source = str(job.model.make(job.task, None))
    phases = Phases()
    warm = Warm(phases)
    methods = {
        "_generate_single_turn": "generation",
        "_calculate_rewards": "rewards",
        "_generate_and_score_completions": "old log-probs and advantages",
        "compute_loss": "loss, forward",
    }
    timed = {n: phases.timed(what, getattr(PolicyTrainer, n)) for n, what in methods.items()}
    engine = colocated(job.engine, phases) if job.engine else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, engine:
        trainer = type("Timed", (PolicyTrainer,), timed)(
            AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32),
            list(job.task.rewards),
            job.config(output_dir=folder, seed=job.tree["seed"]),
            algorithm=job.algorithm,
            train_dataset=training_rows(job.task),
            processing_class=AutoTokenizer.from_pretrained(source, padding_side="left"),
            callbacks=[warm],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.accelerator.backward = phases.timed("backward", trainer.accelerator.backward)
        trainer.create_optimizer()
        trainer.optimizer.step = phases.timed("optimizer", trainer.optimizer.step)
        trainer.train()
        close_rewards(job.task)
        if job.engine:
            trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()
    total = (warm.ended - warm.began) / steps
    found = {name: seconds / steps for name, seconds in phases.seconds.items()}
    return {**found, "the rest": total - sum(found.values())}, total


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=2, help="that are counted (2)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    phases, total = step(args.recipe, args.overrides, args.steps)
    print("| phase of a step | CPU s | share |\n| --- | --- | --- |")
    for name, took in sorted(phases.items(), key=lambda item: -item[1]):
        print(f"| {name} | {took:.2f} | {took / total:.0%} |")
    print(f"| all | {total:.2f} | |")


if __name__ == "__main__":
    main()
