"""Potentials for shaping the reward: how promising a state is.

See `polopt.ext.torchrl.transforms.PotentialShaping`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CarEnergy"]


@dataclass(frozen=True, kw_only=True)
class CarEnergy:
    """Mechanical energy of a mountain car: what it has to gather to get up the hill.

    The equations of gymnasium's MountainCar give v²/2 + 0.0025·sin(3x)/3 per unit of mass.
    Zero is a car at rest in the valley, `weight` one at rest at the height of the goal.

    Attributes:
        weight: Scale, in units of the reward.
    """

    weight: float

    def __call__(self, observation: Tensor) -> Tensor:
        """Return potentials [...] of observations [..., 2]: position and velocity."""
        position, speed = observation.unbind(-1)
        height = (torch.sin(3.0 * position) + 1.0) / 2.0
        return self.weight * (height + speed.square() * (3.0 / 0.01))
