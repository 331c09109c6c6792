"""Actors whose actions follow a normalising flow: no fixed shape, at a price in time."""

from collections.abc import Sequence

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.envs import EnvBase
from torchrl.modules import ProbabilisticActor

try:
    from zuko.flows import NSF
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "policies that are flows need zuko: pip install 'polopt[flow]'", name=error.name
    ) from error

__all__ = ["FlowDistribution", "make_flow_actor"]


class FlowDistribution(Distribution):
    """Actions = middle + reach · x, where x follows a flow that depends on the context.

    Args:
        context: float [..., C].
        flow: From contexts to a distribution of x [..., A] that rsamples, a flow of zuko.
        middle: float [A].
        reach: float [A], positive.
    """

    arg_constraints = {}  # noqa: RUF012  as in torch
    has_rsample = True

    def __init__(self, context: Tensor, flow: nn.Module, middle: Tensor, reach: Tensor) -> None:
        self._flow = flow(context)
        self._middle, self._reach = middle, reach
        super().__init__(context.shape[:-1], middle.shape, validate_args=False)

    @property
    def mode(self) -> Tensor:
        """Where the centre of the base distribution is sent, float [..., A].

        Not the densest action, which has no closed form; with one action it is the median.
        """
        centre = self._flow.base.mean.expand(*self.batch_shape, *self.event_shape)
        return self._middle + self._reach * self._flow.transform.inv(centre)

    @property
    def deterministic_sample(self) -> Tensor:
        """The same, under the name that TorchRL looks for."""
        return self.mode

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        """Draw actions [*sample_shape, ..., A] through which gradients flow."""
        return self._middle + self._reach * self._flow.rsample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-densities [...] of actions [..., A]."""
        x = (value - self._middle) / self._reach
        return self._flow.log_prob(x) - self._reach.log().sum()

    def entropy(self) -> Tensor:
        """Estimates [...] of the entropies, in nats: −log-density of one draw each.

        There is no closed form. The estimate is unbiased, and so is its gradient, which flows
        through the draw.
        """
        _, log_prob = self._flow.rsample_and_log_prob()
        return self._reach.log().sum() - log_prob


class _Context(nn.Module):
    """Hands observations on, and makes the flow's parameters the actor's."""

    def __init__(self, flow: nn.Module, scaling: nn.Module | None) -> None:
        super().__init__()
        self.flow, self.scaling = flow, scaling

    def forward(self, observation: Tensor) -> Tensor:
        return observation if self.scaling is None else self.scaling(observation)


def make_flow_actor(
    env: EnvBase, hidden: Sequence[int] = (64, 64), *, scaling: nn.Module | None = None
) -> ProbabilisticActor:
    """Build an actor with a neural spline flow: tanh layers, then 8 bins for each action.

    It begins close to a normal distribution around the middle of the action range, whose
    bounds lie at two standard deviations. As with a Gaussian, the environment clips what lies
    outside. Source: https://arxiv.org/abs/1906.04032, as zuko implements it.

    Args:
        env: Has one observation entry, `observation` [..., O], and bounded continuous actions.
        hidden: Widths of the layers.
        scaling: Layer before the first one, such as `transforms.ObservationScaling`.

    Raises:
        ValueError: If the actions are discrete or not bounded.
    """
    space = env.action_spec_unbatched.space
    low, high = getattr(space, "low", None), getattr(space, "high", None)
    if low is None or not torch.isfinite(high - low).all():
        kind = "discrete ones" if low is None else f"bounds {low.tolist()} and {high.tolist()}"
        raise ValueError(
            f"policy 'flow' needs bounded continuous actions, got {kind}: use policy 'standard'"
        )
    width = env.observation_spec["observation"].shape[-1]
    flow = NSF(
        low.shape[-1], width, transforms=1, hidden_features=tuple(hidden), activation=nn.Tanh
    )
    with torch.no_grad():
        for transform in flow.transform.transforms:
            transform.hyper[-1].weight.mul_(0.01)
            transform.hyper[-1].bias.zero_()
    return ProbabilisticActor(
        TensorDictModule(_Context(flow, scaling), in_keys=["observation"], out_keys=["context"]),
        in_keys=["context"],
        distribution_class=FlowDistribution,
        distribution_kwargs={"flow": flow, "middle": (low + high) / 2, "reach": (high - low) / 4},
        return_log_prob=True,
    )
