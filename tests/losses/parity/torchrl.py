"""TorchRL: losses for language models, PPO losses, generalised advantages."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from golden import load
from torch import Tensor

from parity.core import Case, Values
from parity.policy import GRAD, LOSS, Setup, batch, describe, far_from_old, some_row_empty
from polopt.losses import (
    Cispo,
    Clip,
    KlPenalty,
    Objective,
    full_kl,
    gae,
    policy_loss,
    value_loss,
    whiten,
)


def llm_cases() -> Iterator[Case]:
    for index, record in enumerate(load("torchrl_llm")["results"]):
        config, mode = record["config"], record["aggregation"]
        where = describe("torchrl_llm", index, record, mode)
        if "kl_mask_threshold" in config:
            yield Case(**where, out_of_scope="mask by divergence is not offered")
            continue
        clip = config["clip_epsilon"]
        low, high = clip if isinstance(clip, list) else (clip, clip)
        cispo = record["fn"].endswith("CISPOLoss")
        coefficients = ("kl_to_ref_coeff", "kl_to_inference_coeff")
        objective = Objective(
            surrogate=Cispo(low=low, high=high) if cispo else Clip(low=low, high=high),
            aggregation="sequence_mean" if mode == "prompt_mean" else "token_mean",
            kl_coef=next((config[k] for k in coefficients if k in config), 0.0),
        )
        inputs = batch(record["case"], record["adv"], record["dtype"], "old_log_prob")
        if "kl_to_inference_coeff" in config:
            inputs["ref_log_prob"] = inputs["old_log_prob"]
        deviations = []
        if cispo:
            deviations.append("no log-probability")
        if far_from_old(inputs):
            deviations.append("no bound on the ratio")
        if mode == "prompt_mean" and some_row_empty(inputs):
            deviations.append("counts empty rows")
        if objective.kl_coef:
            deviations.append("divergence over padding too")
        loss = record["loss_objective"].sum()  # one number per step with aggregation none
        loss = loss + sum(v for k, v in record.items() if k.startswith("loss_kl"))
        yield Case(
            **where,
            theirs={LOSS: loss, GRAD: record[GRAD]},
            ours=Setup(objective, total=mode == "none")(inputs),
            deviations=tuple(deviations),
            dtype=record["dtype"],
        )


def ppo_cases() -> Iterator[Case]:
    data = load("torchrl_ppo")
    for index, record in enumerate(data["results"]):
        config = record["config"]
        where = describe("torchrl_ppo", index, {**record, "case": "control"})
        if "max_importance_ratio" in config:
            yield Case(**where, out_of_scope="rescaled ratios are not offered")
            continue
        deviations = []
        if config.get("loss_critic_type") == "l2":
            deviations.append("no half in the squared error")
        if "beta_after" in record:
            config = {**config, "beta_after": record["beta_after"]}
            deviations.append("coefficient changed before the backward pass")
        names = ("loss_objective", "loss_entropy", "loss_critic", "entropy")
        theirs = {k: record[k].reshape(()) for k in names}
        theirs |= {"grad_logits": record["grad_logits"], "grad_value": record["grad_value"]}

        def ours(
            deviations: frozenset[str],
            config: dict[str, Any] = config,
            name: str = record["loss_name"],
        ) -> Values:
            return ppo(data["inputs"], config, name, deviations)

        yield Case(**where, theirs=theirs, ours=ours, deviations=tuple(deviations))


def ppo(
    inputs: dict[str, Tensor], config: dict[str, Any], name: str, deviations: frozenset[str]
) -> Values:
    """Return our terms and the gradient of their sum in logits and values."""
    logits = inputs["logits"].clone().requires_grad_()
    value = inputs["value"].squeeze(-1).clone().requires_grad_()
    dist = torch.distributions.Categorical(logits=logits)
    advantage = inputs["advantage"].squeeze(-1)
    clip = config.get("clip_epsilon", 0.2)
    low, high = clip if isinstance(clip, list) else (clip, clip)
    objective = Objective(surrogate=Clip(low=low, high=high), entropy_coef=0.01)
    kl = None
    if name == "klpen":
        old = inputs["old_logits"].log_softmax(-1)
        kl = full_kl(old, logits.log_softmax(-1))
        penalty = KlPenalty(coef=0.0)  # theirs is exact: the divergence of the distributions
        objective = replace(objective, surrogate=penalty, kl_coef=config["beta"], kl="full")
    if name == "ppo_plain":
        objective = replace(objective, surrogate=KlPenalty(coef=0.0))
    if config.get("normalize_advantage"):
        advantage = whiten(advantage)
    denominator = torch.ones(()) if config.get("reduction") == "sum" else None
    out = policy_loss(
        dist.log_prob(inputs["action"]),
        inputs["old_log_prob"],
        advantage,
        objective=objective,
        denominator=denominator,
        entropy=dist.entropy(),
        kl=kl,
    )
    value_clip = config.get("clip_value")
    critic = value_loss(
        value,
        inputs["old_value"].squeeze(-1),
        inputs["value_target"].squeeze(-1),
        clip=low if value_clip is True else value_clip,
        loss="mse" if config.get("loss_critic_type") == "l2" else "huber",
        denominator=denominator,
    )["loss_critic"]
    if "no half in the squared error" in deviations:
        critic = 2.0 * critic
    objective_loss = out["loss_objective"] + out.get("loss_kl", 0.0)
    total = objective_loss + out["loss_entropy"] + critic
    if "coefficient changed before the backward pass" in deviations:
        total = total + (config["beta_after"] / config["beta"] - 1.0) * out["loss_kl"]
    grad_logits, grad_value = torch.autograd.grad(total, [logits, value])
    scale = len(value) if denominator is not None else 1
    return {
        "loss_objective": objective_loss.detach(),
        "loss_entropy": out["loss_entropy"].detach(),
        "loss_critic": critic.detach(),
        "entropy": out["entropy"] / scale,
        "grad_logits": grad_logits,
        "grad_value": grad_value[:, None],
    }


def gae_cases() -> Iterator[Case]:
    data = load("torchrl_gae")
    inputs = {k: v.squeeze(-1) for k, v in data["inputs"].items()}
    for index, record in enumerate(data["results"]):
        what = f"{record['done_case']} gamma={record['gamma']} lambda={record['lmbda']}"
        where = {
            "id": f"torchrl_gae[{index}] {record['fn']} {what}",
            "peer": record["peer"],
            "loss": record["fn"].split(".")[-1],
            "case": what,
        }
        if "error" in record:
            yield Case(**where, out_of_scope="the peer raised")
            continue
        done = record.get("done", data["inputs"]["terminated"] | data["inputs"]["truncated"])
        terminated = record.get("terminated", data["inputs"]["terminated"])

        def ours(
            deviations: frozenset[str],
            record: dict[str, Any] = record,
            done: Tensor = done,
            terminated: Tensor = terminated,
        ) -> Values:
            gamma, lam = record["gamma"], record["lmbda"]
            if "constants in float32" in deviations:
                product = torch.tensor(gamma * lam).item()
                gamma = torch.tensor(gamma).item()
                lam = product / gamma
            advantage, target = gae(
                inputs["reward"],
                inputs["state_value"],
                inputs["next_state_value"],
                terminated.squeeze(-1),
                done.squeeze(-1),
                gamma=gamma,
                lam=lam,
            )
            if record.get("average_gae"):
                advantage = whiten(advantage)
            return {"advantage": advantage[..., None], "value_target": target[..., None]}

        yield Case(
            **where,
            theirs={k: record[k] for k in ("advantage", "value_target")},
            ours=ours,
            deviations=("constants in float32",),
        )
