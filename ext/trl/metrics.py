"""The books of one optimizer step: its count, and what it logs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polopt.losses import Objective, kl_estimate

__all__ = ["Window", "step_metrics"]


class Window:
    """The micro-batches of one optimizer step, on one rank.

    Attributes:
        done: Micro-batches so far.
        parts: How often a part of the count became known.
        count: Count of all parts over all ranks, divided by the number of ranks.
        denominator: What the losses are divided by: the count of the first part.
        loss: Sum of the losses so far.
        selections: One per micro-batch, if the surrogate selects.
        masks: One per micro-batch, if only tokens of high entropy are trained on.
        threshold: Their smallest entropy, nats.
    """

    def __init__(self) -> None:
        self.done = self.parts = 0
        self.count: Tensor | float = 0.0
        self.denominator: Tensor = torch.ones(())
        self.loss: Tensor | float = 0.0
        self.selections: list[Tensor] = []
        self.masks: list[Tensor] = []
        self.threshold: Tensor = torch.zeros(())
        self._shares: dict[str, Tensor | float] = {}
        self._sums: dict[str, Tensor | float] = {}
        self._extremes: dict[str, list[Tensor]] = {}
        self._scale: Tensor | float = 1.0

    def add(self, count: Tensor) -> None:
        """Take in the count of a further part."""
        self.parts += 1
        self.count = self.count + count
        if self.parts == 1:
            self.denominator = torch.where(count > 0, count, 1.0)

    def mend(self) -> Tensor:
        """Return what the gradients taken so far have to be multiplied by."""
        self._scale = self.denominator / torch.where(self.count > 0, self.count, 1.0)
        return self._scale

    def record(self, shares: Mapping[str, Tensor], steps: Mapping[str, Tensor]) -> None:
        """Add the terms of the loss and `step_metrics` of a micro-batch."""
        for name, value in shares.items():
            if name not in ("entropy", "kl"):  # means over steps, under TRL's names
                self._shares[name] = self._shares.get(name, 0.0) + value.detach()
        for name, value in steps.items():
            if value.ndim:
                self._extremes.setdefault(name, []).append(value)
            else:
                self._sums[name] = self._sums.get(name, 0.0) + value

    def means(self, accelerator: Any) -> dict[str, float]:  # noqa: ANN401
        """Return the metrics of the whole step over all ranks; a collective."""
        names = list(self._shares)
        sums = list(self._sums)
        local = torch.stack(
            [torch.as_tensor(v * self._scale) for v in self._shares.values()]
            + [torch.as_tensor(v) for v in self._sums.values()]
        ).double()
        total = accelerator.reduce(local, "sum").tolist()
        ranks = accelerator.num_processes
        out = {name: total[i] / ranks for i, name in enumerate(names)}
        values = dict(zip(sums, total[len(names) :], strict=True))
        tokens = max(values.pop("tokens"), 1.0)
        out.update({name: value / tokens for name, value in values.items()})
        for name, parts in self._extremes.items():
            rows = accelerator.gather(torch.cat(parts))
            rows = rows[~rows.isnan()]
            if len(rows):
                out[name] = (rows.min() if name.endswith("min") else rows.max()).item()
        return out


@torch.no_grad()
def step_metrics(objective: Objective, steps: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what TRL logs, as sums over steps, under its names.

    Args:
        objective: Without schedules.
        steps: `log_prob`, `action_log_prob`, `entropy`, bool `mask` [B, T], `advantage` [B, 1],
            `ref_log_prob` if there is a reference, or `kl` if it is compared as a whole,
            `selection` if the surrogate selects, and `behavior_log_prob`, the same tensor as
            `action_log_prob` if the policy sampled.

    Returns:
        Sums over the trained steps, and their number `tokens`; the entries of shape [B] are
        means of each sequence (NaN for one without steps), of which an extreme is logged.
    """
    mask, advantage = steps["mask"], steps["advantage"]
    length = mask.sum(-1)
    out = {"tokens": length.sum(), "entropy": torch.where(mask, steps["entropy"], 0.0).sum()}
    if "ref_log_prob" in steps and objective.kl_in == "loss":
        kl = kl_estimate(steps["log_prob"], steps["ref_log_prob"], objective.kl)
        out["kl"] = torch.where(mask, kl, 0.0).sum()
    if "kl" in steps:
        out["kl"] = torch.where(mask, steps["kl"], 0.0).sum()
    old, behavior = steps["action_log_prob"], steps["behavior_log_prob"]
    if behavior is not old:
        gap = torch.where(mask, old - behavior, 0.0)
        out["mismatch/log_prob_gap"] = gap.abs().sum()
        out["mismatch/kl"] = kl_estimate(-gap, torch.zeros_like(gap), "k3").sum()
    if "selection" in steps:
        return {**out, "selected_fraction": (steps["selection"] & mask).sum()}
    clipped = objective.clipped(steps["log_prob"], steps["action_log_prob"], advantage, mask)
    low, high = clipped & (advantage < 0), clipped & (advantage > 0)
    return {
        **out,
        "clip_ratio/low_mean": low.sum(),
        "clip_ratio/high_mean": high.sum(),
        "clip_ratio/region_mean": (low | high).sum(),
        "clip_ratio/low_min": low.sum(-1) / length,
        "clip_ratio/high_max": high.sum(-1) / length,
    }
