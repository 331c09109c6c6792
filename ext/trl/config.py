"""What `PolicyTrainer` refuses before any work starts."""

import copy
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from trl import GRPOConfig

from polopt.losses import Algorithm, OffPolicy
from polopt.losses.controllers import observe_all

__all__ = [
    "LOSS_FIELDS",
    "check_algorithm",
    "check_config",
    "check_data",
    "check_rollouts",
    "check_sampling",
    "check_tokenizer",
    "check_turns",
    "check_whole",
    "check_windows",
    "needs_whole",
    "selects",
    "with_reference",
]

LOSS_FIELDS = {
    "loss_type": "algorithm",
    "epsilon": "the clip of the algorithm's surrogate",
    "epsilon_high": "the clip of the algorithm's surrogate",
    "delta": "the dual clip of the algorithm's surrogate",
    "beta": "objective.kl_coef",
    "use_bias_correction_kl": "objective.kl_reweighted",
    "importance_sampling_level": "objective.ratio",
    "sapo_temperature_neg": "sapo(tau_negative=…)",
    "sapo_temperature_pos": "sapo(tau_positive=…)",
    "vespo_k_pos": "nothing: VESPO is not offered",
    "vespo_lambda_pos": "nothing: VESPO is not offered",
    "vespo_k_neg": "nothing: VESPO is not offered",
    "vespo_lambda_neg": "nothing: VESPO is not offered",
    "multi_objective_aggregation": "algorithm.advantage",
    "scale_rewards": "the scale of algorithm.advantage",
    "mask_truncated_completions": "sampling.drop_truncated",
    "top_entropy_quantile": "sampling.top_entropy",
    "entropy_coef": "objective.entropy_coef",
    "use_adaptive_entropy": "objective.entropy_coef",
    "entropy_coef_min": "objective.entropy_coef",
    "entropy_coef_max": "objective.entropy_coef",
    "entropy_coef_delta": "objective.entropy_coef",
    "entropy_target": "objective.entropy_coef",
    "off_policy_mask_threshold": "objective.corrections (OffPolicyMask)",
    "vllm_importance_sampling_correction": "objective.corrections",
    "vllm_importance_sampling_mode": "objective.corrections",
    "vllm_importance_sampling_clip_max": "objective.corrections",
    "vllm_importance_sampling_clip_min": "objective.corrections",
    "vllm_importance_sampling_cap": "objective.corrections",
    "router_aux_loss_coef": "nothing: the auxiliary loss of mixtures of experts is not supported",
    "use_liger_kernel": "nothing: Liger's kernel computes TRL's loss, not the algorithm's",
}
"""Fields of `GRPOConfig` that belong to the loss, and where polopt has that setting."""

ADVANTAGE_INPUTS = (
    "reward", "group", "rewards", "length", "token_reward", "mask", "greedy_reward",
)  # fmt: skip


def check_config(args: GRPOConfig) -> None:
    """Refuse a config that sets the loss, the algorithm's business, or starves the rewards.

    Args:
        args: TRL's config. Fields that this version of TRL lacks are skipped.

    Raises:
        ValueError: If a field of `LOSS_FIELDS` differs from its default, or columns would be
            removed that the rewards need.
    """
    if args.remove_unused_columns:
        raise ValueError(
            "trainer.remove_unused_columns=True takes the columns away that the rewards need: "
            "leave it at False"
        )
    for field in fields(args):
        if field.name not in LOSS_FIELDS:
            continue
        default = field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
        value = getattr(args, field.name)
        if value != default:
            where = LOSS_FIELDS[field.name]
            reason = where.removeprefix("nothing: ")
            mend = f"and set {where} instead" if reason == where else f"({reason})"
            raise ValueError(
                f"trainer.{field.name}={value!r} is a setting of TRL's own loss, which is not "
                f"used: leave it at {default!r} {mend}"
            )


def check_algorithm(algorithm: Algorithm) -> None:
    """Refuse an algorithm that needs what this trainer does not provide.

    Raises:
        ValueError: If it trains a critic, or a part needs inputs that are not there.
    """
    if isinstance(algorithm, OffPolicy):
        raise ValueError(
            "the algorithm learns values of actions from a replay buffer, for control tasks: a "
            "language model takes one of policy gradients (grpo, dapo, rloo, …)"
        )
    if not isinstance(algorithm, Algorithm):
        raise ValueError(f"algorithm must be an Algorithm such as dapo(), got {algorithm!r}")
    if algorithm.value is not None:
        raise ValueError(
            "the algorithm trains a critic (value is set), which PolicyTrainer does not: use a "
            "group-based one (grpo, dapo, rloo, …)"
        )
    unknown = [name for name in algorithm.advantage.needs if name not in ADVANTAGE_INPUTS]
    if unknown:
        raise ValueError(
            f"the advantage needs {unknown}, and PolicyTrainer provides {list(ADVANTAGE_INPUTS)}"
        )
    objective = algorithm.objective
    if algorithm.sampling.top_entropy is not None and objective.aggregation == "group_token_mean":
        raise ValueError(
            "sampling.top_entropy chooses tokens for each optimizer step, and aggregation "
            "'group_token_mean' counts those of a whole group, of which steps may see parts: use "
            "'token_mean'"
        )
    measured = ["entropy", "clip_fraction", "loss_objective"]
    measured += ["kl_approx", "ratio_mean"] if objective.ratio != "none" else []
    measured += ["kl"] if objective.uses_reference else []
    # Not a number: asks only whether every controller finds its metric.
    observe_all(algorithm, dict.fromkeys(measured, math.nan), 0)


def check_data(args: GRPOConfig, dataset: Any) -> None:  # noqa: ANN401
    """Refuse data that cannot be trained on.

    Args:
        args: TRL's config, which has checked that whole groups make a generation batch.
        dataset: Training data, or None where an environment owns it.

    Raises:
        ValueError: If the data has images or too few rows.
    """
    columns = set(getattr(dataset, "column_names", None) or ())
    images = columns & {"image", "images"}
    if images:
        raise ValueError(
            f"the dataset has the column {sorted(images)[0]!r}: PolicyTrainer does not support "
            "images yet, use a dataset of texts"
        )
    prompts = args.generation_batch_size // args.num_generations
    # None: files that are read later. TRL drops incomplete batches: it would train for zero steps
    # and say that it is done.
    if hasattr(dataset, "__len__") and 0 < len(dataset) < prompts:
        raise ValueError(
            f"the training data has {len(dataset)} rows, and one generation takes {prompts} "
            f"prompts (generation_batch_size={args.generation_batch_size} / "
            f"num_generations={args.num_generations}): use more data or a smaller batch"
        )


def check_sampling(
    args: GRPOConfig,
    algorithm: Algorithm,
    dataset: Any,  # noqa: ANN401
    processes: int,
    *,
    environment: bool = False,
) -> None:
    """Refuse ways of sampling that the batches or the data do not allow.

    Args:
        args: TRL's config.
        algorithm: The algorithm.
        dataset: Training data, or None where an environment owns it.
        processes: Number of ranks.
        environment: Whether an environment may own the data.

    Raises:
        ValueError: If refilling or the greedy baseline need what is not there, or the slope of
            the soft punishment does not fit the longest answer.
    """
    cache = algorithm.sampling.overlong_cache
    if cache is not None and cache > args.max_completion_length:
        raise ValueError(
            f"sampling.overlong_cache={cache} must be at most "
            f"max_completion_length={args.max_completion_length}"
        )
    greedy = "greedy_reward" in algorithm.advantage.needs
    if greedy and args.use_vllm:
        raise ValueError(
            "the advantage needs the reward of the greedy answer, which PolicyTrainer does not ask "
            "vLLM for yet: leave use_vllm out, or use another baseline (rloo, grpo)"
        )
    refill = algorithm.sampling.refill is not None
    owned = environment and dataset is None
    if refill and not owned and not hasattr(dataset, "__len__"):
        raise ValueError(
            "sampling.refill draws further prompts, which needs a dataset with a length: load "
            "it without streaming, or set refill to none"
        )
    local = args.generation_batch_size // processes
    if (refill or greedy) and local % args.num_generations:
        what = "sampling.refill replaces" if refill else "the greedy baseline needs"
        raise ValueError(
            f"{what} whole groups within a process: "
            f"per_device_train_batch_size * steps_per_generation = {local} must be a multiple "
            f"of num_generations={args.num_generations}"
        )


def check_rollouts(algorithm: Algorithm, given: Mapping[str, Any]) -> None:
    """Refuse a way of generating that cannot be asked for greedy answers.

    Args:
        algorithm: The algorithm.
        given: Keyword arguments for `GRPOTrainer`.

    Raises:
        ValueError: If the algorithm needs them, and a function of its own generates.
    """
    if given.get("rollout_func") is not None and "greedy_reward" in algorithm.advantage.needs:
        raise ValueError(
            "the greedy baseline needs greedy answers, which PolicyTrainer cannot ask rollout_func "
            "for: use another baseline (rloo, grpo)"
        )


def check_turns(
    args: GRPOConfig, given: Mapping[str, Any], processes: int, *, gathered: bool
) -> None:
    """Refuse tools where ranks generate together: TRL lets each call them as often as it wants.

    A rank whose answers call none goes on alone, and the others would wait for it, or get its
    answers for theirs.

    Args:
        args: TRL's config.
        given: Keyword arguments for `GRPOTrainer`.
        processes: Number of ranks.
        gathered: Whether each forward gathers parameters from all ranks (FSDP, ZeRO-3).

    Raises:
        ValueError: With what ranks share.
    """
    names = [name for name in ("tools", "environment_factory") if given.get(name)]
    if processes == 1 or not names:
        return
    shared = "shards of the model (FSDP, ZeRO-3)" if gathered else None
    if args.use_vllm and args.vllm_mode == "server":
        shared = "the calls of a vLLM server (vllm_mode='server')"
    elif args.use_vllm:  # each rank has an engine, or shares one
        shared = None if args.vllm_tensor_parallel_size == 1 else "vLLM (vllm_tensor_parallel_size)"
    if shared is not None:
        raise ValueError(
            f"{names[0]}: each of the {processes} ranks generates as often as its answers call for "
            f"it, and they share {shared}: use DDP with a colocated vLLM for each rank or none, or "
            "one process"
        )


def check_tokenizer(tokenizer: Any, dataset: Any) -> None:  # noqa: ANN401
    """Refuse a tokenizer that cannot pad or write conversations, which TRL finds out late.

    Raises:
        ValueError: If there is no token to pad with, or the first prompt is a list of messages and
            there is no chat template.
    """
    if getattr(tokenizer, "pad_token_id", 0) is None:
        raise ValueError(
            "the tokenizer has no pad token, and no end-of-sequence token to take its place: set "
            "tokenizer.eos_token and tokenizer.pad_token, or take the tokenizer of the model"
        )
    row = next(iter(dataset), {}) if dataset is not None else {}
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(row.get("prompt"), list) and template is None:
        raise ValueError(
            "the prompts are conversations, and the tokenizer has no chat template: set "
            "tokenizer.chat_template, take the model's instruction-tuned variant, or give prompts "
            "as text"
        )


def selects(algorithm: Algorithm) -> bool:
    """Tell whether an algorithm chooses among the tokens of a whole optimizer step."""
    return algorithm.objective.selects or algorithm.sampling.top_entropy is not None


def needs_whole(algorithm: Algorithm) -> bool:
    """Tell whether an algorithm compares whole distributions with the reference's."""
    return algorithm.objective.uses_reference and algorithm.objective.kl == "full"


def check_whole(algorithm: Algorithm, *, sharded: bool) -> None:
    """Refuse to compare whole distributions where the output layers are not at hand.

    Args:
        algorithm: The algorithm.
        sharded: Whether FSDP or DeepSpeed owns the models.

    Raises:
        ValueError: With the estimate to use instead.
    """
    if sharded and needs_whole(algorithm):
        raise ValueError(
            "kl='full' reads the output layers beside the models, which DeepSpeed and FSDP shard: "
            "use 'k3'"
        )


def check_windows(args: GRPOConfig, *, deepspeed: bool, selects: bool = False) -> None:
    """Refuse optimizer steps that span two generations where all has to be known before.

    Args:
        args: TRL's config.
        selects: Whether tokens are chosen over the whole optimizer step.
        deepspeed: Whether DeepSpeed owns the gradients and steps within its backward.

    Raises:
        ValueError: If a count would not be known in time.
    """
    cycle = args.steps_per_generation * args.num_iterations
    if (deepspeed or selects) and cycle % args.gradient_accumulation_steps:
        reason = "DeepSpeed" if deepspeed else "a choice among the tokens of a step"
        raise ValueError(
            f"with {reason}, steps_per_generation * num_iterations = {cycle} must be a multiple "
            f"of gradient_accumulation_steps = {args.gradient_accumulation_steps}"
        )


def with_reference(args: GRPOConfig, algorithm: Algorithm) -> GRPOConfig:
    """Return a config that makes TRL load the reference model if the algorithm needs it.

    TRL does so when its `beta` is not zero; its value is not used.
    """
    if not algorithm.objective.uses_reference:
        return args
    args = copy.copy(args)
    args.beta = 1.0
    return args
