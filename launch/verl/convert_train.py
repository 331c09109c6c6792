"""Optimizer, schedule, steps, checkpoints, logging: fields of TRL's `GRPOConfig`."""

import re
from typing import Any

from polopt.launch.verl.batch import Batch, known_rows
from polopt.launch.verl.plan import Plan

__all__ = ["convert_optimizer", "convert_steps", "convert_trackers", "word"]

_OPTIM = "actor_rollout_ref.actor.optim."
_TRACKERS = ("tensorboard", "wandb", "swanlab", "mlflow", "clearml", "trackio")
_OPTIMIZERS = {"adamw": "adamw_torch_fused", "adam": "adamw_torch_fused", "sgd": "sgd"}


def word(text: str) -> str:
    """A name that recipes accept: letters, digits and . _ + -."""
    return re.sub(r"[^\w.+-]+", "-", text).strip("-.+") or "run"


def convert_optimizer(plan: Plan, batch: Batch) -> None:
    """Write learning rate, decay, clipping and schedule."""
    trainer = plan.trainer
    trainer["learning_rate"] = plan.number(_OPTIM + "lr")
    plan.say(_OPTIM + "lr", "exact", "trainer.learning_rate", "")
    trainer["weight_decay"] = plan.number(_OPTIM + "weight_decay")
    plan.say(
        _OPTIM + "weight_decay",
        "exact",
        "trainer.weight_decay",
        "transformers leaves norms and biases undecayed, verl decays all",
    )
    plan.default(_OPTIM + "weight_decay", "trainer.weight_decay", "verl: 0.01, transformers: 0")
    trainer["max_grad_norm"] = plan.number(_OPTIM + "clip_grad")
    plan.say(
        _OPTIM + "clip_grad",
        "exact",
        "trainer.max_grad_norm",
        "verl also skips a step whose norm is not finite",
    )
    plan.default(_OPTIM + "clip_grad", "trainer.max_grad_norm", "verl: 1.0")
    name = "actor_rollout_ref.actor.grad_clip"
    plan.say(name, "inert", "", f"verl 0.9.1 reads optim.clip_grad={trainer['max_grad_norm']:g}")
    item = plan.override(name)
    if item is not None and plan.number(name) != trainer["max_grad_norm"]:
        plan.traps.append(
            f"line {item.line}: actor.grad_clip={item.text} does nothing in verl 0.9.1, gradients "
            f"are clipped at optim.clip_grad={trainer['max_grad_norm']:g}"
        )
    _betas(plan)
    _optimizer(plan)
    _schedule(plan, batch)


def _betas(plan: Plan) -> None:
    betas = plan.value(_OPTIM + "betas")
    betas = [0.9, 0.999] if betas is None else betas
    if not isinstance(betas, list) or len(betas) != 2:
        raise plan.fail(_OPTIM + "betas", "a list of two numbers")
    for field, beta in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
        if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta < 1:
            raise plan.fail(_OPTIM + "betas", "two numbers in [0, 1)")
        plan.trainer[field] = beta
    plan.say(_OPTIM + "betas", "converted", "trainer.adam_beta1, trainer.adam_beta2", "")


def _optimizer(plan: Plan) -> None:
    name = plan.text(_OPTIM + "optimizer")
    found = _OPTIMIZERS.get(name.lower())
    if found:
        plan.trainer["optim"] = found
        plan.say(_OPTIM + "optimizer", "exact", "trainer.optim", found)
    else:
        plan.say(
            _OPTIM + "optimizer",
            "refused",
            "",
            f"no optimizer of transformers is known to be {name!r}; with --allow AdamW",
        )
    plan.say(
        _OPTIM + "optimizer_impl",
        "no effect" if plan.text(_OPTIM + "optimizer_impl") == "torch.optim" else "unsupported",
        "",
        "transformers takes torch's optimizers",
    )


def _schedule(plan: Plan, batch: Batch) -> None:
    trainer = plan.trainer
    kind, source = "constant", _OPTIM + "lr_scheduler_type"
    for name in ("lr_scheduler_type", "lr_decay_style", "warmup_style"):
        if plan.is_set(_OPTIM + name) and plan.value(_OPTIM + name) is not None:
            kind, source = plan.text(_OPTIM + name), _OPTIM + name
            break
    for name in ("lr_scheduler_type", "lr_decay_style", "warmup_style"):
        if plan.is_set(_OPTIM + name) and _OPTIM + name != source:
            plan.say(_OPTIM + name, "no effect", "", f"{source.rpartition('.')[2]} decides")
    steps, factor = plan.value(_OPTIM + "lr_warmup_steps"), batch.optimizer_steps
    ratio = plan.number(_OPTIM + "lr_warmup_steps_ratio")
    warmup: float = ratio
    if steps is not None and plan.integer(_OPTIM + "lr_warmup_steps", low=-1) >= 0:
        count = plan.integer(_OPTIM + "lr_warmup_steps")
        warmup = count * factor
        plan.say(
            _OPTIM + "lr_warmup_steps",
            "converted",
            "trainer.warmup_steps",
            f"{count} rollouts × {factor} optimizer steps = {warmup}; verl's rate is "
            "constant within a rollout",
        )
        plan.say(_OPTIM + "lr_warmup_steps_ratio", "no effect", "", "lr_warmup_steps decides")
    else:
        if not 0 <= ratio < 1:
            raise plan.fail(_OPTIM + "lr_warmup_steps_ratio", "in [0, 1)")
        plan.say(_OPTIM + "lr_warmup_steps", "no effect", "", "negative: the ratio decides")
        plan.say(
            _OPTIM + "lr_warmup_steps_ratio",
            "converted",
            "trainer.warmup_steps",
            f"{ratio:g}: below 1 transformers reads a share of all steps",
        )
    trainer["warmup_steps"] = warmup
    floor = plan.value(_OPTIM + "min_lr_ratio")
    floor = 0.0 if floor is None else plan.number(_OPTIM + "min_lr_ratio")
    scheduler, arguments = kind, {}
    if kind == "constant" and warmup:
        scheduler = "constant_with_warmup"
    elif kind == "cosine" and floor:
        scheduler, arguments = "cosine_with_min_lr", {"min_lr_rate": floor}
    if kind not in ("constant", "cosine", "linear"):
        plan.say(
            source, "refused", "", f"the schedule {kind!r} is not known; with --allow constant"
        )
        scheduler = "constant_with_warmup" if warmup else "constant"
    else:
        plan.say(source, "converted", "trainer.lr_scheduler_type", scheduler)
    trainer["lr_scheduler_type"] = scheduler
    if arguments:
        trainer["lr_scheduler_kwargs"] = arguments
    plan.say(
        _OPTIM + "min_lr_ratio",
        "converted" if arguments else "no effect",
        "trainer.lr_scheduler_kwargs" if arguments else "",
        f"{kind} schedule",
    )
    plan.default(
        source, "trainer.lr_scheduler_type", "verl: constant, transformers decays linearly to zero"
    )


def convert_steps(plan: Plan, batch: Batch, rows: int | None) -> None:
    """Write lengths of the run, checkpoints and evaluations, in optimizer steps.

    Args:
        plan: The work sheet.
        batch: Its sizes.
        rows: Training rows, if they are known.
    """
    trainer, factor = plan.trainer, batch.optimizer_steps
    epochs = plan.integer("trainer.total_epochs", low=1)
    trainer["num_train_epochs"] = epochs
    limit = plan.optional_integer("trainer.total_training_steps", low=-1)
    limit = limit if limit and limit > 0 else None
    plan.say(
        "trainer.total_epochs",
        "exact" if limit is None else "no effect",
        "trainer.num_train_epochs",
        "" if limit is None else "total_training_steps decides",
    )
    if limit is not None:
        trainer["max_steps"] = limit * factor
        plan.say(
            "trainer.total_training_steps",
            "converted",
            "trainer.max_steps",
            f"{limit} rollouts × {factor} optimizer steps = {limit * factor}",
        )
    else:
        plan.say("trainer.total_training_steps", "no effect", "", "null: epochs decide")
    rows = rows or known_rows(plan.texts("data.train_files"))
    rollouts = limit
    if rows is not None:
        per_epoch = rows // batch.prompts
        plan.facts.append(("rollouts per epoch", per_epoch, f"⌊{rows} rows / {batch.prompts}⌋"))
        if per_epoch == 0:
            plan.refusals.append(
                f"{rows} training rows do not fill one rollout of {batch.prompts} prompts"
            )
        if limit is None:
            rollouts = per_epoch * epochs
        left = rows - per_epoch * batch.prompts
        if per_epoch and left and not plan.flag("data.shuffle"):
            plan.traps.append(
                f"data.shuffle=False and {rows} rows: the last {left} rows never fill a rollout, "
                "they are never trained on"
            )
    if rollouts is not None:
        plan.facts.append(
            (
                "rollouts in all",
                rollouts,
                f"{epochs} epochs" if limit is None else "total_training_steps",
            )
        )
        plan.facts.append(("optimizer steps in all", rollouts * factor, f"{rollouts} × {factor}"))
    _checkpoints(plan, factor, rollouts)
    _evaluations(plan, factor, rollouts)


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


def convert_trackers(plan: Plan) -> None:
    """Write trackers and names."""
    trainer = plan.trainer
    loggers = plan.texts("trainer.logger")
    known = [t for t in loggers if t in _TRACKERS]
    other = [t for t in loggers if t not in _TRACKERS and t != "console"]
    trainer["report_to"] = known or "none"
    how = f"{', '.join(known) or 'none'}"
    how += "; console is always on" if "console" in loggers else ""
    how += f"; unknown to transformers: {', '.join(other)}" if other else ""
    plan.say("trainer.logger", "approximate" if other else "converted", "trainer.report_to", how)
    plan.default("trainer.logger", "trainer.report_to", "verl: console and wandb")
    experiment, project = plan.text("trainer.experiment_name"), plan.text("trainer.project_name")
    plan.sections["name"], plan.sections["project"] = word(experiment), word(project)
    same = word(experiment) == experiment
    plan.say(
        "trainer.experiment_name",
        "exact" if same else "converted",
        "name",
        "" if same else f"as a folder name: {word(experiment)}",
    )
    plan.say(
        "trainer.project_name",
        "exact" if word(project) == project else "converted",
        "project",
        "for trackers",
    )
    folder = plan.text("trainer.default_local_dir")
    plan.say(
        "trainer.default_local_dir",
        "ours",
        "",
        f"a run is a folder below ./runs: polopt train --runs {folder} for another place",
    )
    shown = plan.integer("trainer.log_val_generations")
    if shown:
        trainer["log_completions"] = True
        trainer["num_completions_to_print"] = shown
    plan.say(
        "trainer.log_val_generations",
        "approximate" if shown else "no effect",
        "trainer.log_completions" if shown else "",
        f"{shown} samples of training, not of validation" if shown else "0: off",
    )
