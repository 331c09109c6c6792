"""TRL: the loss of its trainer, its off-policy masks and importance weights."""

from collections.abc import Iterator
from typing import Any

import torch
from golden import load
from torch import Tensor

from parity.core import Case
from parity.policy import (
    CLIPPED,
    GRAD,
    LOSS,
    Setup,
    batch,
    describe,
    far_from_old,
    some_row_empty,
    varies,
)
from polopt.losses import (
    Cispo,
    Clip,
    GeometricClip,
    Objective,
    OffPolicyMask,
    Reject,
    Reweight,
    SoftGate,
)

AGGREGATIONS = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "dr_grpo": "constant",
}
PER_ROW = ("grpo", "sapo", "dr_grpo")


def objective_of(config: dict[str, Any]) -> Objective | None:
    """Return our objective for the attributes of a trainer, or None if it is not offered."""
    kind = config.get("loss_type")
    if kind is None:  # the experimental GMPO trainer
        bound = config["epsilon"]
        return Objective(
            surrogate=GeometricClip(low=bound, high=bound), aggregation="sequence_mean"
        )
    if kind not in AGGREGATIONS:
        return None
    low, high = config.get("epsilon_low", 0.2), config.get("epsilon_high", 0.2)
    surrogate = {
        "sapo": lambda: SoftGate(),
        "cispo": lambda: Cispo(high=high - 1.0),
    }.get(kind, lambda: Clip(low=low, high=high, dual=config.get("delta")))()
    corrections = ()
    if (threshold := config.get("off_policy_mask_threshold")) is not None:
        corrections = (OffPolicyMask(threshold=threshold),)
    return Objective(
        surrogate=surrogate,
        ratio=config.get("importance_sampling_level", "token"),
        aggregation=AGGREGATIONS[kind],
        horizon=load("trl_losses")["meta"]["max_completion_length"] if kind == "dr_grpo" else None,
        entropy_coef=config.get("entropy_coef", 0.0),
        kl_coef=config.get("beta", 0.0),
        kl_reweighted=config.get("use_bias_correction_kl", True),
        corrections=corrections,
    )


def loss_cases() -> Iterator[Case]:
    data = load("trl_losses")
    for index, record in enumerate(data["results"]):
        inputs = batch(record["case"], record["adv"], record["dtype"], "old_log_prob")
        yield loss_case("trl_losses", index, record, inputs)
    model = data["tiny_qwen3"]["inputs"]
    inputs = {
        "log_prob": model["model_log_prob"],
        "old_log_prob": model["old_per_token_logps"].float(),
        "behavior_log_prob": model["old_per_token_logps"].float(),
        "ref_log_prob": model["ref_per_token_logps"].float(),
        "entropy": model["model_entropy"],
        "advantage": model["advantages"].float()[:, None],
        "mask": model["completion_mask"].bool(),
    }
    for index, record in enumerate(data["tiny_qwen3"]["results"]):
        record = {**record, "case": "tiny_qwen3", "dtype": "float32"}
        yield loss_case("trl_losses:tiny_qwen3", index, record, inputs)


def loss_case(file: str, index: int, record: dict[str, Any], inputs: dict[str, Any]) -> Case:
    """Return one loss of the trainer."""
    config, where = record["config"], describe(file, index, record)
    kind = config.get("loss_type", "gmpo")
    objective = objective_of(config)
    if objective is None:
        return Case(**where, out_of_scope=f"{kind} is not offered")
    share = config.get("top_entropy_quantile")
    deviations = [] if share is None else ["divides by dropped steps"]
    if far_from_old(inputs):
        deviations.append("no bound on the ratio")
    if kind in PER_ROW and some_row_empty(inputs):
        deviations.append("counts empty rows")
    if kind == "gmpo" and not inputs["mask"].any(-1).all():
        deviations += ["counts empty rows", "empty row adds its advantage"]
    if config.get("accum", 1) > 1:
        deviations.append("local denominators")
    if objective.ratio == "sequence" and varies(inputs):
        deviations.append("sequence ratio differentiated")
    if kind == "sapo":
        deviations.append("constants in float32")
    if record["dtype"] == "bfloat16" and (objective.ratio == "sequence" or far_from_old(inputs)):
        deviations.append("ratio rounded to bfloat16")
    if objective.entropy_coef and objective.aggregation != "token_mean":
        deviations.append("entropy over all steps")
    theirs = {LOSS: record[LOSS], GRAD: record[GRAD]}
    clipped = record["metrics"].get("clip_ratio/region_mean")
    # Theirs leaves dual clips out, is over all steps after a selection, of the last micro-batch,
    # and over sequences or steps depending on the shape of the advantage.
    counted = clipped is not None and share is None and not config.keys() & {"delta", "accum"}
    counted &= objective.ratio == "token" or inputs["advantage"].shape[1] == 1 or not varies(inputs)
    if counted:
        theirs[CLIPPED] = torch.tensor(clipped[0], dtype=torch.float64)
    return Case(
        **where,
        theirs=theirs,
        ours=Setup(objective, counted=counted, top_share=share)(inputs),
        deviations=tuple(deviations),
        dtype=record["dtype"],
    )


def off_policy_mask_cases() -> Iterator[Case]:
    for index, record in enumerate(load("trl_losses")["off_policy_mask"]):
        case = record["case"]
        inputs = batch(case, "adv_seq", "float64", record["sampling"])

        def ours(_: frozenset[str], inputs=inputs, record=record) -> dict[str, Tensor]:
            rule = OffPolicyMask(threshold=record["threshold"])
            return {"keep": weights(rule, inputs)[:, :1]}

        yield Case(
            id=f"trl_losses:off_policy_mask[{index}] {case} {record['threshold']}",
            peer=record["peer"],
            loss="get_off_policy_mask",
            case=case,
            theirs={"keep": record["keep"]},
            ours=ours,
        )


def weights(rule: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the weights of a correction, one outside the mask where it has none."""
    mask = inputs["mask"]
    steps = [torch.where(mask, inputs[k], 0.0) for k in ("log_prob", "old_log_prob")]
    behavior = torch.where(mask, inputs["behavior_log_prob"], 0.0)
    advantage = torch.where(mask, inputs["advantage"], 0.0)
    return rule(*steps, behavior, advantage, mask).expand_as(mask)


def importance_cases() -> Iterator[Case]:
    for index, record in enumerate(load("trl_losses")["vllm_importance_sampling"]):
        case = record["case"]
        inputs = batch(case, "adv_seq", "float64", "rollout_log_prob")
        inputs["mask"] = record["completion_mask"].bool()
        level, action = record["mode"].split("_")
        bounds = {"level": level, "low": record["clip_min"], "high": record["clip_max"]}
        rule = Reweight(**bounds) if action == "truncate" else Reject(**bounds)

        def ours(_: frozenset[str], inputs=inputs, rule=rule) -> dict[str, Tensor]:
            return {"ratio": torch.where(inputs["mask"], weights(rule, inputs), 0.0)}

        ratio = record["importance_sampling_ratio"].expand_as(inputs["mask"])
        yield Case(
            id=f"trl_losses:vllm_importance_sampling[{index}] {record['mode']} {case}",
            peer=record["peer"],
            loss=f"vllm_importance_sampling {record['mode']}",
            case=case,
            theirs={"ratio": torch.where(inputs["mask"], ratio, 0.0)},
            ours=ours,
        )
