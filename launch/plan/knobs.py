"""Which setting helps the phase that does not fit, found by planning with it changed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from polopt.launch.plan.phases import Phase, Plan, plan
from polopt.launch.plan.setup import Setup

__all__ = ["GUIDE", "KNOBS", "Effect", "Knob", "effect", "effects", "faster", "way_out"]


@dataclass(frozen=True)
class Knob:
    """One setting to turn.

    Attributes:
        name: The attribute of `Setup`.
        turn: Returns the changed settings, or None where there is nothing left to turn.
        trl: What TRL or accelerate calls it.
        verl: What verl calls it.
        price: What it costs.
    """

    name: str
    turn: Callable[[Setup], dict[str, Any] | None]
    trl: str
    verl: str
    price: str


def _halve(name: str) -> Callable[[Setup], dict[str, Any] | None]:
    def turn(s: Setup) -> dict[str, Any] | None:
        value = getattr(s, name) or s.micro_batch
        return {name: value // 2} if value > 1 else None

    return turn


def _double(name: str) -> Callable[[Setup], dict[str, Any] | None]:
    return lambda s: {name: 2 * getattr(s, name)}


def _set(name: str, value: bool | str) -> Callable[[Setup], dict[str, Any] | None]:
    return lambda s: {name: value} if getattr(s, name) != value else None


def _micro_batch(s: Setup) -> dict[str, Any] | None:
    # The passes without gradient keep their batch: they are another knob.
    if s.micro_batch == 1:
        return None
    keep = {"log_prob_batch": s.log_prob_batch or s.micro_batch} if s.engine == "verl" else {}
    return {"micro_batch": s.micro_batch // 2, **keep}


def _log_prob_batch(s: Setup) -> dict[str, Any] | None:
    # TRL runs them at per_device_train_batch_size.
    return _halve("log_prob_batch")(s) if s.engine == "verl" else None


def _head(s: Setup) -> dict[str, Any] | None:
    return {"head": "fused"} if s.head == "full" else None


def _less_vllm(s: Setup) -> dict[str, Any] | None:
    if s.vllm == "none" or s.vllm_memory <= 0.15:
        return None
    return {"vllm_memory": round(s.vllm_memory - 0.05, 4)}


def _more_vllm(s: Setup) -> dict[str, Any] | None:
    if s.vllm == "none" or s.vllm_memory >= 0.9:
        return None
    return {"vllm_memory": round(s.vllm_memory + 0.05, 4)}


def _parameters(s: Setup) -> dict[str, Any] | None:
    if s.parameter_offload:
        return None
    whole = s.sharding == "fsdp" and (s.engine == "trl" or s.streaming)
    return {"parameter_offload": True} | ({"optimizer_offload": True} if whole else {})


def _optimizer(s: Setup) -> dict[str, Any] | None:
    if s.optimizer_offload or (s.engine == "trl" and s.sharding == "fsdp"):
        return None
    return {"optimizer_offload": True}


def _shard(s: Setup) -> dict[str, Any] | None:
    if s.sharding == "none":
        return {"sharding": "fsdp", "precision": "auto"} if s.gpus > 1 else None
    if s.sharding in ("zero1", "zero2"):
        return {"sharding": "zero3"}
    return {"shards": min(s.gpus, 2 * s.degree)} if s.degree < s.gpus else None


def _more_gpus(s: Setup) -> dict[str, Any] | None:
    return {"gpus": 2 * s.gpus, "shards": 2 * s.shards} if s.sharding != "none" else None


KNOBS = {
    knob.name: knob
    for knob in (
        Knob(
            "gradient_sync",
            lambda s: None if s.synced else {"gradient_sync": "each"},
            "accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}",
            "verl 0.9.1 or newer (older ones keep whole gradients)",
            "one reduction per micro-batch",
        ),
        Knob(
            "checkpointing",
            _set("checkpointing", True),
            "fsdp_activation_checkpointing or gradient_checkpointing",
            "actor_rollout_ref.model.enable_gradient_checkpointing",
            "every layer runs forward twice",
        ),
        Knob(
            "micro_batch",
            _micro_batch,
            "per_device_train_batch_size, with gradient_accumulation_steps doubled",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            "more, smaller passes",
        ),
        Knob(
            "log_prob_batch",
            _log_prob_batch,
            "none: it follows per_device_train_batch_size",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu (and ref.…)",
            "more, smaller passes",
        ),
        Knob(
            "head",
            _head,
            "always fused",
            "actor_rollout_ref.model.use_fused_kernels",
            "logits are computed again in backward",
        ),
        Knob(
            "sequence_parallel",
            lambda s: (
                {"sequence_parallel": 2 * s.sequence_parallel} if s.engine == "verl" else None
            ),
            "none",
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
            "all-to-all in attention; fewer data-parallel ranks",
        ),
        Knob(
            "sharding",
            _shard,
            "accelerate's FSDP or DeepSpeed config",
            "actor_rollout_ref.actor.fsdp_config.fsdp_size",
            "weights are gathered for every pass",
        ),
        Knob(
            "reference",
            lambda s: {"reference": False} if s.reference else None,
            "the algorithm's kl_coef at 0, or LoRA (the base model is the reference)",
            "actor_rollout_ref.actor.use_kl_loss",
            "no KL to a reference",
        ),
        Knob(
            "parameter_offload",
            _parameters,
            "fsdp_offload_params, offload_param_device: streams, with Adam on the CPU",
            "actor_rollout_ref.actor.fsdp_config.param_offload",
            "copies over PCIe; host memory",
        ),
        Knob(
            "optimizer_offload",
            _optimizer,
            "offload_optimizer_device (DeepSpeed)",
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
            "copies over PCIe; host memory",
        ),
        Knob(
            "vllm_memory",
            _less_vllm,
            "vllm_gpu_memory_utilization",
            "actor_rollout_ref.rollout.gpu_memory_utilization",
            "fewer sequences decoded at a time",
        ),
        Knob(
            "tensor_parallel",
            _double("tensor_parallel"),
            "vllm_tensor_parallel_size",
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            "half as many replicas, which talk to each other",
        ),
        Knob("gpus", _more_gpus, "num_processes", "trainer.nnodes", "more cards"),
    )
}

ORDER = {
    "generation": (
        "parameter_offload",
        "optimizer_offload",
        "vllm_memory",
        "tensor_parallel",
        "sharding",
        "gpus",
    ),
    "log_probs": ("log_prob_batch", "micro_batch", "head", "sequence_parallel", "sharding"),
    "sync": ("optimizer_offload", "sharding"),
    "reference": ("reference", "log_prob_batch", "micro_batch", "head", "sharding"),
}
"""Knobs by phase, the cheap ones first; the remaining ones follow in the order of `KNOBS`."""

WORTH = 0.01
"""Share of the card that a step of `way_out` should save, if any step does."""

GUIDE = {
    "10.6": ("micro_batch", "log_prob_batch", "parameter_offload"),
    "10.4 and 10.11": ("parameter_offload", "optimizer_offload", "micro_batch"),
}
"""What the tuning guide says to turn when memory is short; its two orders contradict."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What one knob does to one phase.

    Attributes:
        knob: The knob.
        settings: What it changes; empty if it is at its end or this engine has none.
        before: GiB of the phase.
        after: GiB of the phase with it.
        helps: Whether the phase needs less, or vLLM gets the room it lacked.
        plan: The plan with it, or None.
    """

    knob: Knob
    settings: dict[str, Any]
    before: float
    after: float
    helps: bool
    plan: Plan | None


def effect(knob: Knob, current: Plan, phase: Phase) -> Effect:
    """Plan again with one knob turned.

    Args:
        knob: A knob.
        current: The plan.
        phase: The phase of `current` that it is to help.
    """
    settings = knob.turn(current.setup)
    if phase.problem and knob.name == "vllm_memory":  # too little for vLLM, not too much
        settings = _more_vllm(current.setup)
    try:
        changed = plan(replace(current.setup, **settings)) if settings else None
    except ValueError:  # it does not divide the heads, or this engine cannot
        settings, changed = None, None
    if changed is None:
        return Effect(
            knob=knob,
            settings={},
            before=phase.total,
            after=phase.total,
            helps=False,
            plan=None,
        )
    phases = {p.name: p for p in changed.phases}
    after = phases[phase.name].total if phase.name in phases else 0.0
    helps = after < phase.total - 0.01
    if phase.problem and current.engine and changed.engine:
        helps = changed.engine.cache > current.engine.cache
    return Effect(
        knob=knob,
        settings=dict(settings or {}),
        before=phase.total,
        after=after,
        helps=helps,
        plan=changed,
    )


def effects(current: Plan) -> list[Effect]:
    """Return what every knob does to the worst phase, in the order to try them."""
    phase = current.worst
    first = ORDER.get(phase.name, ())
    names = [*first, *(n for n in KNOBS if n not in first)]
    found = [effect(KNOBS[name], current, phase) for name in names]
    return sorted(found, key=lambda e: not e.helps)


def way_out(current: Plan) -> list[Effect]:
    """Turn one knob after the other until the plan fits, at least at risk.

    Args:
        current: A plan; nothing is turned if it fits already.

    Returns:
        The knobs in order; the last one's plan is the result. More cards come last, when no
        other knob helps. Empty if none does.
    """
    taken: list[Effect] = []
    while current.verdict == "does not fit" and len(taken) < 40:
        helping = [e for e in effects(current) if e.helps and e.plan]
        cheap = [e for e in helping if e.knob.name != "gpus"]
        worth = [e for e in cheap if e.before - e.after > WORTH * current.setup.gpu.memory]
        steps = worth or cheap[:1] or helping
        if not steps:
            break
        taken.append(steps[0])
        current = steps[0].plan or current
    return taken


def faster(current: Plan) -> list[tuple[str, Plan]]:
    """Return the guide's steps for more speed (10.11, step 2), each planned on its own."""
    s, steps = current.setup, []
    if s.parameter_offload:
        steps.append({"parameter_offload": False})
        if s.engine == "trl" and s.sharding == "fsdp":
            steps[-1]["optimizer_offload"] = False
    if s.vllm != "none" and s.vllm_memory < 0.8:
        steps.append({"vllm_memory": 0.8})
    if s.vllm != "none":
        steps.append({"max_batched_tokens": 2 * s.max_batched_tokens})
    steps.append({"micro_batch": 2 * s.micro_batch})
    return [
        (", ".join(f"{k}={str(v).lower()}" for k, v in step.items()), plan(replace(s, **step)))
        for step in steps
    ]
