"""What a run of a language model shows of itself: metrics, evaluations, answers, the best model."""

import itertools
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from safetensors import SafetensorError
from transformers import TrainerCallback
from trl.models.utils import unwrap_model_for_generation

from polopt.envs.contract import RewardError
from polopt.ext.trl.checkpoints import recover_folder, replace_folder
from polopt.ext.trl.evaluate import Answers, Problem, judge, report
from polopt.ext.trl.trainer import PolicyTrainer
from polopt.launch.files import read_json, write_json
from polopt.launch.llm import LlmJob
from polopt.launch.llm_data import close_rewards
from polopt.launch.record import read_metrics
from polopt.launch.run import Run, cpu_seconds

__all__ = ["KINDS", "Watch"]

KINDS = ("greedy", "sampled")

_BEST = "eval/accuracy_sampled"
_SHOWN = 16  # answers kept of each evaluation and of each line of metrics
_MOST = 64 * 2**20  # bytes of completions.jsonl


class Watch(TrainerCallback):
    """Carries what TRL tells into the run folder, evaluates, and keeps the best model.

    The run folder gets `samples.jsonl` (answers to held-out problems), `completions.jsonl`
    (answers trained on) and `best/` (the model with the best sampled accuracy so far).

    Args:
        job: The recipe.
        run: The run folder.
        trainer: The trainer that calls.
        tokenizer: Its tokenizer.

    Attributes:
        rows: The held-out problems.
        evaluated: Step of the latest evaluation, −1 before the first.
        began: Wall and CPU clock when training began, after the first evaluation.
        interrupted: Whether the run was asked to end early.
        best: Step, metric, value and folder of the best model, or None before an evaluation. The
            folder of the model that the run began with is None: it is not kept twice.
    """

    def __init__(self, job: LlmJob, run: Run, trainer: PolicyTrainer, tokenizer: Any) -> None:  # noqa: ANN401
        self._job, self._run, self._trainer, self._tokenizer = job, run, trainer, tokenizer
        self.rows = list(job.task.evaluation)[: job.evaluation.problems]
        self.evaluated, self.interrupted = -1, False
        self.began = time.monotonic(), cpu_seconds()
        self._text = ""
        if trainer.accelerator.is_main_process:
            recover_folder(run.path / "best")
        trainer.accelerator.wait_for_everyone()
        self.best = self._known_best()

    def _known_best(self) -> dict[str, Any] | None:
        """Return the best model of a run that is resumed, or None."""
        path = self._run.path / "best" / "best.json"
        if path.is_file():
            return read_json(path)
        lines = read_metrics(self._run.path / "metrics.jsonl")
        first = next((x for x in lines if x["step"] == 0 and _BEST in x), None)
        return None if first is None else self._as_best(0, first[_BEST])

    def _as_best(self, step: int, value: float) -> dict[str, Any]:
        folder = str(self._run.path / "best") if step else None
        return {"step": step, "metric": _BEST, "value": value, "folder": folder}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ANN401
        """Log numbers and some answers; what Trainer sums up at the end is in the summary."""
        if not logs or "train_runtime" in logs:
            return
        numbers = {k: v for k, v in logs.items() if isinstance(v, int | float)}
        self._run.log(state.global_step, {**numbers, **self._run.usage()})
        if "reward" in numbers:
            self._text = f"reward {numbers['reward']:.3f}"
            if self._trainer.accelerator.is_main_process:
                self._write_completions(state.global_step)

    def _write_completions(self, step: int) -> None:
        path = self._run.path / "completions.jsonl"
        if path.exists() and path.stat().st_size > _MOST:
            return
        rows = itertools.islice(self._trainer.completions(), _SHOWN)
        _append(path, ({"step": step, **row} for row in rows))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
        """Evaluate the model that a new run begins with: here it is where it is trained."""
        if self.evaluated < 0 and not state.global_step:
            self.evaluate(0)
        close_rewards(self._job.task)  # the CPU seconds of workers count when they end
        self.began = time.monotonic(), cpu_seconds()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
        """Show progress, evaluate when due, and end early when asked to."""
        self._run.progress(state.global_step, state.max_steps, self._line(state))
        every = self._job.evaluation.every
        if every and state.global_step % every == 0:
            self.evaluate(state.global_step)
        if self._run.should_stop():
            self.interrupted = True
            control.should_save = control.should_training_stop = True

    def _line(self, state: Any) -> str:  # noqa: ANN401
        return f"step {state.global_step}/{state.max_steps} {self._text}".rstrip()

    def evaluate(self, step: int) -> None:
        """Answer the held-out problems, greedily and by sampling; every rank takes a share."""
        accelerator = self._trainer.accelerator
        rank, world = accelerator.process_index, accelerator.num_processes
        mine, samples = self.rows[rank::world], self._job.evaluation.samples
        # Where the model is sharded, ranks take part in each other's batches: all have as many.
        filled = mine + self.rows[:1] * (-(-len(self.rows) // world) - len(mine))
        problems, greedy, drawn = self._judge(filled, seed=1000 * step + rank)
        problems = problems[: len(mine)]
        metrics = dict(_named(report(gather_object(problems)), samples))
        self.evaluated = step
        self._text = f"held-out accuracy {metrics[_BEST]:.3f}"
        self._run.log(step, metrics)
        if accelerator.is_main_process:
            kept = (("greedy", greedy, mine), ("sampled", drawn, _repeated(mine, samples)))
            for kind, answers, rows in kept:
                parts = zip(rows, answers.completions, answers.correct, strict=False)
                shown = itertools.islice(parts, _SHOWN)
                _append(
                    self._run.path / "samples.jsonl",
                    (
                        {"step": step, "kind": kind, **row, "completion": text, "correct": right}
                        for row, text, right in shown
                    ),
                )
        self._keep_best(step, metrics[_BEST])

    def _judge(self, rows: list[Any], seed: int) -> tuple[list[Problem], Answers, Answers]:
        """See `judge`; a reward that does not work on one rank is told on all of them."""
        found, fault = None, None
        with self._whole_model() as model:
            try:
                found = judge(
                    model,
                    self._tokenizer,
                    self._job.task,
                    rows,
                    samples=self._job.evaluation.samples,
                    max_new_tokens=self._job.batch.max_length,
                    seed=seed,
                )
            except RewardError as error:  # the other ranks would wait for this one for ever
                fault = error
        told = gather_object([str(fault)] if fault else [])
        if told or found is None:
            raise fault or RewardError(told[0])
        return found

    def _whole_model(self) -> AbstractContextManager[Any, None]:
        """Return the context of the model that answers, which ZeRO-3 has to gather."""
        trainer = self._trainer
        if trainer.is_deepspeed_enabled:
            gathered: Any = unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator)
            return gathered
        return nullcontext(trainer.accelerator.unwrap_model(trainer.model))

    def _keep_best(self, step: int, value: float) -> None:
        """Write the model into `best/` if none was better; on all ranks, which save together."""
        if self.best is not None and value <= self.best["value"]:
            return
        folder = self._run.path / "best"
        self.best = self._as_best(step, value)
        if not step:
            return
        staging = self._run.path / ".best"
        main = self._trainer.accelerator.is_main_process
        if main:
            shutil.rmtree(staging, ignore_errors=True)
        self._trainer.accelerator.wait_for_everyone()
        try:
            self._trainer.save_model(str(staging))
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"cannot write the best model to {folder}: {error}; checkpoints are as they were"
            ) from error
        self._trainer.accelerator.wait_for_everyone()
        if main:
            write_json(staging / "best.json", self.best)
            replace_folder(staging, folder)


def _named(found: dict[str, Any], samples: int) -> Iterator[tuple[str, float]]:
    """Yield the metrics of an evaluation under their names in the run folder."""
    yield "eval/accuracy_greedy", found["greedy"]
    yield _BEST, found[f"mean@{samples}"]
    if samples > 1:
        yield from ((f"eval/{k}", v) for k, v in found.items() if k.startswith(("pass", "major")))
    for source, part in found.get("sources", {}).items():
        yield f"eval/{source}/accuracy_greedy", part["greedy"]
        yield f"eval/{source}/accuracy_sampled", part[f"mean@{samples}"]


def _repeated(rows: list[Any], count: int) -> Iterator[Any]:
    return (row for row in rows for _ in range(count))


def _append(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        # Columns may hold what JSON lacks, such as dates.
        file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
