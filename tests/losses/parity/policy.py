"""Policy losses: verl, OpenRLHF, TRL and TorchRL's losses for language models."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from golden import load
from torch import Tensor

from parity.core import Case, Ours, cast, unbounded
from polopt.losses import (
    Cispo,
    Clip,
    ClipCov,
    GeometricClip,
    KlCov,
    Objective,
    Plain,
    Reject,
    Reweight,
    SoftGate,
    policy_loss,
    top_entropy,
)

LOSS, GRAD, CLIPPED = "loss", "grad_log_prob", "clip_fraction"


@dataclass(frozen=True)
class ClippedRatio:
    """What TorchRL calls CISPO: −clip(r)·A, without the log-probability."""

    bounds: Cispo

    def __call__(
        self, log_ratio: Tensor, advantage: Tensor, log_prob: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ratio = log_ratio.exp()
        bounded = ratio.clamp(1.0 - self.bounds.low, 1.0 + self.bounds.high)
        return -bounded * advantage, bounded != ratio


@dataclass(frozen=True)
class Setup:
    """A loss of a peer in our terms.

    Attributes:
        objective: The configuration.
        total: Divide by one instead of the count (the sum).
        counted: Compare the clip fraction; the peer's has to mean what ours does.
        top_share: Train on this share of steps, those of the highest entropy.
    """

    objective: Objective
    total: bool = False
    counted: bool = False
    top_share: float | None = None

    def __call__(self, inputs: dict[str, Any]) -> Ours:
        return lambda deviations: evaluate(self, inputs, deviations)


def evaluate(setup: Setup, inputs: dict[str, Any], deviations: frozenset[str]) -> dict[str, Tensor]:
    """Return our loss and gradient on the inputs of a case, with deviations imitated."""
    objective, mask = setup.objective, inputs["mask"]
    if setup.top_share is not None:
        mask = top_entropy(inputs["entropy"], mask, share=setup.top_share)
    if "ratio rounded to bfloat16" in deviations:
        inputs = {**inputs, "old_log_prob": rounded_old(inputs, objective)}
    if "constants in float32" in deviations:
        tau = torch.tensor(objective.surrogate.tau_negative).item()
        objective = replace(objective, surrogate=SoftGate(tau_negative=tau))
    if "no log-probability" in deviations:
        objective = replace(objective, surrogate=ClippedRatio(objective.surrogate))
    log_prob = inputs["log_prob"].clone().requires_grad_()
    count = objective.count(mask).to(log_prob.dtype)
    if "divides by dropped steps" in deviations:
        count = objective.count(inputs["mask"]).to(log_prob.dtype)
    scale = 1.0
    if "counts empty rows" in deviations:
        scale = (mask.any(-1).sum() / len(mask)).item()
    context = unbounded() if "no bound on the ratio" in deviations else nullcontext()

    def call(part: slice, denominator: Tensor | None, chosen: Objective) -> dict[str, Tensor]:
        return policy_loss(
            log_prob[part],
            inputs["old_log_prob"][part],
            inputs["advantage"][part],
            mask[part],
            objective=chosen,
            denominator=denominator,
            behavior_log_prob=inputs["behavior_log_prob"][part],
            ref_log_prob=inputs["ref_log_prob"][part],
            entropy=inputs["entropy"][part],
        )

    with context:
        if "local denominators" in deviations:
            half = len(mask) // 2
            parts = [call(slice(half), None, objective), call(slice(half, None), None, objective)]
            loss = sum(v for out in parts for k, v in out.items() if k.startswith("loss_")) / 2
        else:
            out = call(slice(None), torch.ones(()) if setup.total else count, objective)
            loss = sum(v for k, v in out.items() if k.startswith("loss_"))
        # Peers take metrics over steps, and of sequence ratios over sequences.
        unit = "sequence_mean" if objective.ratio == "sequence" else "token_mean"
        metrics = call(slice(None), None, replace(objective, aggregation=unit, horizon=None))
        if "divides by dropped steps" in deviations and "loss_kl" in out:
            kept, mask = mask, inputs["mask"]
            loss = loss - out["loss_kl"] + call(slice(None), None, objective)["loss_kl"]
            mask = kept
    loss = loss * scale
    if "entropy over all steps" in deviations:
        loss = loss + metrics["loss_entropy"] - scale * out["loss_entropy"]
    if "divergence over padding too" in deviations:
        loss = loss + metrics["loss_kl"] * mask.double().mean() - scale * out["loss_kl"]
    (grad,) = torch.autograd.grad(loss, log_prob)
    loss = loss.detach()
    if "empty row adds its advantage" in deviations:
        # TRL's exp(0) for each empty row; the whole is divided by all rows.
        loss = loss - inputs["advantage"][~mask.any(-1), 0].sum() / len(mask)
    far = (inputs["log_prob"] - inputs["old_log_prob"]).abs() > 20.0
    if "clamp cuts the gradient" in deviations:
        grad = torch.where(mask & far, 0.0, grad)
    if "sequence ratio differentiated" in deviations:
        length = mask.sum(-1, keepdim=True).clamp(min=1)
        grad = torch.where(mask, torch.where(mask, grad, 0.0).sum(-1, keepdim=True) / length, 0.0)
    if "tie at the dual bound" in deviations:
        grad = torch.where(mask & at_dual_bound(setup.objective, inputs), grad / 2, grad)
    clipped = metrics["clip_fraction"] * (scale if objective.ratio == "sequence" else 1.0)
    if "NaN without steps" in deviations:
        loss = torch.full_like(loss, torch.nan)
    if "NaN gradient without steps" in deviations:
        grad, clipped = torch.full_like(grad, torch.nan), torch.full_like(clipped, torch.nan)
    result = {LOSS: loss, GRAD: grad}
    if setup.counted:
        result[CLIPPED] = clipped
    return result


def batch(case: str, advantage: str, dtype: str, behavior: str) -> dict[str, Any]:
    """Return the inputs of a case under our names."""
    inputs = cast(load("policy_losses")["inputs"][case], dtype)
    inputs["advantage"] = inputs[advantage]
    inputs["behavior_log_prob"] = inputs[behavior]
    return inputs


def far_from_old(inputs: dict[str, Any]) -> bool:
    """Whether any step is more than 20 nats from the old policy."""
    gap = (inputs["log_prob"] - inputs["old_log_prob"]).double().abs()
    return bool((inputs["mask"] & (gap > 20.0)).any())


def at_dual_bound(objective: Objective, inputs: dict[str, Any]) -> Tensor:
    """Return where the ratio is exactly the dual bound and the advantage negative."""
    dual = getattr(objective.surrogate, "dual", None)
    ratio = (inputs["log_prob"] - inputs["old_log_prob"]).exp()
    return (
        torch.zeros_like(ratio, dtype=torch.bool)
        if dual is None
        else ((ratio == dual) & (inputs["advantage"] < 0))
    )


def rounded_old(inputs: dict[str, Any], objective: Objective) -> Tensor:
    """Return old log-probabilities for which ratios are what bfloat16 makes of them."""
    mask = inputs["mask"]
    gap = (inputs["log_prob"] - inputs["old_log_prob"]).float()
    if objective.ratio == "token":
        return inputs["log_prob"].float() - gap
    gap = torch.where(mask, gap, 0.0)
    mean = gap.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return inputs["log_prob"].float() - mean.exp().bfloat16().float().log()


def some_row_empty(inputs: dict[str, Any]) -> bool:
    """Whether some sequences, but not all, have no step."""
    rows = inputs["mask"].any(-1)
    return bool(rows.any()) and not bool(rows.all())


def varies(inputs: dict[str, Any]) -> bool:
    """Whether the advantage differs within a sequence."""
    mask, advantage = inputs["mask"], inputs["advantage"]
    low = torch.where(mask, advantage, torch.inf).amin(-1)
    high = torch.where(mask, advantage, -torch.inf).amax(-1)
    return bool((high > low).any())


# --- verl -------------------------------------------------------------------
VERL_MODES = {
    "token-mean": "token_mean",
    "token-sum": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant",
}


def verl_surrogate(name: str, config: dict[str, Any]) -> dict[str, Any] | None:
    low, high = config.get("clip_ratio_low"), config.get("clip_ratio_high")
    if name.startswith(("ppo_clip", "clip_higher", "dual_clip")):
        return {"surrogate": Clip(low=low, high=high, dual=config["clip_ratio_c"])}
    if name.startswith("gspo"):
        return {"surrogate": Clip(low=low, high=high), "ratio": "sequence"}
    if name.startswith("cispo"):
        return {"surrogate": Cispo(low=low if low <= 1.0 else None, high=high)}
    if name.startswith("sapo"):
        gate = SoftGate(tau_positive=config["tau_pos"], tau_negative=config["tau_neg"])
        return {"surrogate": gate}
    if name.startswith("gmpo"):
        return {"surrogate": GeometricClip(low=low, high=high)}
    if name == "clip_cov":
        share, least, most = (config[f"clip_cov_{k}"] for k in ("ratio", "lb", "ub"))
        rule = ClipCov(low=low, high=high, share=share, cov_low=least, cov_high=most)
        return {"surrogate": rule}
    if name == "kl_cov":
        return {"surrogate": KlCov(coef=config["ppo_kl_coef"], share=config["kl_cov_ratio"])}
    if name == "gpg":
        return {"surrogate": Plain(), "ratio": "none"}
    return None


def verl_cases() -> Iterator[Case]:
    for index, record in enumerate(load("policy_losses")["results"]):
        if not record["peer"].startswith("verl"):
            continue
        name, mode = record["loss_name"], record["loss_agg_mode"]
        where = describe("policy_losses", index, record, mode)
        axes = verl_surrogate(name, record["config"])
        if axes is None:
            yield Case(**where, out_of_scope=f"{name.split('_')[0]} is not offered")
            continue
        inputs = batch(record["case"], record["adv"], record["dtype"], "old_log_prob")
        width = inputs["mask"].shape[1]
        objective = Objective(
            **axes,
            aggregation=VERL_MODES[mode],
            horizon=width if mode == "seq-mean-token-sum-norm" else None,
        )
        # Theirs is over tokens in GSPO, by side in GMPO, and of the selection in Clip-Cov.
        others = ("gmpo", "gspo", "clip_cov")
        counted = "actor/pg_clipfrac" in record["metrics"] and not name.startswith(others)
        theirs = {LOSS: record[LOSS], GRAD: record[GRAD]}
        if counted:
            clipped = record["metrics"]["actor/pg_clipfrac"]
            clipped += record["metrics"].get("actor/pg_clipfrac_lower", 0.0)
            theirs[CLIPPED] = torch.tensor(clipped, dtype=torch.float64)
        deviations = []
        if far_from_old(inputs):
            deviations.append("clamp cuts the gradient")
        if not inputs["mask"].any():
            deviations.append("NaN without steps")
        if at_dual_bound(objective, inputs).any():
            deviations.append("tie at the dual bound")
        if name.startswith("gspo") and record["dtype"] == "bfloat16":
            deviations.append("ratio rounded to bfloat16")
        if name.startswith("gmpo") and some_row_empty(inputs):
            deviations.append("counts empty rows")
        if name.startswith(("gmpo", "clip_cov", "kl_cov")) and far_from_old(inputs):
            deviations = ["no bound on the ratio"]
        yield Case(
            **where,
            theirs=theirs,
            ours=Setup(objective, total=mode == "token-sum", counted=counted)(inputs),
            deviations=tuple(deviations),
            dtype=record["dtype"],
        )


# --- OpenRLHF ---------------------------------------------------------------
def openrlhf_cases() -> Iterator[Case]:
    for index, record in enumerate(load("policy_losses")["results"]):
        if not record["peer"].startswith("OpenRLHF"):
            continue
        config = record["config"]
        mode = record["loss_name"].split("|")[1]
        surrogate = Clip(
            low=config["clip_eps_low"], high=config["clip_eps_high"], dual=config.get("dual_clip")
        )
        corrections = ()
        if bounds := config.get("vllm_is_truncated_threshold"):
            low, high = bounds
            corrections = {
                "tis": (Reweight(low=low, high=high),),
                "icepop": (Reject(low=low, high=high),),
                "seq-mask-tis": (
                    Reject(level="geometric", low=low, high=high, weigh=False),
                    Reweight(high=float("inf")),
                ),
            }[config["vllm_is_correction_type"]]
        gspo = config.get("policy_loss_type") == "gspo"
        objective = Objective(
            surrogate=surrogate,
            ratio="sequence" if gspo else "token",
            aggregation="token_mean" if mode == "token" else "sequence_mean",
            corrections=corrections,
        )
        inputs = batch(record["case"], record["adv"], record["dtype"], "rollout_log_prob")
        deviations = []
        if far_from_old(inputs):
            deviations.append("clamp cuts the gradient")
        if not inputs["mask"].any():
            deviations += ["NaN without steps", "NaN gradient without steps"]
        if gspo and varies(inputs):
            deviations.append("sequence ratio differentiated")
        if gspo and record["dtype"] == "bfloat16":
            deviations.append("ratio rounded to bfloat16")
        if at_dual_bound(objective, inputs).any():
            deviations.append("tie at the dual bound")
        counted = (
            mode == "token" and not gspo and "dual_clip" not in config
        )  # theirs leaves dual clips out
        theirs = {LOSS: record[LOSS], GRAD: record[GRAD]}
        if not inputs["mask"].any() and record[GRAD].isnan().any():
            # Zero where a branch of the clip is flat, NaN elsewhere.
            theirs[GRAD] = torch.full_like(record[GRAD], torch.nan)
        if counted:
            theirs[CLIPPED] = record["metrics"]["clip_ratio"]
        yield Case(
            **describe("policy_losses", index, record),
            theirs=theirs,
            ours=Setup(objective, counted=counted)(inputs),
            deviations=tuple(deviations),
            dtype=record["dtype"],
        )


def describe(file: str, index: int, record: dict[str, Any], *more: str) -> dict[str, str]:
    loss = " ".join(str(m) for m in (record["loss_name"], *more) if m)
    case = record["case"]
    what = (loss, case, record.get("adv", ""), record.get("dtype", ""))
    return {
        "id": f"{file}[{index}] {record['peer']} {' '.join(what)}".strip(),
        "peer": record["peer"],
        "loss": loss,
        "case": case,
    }
