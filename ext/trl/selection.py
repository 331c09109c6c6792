"""Selections over a whole optimizer step, for surrogates that treat some of its steps apart."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from polopt.losses import Objective, select_steps

__all__ = ["select_window"]


def select_window(
    batches: Sequence[dict[str, Any]],
    objective: Objective,
    accelerator: Any,  # noqa: ANN401
    seed: int,
) -> list[Tensor]:
    """Return the selection of each micro-batch of an optimizer step; a collective.

    It is made over the micro-batches of all ranks, from log-probabilities before the update:
    those of the old policy, which are `select_from` where TRL does without them.

    Args:
        batches: The micro-batches of this rank, [B, T] each with a T of its own.
        objective: Without schedules; its surrogate selects.
        accelerator: Of the trainer.
        seed: Of the draws, the same on all ranks.

    Returns:
        One bool [B, T] per micro-batch.
    """
    width = max(batch["loss_mask"].size(1) for batch in batches)

    def whole(parts: list[Tensor]) -> Tensor:
        rows = torch.cat([pad(part, (0, width - part.size(1))) for part in parts])
        return accelerator.gather(accelerator.pad_across_processes(rows, dim=1))

    old = whole([batch.get("old_per_token_logps", batch.get("select_from")) for batch in batches])
    mask = whole([batch["loss_mask"].long() for batch in batches]).bool()
    credit = [batch["advantages"] for batch in batches]
    advantage = whole([
        a if a.ndim == 2 else a[:, None].expand(batch["loss_mask"].shape)
        for a, batch in zip(credit, batches, strict=True)
    ])  # fmt: skip
    with torch.random.fork_rng(devices=[old.device] if old.is_cuda else []):
        torch.manual_seed(seed)
        chosen = select_steps(old, old, advantage, mask, objective=objective)
    sizes = [len(batch["loss_mask"]) for batch in batches]
    first = accelerator.process_index * sum(sizes)
    parts = chosen[first : first + sum(sizes)].split(sizes)
    return [
        part[:, : batch["loss_mask"].size(1)] for part, batch in zip(parts, batches, strict=True)
    ]
