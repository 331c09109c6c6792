"""Steps: verl counts rollouts, TRL counts optimizer steps."""

from typing import Any

from polopt.launch.verl.batch import Batch, known_rows
from polopt.launch.verl.plan import Plan

__all__ = ["convert_steps"]


def convert_steps(plan: Plan, batch: Batch, rows: int | None) -> None:
    """Write lengths of the run, checkpoints and evaluations, in optimizer steps.

    Args:
        plan: The work sheet.
        batch: Its sizes.
        rows: Training rows, if they are known.
    """
    factor = batch.optimizer_steps
    epochs = plan.integer("trainer.total_epochs", low=1)
    limit = plan.optional_integer("trainer.total_training_steps", low=-1)
    limit = limit if limit and limit > 0 else None
    rows = rows or known_rows(plan.texts("data.train_files"))
    whole = None if rows is None else _epochs(plan, rows, batch.prompts) * epochs
    rollouts = min((n for n in (limit, whole) if n is not None), default=None)
    _length(plan, epochs, limit, whole, factor)
    if rollouts is not None:
        how = f"{epochs} epochs" if rollouts == whole else "total_training_steps"
        plan.facts.append(("rollouts in all", rollouts, how))
        plan.facts.append(("optimizer steps in all", rollouts * factor, f"{rollouts} × {factor}"))
    _checkpoints(plan, factor, rollouts)
    _evaluations(plan, factor, rollouts)


def _epochs(plan: Plan, rows: int, prompts: int) -> int:
    """Rollouts per epoch; both frameworks drop what does not fill the last one."""
    per_epoch = rows // prompts
    plan.facts.append(("rollouts per epoch", per_epoch, f"⌊{rows} rows / {prompts}⌋"))
    if per_epoch == 0:
        plan.refusals.append(f"{rows} training rows do not fill one rollout of {prompts} prompts")
    left = rows - per_epoch * prompts
    if per_epoch and left and not plan.flag("data.shuffle"):
        plan.traps.append(
            f"data.shuffle=False and {rows} rows: the last {left} rows never fill a rollout, "
            "they are never trained on"
        )
    return per_epoch


def _length(plan: Plan, epochs: int, limit: int | None, whole: int | None, factor: int) -> None:
    """Write the length of the run: verl stops at the epochs or the steps, what comes first."""
    plan.trainer["num_train_epochs"] = epochs
    plan.default("trainer.total_epochs", "trainer.num_train_epochs", f"verl: {epochs}")
    name = "trainer.total_training_steps"
    if limit is None or (whole is not None and whole <= limit):
        plan.say("trainer.total_epochs", "exact", "trainer.num_train_epochs", "")
        reason = "null: epochs decide" if limit is None else f"{epochs} epochs end before"
        plan.say(name, "no effect", "", reason)
        return
    plan.trainer["max_steps"] = limit * factor
    how = f"{limit} rollouts × {factor} optimizer steps = {limit * factor}"
    if whole is None:
        how += f"; verl also stops after {epochs} epochs, if that comes first (--set data.rows=…)"
    plan.say(name, "converted", "trainer.max_steps", how)
    plan.say("trainer.total_epochs", "no effect", "", "total_training_steps ends the run before")


def _every(plan: Plan, name: str, target: str, factor: int) -> int | None:
    frequency = plan.integer(name, low=-1)
    if frequency <= 0:
        plan.say(name, "converted", f"trainer.{target}_strategy", "no")
        plan.trainer[f"{target}_strategy"] = "no"
        return None
    plan.trainer[f"{target}_strategy"] = "steps"
    plan.trainer[f"{target}_steps"] = frequency * factor
    plan.say(
        name,
        "converted",
        f"trainer.{target}_steps",
        f"{frequency} rollouts × {factor} optimizer steps = {frequency * factor}",
    )
    plan.facts.append((f"{target}_steps", frequency * factor, f"{frequency} × {factor}"))
    return frequency


def _checkpoints(plan: Plan, factor: int, rollouts: int | None) -> None:
    frequency = _every(plan, "trainer.save_freq", "save", factor)
    item = plan.override("trainer.save_freq")
    if frequency and rollouts is not None and frequency > rollouts:
        where = f"line {item.line}: " if item else ""
        plan.traps.append(
            f"{where}save_freq={frequency} counts rollouts and there are {rollouts}: only the "
            "final checkpoint is written"
        )
    keep = plan.value("trainer.max_actor_ckpt_to_keep")
    if keep is not None:
        plan.trainer["save_total_limit"] = plan.integer("trainer.max_actor_ckpt_to_keep", low=1)
        plan.say("trainer.max_actor_ckpt_to_keep", "exact", "trainer.save_total_limit", "")
    else:
        plan.trainer["save_total_limit"] = None
        plan.say("trainer.max_actor_ckpt_to_keep", "no effect", "", "null: all are kept")
    _resume(plan)


def _resume(plan: Plan) -> None:
    mode, path = plan.text("trainer.resume_mode"), plan.text("trainer.resume_from_path")
    item = plan.override("trainer.resume_from_path")
    if mode == "resume_path" and "global_step_" in path:
        plan.say(
            "trainer.resume_mode",
            "unsupported",
            "",
            "a run is resumed with polopt train --resume RUN; verl's checkpoints cannot be "
            "read, merge them to the Hugging Face format and use that as the model",
        )
        plan.say("trainer.resume_from_path", "unsupported", "", "see resume_mode")
        return
    plan.say(
        "trainer.resume_mode",
        "approximate",
        "",
        "verl resumes by itself, polopt when asked: polopt train --resume RUN"
        if mode == "auto"
        else "a new run starts from the model",
    )
    plan.say(
        "trainer.resume_from_path",
        "inert",
        "",
        f"verl reads it only with resume_mode=resume_path, and resume_mode is {mode}",
    )
    if item is not None and path:
        plan.traps.append(
            f"line {item.line}: resume_from_path={item.text} does nothing: resume_mode is {mode}"
            + ("" if "global_step_" in path else ", and the path holds no global_step_ folder")
        )


def _evaluations(plan: Plan, factor: int, rollouts: int | None) -> None:
    frequency = plan.integer("trainer.test_freq", low=-1)
    section: dict[str, Any] = {}
    if frequency > 0:
        section["every"] = frequency * factor
        plan.facts.append(("eval_steps", frequency * factor, f"{frequency} × {factor}"))
        plan.say(
            "trainer.test_freq",
            "converted",
            "evaluation.every",
            f"{frequency} rollouts × {factor} optimizer steps = {frequency * factor}",
        )
    else:
        plan.say("trainer.test_freq", "converted", "evaluation.every", "none in between")
    plan.sections["evaluation"] = section
    before = plan.flag("trainer.val_before_train")
    plan.say(
        "trainer.val_before_train",
        "exact" if before else "approximate",
        "evaluation",
        "polopt evaluates before and after training"
        if before
        else "polopt evaluates before training all the same",
    )
    plan.default("trainer.val_before_train", "evaluation", "verl and polopt validate first")
    if frequency > 0 and rollouts is not None:
        count = rollouts // frequency + (rollouts % frequency > 0) + before
        plan.facts.append(
            (
                "evaluations",
                count,
                f"every {frequency} of {rollouts} rollouts"
                f"{', the last step' if rollouts % frequency else ''}"
                f"{' and the start' if before else ''}",
            )
        )
    prefix = "actor_rollout_ref.rollout.val_kwargs."
    repeats = plan.integer(prefix + "n", low=1)
    plan.say(
        prefix + "n",
        "exact" if repeats == 1 else "approximate",
        "evaluation",
        "" if repeats == 1 else f"one answer per problem, not the mean of {repeats}",
    )
    sampled = plan.flag(prefix + "do_sample")
    for name in ("do_sample", "temperature", "top_p", "top_k"):
        fits = not sampled or (name != "do_sample" and plan.value(prefix + name) in (1, 1.0, -1, 0))
        plan.say(
            prefix + name,
            "exact" if fits else "approximate",
            "evaluation",
            "polopt evaluates greedily, as verl does, and once more at temperature 1"
            if not sampled
            else "polopt evaluates greedily and at temperature 1",
        )
