"""Optimizer, schedule, trackers and names: fields of TRL's `GRPOConfig`."""

import re

from polopt.launch.verl.batch import Batch
from polopt.launch.verl.plan import Plan

__all__ = ["convert_optimizer", "convert_trackers", "word"]

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
