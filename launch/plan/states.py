"""Sizes of weights, gradients and optimizer states on one GPU, in bytes, by sharding."""

from dataclasses import dataclass

from polopt.launch.plan.setup import Setup

__all__ = [
    "LIVE_PARAMETERS",
    "States",
    "accumulation",
    "gathered",
    "in_flight",
    "states",
    "unsynced",
]

LIVE_PARAMETERS = 10**9
"""ZeRO-3 gathers at most so many weights (stage3_max_live_parameters); accelerate's default."""

SUB_GROUP = 10**9
"""Weights that ZeRO-3 steps at a time (sub_group_size)."""


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes of one model in training, on one GPU.

    Attributes:
        weights: Resident weights: float32 masters, or bfloat16 where there are none.
        optimizer: Adam's moments, and ZeRO's float32 masters.
        gradients: Accumulated gradients.
        buckets: Copies of gradients that a reduction needs (DDP).
        step: What the optimizer step needs besides, when activations are gone.
    """

    weights: float
    optimizer: float
    gradients: float
    buckets: float = 0.0
    step: float = 0.0


def states(setup: Setup, parameters: int) -> States:
    """Return what one model with gradients needs.

    Args:
        setup: Settings.
        parameters: Number of parameters of the model.
    """
    n, kind = setup.degree, setup.sharding
    size = 2 if setup.dtype == "bf16" else 4
    if kind == "none":
        return States(
            weights=size * parameters,
            optimizer=2 * size * parameters,
            gradients=size * parameters,
            buckets=size * parameters if setup.gpus > 1 else 0.0,
        )
    if kind == "fsdp":
        shard = 0.0 if setup.streams else size * parameters / n
        # Without a reduction per micro-batch the gradients stay whole, in the dtype of compute.
        whole = min(size, 2) * parameters if unsynced(setup) else 0.0
        return States(weights=shard, optimizer=2 * shard, gradients=shard + whole)
    on_gpu = 0 if setup.parameter_offload else 1
    # Gradients become float32 for the step: all of the shard, in stage 3 a sub-group at a time.
    converted = min(parameters / n, SUB_GROUP) if kind == "zero3" else parameters / n
    return States(
        weights=2 * on_gpu * parameters / (n if kind == "zero3" else 1),
        optimizer=0.0 if setup.optimizer_offload else 12 * parameters / n,
        gradients=2 * parameters / (1 if kind == "zero1" else n),
        step=0.0 if setup.optimizer_offload else 4.0 * converted,
    )


def unsynced(setup: Setup) -> bool:
    """Whether FSDP accumulates gradients unsharded."""
    return setup.sharding == "fsdp" and not setup.synced and accumulation(setup) > 1


def accumulation(setup: Setup) -> int:
    """Return the micro-batches of one optimizer step on one rank, rounded up."""
    rollout = setup.prompts_per_rollout * setup.num_generations
    completions = setup.completions_per_step or rollout
    return -(-completions // (setup.micro_batch * setup.data_parallel))


def gathered(setup: Setup) -> dict[str, float]:
    """Return the weights that are whole on this GPU through a pass, in bytes.

    FSDP keeps embedding, head and last norm gathered (they are its root), and one layer; ZeRO-3
    as many weights as it may.
    """
    m, size = setup.model, 4 if setup.dtype == "fp32" else 2
    if setup.sharding == "fsdp":
        return {"gathered embedding and head": size * m.root, "gathered layer": size * m.layer}
    if setup.sharding == "zero3":
        return {"gathered layers": size * min(m.parameters, LIVE_PARAMETERS)}
    return {}


def in_flight(setup: Setup, *, backward: bool) -> float:
    """Return the bytes of the next layer, gathered ahead, and of a gradient not yet reduced."""
    m, size = setup.model, 4 if setup.dtype == "fp32" else 2
    ahead = size * m.layer if setup.sharding == "fsdp" else 0
    unreduced = size * m.layer if backward and setup.sharding in ("fsdp", "zero3") else 0
    return float(ahead + unreduced)
