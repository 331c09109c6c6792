"""One run of a language model: training, evaluation, and what it leaves in the run folder."""

import contextlib
import json
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

from polopt.envs.contract import RewardError
from polopt.envs.rows import first_line
from polopt.ext.trl.trainer import PolicyTrainer
from polopt.ext.vllm.errors import ServerError
from polopt.launch.curve import write_curves
from polopt.launch.llm import LlmJob
from polopt.launch.llm_data import (
    check_lengths,
    check_rows,
    close_rewards,
    held_out_rows,
    record_rows,
    training_rows,
)
from polopt.launch.llm_vllm import generation
from polopt.launch.llm_watch import KINDS, Watch
from polopt.launch.peers import PeersError, kept, lost, newest
from polopt.launch.recipe import RecipeError
from polopt.launch.record import phase_seconds, read_metrics
from polopt.launch.run import Run, cpu_seconds
from polopt.launch.world import check_folder, meet

__all__ = ["train"]


def train(job: LlmJob, run: Run) -> dict[str, Any]:
    """Train a language model as its recipe says, and return the summary.

    Raises:
        RecipeError: If the number of processes is not the one asked for, TRL refuses the
            recipe, or a reward does not work.
        PeersError: If another rank does not answer for `trainer.ddp_timeout` seconds, or ended.
    """
    try:
        with contextlib.ExitStack() as stack:
            return _train(job, run, stack)
    except RewardError as error:
        raise RecipeError(str(error)) from error
    except (RuntimeError, OSError) as error:  # also of a checkpoint that all ranks were writing
        if (reason := lost(error)) is None:
            raise
        raise PeersError(PartialState().process_index, reason, run.path) from error
    finally:
        close_rewards(job.task)


def _train(job: LlmJob, run: Run, stack: contextlib.ExitStack) -> dict[str, Any]:
    logging.disable_progress_bar()
    # TRL still uses names that transformers renames.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    state = meet(job)
    check_folder(run.path, state)
    rows = check_rows(job.task)
    if rows is not None and state.is_main_process:
        record_rows(rows, run.path)
    began = time.monotonic(), cpu_seconds()
    try:
        with state.local_main_process_first():  # the cache is that of a host
            source = job.model.make(job.task, run.progress)
    except ValueError as error:
        raise RecipeError(f"model: {error}") from error
    warmup = time.monotonic() - began[0], cpu_seconds() - began[1]
    loading = getattr(job.model, "loading", {})  # of Pretrained; makers of one's own need not
    adapter = getattr(job.model, "adapter", lambda: None)()
    trust = {"trust_remote_code": loading.get("trust_remote_code", False)}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left", **trust)
        model = AutoModelForCausalLM.from_pretrained(source, **loading)
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"cannot load the model {str(source)!r}: {first_line(error)}; 'model.path' is a folder "
            "with model and tokenizer, or a name on the Hugging Face hub"
        ) from error
    config = job.config(
        output_dir=str(run.path / "checkpoints"),
        seed=job.tree["seed"],
        run_name=run.path.name,
        project=job.tree["project"],
        **trust,
    )
    main = state.is_main_process
    try:
        data = training_rows(job.task)
        with generation(job, run, str(source), config, stack, main=main):
            trainer = PolicyTrainer(
                model,
                list(job.task.rewards),
                config,
                algorithm=job.algorithm,
                correct_at=job.task.correct_at,
                train_dataset=data,
                processing_class=tokenizer,
                peft_config=adapter,
                **job.ours,
            )
    except ValueError as error:
        raise RecipeError(str(error)) from error
    if job.engine is not None:
        ours: Any = trainer.vllm_generation  # of `installed`
        stack.callback(ours.close)
    held_out = [row["prompt"] for row in held_out_rows(job.task, job.evaluation.problems)]
    check_lengths([*data["prompt"], *held_out], tokenizer, model.config)
    trainer.remove_callback(PrinterCallback)
    watch = Watch(job, run, trainer, tokenizer)
    trainer.add_callback(watch)

    found = newest(run.path)
    if found is not None:
        try:
            trainer.check_checkpoint(found)
        except ValueError as error:
            raise RecipeError(str(error)) from error
    run.continue_from(_step(found) if found else -1)
    steps = _finished(found, config.max_steps)
    if steps is None:
        try:
            trainer.train(resume_from_checkpoint=str(found) if found else None)
        except ServerError as error:  # on all ranks; nothing that was learnt is lost
            trainer._save_checkpoint(trainer.model, trial=None)
            raise ServerError(f"{error}; {kept(run.path)}", refused=error.refused) from error
        steps = trainer.state.global_step
    elif found is not None:  # there is nothing left to do, and Trainer would do a step
        trainer.restore(found)
        trainer._load_from_checkpoint(str(found))
    close_rewards(job.task)
    spent = time.monotonic() - watch.began[0], cpu_seconds() - watch.began[1]
    if not watch.interrupted and watch.evaluated != steps:
        watch.evaluate(steps)
    failures = _summed(gather_object([close_rewards(job.task)]))
    cpu = sum(gather_object([spent[1]]))
    answers = sum(gather_object([trainer.generated]))
    if not state.is_main_process:
        return {}
    points = _points(run)
    _draw(run, points, job)
    before, after = ({p["step"]: p for p in points}.get(step, {}) for step in (0, steps))
    return {
        "task": job.task.name,
        "seed": job.tree["seed"],
        "steps": steps,
        "world_size": state.num_processes,
        "accuracy_before": {kind: before.get(f"eval/accuracy_{kind}") for kind in KINDS},
        "accuracy_after": {kind: after.get(f"eval/accuracy_{kind}") for kind in KINDS},
        "best": watch.best,
        "evaluation_problems": len(watch.rows),
        "samples": answers,
        "samples_per_second": round(answers / max(spent[0], 1e-9), 1),
        "train_wall_seconds": round(spent[0], 1),
        "train_cpu_seconds": round(cpu, 1),
        "warmup_wall_seconds": round(warmup[0], 1),
        "warmup_cpu_seconds": round(warmup[1], 1),
        "phase_seconds": phase_seconds(read_metrics(run.path / "metrics.jsonl")),
        "groups": dict(trainer.refilled),
        **({"ended": trainer.ended} if trainer.ended else {}),
        **({"data": rows} if rows else {}),
        **({"rewards": failures} if failures else {}),
    }


def _summed(ranks: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Return counts by name summed over ranks."""
    total: dict[str, Counter[str]] = {}
    for counts in ranks:
        for name, found in counts.items():
            total.setdefault(name, Counter()).update(found)
    return {name: dict(found) for name, found in total.items()}


def _finished(checkpoint: Path | None, max_steps: int) -> int | None:
    """Return the step of a checkpoint at which training has ended, or None."""
    if checkpoint is None:
        return None
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    end = max_steps if max_steps > 0 else state["max_steps"]
    return state["global_step"] if state["global_step"] >= end else None


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _points(run: Run) -> list[dict[str, Any]]:
    return [
        line for line in read_metrics(run.path / "metrics.jsonl") if "eval/accuracy_sampled" in line
    ]


def _draw(run: Run, points: list[dict[str, Any]], job: LlmJob) -> None:
    curves = {
        f"held out, {kind}": [(p["step"], p[f"eval/accuracy_{kind}"]) for p in points]
        for kind in KINDS
    }
    curves["reward in training, before refilling"] = [
        (line["step"], line.get("sampling/reward_before_refill", line["reward"]))
        for line in read_metrics(run.path / "metrics.jsonl")
        if "reward" in line
    ]
    write_curves(
        run.path / "learning_curve.svg",
        curves,
        title=f"{job.name}: {job.task.name}",
        x="optimizer steps",
        y="accuracy or reward",
    )
