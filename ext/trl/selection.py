"""Selections over a whole optimizer step: its micro-batches on all ranks see one rule."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from polopt.losses import Objective, entropy_threshold, select_steps, top_entropy

__all__ = ["select_tokens", "select_window"]


def select_window(
    batches: Sequence[dict[str, Any]],
    objective: Objective,
    accelerator: Any,  # noqa: ANN401
    seed: int,
) -> list[Tensor]:
    """Return what a surrogate treats apart in each micro-batch of a step; a collective.

    It is chosen over the micro-batches of all ranks, from log-probabilities before the update:
    those of the old policy, which are `select_from` where TRL does without them.

    Args:
        batches: The micro-batches of this rank, [B, T] each with a T of its own.
        objective: Without schedules; its surrogate selects.
        accelerator: Of the trainer.
        seed: Of the draws, the same on all ranks.

    Returns:
        One bool [B, T] per micro-batch.
    """
    old = _whole(
        [batch.get("old_per_token_logps", batch.get("select_from")) for batch in batches],
        accelerator,
    )
    mask = _whole([batch["loss_mask"].long() for batch in batches], accelerator).bool()
    credit = [batch["advantages"] for batch in batches]
    advantage = _whole(
        [
            a if a.ndim == 2 else a[:, None].expand(batch["loss_mask"].shape)
            for a, batch in zip(credit, batches, strict=True)
        ],
        accelerator,
    )
    with torch.random.fork_rng(devices=[old.device] if old.is_cuda else []):
        torch.manual_seed(seed)
        chosen = select_steps(old, old, advantage, mask, objective=objective)
    sizes = [len(batch["loss_mask"]) for batch in batches]
    first = accelerator.process_index * sum(sizes)
    parts = chosen[first : first + sum(sizes)].split(sizes)
    return [
        part[:, : batch["loss_mask"].size(1)] for part, batch in zip(parts, batches, strict=True)
    ]


def select_tokens(
    batches: Sequence[dict[str, Any]],
    share: float,
    accelerator: Any,  # noqa: ANN401
) -> tuple[list[Tensor], Tensor]:
    """Return the tokens of a step at which the policy's entropy is highest; a collective.

    One quantile holds for the micro-batches of all ranks. The entropies are those of the old
    policy (`policy_entropy`), so that each pass over a generation trains on the same tokens.

    Args:
        batches: The micro-batches of this rank, [B, T] each with a T of its own.
        share: Of the trained tokens to keep.
        accelerator: Of the trainer.

    Returns:
        One bool [B, T] per micro-batch, within its `loss_mask`, and the threshold in nats.
    """
    entropy = _whole([batch["policy_entropy"] for batch in batches], accelerator)
    mask = _whole([batch["loss_mask"].long() for batch in batches], accelerator).bool()
    threshold = entropy_threshold(entropy, mask, share=share)
    chosen = [
        top_entropy(batch["policy_entropy"], batch["loss_mask"], threshold=threshold)
        for batch in batches
    ]
    return chosen, threshold


def _whole(parts: Sequence[Any], accelerator: Any) -> Tensor:  # noqa: ANN401
    """Return the rows of all micro-batches of all ranks, padded to one width."""
    width = max(part.size(1) for part in parts)
    rows = torch.cat([pad(part, (0, width - part.size(1))) for part in parts])
    return accelerator.gather(accelerator.pad_across_processes(rows, dim=1))
