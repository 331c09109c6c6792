"""Rewards on all ranks: samples whose reward failed have none, and faults are told everywhere."""

from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from polopt.envs.contract import RewardError
from polopt.envs.isolation import Isolated
from polopt.ext.trl.phases import PhaseTrainer

__all__ = ["ScoringTrainer"]


class ScoringTrainer(PhaseTrainer):
    """`GRPOTrainer` that leaves out a sample for which an isolated reward failed.

    Otherwise its other rewards, a punishment for length for one, would count as its whole reward.
    A reward that returns None by itself is one that does not apply: the others count, as in TRL.

    Attributes:
        reward_faults: What is wrong with the rewards of this rank, see `checked_rewards`.
    """

    reward_faults: list[RewardError]

    def _calculate_rewards(self, inputs: list[dict[str, Any]], *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        rewards = super()._calculate_rewards(inputs, *args, **kwargs)
        # Raised here and not in the reward: the other ranks would wait for this one for ever.
        told = gather_object([str(fault) for fault in self.reward_faults])
        if told:
            raise self.reward_faults[0] if self.reward_faults else RewardError(told[0])
        guarded = [getattr(reward, "__wrapped__", None) for reward in self.reward_funcs]
        guarded = [reward for reward in guarded if isinstance(reward, Isolated)]
        if not guarded:  # the same on all ranks
            return rewards
        failed = set().union(*(reward.failed for reward in guarded))
        mine = torch.tensor([i in failed for i in range(len(inputs))], device=rewards.device)
        return rewards.masked_fill(self.accelerator.gather(mine)[:, None], torch.nan)
