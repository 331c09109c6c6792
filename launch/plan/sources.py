"""From a recipe or a launch script of verl to a setup."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polopt.launch.plan.architecture import Architecture, from_config, load
from polopt.launch.recipe import RecipeError, check_keys
from polopt.launch.recipe import load as load_recipe

__all__ = ["Source", "from_recipe", "from_script"]

TINY_VOCABULARY = 128
"""Bound on the tokenizer that `tiny_qwen3` makes for a task; planning does not make it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """What a file says.

    Attributes:
        model: The architecture, None if the file names none that is known here.
        model_name: How the file calls it.
        settings: Attributes of `Setup`.
        said: What was assumed because the file does not say, one sentence each.
    """

    model: Architecture | None
    model_name: str
    settings: dict[str, Any]
    said: list[str]


def from_recipe(path: Path, overrides: Sequence[str]) -> Source:
    """Read a recipe of a text task; an `accelerate.yaml` beside it is read too.

    Raises:
        RecipeError: If it is no such recipe.
    """
    from polopt.launch.job import processes

    tree = load_recipe(path, overrides)
    sections = [s for n in ("trainer", "model", "task") if isinstance(s := tree.get(n), dict)]
    if len(sections) < 3:
        raise RecipeError(
            f"{path.name} trains no language model (sections task, model and trainer): there is "
            "nothing to plan, control tasks need little memory"
        )
    trainer, model, task = sections
    check_keys(trainer, _trl_defaults(), "trainer")
    trainer = {**_trl_defaults(), **trainer}

    def number(key: str, default: int) -> int:
        return _number(trainer, "trainer", key, default)

    world = processes(tree)
    accumulation = number("gradient_accumulation_steps", 1)
    group = number("num_generations", 8)
    per_device = number("per_device_train_batch_size", 8)
    generate = number("steps_per_generation", accumulation)
    rollout = number("generation_batch_size", per_device * generate * world)
    tensor_parallel = number("vllm_tensor_parallel_size", 1)
    said = []
    if task.get("max_prompt_length") is None:
        said.append("the recipe bounds no prompt: prompt_length=512 is assumed")
    architecture, name = _recipe_model(model)
    tiny = model.get("use") == "tiny_qwen3"
    settings = {
        "engine": "trl",
        "gpus": world,
        "precision": "fp32" if trainer["bf16"] is False else "mixed" if tiny else "auto",
        "prompt_length": _number(task, "task", "max_prompt_length", 512),
        "completion_length": number("max_completion_length", 256),
        "micro_batch": per_device,
        "checkpointing": bool(_checkpointing(trainer)),
        "attention": "eager" if architecture and architecture.model_type == "gemma2" else "sdpa",
        "gradient_sync": "each" if _synced(trainer) else "last",
        "vllm": trainer["vllm_mode"] if trainer["use_vllm"] else "none",
        "vllm_memory": trainer["vllm_gpu_memory_utilization"],
        "vllm_sleep": bool(trainer["vllm_enable_sleep_mode"]),
        "tensor_parallel": tensor_parallel,
        "max_batched_tokens": 4096,  # TRL fixes it for a colocated vLLM
        "max_sequences": per_device * tensor_parallel * generate,
        "prompts_per_rollout": max(1, rollout // group),
        "num_generations": group,
        "completions_per_step": per_device * accumulation * world,
        "iterations": number("num_iterations", 1),
        "epochs": trainer["num_train_epochs"],
    }
    settings |= _algorithm(tree.get("algorithm")) | _accelerate(path.parent / "accelerate.yaml")
    if settings["sharding"] == "none" and world > 1:
        said.append("no accelerate.yaml beside the recipe shards the model: DDP is assumed")
    return Source(model=architecture, model_name=name, settings=settings, said=said)


def _number(section: Mapping[str, Any], title: str, key: str, default: int) -> int:
    value = default if section.get(key) is None else section[key]
    if type(value) is not int or value < 1:
        raise RecipeError(f"'{title}.{key}' must be a whole number from 1, got {value!r}")
    return value


def _trl_defaults() -> dict[str, Any]:
    from polopt.launch.job import missing_extra

    with missing_extra("planning a recipe"):
        from trl.trainer.grpo_config import GRPOConfig
    fields = dataclasses.fields(GRPOConfig)
    return {f.name: None if f.default is dataclasses.MISSING else f.default for f in fields}


def _checkpointing(trainer: Mapping[str, Any]) -> Any:  # noqa: ANN401
    given = trainer.get("activation_checkpointing")
    return trainer.get("gradient_checkpointing") if given is None else given


def _synced(trainer: Mapping[str, Any]) -> bool:
    config = trainer.get("accelerator_config")
    kwargs = config.get("gradient_accumulation_kwargs") if isinstance(config, Mapping) else None
    return bool((kwargs or {}).get("sync_each_batch"))


def _recipe_model(section: Mapping[str, Any]) -> tuple[Architecture | None, str]:
    if section.get("use") == "tiny_qwen3":
        hidden, heads = (
            _number(section, "model", key, size)
            for key, size in (("hidden_size", 64), ("heads", 4))
        )
        config = {
            "model_type": "qwen3",
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": _number(section, "model", "layers", 2),
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "head_dim": max(16, hidden // heads),
            "vocab_size": TINY_VOCABULARY,
            "tie_word_embeddings": True,
        }
        return from_config(config, name="tiny_qwen3"), "tiny_qwen3"
    return _known(str(section.get("path", "")))


def _known(name: str) -> tuple[Architecture | None, str]:
    try:
        return load(name), name
    except ValueError as error:
        if "neither a folder" in str(error):
            return None, name
        raise


def _algorithm(section: object) -> dict[str, Any]:
    """Whether the algorithm has a reference and a critic."""
    if section is None:
        return {}
    from polopt.launch.job import loss_names
    from polopt.launch.recipe import build

    algorithm = build(section, loss_names(), "algorithm")
    if not hasattr(algorithm, "objective"):
        raise RecipeError(
            f"'algorithm' must build an Algorithm, such as dapo, got {type(algorithm).__name__}"
        )
    return {
        "reference": bool(algorithm.objective.uses_reference),
        "critic": "none" if algorithm.value is None else "separate",
    }


def _accelerate(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {"sharding": "none"}
    tree = load_recipe(path)
    kind = str(tree.get("distributed_type", "NO")).upper()
    if kind == "FSDP":
        config = _mapping(tree, "fsdp_config", path)
        offload = bool(config.get("fsdp_offload_params"))
        found = {
            "sharding": "fsdp",
            "parameter_offload": offload,
            "optimizer_offload": offload,
        }
        if config.get("fsdp_activation_checkpointing"):
            found["checkpointing"] = True
        return found
    if kind == "DEEPSPEED":
        config = _mapping(tree, "deepspeed_config", path)
        stage = config.get("zero_stage", 2)
        return {
            "sharding": f"zero{stage}" if stage else "none",
            "parameter_offload": config.get("offload_param_device", "none") != "none",
            "optimizer_offload": config.get("offload_optimizer_device", "none") != "none",
        }
    return {"sharding": "none"}


def _mapping(tree: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    section = tree.get(key) or {}
    if not isinstance(section, Mapping):
        raise RecipeError(f"{path.name}: {key!r} must be a mapping of settings, got {section!r}")
    return section


_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."


def from_script(text: str, given: Mapping[str, str]) -> Source:
    """Read a launch script of verl with the importer; nothing in it is executed.

    Args:
        text: The script.
        given: What only running it would tell, and further overrides by key.

    Raises:
        ValueError: If it cannot be read, or trains with something that is not planned.
    """
    from polopt.launch.job import missing_extra
    from polopt.launch.verl.batch import known_rows

    with missing_extra("reading a script of verl"):
        from polopt.launch.verl.importer import ROWS, import_script

        script = import_script(text, given).plan
    if script.launch.kind in ("sft", "generation", "evaluation"):
        raise ValueError(f"{script.launch.module} does not train by reinforcement: nothing to plan")
    strategy = script.text(_ACTOR + "strategy")
    if not strategy.startswith("fsdp"):
        raise ValueError(f"{_ACTOR}strategy={strategy} is not planned, only fsdp and fsdp2 are")
    length = script.integer("data.max_prompt_length") + script.integer("data.max_response_length")
    ulysses = "ulysses_sequence_parallel_size"
    sequence = max(
        script.integer(_ACTOR + ulysses, low=1),
        script.integer(_ACTOR + "fsdp_config." + ulysses, low=1),
    )

    def batch(size: str, dynamic: str, tokens: str, otherwise: int) -> int:
        if script.flag(dynamic):
            return max(1, script.integer(tokens, low=1) * sequence // length)
        return script.optional_integer(size, low=1) or otherwise

    micro = batch(
        _ACTOR + "ppo_micro_batch_size_per_gpu",
        _ACTOR + "use_dynamic_bsz",
        _ACTOR + "ppo_max_token_len_per_gpu",
        0,
    )
    if not micro:
        raise ValueError(
            f"{_ACTOR}ppo_micro_batch_size_per_gpu is not set: supply {_ACTOR}"
            "ppo_micro_batch_size_per_gpu=N"
        )
    lora = script.value("actor_rollout_ref.model.lora_rank")
    if type(lora) is int and lora > 0:
        raise ValueError(
            f"actor_rollout_ref.model.lora_rank={lora}: LoRA is not planned; "
            "actor_rollout_ref.model.lora_rank=0 plans the training of all weights"
        )
    generations = script.integer(_ROLLOUT + "n", low=1)
    engine = script.text(_ROLLOUT + "name")
    shards = script.value(_ACTOR + "fsdp_config.fsdp_size")
    model, name = _known(script.text("actor_rollout_ref.model.path"))
    dtype = script.text(_ACTOR + "fsdp_config.model_dtype", default="fp32")
    streams = script.flag(_ACTOR + "fsdp_config.offload_policy", default=False)
    gae = script.text("algorithm.adv_estimator") == "gae"
    rows = given.get(ROWS) or known_rows(script.texts("data.train_files"))
    settings = {
        "engine": "verl",
        "sharding": "fsdp",
        "shards": shards if type(shards) is int and shards > 0 else 0,
        "gpus": script.integer("trainer.nnodes", low=1)
        * script.integer("trainer.n_gpus_per_node", low=1),
        "prompt_length": script.integer("data.max_prompt_length", low=1),
        "completion_length": script.integer("data.max_response_length", low=1),
        "micro_batch": micro,
        "log_prob_batch": batch(
            _ROLLOUT + "log_prob_micro_batch_size_per_gpu",
            _ROLLOUT + "log_prob_use_dynamic_bsz",
            _ROLLOUT + "log_prob_max_token_len_per_gpu",
            micro,
        ),
        "sequence_parallel": sequence,
        "checkpointing": script.flag("actor_rollout_ref.model.enable_gradient_checkpointing"),
        "head": "fused" if script.flag("actor_rollout_ref.model.use_fused_kernels") else "full",
        "precision": "bf16" if dtype in ("bf16", "bfloat16") else "mixed",
        "parameter_offload": streams or script.flag(_ACTOR + "fsdp_config.param_offload"),
        "optimizer_offload": streams or script.flag(_ACTOR + "fsdp_config.optimizer_offload"),
        "streaming": streams,
        "reference": script.flag(_ACTOR + "use_kl_loss")
        or script.flag("algorithm.use_kl_in_reward"),
        "critic": "separate" if gae else "none",
        "vllm": "none" if engine == "hf" else "colocate",
        "vllm_memory": script.number(_ROLLOUT + "gpu_memory_utilization"),
        "vllm_sleep": script.flag(_ROLLOUT + "free_cache_engine"),
        "tensor_parallel": script.integer(_ROLLOUT + "tensor_model_parallel_size", low=1),
        "max_batched_tokens": script.integer(_ROLLOUT + "max_num_batched_tokens", low=1),
        "max_sequences": script.integer(_ROLLOUT + "max_num_seqs", low=1),
        "prompts_per_rollout": script.integer("data.train_batch_size", low=1),
        "num_generations": generations,
        "completions_per_step": script.integer(_ACTOR + "ppo_mini_batch_size", low=1) * generations,
        "iterations": script.integer(_ACTOR + "ppo_epochs", low=1),
        "rows": int(rows or 0),
        "epochs": float(script.number("trainer.total_epochs")),
    }
    said = [] if rows else ["the number of training rows is not known: give rows=N"]
    if gae:
        said.append("the critic is planned as large as the policy, with the policy's settings")
    if engine not in ("vllm", "hf"):
        said.append(f"{engine} is planned like vLLM")
    return Source(model=model, model_name=name, settings=settings, said=said)
