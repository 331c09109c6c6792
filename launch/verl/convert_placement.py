"""Model and placement: the section `model`, and accelerate's file."""

from typing import Any

from polopt.launch.verl.batch import Batch
from polopt.launch.verl.plan import Plan

__all__ = ["convert_model", "convert_placement"]

_ACTOR = "actor_rollout_ref.actor."
_MODEL = "actor_rollout_ref.model."
_FSDP = _ACTOR + "fsdp_config."


def convert_model(plan: Plan) -> None:
    """Write the section `model` and the fields that load it."""
    trainer = plan.trainer
    path = plan.text(_MODEL + "path")
    plan.sections["model"] = {"use": "pretrained", "path": path}
    plan.say(_MODEL + "path", "exact", "model.path", "")
    plan.default(_MODEL + "path", "model.path", f"verl: {path}")
    trusted = plan.flag(_MODEL + "trust_remote_code") or plan.flag("data.trust_remote_code")
    if trusted:
        trainer["trust_remote_code"] = True
    for name in (_MODEL + "trust_remote_code", "data.trust_remote_code"):
        plan.say(name, "exact", "trainer.trust_remote_code", "")
    _dropout(plan)
    rank = max(plan.integer(_MODEL + "lora_rank"), plan.integer(_MODEL + "lora.rank", default=0))
    for name in (
        "lora_rank",
        "lora.rank",
        "lora_alpha",
        "lora.alpha",
        "target_modules",
        "exclude_modules",
    ):
        if rank:
            plan.say(
                _MODEL + name,
                "refused" if name.endswith("rank") else "unsupported",
                "",
                "adapters are not imported; with --allow the whole model is trained: more "
                "memory, and the learning rate of an adapter is too large for it",
            )
        else:
            plan.say(_MODEL + name, "no effect", "", "lora_rank is 0: the whole model is trained")
    checkpointing = plan.flag(_MODEL + "enable_gradient_checkpointing")
    sharded = plan.accelerate.get("distributed_type") == "FSDP"
    trainer["activation_checkpointing"] = checkpointing and not sharded
    if sharded:
        plan.accelerate["fsdp_config"]["fsdp_activation_checkpointing"] = checkpointing
    target = (
        "accelerate.fsdp_config.fsdp_activation_checkpointing"
        if sharded
        else "trainer.activation_checkpointing"
    )
    plan.say(
        _MODEL + "enable_gradient_checkpointing",
        "exact",
        target,
        "under FSDP transformers prefers accelerate's switch" if sharded else "",
    )
    plan.default(_MODEL + "enable_gradient_checkpointing", target, "verl: on")


def _dropout(plan: Plan) -> None:
    names = [
        _MODEL + f"override_config.{n}" for n in ("attention_dropout", "embd_pdrop", "resid_pdrop")
    ]
    found = [n for n in names if plan.is_set(n)]
    if not found:
        return
    off = all(plan.number(n) == 0 for n in found)
    if off:
        plan.trainer["disable_dropout"] = True
    for name in found:
        plan.say(
            name,
            "exact" if off else "refused",
            "trainer.disable_dropout",
            "0: dropout off" if off else "a dropout other than 0 is not imported",
        )


def convert_placement(plan: Plan, batch: Batch) -> None:
    """Write accelerate's file: FSDP2 over all processes, or one process."""
    machines = plan.integer("trainer.nnodes", low=1)
    file: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if batch.world > 1 else "NO",
        "mixed_precision": "bf16",
        "num_machines": machines,
        "num_processes": batch.world,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    plan.accelerate.update(file)
    plan.sections["launch"] = {"processes": batch.world}
    plan.trainer["bf16"] = True
    if batch.world > 1:
        plan.accelerate["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": plan.flag(_FSDP + "reshard_after_forward"),
            "fsdp_offload_params": plan.flag(_FSDP + "offload_policy"),
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
        }
        plan.trainer["accelerator_config"] = {
            "gradient_accumulation_kwargs": {"sync_each_batch": True}
        }
        plan.defaults.append(
            (
                "(no such key)",
                "trainer.accelerator_config",
                "sync_each_batch: without it FSDP2 keeps whole gradients while it accumulates",
            )
        )
    sharded = "accelerate.fsdp_config" if batch.world > 1 else ""
    plan.say(_FSDP + "reshard_after_forward", "exact", sharded, "")
    plan.say(_FSDP + "offload_policy", "exact", sharded, "fsdp_offload_params")
    _offload(plan, sharded)
    _shards(plan, batch)
    _precision(plan)
    named = plan.launch.options.get("--config-name", "") + plan.launch.options.get("-cn", "")
    if "megatron" in named:
        plan.refusals.append(
            f"line {plan.launch.line}: --config-name={named} chooses Megatron's engine, which has "
            f"no counterpart; with --allow FSDP2 over {batch.world} processes"
        )
    strategy = plan.text(_ACTOR + "strategy") or "fsdp"
    engine = plan.text("model_engine", default="dp") or "dp"
    for name, value, fine in (
        (_ACTOR + "strategy", strategy, ("fsdp", "fsdp2")),
        ("model_engine", engine, ("dp", "fsdp", "fsdp2")),
    ):
        if value in fine:
            plan.say(name, "converted", sharded, "FSDP2" if batch.world > 1 else "one process")
        else:
            plan.say(
                name,
                "refused",
                "",
                f"the engine {value} has no counterpart; with --allow FSDP2 over "
                f"{batch.world} processes, its parallel sizes dropped",
            )
    plan.say("actor_rollout_ref.ref.strategy", "no effect", "", "follows the actor")


def _offload(plan: Plan, sharded: str) -> None:
    for name, what in (("param_offload", "parameters"), ("optimizer_offload", "optimizer states")):
        on = plan.flag(_FSDP + name)
        plan.say(
            _FSDP + name,
            "approximate" if on else "no effect",
            f"{sharded}.fsdp_offload_params" if sharded and on else "",
            f"verl moves {what} to the host between phases; accelerate only streams every "
            "layer and runs Adam on the CPU, which is far slower: left off, vLLM sleeps "
            "during updates. Memory: they stay on the GPU while vLLM generates"
            if on
            else "off",
        )
    name = "actor_rollout_ref.ref.fsdp_config.param_offload"
    if plan.flag(_ACTOR + "use_kl_loss") or plan.flag("algorithm.use_kl_in_reward"):
        plan.say(
            name,
            "inert",
            "",
            "verl 0.9.1 always offloads the reference; TRL gathers it whole on every GPU "
            "while it runs (2 bytes per parameter): for a large model set kl_coef 0 or use "
            "DeepSpeed ZeRO-3",
        )
    else:
        plan.say(name, "no effect", "", "no reference model is loaded")


def _shards(plan: Plan, batch: Batch) -> None:
    size = plan.integer(_FSDP + "fsdp_size", low=-1)
    if size in (-1, 0) or size == batch.world:
        plan.say(_FSDP + "fsdp_size", "exact", "accelerate.fsdp_config", "sharded over all")
        return
    if size > batch.world or batch.world % size:
        item = plan.override(_FSDP + "fsdp_size")
        if item is not None:
            plan.say(
                _FSDP + "fsdp_size",
                "refused",
                "",
                f"it does not divide {batch.world} processes; with --allow sharded over all",
            )
        return
    plan.accelerate["parallelism_config"] = {
        "parallelism_config_dp_replicate_size": batch.world // size,
        "parallelism_config_dp_shard_size": size,
    }
    plan.say(
        _FSDP + "fsdp_size",
        "converted",
        "accelerate.parallelism_config",
        f"shards of {size}, {batch.world} / {size} = {batch.world // size} replicas",
    )


def _precision(plan: Plan) -> None:
    prefix = _FSDP + "mixed_precision."
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        key = prefix + name
        if not plan.is_set(key):
            continue
        value = plan.text(key)
        if name == "buffer_dtype":
            plan.say(key, "no effect", "", "FSDP2 leaves buffers in their own dtype, fp32")
        elif value in ("bf16", "bfloat16"):
            plan.say(key, "exact", "trainer.bf16, accelerate.mixed_precision", "")
        elif name == "reduce_dtype":
            plan.say(
                key,
                "unsupported",
                "",
                f"accelerate reduces in the dtype of mixed_precision, bf16: more rounding "
                f"than in {value}",
            )
        elif value in ("fp32", "float32"):
            plan.trainer["bf16"], plan.accelerate["mixed_precision"] = False, "no"
            plan.say(key, "exact", "trainer.bf16, accelerate.mixed_precision", "no mixed precision")
        else:
            plan.say(key, "unsupported", "", f"{value} is not imported, bf16 is used")
    dtype = plan.text(_FSDP + "model_dtype") or "fp32"
    if dtype in ("bf16", "bfloat16"):
        plan.trainer["bf16"], plan.accelerate["mixed_precision"] = False, "no"
        plan.say(
            _FSDP + "model_dtype",
            "approximate",
            "accelerate.mixed_precision",
            "no mixed precision: weights and Adam have the dtype of the checkpoint, bf16 "
            "if that is bf16",
        )
    else:
        plan.say(
            _FSDP + "model_dtype",
            "exact",
            "accelerate.mixed_precision",
            "fp32 master weights, bf16 computation",
        )
    seconds = plan.integer("actor_rollout_ref.nccl_timeout", low=1)
    plan.trainer["ddp_timeout"] = seconds
    plan.say("actor_rollout_ref.nccl_timeout", "exact", "trainer.ddp_timeout", "seconds")
