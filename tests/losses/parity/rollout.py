"""verl's corrections for a sampler that is not the old policy."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from golden import load
from torch import Tensor

from parity.core import Case, Values
from parity.policy import GRAD, LOSS, Setup, batch, far_from_old
from parity.trl import weights
from polopt.losses import Clip, Objective, Plain, Reject, RejectDivergent, Reweight

LEVELS = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
Deviations = frozenset[str]


def cases() -> Iterator[Case]:
    for index, record in enumerate(load("rollout_correction")["results"]):
        fn, case = record["fn"], record["case"]
        keys = ("rollout_is", "rollout_rs", "threshold", "rollout_rs_threshold", "loss_type",
                "batch_normalize", "log_ratio")  # fmt: skip
        what = " ".join(f"{k}={record[k]}" for k in keys if record.get(k) is not None)
        where = {
            "id": f"rollout_correction[{index}] {fn} {what} {case}",
            "peer": record["peer"],
            "loss": f"{fn.split('.')[-1]} {what}".strip(),
            "case": case,
        }
        if record.get("batch_normalize"):
            yield Case(**where, out_of_scope="weights divided by their mean are not offered")
        elif fn.endswith("correction_weights"):
            yield weight_case(record, where)
        elif "error" in record:
            yield Case(**where, out_of_scope="the peer raised")
        elif fn.endswith("rejection_mask"):
            yield rejection_case(record, where)
        elif "bypass" in fn:
            yield bypass_case(record, where)
        else:
            inputs = batch(case, "adv_seq", "float64", "rollout_log_prob")
            objective = Objective(surrogate=Clip(dual=3.0), corrections=(Reweight(high=2.0),))
            yield Case(
                **where,
                theirs={LOSS: record[LOSS], GRAD: record[GRAD]},
                ours=Setup(objective)(inputs),
                deviations=("clamp cuts the gradient",) if far_from_old(inputs) else (),
            )


def bounds_of(threshold: float | str) -> tuple[float | None, float]:
    """Return lower and upper bound as verl reads them."""
    if isinstance(threshold, str) and "_" in threshold:
        low, high = map(float, threshold.split("_"))
        return low, high
    return None, float(threshold)


def weight_case(record: dict[str, Any], where: dict[str, str]) -> Case:
    if "error" in record:
        return Case(**where, out_of_scope="the peer raised")
    inputs = batch(record["case"], "adv_seq", "float64", "rollout_log_prob")
    if record["log_ratio"] == "log_prob-old":
        inputs |= {"old_log_prob": inputs["log_prob"], "behavior_log_prob": inputs["old_log_prob"]}
    low, high = bounds_of(record["threshold"])
    level = record["rollout_is"]
    rule = (
        Reweight(level=level, high=high) if low is None else Reject(level=level, low=low, high=high)
    )

    def ours(_: Deviations) -> Values:
        return {"weights": torch.where(inputs["mask"], weights(rule, inputs), 0.0)}

    theirs = torch.where(inputs["mask"], record["weights"], 0.0)
    return Case(**where, theirs={"weights": theirs}, ours=ours)


def kept(rs: str, threshold: Any, inputs: dict[str, Any], deviations: Deviations) -> Tensor:
    """Return the mask after rejection by bounds on the ratio, or by a limit on k2 or k3."""
    pool, _, kind = rs.removeprefix("seq_").rpartition("_")
    if kind != "k1":
        limit = float(threshold)
        rule: Any = RejectDivergent(limit=limit, kl=kind, pool=pool)
        return inputs["mask"] & (weights(rule, inputs) > 0)
    low, high = bounds_of(threshold)
    low = 1.0 / high if low is None else low
    if "bounds on the inverse ratio" in deviations:
        low, high = 1.0 / high, 1.0 / low
    rule = Reject(level=LEVELS[rs], low=low, high=high, weigh=False)
    return inputs["mask"] & (weights(rule, inputs) > 0)


def rejection_case(record: dict[str, Any], where: dict[str, str]) -> Case:
    inputs = batch(record["case"], "adv_seq", "float64", "rollout_log_prob")
    if record["case"] == "extreme":  # its sampler is close: the policy stands in, as for weights
        inputs |= {"old_log_prob": inputs["log_prob"], "behavior_log_prob": inputs["old_log_prob"]}

    def ours(deviations: Deviations) -> Values:
        mask = kept(record["rollout_rs"], record["threshold"], inputs, deviations)
        return {"mask": mask.double()}

    return Case(
        **where,
        theirs={"mask": record["modified_response_mask"]},
        ours=ours,
        deviations=inverted(record["threshold"]) if record["rollout_rs"].endswith("k1") else (),
    )


def inverted(threshold: float | str) -> tuple[str, ...]:
    low, high = bounds_of(threshold)
    reciprocal = low is None or abs(low * high - 1.0) < 1e-12
    return () if reciprocal else ("bounds on the inverse ratio",)


@dataclass(frozen=True)
class Bypass:
    """verl's bypass mode: the sampler is the old policy, rejected steps leave the mask."""

    record: dict[str, Any]
    inputs: dict[str, Any]
    objective: Objective

    def __call__(self, deviations: Deviations) -> Values:
        inputs, objective = self.inputs, self.objective
        rs, threshold = self.record["rollout_rs"], self.record["rollout_rs_threshold"]
        if rs is None:
            return Setup(objective)(inputs)(deviations)
        now = {**inputs, "old_log_prob": inputs["log_prob"]}
        mask = kept(rs, threshold, now, deviations)
        if "weight of the sequence before rejection" in deviations:
            low, high = bounds_of(threshold)
            rule = Reject(level=LEVELS[rs], low=low, high=high, weigh=False)
            objective = replace(objective, corrections=(*objective.corrections, rule))
            result = Setup(objective)(inputs)(deviations)
            return {k: v * inputs["mask"].sum() / mask.sum() for k, v in result.items()}
        return Setup(objective)({**inputs, "mask": mask})(deviations)


def bypass_case(record: dict[str, Any], where: dict[str, str]) -> Case:
    # The old policy of the case plays the sampler.
    inputs = batch(record["case"], "adv_seq", "float64", "old_log_prob")
    reinforce = record["loss_type"] == "reinforce"
    level = record["rollout_is"]
    if reinforce:
        weigh = (Reweight(level=level, high=2.0),) if level else ()
        objective = Objective(surrogate=Plain(), ratio="none", corrections=weigh)
        # Weights are of the policy itself over the sampler.
        inputs["old_log_prob"] = inputs["log_prob"]
    else:
        objective = Objective(surrogate=Clip(dual=3.0))
    deviations = []
    if not reinforce and far_from_old(inputs):
        deviations.append("clamp cuts the gradient")
    if record["rollout_rs"]:
        deviations += inverted(record["rollout_rs_threshold"])
        if reinforce and level == "sequence" and record["rollout_rs"].startswith("token"):
            deviations.append("weight of the sequence before rejection")
        now = {**inputs, "old_log_prob": inputs["log_prob"]}
        rest = kept(record["rollout_rs"], record["rollout_rs_threshold"], now, frozenset())
        if not rest.any():
            deviations.append("NaN without steps")
    return Case(
        **where,
        theirs={LOSS: record[LOSS], GRAD: record[GRAD]},
        ours=Bypass(record, inputs, objective),
        deviations=tuple(deviations),
    )
