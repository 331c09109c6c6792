"""Networks of off-policy algorithms: few parameters to carry, few entries to write.

TorchRL's losses swap parameters in and out of a module several times in each step, and each
parameter costs. So a network here is one parameter, which optimizers and target updates like too,
and its module reads and writes entries without the layers of `TensorDictModule` between.
"""

import functools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.nn import functional as F
from torchrl.envs import EnvBase
from torchrl.objectives import LossModule

from polopt.ext.torchrl.distributions import Categorical, TanhNormal

__all__ = [
    "DeterministicPolicy",
    "GaussianPolicy",
    "LogitPolicy",
    "Mlp",
    "QOfActions",
    "QOfStateAction",
    "widths_of",
    "with_twins",
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
        return self.run(self.weights, *inputs)

    def run(self, weights: Tensor, *inputs: Tensor) -> Tensor:
        """The same with other weights [P]."""
        x = inputs[0] if len(inputs) == 1 else torch.cat(inputs, -1)
        parts = weights.split(self._sizes)
        last = len(self._shapes) - 1
        for k, (i, o) in enumerate(self._shapes):
            x = F.linear(x, parts[2 * k].view(o, i), parts[2 * k + 1])
            if k < last:
                x = x.relu()
        return x


def widths_of(env: EnvBase) -> tuple[int, int]:
    """Return the lengths of observations and of actions, or how many discrete actions there are.

    Args:
        env: Has one observation entry, `observation`, and actions as of `VectorEnv`.
    """
    space = env.action_spec_unbatched
    width = env.observation_spec["observation"].shape[-1]
    return width, space.shape[-1] if space.shape else space.space.n


class GaussianPolicy(TensorDictModuleBase):
    """SAC's policy: a Gaussian through tanh, scaled to the range of each action.

    Standard deviations before tanh are within [e^−20, e^2].

    Args:
        env: Says what is observed and done.
        hidden: Widths of the layers.
    """

    in_keys = ("observation",)
    out_keys = ("action",)
    dist_sample_keys = ("action",)  # as TorchRL's losses ask for it
    log_prob_keys = ("action_log_prob",)

    def __init__(self, env: EnvBase, hidden: Sequence[int]) -> None:
        super().__init__()
        observed, acted = widths_of(env)
        space = env.action_spec_unbatched.space
        self.net, self._low, self._high = Mlp((observed, *hidden, 2 * acted)), space.low, space.high

    def distribution(self, observation: Tensor) -> TanhNormal:
        """Return the distribution of actions [N, A] for observations [N, O]."""
        loc, log_scale = self.net(observation).chunk(2, -1)
        return TanhNormal(loc, log_scale.clamp(-20.0, 2.0).exp(), self._low, self._high)

    def get_dist(self, tensordict: TensorDictBase) -> TanhNormal:
        """Return the distribution, as TorchRL's losses ask for it."""
        return self.distribution(tensordict.get("observation"))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Draw an action."""
        return tensordict.set("action", self.get_dist(tensordict).sample())


class LogitPolicy(TensorDictModuleBase):
    """Discrete SAC's policy.

    Args:
        env: Says what is observed and done.
        hidden: Widths of the layers.
    """

    in_keys = ("observation",)
    out_keys = ("action",)
    dist_sample_keys = ("action",)  # as TorchRL's losses ask for it
    log_prob_keys = ("action_log_prob",)

    def __init__(self, env: EnvBase, hidden: Sequence[int]) -> None:
        super().__init__()
        observed, acted = widths_of(env)
        self.net = Mlp((observed, *hidden, acted))

    def distribution(self, observation: Tensor) -> Categorical:
        """Return the distribution of actions [N] for observations [N, O]."""
        return Categorical(self.net(observation))

    def get_dist(self, tensordict: TensorDictBase) -> Categorical:
        """Return the distribution, as TorchRL's losses ask for it."""
        return self.distribution(tensordict.get("observation"))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Draw an action."""
        return tensordict.set("action", self.get_dist(tensordict).sample())


class DeterministicPolicy(TensorDictModuleBase):
    """The policy of TD3 and DDPG: tanh, scaled to the range of each action.

    Args:
        env: Says what is observed and done.
        hidden: Widths of the layers.
    """

    in_keys = ("observation",)
    out_keys = ("action",)

    def __init__(self, env: EnvBase, hidden: Sequence[int]) -> None:
        super().__init__()
        observed, acted = widths_of(env)
        space = env.action_spec_unbatched.space
        self.net = Mlp((observed, *hidden, acted))
        self._half, self._middle = (space.high - space.low) / 2, (space.high + space.low) / 2

    def action(self, observation: Tensor) -> Tensor:
        """Return actions [N, A] for observations [N, O]."""
        return self.net(observation).tanh() * self._half + self._middle

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action."""
        return tensordict.set("action", self.action(tensordict.get("observation")))


class QOfStateAction(TensorDictModuleBase):
    """A critic of observations and continuous actions; writes `state_action_value` [N, 1].

    Args:
        env: Says what is observed and done.
        hidden: Widths of the layers.
    """

    in_keys = ("observation", "action")
    out_keys = ("state_action_value",)

    def __init__(self, env: EnvBase, hidden: Sequence[int]) -> None:
        super().__init__()
        self.net = Mlp((sum(widths_of(env)), *hidden, 1))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the value."""
        value = self.net(tensordict.get("observation"), tensordict.get("action"))
        return tensordict.set("state_action_value", value)


class QOfActions(TensorDictModuleBase):
    """A critic with one value for each discrete action, [N, A].

    It writes what TorchRL's `QValueActor` writes for categorical actions.

    Args:
        env: Says what is observed and done.
        hidden: Widths of the layers.
    """

    in_keys = ("observation",)
    out_keys = ("action_value", "action", "chosen_action_value")

    def __init__(self, env: EnvBase, hidden: Sequence[int]) -> None:
        super().__init__()
        observed, acted = widths_of(env)
        self.net = Mlp((observed, *hidden, acted))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the values, the best action and its value."""
        value = self.net(tensordict.get("observation"))
        best, action = value.max(-1, keepdim=True)
        tensordict.set("action_value", value)
        tensordict.set("action", action.squeeze(-1))
        return tensordict.set("chosen_action_value", best)


def with_twins(
    make: Callable[[TensorDictModuleBase], LossModule], critics: Sequence[TensorDictModuleBase]
) -> LossModule:
    """Make a loss whose twin critics have the weights of two networks.

    Given one network, TorchRL draws both anew, uniformly between the lowest and the highest
    weight of the one. (A list of two it takes too, but 0.13 cannot update their targets.)
    Targets follow when their updater is made.
    """
    weights = torch.stack([critic.net.weights.detach() for critic in critics])
    with torch.random.fork_rng(devices=[]):
        loss = make(critics[0])
    loss.qvalue_network_params["net", "weights"].data.copy_(weights)
    _both_at_once(loss)
    return loss


def _both_at_once(loss: LossModule) -> None:
    """Let twin critics run one after the other on their weights, [2, P].

    TorchRL runs them by `vmap`, whose batched products are slower on a CPU, and whose swapping of
    parameters costs as much as a layer. The attributes are not part of its interface: where
    they are missing, TorchRL's own way is taken, which gives the same numbers.
    """
    critic = loss.qvalue_network

    def run(tensordict: TensorDictBase, params: TensorDictBase, *, apart: bool) -> TensorDictBase:
        inputs = [tensordict.get(key) for key in critic.in_keys]
        weights = params.get(("net", "weights")).unbind(0)
        own = zip(*(x.unbind(0) for x in inputs), strict=True) if apart else [inputs] * len(weights)
        values = [critic.net.run(w, *x) for w, x in zip(weights, own, strict=True)]
        value = torch.stack(values)
        return TensorDict({critic.out_keys[0]: value}, value.shape[:2])

    for name, apart in (("_vmap_qnetworkN0", False), ("_vmap_qvalue_network00", True)):
        if hasattr(loss, name):
            setattr(loss, name, functools.partial(run, apart=apart))
