"""Samples whose reward failed have no reward at all, whatever the other rewards say."""

from typing import Any

import torch
from torch import Tensor

from polopt.envs.isolation import Isolated
from polopt.ext.trl.checkpoints import CheckpointingTrainer

__all__ = ["ScoringTrainer"]


class ScoringTrainer(CheckpointingTrainer):
    """`GRPOTrainer` that leaves out a sample for which an isolated reward failed.

    Otherwise its other rewards, a punishment for length for one, would count as its whole reward.
    A reward that returns None by itself is one that does not apply: the others count, as in TRL.
    """

    def _calculate_rewards(self, inputs: list[dict[str, Any]], *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        rewards = super()._calculate_rewards(inputs, *args, **kwargs)
        guarded = [getattr(reward, "__wrapped__", None) for reward in self.reward_funcs]
        guarded = [reward for reward in guarded if isinstance(reward, Isolated)]
        if not guarded:  # the same on all ranks
            return rewards
        failed = set().union(*(reward.failed for reward in guarded))
        mine = torch.tensor([i in failed for i in range(len(inputs))], device=rewards.device)
        return rewards.masked_fill(self.accelerator.gather(mine)[:, None], torch.nan)
