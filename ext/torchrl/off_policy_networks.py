"""Networks of off-policy algorithms: few parameters to carry, few entries to write.

TorchRL's losses swap parameters in and out of a module several times in each step, and each
parameter costs. So a network here is one parameter, which optimizers and target updates like too.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn
from torch.nn import functional as F
from torchrl.envs import EnvBase
from torchrl.modules import ProbabilisticActor

from polopt.ext.torchrl.distributions import Categorical, TanhNormal

__all__ = [
    "Mlp",
    "deterministic_actor",
    "gaussian_actor",
    "logit_actor",
    "q_of_actions",
    "q_of_state_action",
    "widths_of",
]


class Mlp(nn.Module):
    """Linear layers with ReLU between them, whose weights and biases are one parameter.

    Weights and biases are uniform within ±1/√(inputs), as of `torch.nn.Linear`.

    Args:
        widths: Of the input, the hidden layers and the output.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self._shapes = list(pairwise(widths))
        self._sizes = [n for i, o in self._shapes for n in (o * i, o)]
        bounds = [1 / math.sqrt(i) for i, _ in self._shapes for _ in range(2)]
        parts = [torch.empty(n).uniform_(-b, b) for n, b in zip(self._sizes, bounds, strict=True)]
        self.weights = nn.Parameter(torch.cat(parts))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Map inputs, joined along the last dimension, to outputs [..., O]."""
        x = inputs[0] if len(inputs) == 1 else torch.cat(inputs, -1)
        parts = self.weights.split(self._sizes)
        last = len(self._shapes) - 1
        for k, (i, o) in enumerate(self._shapes):
            x = F.linear(x, parts[2 * k].view(o, i), parts[2 * k + 1])
            if k < last:
                x = x.relu()
        return x


class _Gaussian(nn.Module):
    """Means, and standard deviations within [e^−20, e^2]."""

    def __init__(self, net: Mlp) -> None:
        super().__init__()
        self.net = net

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        loc, log_scale = self.net(observation).chunk(2, -1)
        return loc, log_scale.clamp(-20.0, 2.0).exp()


class _Bounded(nn.Module):
    """Actions in their range."""

    def __init__(self, net: Mlp, low: Tensor, high: Tensor) -> None:
        super().__init__()
        self.net, self.half, self.middle = net, (high - low) / 2, (high + low) / 2

    def forward(self, observation: Tensor) -> Tensor:
        return self.net(observation).tanh() * self.half + self.middle


class _QOfActions(TensorDictModuleBase):
    """What TorchRL's `QValueActor` writes for categorical actions, without one-hot detours."""

    in_keys = ("observation",)
    out_keys = ("action_value", "action", "chosen_action_value")

    def __init__(self, net: Mlp) -> None:
        super().__init__()
        self.net = net

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        value = self.net(tensordict.get("observation"))
        best, action = value.max(-1, keepdim=True)
        tensordict.set("action_value", value)
        tensordict.set("action", action.squeeze(-1))
        return tensordict.set("chosen_action_value", best)


def widths_of(env: EnvBase) -> tuple[int, int]:
    """Return the lengths of observations and of actions, or how many discrete actions there are.

    Args:
        env: Has one observation entry, `observation`, and actions as of `VectorEnv`.
    """
    space = env.action_spec_unbatched
    width = env.observation_spec["observation"].shape[-1]
    return width, space.shape[-1] if space.shape else space.space.n


def gaussian_actor(env: EnvBase, hidden: Sequence[int]) -> ProbabilisticActor:
    """Build SAC's policy: a Gaussian through tanh, scaled to the range of each action."""
    observed, acted = widths_of(env)
    space = env.action_spec_unbatched.space
    net = _Gaussian(Mlp((observed, *hidden, 2 * acted)))
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": space.low, "high": space.high},
    )


def logit_actor(env: EnvBase, hidden: Sequence[int]) -> ProbabilisticActor:
    """Build discrete SAC's policy."""
    net = Mlp((widths_of(env)[0], *hidden, widths_of(env)[1]))
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
    )


def deterministic_actor(env: EnvBase, hidden: Sequence[int]) -> TensorDictModule:
    """Build the policy of TD3 and DDPG: tanh, scaled to the range of each action."""
    observed, acted = widths_of(env)
    space = env.action_spec_unbatched.space
    net = _Bounded(Mlp((observed, *hidden, acted)), space.low, space.high)
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


def q_of_state_action(env: EnvBase, hidden: Sequence[int]) -> TensorDictModule:
    """Build a critic of observations and continuous actions."""
    net = Mlp((sum(widths_of(env)), *hidden, 1))
    return TensorDictModule(net, in_keys=["observation", "action"], out_keys=["state_action_value"])


def q_of_actions(env: EnvBase, hidden: Sequence[int]) -> TensorDictModuleBase:
    """Build a critic with one value for each discrete action."""
    return _QOfActions(Mlp((widths_of(env)[0], *hidden, widths_of(env)[1])))
