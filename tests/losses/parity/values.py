"""Value losses, divergences, aggregation and entropies."""

from collections.abc import Iterator
from typing import Any

import torch
from golden import load
from tensordict import TensorDict
from torch import Tensor
from torch.distributions import Categorical

from parity.core import Case, Values, cast
from parity.policy import VERL_MODES, batch
from polopt.losses import Objective, Plain, kl_estimate, step_weights, unit_count, value_loss
from polopt.losses.modules import PolicyLoss

Deviations = frozenset[str]


def value_cases() -> Iterator[Case]:
    for index, record in enumerate(load("value_loss")["results"]):
        x = load("advantages")["inputs"][record["case"]]
        mask = x["mask"]
        target = x["token_level_rewards"].flip(-1).cumsum(-1).flip(-1)
        kind = record.get("loss_critic_type")
        mode = record.get("mode", kind)
        clip = record.get("cliprange_value", record.get("clip_eps", record.get("clip_value")))
        where = {
            "id": f"value_loss[{index}] {record['peer']} {mode} clip={clip} {record['case']}",
            "peer": record["peer"],
            "loss": f"value loss {mode} clip={clip}",
            "case": record["case"],
        }
        if kind == "l1":
            yield Case(**where, out_of_scope="absolute error is not offered")
            continue
        settings: dict[str, Any] = {"clip": clip, "loss": "huber" if kind == "smooth_l1" else "mse"}
        per_row = mode in ("seq-mean-token-mean", "sample")
        settings["aggregation"] = "sequence_mean" if per_row else "token_mean"
        theirs = {"loss": record.get("loss", record.get("loss_mean"))}
        theirs["grad"] = record.get("grad_values", record.get("grad_values_of_mean"))
        if "clipfrac" in record:
            theirs["clip_fraction"] = record["clipfrac"]

        def ours(
            deviations: Deviations,
            x: dict[str, Tensor] = x,
            target: Tensor = target,
            mask: Tensor | None = None if kind else mask,
            settings: dict[str, Any] = settings,
            counted: bool = "clipfrac" in record,
        ) -> Values:
            value = x["new_values"].clone().requires_grad_()
            out = value_loss(value, x["values"], target, mask, **settings)
            loss = out["loss_critic"]
            if "no half in the squared error" in deviations:
                loss = 2.0 * loss
            (grad,) = torch.autograd.grad(loss, value)
            result = {"loss": loss.detach(), "grad": grad}
            if counted:
                steps = {**settings, "aggregation": "token_mean"}
                out = value_loss(value, x["values"], target, mask, **steps)
                result["clip_fraction"] = out["value_clip_fraction"].detach()
            return result

        yield Case(
            **where,
            theirs=theirs,
            ours=ours,
            deviations=("no half in the squared error",) if kind == "l2" else (),
        )


# --- divergences ------------------------------------------------------------
KINDS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def kl_cases() -> Iterator[Case]:
    data = load("kl")
    for index, record in enumerate(data["results"]):
        name, dtype = record["type"], record["dtype"]
        where = {
            "id": f"kl[{index}] {record['peer']} {name} {record['case']} {dtype}",
            "peer": record["peer"],
            "loss": f"divergence {name}",
            "case": f"{record['case']} {dtype}",
        }
        if "error" in record:
            yield Case(**where, out_of_scope="the peer raised")
            continue
        base = name.removesuffix("+")
        kind = KINDS.get(base, base) + name[len(base) :]
        kind = "k2" if kind == "k2+" else kind  # its own gradient is the straight-through one
        x = cast(data["inputs"][record["case"]], dtype)
        gap = (x["ref_log_prob"] - x["log_prob"]).double()
        k3 = gap.clamp(-20, 20).exp() - 1 - gap.clamp(-20, 20)
        deviations = []
        openrlhf = record["peer"].startswith("OpenRLHF")
        raw = {"k1": gap.abs(), "k2": gap.square() / 2, "k3": k3}.get(
            kind.removesuffix("+"), gap * 0
        )
        if raw.max() > 10.0 and (openrlhf or kind.startswith("k3")):
            deviations.append("result clamped to 10")
        if openrlhf and kind == "k3" and dtype == "float64":
            deviations.append("divergence in float32")
        if openrlhf and kind == "k3" and gap.float().exp().isinf().any():
            deviations.append("NaN where exp overflows")

        def ours(
            deviations: Deviations, x: dict[str, Tensor] = x, kind: str = kind, gap: Tensor = gap
        ) -> Values:
            return divergence(deviations, x, kind, gap)

        theirs = {"kl": record["kl"], "grad": record["grad_log_prob"]}
        yield Case(**where, theirs=theirs, ours=ours, deviations=tuple(deviations), dtype=dtype)


def divergence(deviations: Deviations, x: dict[str, Tensor], kind: str, gap: Tensor) -> Values:
    log_prob = x["log_prob"].clone().requires_grad_()
    wide = torch.promote_types(log_prob.dtype, torch.float32)
    kl = kl_estimate(log_prob.to(wide), x["ref_log_prob"].to(wide), kind)
    (grad,) = torch.autograd.grad(kl.sum(), log_prob)
    kl = kl.detach()
    if "divergence in float32" in deviations:  # without expm1
        near = gap.float().clamp(max=88.0)
        kl, grad = near.exp() - 1.0 - near, 1.0 - near.exp()
    if "result clamped to 10" in deviations:
        straight = kind.endswith("+")
        grad = torch.where((kl.abs() > 10.0) & (not straight), 0.0, grad)
        kl = kl.clamp(-10.0, 10.0)
    if "NaN where exp overflows" in deviations:
        grad = torch.where(gap.float().exp().isinf(), torch.nan, grad)
    return {"kl": kl, "grad": grad}


# --- aggregation ------------------------------------------------------------
def aggregation_cases() -> Iterator[Case]:
    for index, record in enumerate(load("aggregation")["results"]):
        name = record["mode"]
        x = batch(record["case"], "adv_tok", "float64", "old_log_prob")
        step, mask = x["adv_tok"] * 1.7 + 0.3, x["mask"]
        mode = {**VERL_MODES, "token": "token_mean", "sample": "sequence_mean"}[name]
        horizon = None
        if mode == "constant":
            horizon = record["loss_scale_factor"] or mask.shape[1]
        split = record["split"]
        deviations = []
        if split != "whole" and not mask.any(-1).all() and mode != "token_mean":
            deviations.append("counts empty rows")
        if "LOCAL" in split:
            deviations = ["local denominators"]
        if not mask.any():
            deviations.append("NaN without steps")
            if record["peer"].startswith("OpenRLHF"):
                deviations.append("NaN gradient without steps")

        def ours(
            deviations: Deviations,
            step: Tensor = step,
            mask: Tensor = mask,
            mode: str = mode,
            horizon: int | None = horizon,
            total: bool = name == "token-sum",
        ) -> Values:
            return aggregate(deviations, step, mask, mode, horizon, total)

        yield Case(
            id=f"aggregation[{index}] {record['peer']} {name} {record['case']} {split}",
            peer=record["peer"],
            loss=f"aggregation {name}, {split}",
            case=record["case"],
            theirs={"loss": record["loss"], "grad": record["grad"]},
            ours=ours,
            deviations=tuple(deviations),
        )


def aggregate(
    deviations: Deviations, step: Tensor, mask: Tensor, mode: str, horizon: int | None, total: bool
) -> Values:
    step = step.clone().requires_grad_()

    def mean(part: slice) -> Tensor:
        count = unit_count(mask[part], mode, horizon=horizon, dtype=step.dtype)
        if "counts empty rows" in deviations:
            rows = torch.ones_like(mask[part])
            count = unit_count(rows, mode, horizon=horizon, dtype=step.dtype)
        count = torch.ones_like(count) if total else count
        count = count.clamp(min=1e-300)
        return (step[part] * step_weights(mask[part], mode, dtype=step.dtype)).sum() / count

    if "local denominators" in deviations:
        half = len(step) // 2
        loss = (mean(slice(half)) + mean(slice(half, None))) / 2
    else:
        loss = mean(slice(None))
    (grad,) = torch.autograd.grad(loss, step)
    loss = loss.detach()
    if "NaN gradient without steps" in deviations:
        grad = grad * torch.nan
    return {"loss": loss * torch.nan if "NaN without steps" in deviations else loss, "grad": grad}


# --- entropies --------------------------------------------------------------
class Fixed:
    """An actor with given logits."""

    in_keys = ("logits",)

    def get_dist(self, tensordict: TensorDict) -> Categorical:
        return Categorical(logits=tensordict["logits"], validate_args=False)


def entropy_cases() -> Iterator[Case]:
    data = load("entropy")
    for index, record in enumerate(data["results"]):
        dtype, case = record["dtype"], record["case"]
        where = {
            "id": f"entropy[{index}] {record['peer']} {record['fn']} {case} {dtype}",
            "peer": record["peer"],
            "loss": record["fn"],
            "case": f"{case} {dtype}",
        }
        logits = data["inputs"][case].to(getattr(torch, dtype))
        mode = record.get("mode")
        mask = data["inputs"]["mask"] if mode else torch.ones(logits.shape[:-1], dtype=torch.bool)
        theirs = {"entropy": torch.as_tensor(record["entropy"]).sum()}
        if "grad_logits" in record:
            theirs["grad"] = record["grad_logits"]

        def ours(
            deviations: Deviations,
            logits: Tensor = logits,
            mask: Tensor = mask,
            mode: str | None = mode,
        ) -> Values:
            return entropy(deviations, logits, mask, mode)

        deviations = []
        if not record["fn"].startswith(("Categorical", "Masked")):
            if case == "neg_inf":
                deviations.append("NaN for an impossible token")
            elif dtype != "float64":
                deviations.append("entropy by cancellation")
        elif dtype == "bfloat16":
            deviations.append("arithmetic in bfloat16")
        yield Case(**where, theirs=theirs, ours=ours, deviations=tuple(deviations), dtype=dtype)


def entropy(deviations: Deviations, logits: Tensor, mask: Tensor, mode: str | None) -> Values:
    """Return the entropy as the module computes it, from an actor."""
    # A distribution computes in the type of its logits; below float32 that is the user's fault.
    given, logits = logits, logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits.clone().requires_grad_()
    aggregation = VERL_MODES[mode] if mode else "token_mean"
    horizon = mask.shape[1] if aggregation == "constant" else None
    objective = Objective(
        surrogate=Plain(), ratio="none", aggregation=aggregation, horizon=horizon, entropy_coef=1.0
    )
    inputs = {
        "logits": logits,
        "action": torch.zeros(mask.shape, dtype=torch.long),
        "advantage": torch.zeros(mask.shape, dtype=logits.dtype),
        "mask": mask,
    }
    loss = PolicyLoss(objective, Fixed())
    out = loss(TensorDict(inputs, batch_size=mask.shape))
    (grad,) = torch.autograd.grad(-out["loss_entropy"], logits)
    total = objective.count(mask) if mode in (None, "token-sum") else 1.0
    result = {"entropy": out["entropy"] * total}
    if mode is None:
        result["grad"] = grad * total
        if "NaN for an impossible token" in deviations:
            impossible = (given == -torch.inf).any(-1, keepdim=True)
            grad = torch.where(impossible, torch.nan, result["grad"])
            result = {"entropy": result["entropy"] * torch.nan, "grad": grad}
        if "arithmetic in bfloat16" in deviations:
            z = given.clone().requires_grad_()
            total = Categorical(logits=z, validate_args=False).entropy().sum()
            (grad,) = torch.autograd.grad(total, z)
            result = {"entropy": total.detach(), "grad": grad}
        if "entropy by cancellation" in deviations:
            z = given.clone().requires_grad_()
            p = z.softmax(-1)
            total = (z.logsumexp(-1) - (p * z).sum(-1)).sum()
            (grad,) = torch.autograd.grad(total, z)
            result = {"entropy": total.detach(), "grad": grad}
    return result
