"""Divergences in the reward, adaptive coefficients, punishment of long answers."""

from collections.abc import Iterator
from typing import Any

import torch
from golden import load
from torch import Tensor

from parity.core import Case, Values
from polopt.losses import AdaptiveKl, last_step_reward, soft_overlong, subtract_kl

Deviations = frozenset[str]

KINDS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}


def kl_in_reward_cases() -> Iterator[Case]:
    for index, record in enumerate(load("kl_in_reward")["results"]):
        x = load("advantages")["inputs"][record["case"]]
        coef = record.get("coef_before", record.get("kl_coef"))
        verl = record["peer"].startswith("verl")
        theirs = {"token_level_rewards": torch.where(x["mask"], record["token_level_rewards"], 0.0)}
        adaptive = record.get("controller") == "adaptive"
        if adaptive:
            theirs["coef_after"] = torch.tensor(record["coef_after"], dtype=torch.float64)
            measured = record["metrics"]["actor/reward_kl_penalty"]

        def ours(
            deviations: Deviations,
            x: dict[str, Tensor] = x,
            coef: float = coef,
            kind: str = KINDS[record["type"]],
            measured: float | None = measured if adaptive else None,
            verl: bool = verl,
        ) -> Values:
            mask = x["mask"]
            base = x["token_level_rewards"] if verl else last_step_reward(x["scores"], mask)
            reward = subtract_kl(base, x["log_prob"], x["ref_log_prob"], mask, coef=coef, kind=kind)
            result = {"token_level_rewards": reward}
            if measured is not None:
                # The records do not name target and horizon; these are those of the run.
                controller = AdaptiveKl(value=coef, target=0.1, horizon=100)
                controller.observe(measured, len(mask))
                result["coef_after"] = torch.tensor(controller(0.0), dtype=torch.float64)
            return result

        yield Case(
            id=f"kl_in_reward[{index}] {record['peer']} {record['type']} "
            f"{record.get('controller', '')} {record['case']}",
            peer=record["peer"],
            loss=f"{record['fn']} {record['type']} {record.get('controller', '')}".strip(),
            case=record["case"],
            theirs=theirs,
            ours=ours,
        )


def controller_cases() -> Iterator[Case]:
    for index, record in enumerate(load("kl")["controllers"]):

        def ours(deviations: Deviations, record: dict[str, Any] = record) -> Values:
            controller = AdaptiveKl(
                value=record["init_kl_coef"], target=record["target"], horizon=record["horizon"]
            )
            values = [controller(0.0)]
            for measured in record["current_kl"]:
                controller.observe(measured, record["n_steps"])
                values.append(controller(0.0))
            return {"values": torch.tensor(values, dtype=torch.float64)}

        yield Case(
            id=f"kl:controllers[{index}] {record['peer']}",
            peer=record["peer"],
            loss="AdaptiveKLController",
            case=f"target={record['target']}",
            theirs={"values": torch.tensor(record["values"], dtype=torch.float64)},
            ours=ours,
        )


def overlong_cases() -> Iterator[Case]:
    data = load("overlong")
    limit, cache = data["meta"]["L_max"], data["meta"]["L_cache"]
    length = torch.tensor(data["lengths"])
    for peer in ("trl", "verl_expression", "openrlhf"):

        def ours(deviations: Deviations) -> Values:
            penalty = soft_overlong(length, limit=limit, cache=cache)
            if "no floor beyond the limit" in deviations:
                over = (limit - cache - length) / cache
                penalty = torch.where(length > limit, over, penalty)
            return {"penalty": penalty}

        yield Case(
            id=f"overlong:{peer}[0]",
            peer=peer.partition("_")[0],
            loss="soft overlong punishment",
            case="every length",
            theirs={"penalty": torch.tensor(data[peer])},
            ours=ours,
            deviations=("no floor beyond the limit",) if (length > limit).any() else (),
            dtype="float32",
        )
