"""Advantages of verl, OpenRLHF, TRL and TorchRL."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from golden import load
from torch import Tensor

from parity.core import Case, Values, cast
from polopt.losses import (
    combine_rewards,
    gae,
    gdpo_advantage,
    gpg_advantage,
    group_advantage,
    last_step_reward,
    length_adaptive_lam,
    opo_advantage,
    pass_at_k_advantage,
    reinforce_pp_advantage,
    remax_advantage,
    subtract_kl,
    whiten,
)

Deviations = frozenset[str]


def cases() -> Iterator[Case]:
    data = load("advantages")
    for index, record in enumerate(data["results"]):
        estimator, config = record["estimator"], record["config"]
        what = " ".join(f"{k}={v}" for k, v in config.items())
        where = {
            "id": f"advantages[{index}] {record['peer']} {estimator} {what} {record['case']} "
            f"{record['dtype']}",
            "peer": record["peer"].split(" ")[0],
            "loss": f"{estimator} {what}".strip(),
            "case": record["case"],
        }
        if estimator.endswith("optimal_token_baseline"):
            yield Case(**where, out_of_scope="optimal token baseline is not offered")
            continue
        if "error" in record:
            yield Case(**where, out_of_scope="the peer raised")
            continue
        x = cast(data["inputs"][record["case"]], record["dtype"])
        peer = record["peer"].partition("-")[0]
        estimate, deviations = {"verl": verl, "OpenRLHF": openrlhf, "torchrl": torchrl}[peer](
            estimator, config, x
        )
        theirs = {
            k: record[k]
            for k in ("advantages", "advantage_per_trajectory", "advantages_policy",
                      "returns_critic")
            if k in record
        }  # fmt: skip
        if peer != "torchrl":
            theirs = {k: torch.where(x["mask"], v, 0.0) for k, v in theirs.items()}

        def ours(
            deviations: Deviations,
            estimate: Callable[[Deviations], Any] = estimate,
            names: tuple[str, ...] = tuple(theirs),
            mask: Tensor = x["mask"],
            steps: bool = peer != "torchrl",
        ) -> Values:
            result = estimate(deviations)
            result = result if isinstance(result, tuple) else (result,)
            if steps:
                result = [torch.where(mask, per_step(r, mask), 0.0) for r in result]
            return dict(zip(names, result, strict=True))

        yield Case(**where, theirs=theirs, ours=ours, deviations=deviations, dtype=record["dtype"])


def per_step(advantage: Tensor, mask: Tensor) -> Tensor:
    return advantage if advantage.ndim == 2 else advantage[:, None].expand_as(mask)


# --- verl -------------------------------------------------------------------
def verl(
    estimator: str, config: dict[str, Any], x: dict[str, Tensor]
) -> tuple[Callable[[Deviations], Any], tuple[str, ...]]:
    """Return our estimator as a function of deviations, and those that may apply."""
    mask, token_reward, group = x["mask"], x["token_level_rewards"], x["index"]
    reward = token_reward.sum(-1)
    alone = tuple(["single answer keeps its reward"] if singles(group).any() else [])
    scale = "group" if config.get("norm", True) else "none"

    def grouped(deviations: Deviations, reward: Tensor = reward, **settings: Any) -> Tensor:
        if "rewards in float32" in deviations:
            reward = reward.float()
        advantage = group_advantage(reward, group, **settings)
        if "single answer keeps its reward" in deviations:
            kept = reward / (1.0 + 1e-6) if settings.get("scale") == "group" else reward
            advantage = torch.where(singles(group), kept, advantage)
        return advantage.to(token_reward.dtype)

    if estimator in ("grpo", "grpo_vectorized"):
        rounded = ("rewards in float32",) if estimator == "grpo_vectorized" else ()
        return partial(grouped, scale=scale), alone + rounded
    if estimator in ("rloo", "rloo_vectorized"):
        return partial(grouped, baseline="leave_one_out", scale="none"), alone
    if estimator == "reinforce_plus_plus_baseline":
        return lambda d: white(grouped(d, scale="none"), mask), alone
    if estimator == "gdpo":

        def gdpo(deviations: Deviations) -> Tensor:
            advantage = gdpo_advantage(reward[:, None], group)
            if "single answer keeps its reward" in deviations:
                advantage = torch.where(singles(group), reward / (1.0 + 1e-6), advantage)
            return white(advantage, mask)

        return gdpo, alone
    if estimator == "grpo_passk":
        return lambda d: pass_at_k_advantage(reward, group, scale=scale == "group"), ()
    if estimator == "opo":

        def opo(deviations: Deviations) -> Tensor:
            advantage = opo_advantage(reward, group, mask.sum(-1))
            if "single answer keeps its reward" in deviations:
                advantage = torch.where(singles(group), reward, advantage)
            return advantage

        return opo, alone
    if estimator == "gpg":

        def gpg(deviations: Deviations) -> Tensor:
            advantage = gpg_advantage(reward, group)
            if "single answer keeps its reward" in deviations:
                alpha = gpg_alpha(reward, group)
                advantage = torch.where(singles(group), reward * alpha, advantage)
            if "counts rewards that are not zero" in deviations:
                theirs = len(reward) / reward.count_nonzero().clamp(min=1)
                advantage = advantage / gpg_alpha(reward, group) * theirs
            return advantage

        return gpg, ("counts rewards that are not zero", *alone)
    if estimator == "remax":

        def remax(_: Deviations) -> Tensor:
            ahead = reinforce_pp_advantage(token_reward, mask)
            return remax_advantage(ahead, per_step(x["reward_baseline"], mask))

        return remax, ()
    if estimator == "reinforce_plus_plus":
        gamma = config.get("gamma", 1.0)
        return lambda d: white(reinforce_pp_advantage(token_reward, mask, gamma=gamma), mask), ()
    if estimator == "gae":
        return (
            lambda d: whiten(packed_gae(token_reward, x["values"], mask, **config)[0], mask),
            (),
        )
    if estimator.startswith("vapo"):
        alpha = config["alpha"]

        def vapo(deviations: Deviations) -> tuple[Tensor, Tensor]:
            length = mask.sum(-1, keepdim=True).to(token_reward.dtype)
            lam = length_adaptive_lam(length, alpha=alpha)
            if "λ below zero" in deviations:
                lam = 1.0 - 1.0 / (alpha * length.clamp(min=1))
            lam = {"gamma": 1.0, "lam": lam, "target_lam": config["lam_critic"]}
            advantage, target = packed_gae(token_reward, x["values"], mask, **lam)
            return whiten(advantage, mask), target

        short = bool((mask.sum(-1) * alpha < 1.0).any())
        unclamped = estimator.endswith("UNCLAMPED") and short
        return vapo, ("λ below zero",) if unclamped else ()
    raise AssertionError(estimator)


def singles(group: Tensor) -> Tensor:
    """Return which samples are alone in their group."""
    return group.bincount()[group] == 1


def gpg_alpha(reward: Tensor, group: Tensor) -> float:
    low, high = (reward.new_zeros(int(group.max()) + 1) for _ in range(2))
    low = low.scatter_reduce(0, group, reward, "amin", include_self=False)
    high = high.scatter_reduce(0, group, reward, "amax", include_self=False)
    return len(low) / max(int((high > low).sum()), 1)


def white(advantage: Tensor, mask: Tensor) -> Tensor:
    return whiten(per_step(advantage, mask), mask)


def packed_gae(
    reward: Tensor, value: Tensor, mask: Tensor, **settings: Any
) -> tuple[Tensor, Tensor]:
    """Return GAE over the trained tokens of each row: others are carried over."""
    order = (~mask).long().argsort(dim=-1, stable=True)
    length = mask.sum(-1, keepdim=True)
    steps = torch.arange(mask.shape[1])
    final = steps >= length - 1
    reward, value = (torch.where(steps < length, t.gather(-1, order), 0.0) for t in (reward, value))
    following = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], -1)
    packed = gae(reward, value, following, final, final, **settings)
    return tuple(torch.zeros_like(p).scatter(-1, order, p) for p in packed)


# --- OpenRLHF ---------------------------------------------------------------
def openrlhf(
    estimator: str, config: dict[str, Any], x: dict[str, Tensor]
) -> tuple[Callable[[Deviations], Any], tuple[str, ...]]:
    """Return our estimator as a function of deviations, and those that may apply."""
    mask, group, score = x["mask"], x["index"], x["scores"]
    prefix = bool((mask == (torch.arange(mask.shape[1]) < mask.sum(-1, keepdim=True))).all())

    if estimator == "gae_raw_unwhitened":
        holes = () if prefix else ("values of zero at untrained tokens",)
        return (
            lambda d: openrlhf_gae(x["token_level_rewards"], x["values"], mask, d, **config)[0],
            holes,
        )

    shaped: dict[str, Callable[[], Tensor]] = {
        "rloo": lambda: group_advantage(score, group, baseline="leave_one_out", scale="none"),
        "reinforce_baseline": lambda: group_advantage(score, group, scale="none"),
        "dr_grpo": lambda: group_advantage(score, group, scale="none"),
        "group_norm": lambda: group_advantage(score, group, eps=1e-9),
    }

    whitened = estimator in ("gae", "reinforce", "reinforce_baseline")

    def estimate(deviations: Deviations) -> Tensor:
        reward = shaped.get(estimator, lambda: score)()
        token_reward = last_step_reward(reward, mask)
        if coef := config.get("kl_coef"):
            pair = [x["log_prob"], x["ref_log_prob"]]
            if "divergence in float32" in deviations:
                gap = torch.where(mask, pair[0] - pair[1], 0.0).float().double()
                token_reward = token_reward - coef * gap
            else:
                token_reward = subtract_kl(token_reward, *pair, mask, coef=coef)
        if estimator == "gae":
            gamma, lam = config.get("gamma", 1.0), config["lambd"]
            advantage, _ = openrlhf_gae(
                token_reward, x["values"], mask, deviations, gamma=gamma, lam=lam
            )
        else:
            advantage = reinforce_pp_advantage(token_reward, mask)
        if "centred over the batch" in deviations:
            advantage = advantage - advantage[mask].mean()
        elif whitened and "no_std_norm" not in config:
            spread = advantage[mask].var()
            advantage = whiten(advantage, mask)
            if "deviation with n" in deviations and spread > 0:
                n = mask.sum()
                # 1e-8 is a floor there and added here.
                advantage = advantage * (spread + 1e-8).sqrt() / (spread * (n - 1) / n).sqrt()
        return advantage

    deviations = []
    if estimator == "gae" and not prefix:
        deviations.append("values of zero at untrained tokens")
    if whitened:
        centred = "no_std_norm" in config
        deviations.append("centred over the batch" if centred else "deviation with n")
    if "kl_coef" in config:
        deviations.append("divergence in float32")
    return estimate, tuple(deviations)


def openrlhf_gae(
    reward: Tensor, value: Tensor, mask: Tensor, deviations: Deviations, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    if "values of zero at untrained tokens" not in deviations:
        return packed_gae(reward, value, mask, gamma=gamma, lam=lam)
    value = torch.where(mask, value, 0.0)
    following = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], -1)
    never = torch.zeros_like(mask)
    reward = torch.where(mask, reward, 0.0)
    return gae(reward, value, following, never, never, gamma=gamma, lam=lam)


# --- TorchRL and TRL --------------------------------------------------------
def torchrl(
    estimator: str, config: dict[str, Any], x: dict[str, Tensor]
) -> tuple[Callable[[Deviations], Any], tuple[str, ...]]:
    rewards = torch.where(x["mask"], x["token_level_rewards"], 0.0)
    reward = {
        "mc_sum": rewards.sum(-1),
        "mc_max": torch.where(x["mask"], rewards, -torch.inf).amax(-1),
        "mc_mean": rewards.sum(-1) / x["mask"].sum(-1),
    }[estimator]

    def estimate(deviations: Deviations) -> Tensor:
        # A floor of 1e-6 for the deviation, where ours adds it.
        eps = 0.0 if "floor under the deviation" in deviations else 1e-6
        return group_advantage(reward, x["index"], eps=eps).view(2, 4)

    return estimate, ("floor under the deviation",)


def trl_cases() -> Iterator[Case]:
    for index, record in enumerate(load("trl_advantages")["results"]):
        variant, weights = record["variant"], record["config"].get("reward_weights")
        rewards = torch.tensor(record["rewards"], dtype=torch.float32)
        group = load("advantages")["inputs"][record["case"]]["index"]

        def ours(
            deviations: Deviations,
            variant: str = variant,
            rewards: Tensor = rewards,
            group: Tensor = group,
            weights: list[float] | None = weights,
        ) -> Values:
            if variant == "grpo_two_rewards_gdpo":
                total = gdpo_advantage(rewards.T, group, weights=weights, eps=1e-4)
                return {"advantages": sample_white(total, deviations)}
            if variant.startswith("grpo_two"):
                reward = combine_rewards(rewards.T, weights)
                return {"advantages": group_advantage(reward, group, eps=1e-4)}
            if variant.startswith("rloo"):
                advantage = group_advantage(rewards, group, baseline="leave_one_out", scale="none")
                normalised = variant.endswith("normalized")
                if normalised:
                    advantage = sample_white(advantage, deviations)
                return {"advantages": advantage}
            scale = variant.removeprefix("grpo_scale_")
            return {"advantages": group_advantage(rewards, group, scale=scale, eps=1e-4)}

        yield Case(
            id=f"trl_advantages[{index}] {variant} {record['case']}",
            peer=record["peer"],
            loss=variant,
            case=record["case"],
            theirs={"advantages": record["advantages"]},
            ours=ours,
            deviations=("adds to the deviation",)
            if variant in ("grpo_two_rewards_gdpo", "rloo_normalized")
            else (),
            dtype=record["dtype"],
        )


def sample_white(advantage: Tensor, deviations: Deviations) -> Tensor:
    white = whiten(advantage)
    if "adds to the deviation" in deviations:  # 1e-4, where ours adds 1e-8 to the variance
        variance = advantage.var()
        white = white * (variance + 1e-8).sqrt() / (variance.sqrt() + 1e-4)
    return white
