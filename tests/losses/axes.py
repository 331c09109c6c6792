"""Every preset, aggregation and regulariser, and batches to try them on."""

import inspect
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from polopt.losses import (
    Aggregation,
    Kl,
    Objective,
    OffPolicyMask,
    Reject,
    RejectDivergent,
    Reweight,
    outcome_presets,
    policy_loss,
    presets,
    resolve,
    select_steps,
)

HORIZON = 16
# Found by their modules, so that a new preset cannot be forgotten.
PRESETS = {
    name: getattr(module, name) for module in (presets, outcome_presets) for name in module.__all__
}
AGGREGATIONS = get_args(Aggregation)
REGULARISERS: dict[str, dict[str, Any]] = {
    "none": {},
    "entropy": {"entropy_coef": 0.01},
    **{f"kl {kind}": {"kl_coef": 0.1, "kl": kind} for kind in get_args(Kl)},
    "kl reweighted": {"kl_coef": 0.1, "kl_reweighted": True},
    **{
        f"{rule.__name__} {level}": {"corrections": (rule(level=level, low=0.8, high=1.3),)}
        for rule in (Reweight, Reject)
        for level in ("token", "sequence", "geometric")
    },
    **{
        f"RejectDivergent {pool}": {"corrections": (RejectDivergent(limit=0.02, pool=pool),)}
        for pool in ("token", "sum", "mean", "max")
    },
    "two corrections": {
        "corrections": (
            Reject(level="geometric", weigh=False),
            Reweight(),
            OffPolicyMask(threshold=0.05),
        )
    },
}


def objective_of(preset: str) -> Objective:
    """Return the objective of a preset with its defaults."""
    make = PRESETS[preset]
    needs = inspect.signature(make).parameters
    settings = {"horizon": HORIZON} if "horizon" in needs else {}
    return resolve(make(**settings), 0.0).objective


def combine(preset: str, aggregation: str, regulariser: str) -> Objective:
    """Return one point on the axes."""
    return replace(
        objective_of(preset),
        aggregation=aggregation,
        horizon=HORIZON if aggregation == "constant" else None,
        **{"kl_coef": 0.0, "kl_in": "loss", **REGULARISERS[regulariser]},
    )


@dataclass(frozen=True)
class Batch:
    """Steps and what belongs to them, row by row."""

    steps: dict[str, Tensor]  # [B, T] each, "mask" and "selection" among them
    group_tokens: Tensor  # [B]

    def rows(self, index: Any) -> "Batch":
        steps = {k: v[index] for k, v in self.steps.items()}
        return Batch(steps, self.group_tokens[index])

    def to(self, dtype: torch.dtype) -> "Batch":
        steps = {k: v.to(dtype) if v.is_floating_point() else v for k, v in self.steps.items()}
        return Batch(steps, self.group_tokens)

    def padded(self, left: int, right: int, rows: int) -> "Batch":
        """Return it in a wider frame, with poison wherever no step is trained on."""
        poison = [torch.nan, torch.inf, -torch.inf]
        mask = torch.nn.functional.pad(self.steps["mask"], (left, right, 0, rows))
        spots = torch.tensor(poison).repeat(mask.numel())[: mask.numel()].view(mask.shape)
        steps = {}
        for name, x in self.steps.items():
            x = torch.nn.functional.pad(x, (left, right, 0, rows))
            steps[name] = torch.where(mask, x, spots.to(x.dtype)) if x.is_floating_point() else x
        steps["mask"] = mask
        return Batch(steps, torch.nn.functional.pad(self.group_tokens, (0, rows)))


def draw(
    seed: int, mask: Tensor, objective: Objective, *, spread: float = 0.3, far: bool = False
) -> Batch:
    """Return a batch in float64 for a mask [B, T]; `far` puts one step 30 nats away."""
    g = torch.Generator().manual_seed(seed)

    def normal(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(mask.shape, generator=g, dtype=torch.float64)

    old = -3.0 * torch.rand(mask.shape, generator=g, dtype=torch.float64) - 0.05
    new = old + normal(spread)
    if far:
        new[0, 0] = old[0, 0] + 30.0
    steps = {
        "log_prob": new,
        "old_log_prob": old,
        "behavior_log_prob": old + normal(0.2),
        "ref_log_prob": old + normal(0.5),
        "entropy": normal().abs(),
        "kl": normal().abs(),
        "advantage": normal(),
        "mask": mask,
    }
    # Groups of two, cut by every partition into rows.
    group = torch.arange(len(mask)) // 2
    tokens = torch.zeros(len(mask), dtype=torch.long).index_add(0, group, mask.sum(-1))[group]
    if objective.selects:
        torch.manual_seed(seed)
        names = ("log_prob", "old_log_prob", "advantage", "mask")
        steps["selection"] = select_steps(**{k: steps[k] for k in names}, objective=objective)
    return Batch(steps, tokens)


def count(batch: Batch, objective: Objective) -> Tensor:
    """Return the additive count of a batch."""
    grouped = objective.aggregation == "group_token_mean"
    tokens = batch.group_tokens if grouped else None
    return objective.count(batch.steps["mask"], group_tokens=tokens)


def evaluate(
    log_prob: Tensor, batch: Batch, objective: Objective, denominator: Tensor | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the outputs of the loss for given log-probabilities, and the sum of its terms."""
    grouped = objective.aggregation == "group_token_mean"
    out = policy_loss(
        **{**batch.steps, "log_prob": log_prob},
        objective=objective,
        denominator=denominator,
        group_tokens=batch.group_tokens if grouped else None,
    )
    return out, torch.stack([v for k, v in out.items() if k.startswith("loss_")]).sum()


def run(
    batch: Batch, objective: Objective, denominator: Tensor | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the outputs of the loss and the gradient of its terms in `log_prob`."""
    log_prob = batch.steps["log_prob"].clone().requires_grad_()
    out, total = evaluate(log_prob, batch, objective, denominator)
    (grad,) = torch.autograd.grad(total, log_prob)
    return {k: v.detach() for k, v in out.items()}, grad
