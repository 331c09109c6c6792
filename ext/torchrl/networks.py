"""Actors and critics for control, and their evaluation without a TensorDict per layer."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch
from tensordict import TensorDict
from tensordict.nn import (
    AddStateIndependentNormalScale,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.data import Categorical as CategoricalSpec
from torchrl.envs import EnvBase
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator

from polopt.ext.torchrl.distributions import Categorical

__all__ = ["distribution_of", "flatten", "make_actor", "make_critic", "value_of"]


def make_actor(
    env: EnvBase, hidden: Sequence[int] = (64, 64), *, scaling: nn.Module | None = None
) -> ProbabilisticActor:
    """Build an actor: tanh layers, then logits, or means with a deviation per action.

    Args:
        env: Has one observation entry, `observation` [..., O].
        hidden: Widths of the layers.
        scaling: Layer before the first one, such as `transforms.ObservationScaling`.
    """
    space = env.action_spec_unbatched
    width = env.observation_spec["observation"].shape[-1]
    if isinstance(space, CategoricalSpec):
        net: nn.Module = _layers((width, *hidden, space.space.n), last_gain=0.01, scaling=scaling)
        keys, distribution = ["logits"], Categorical
    else:
        count = space.shape[-1]
        net = nn.Sequential(
            _layers((width, *hidden, count), last_gain=0.01, scaling=scaling),
            AddStateIndependentNormalScale(count, scale_mapping="exp"),
        )
        keys, distribution = ["loc", "scale"], IndependentNormal
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=keys),
        in_keys=keys,
        distribution_class=distribution,
        return_log_prob=True,
    )


def make_critic(
    env: EnvBase, hidden: Sequence[int] = (64, 64), *, scaling: nn.Module | None = None
) -> ValueOperator:
    """Build a critic with layers like those of `make_actor`; writes `state_value` [..., 1]."""
    width = env.observation_spec["observation"].shape[-1]
    net = _layers((width, *hidden, 1), last_gain=1.0, scaling=scaling)
    return ValueOperator(net, in_keys=["observation"])


def distribution_of(actor: ProbabilisticActor) -> Callable[[Tensor], Distribution]:
    """Return the function from observations to the actor's distribution.

    For the usual actor (one network, one distribution) it calls the network directly, which
    at small batches is several times faster than the actor itself; others run as they are.

    Args:
        actor: Reads `observation`.
    """
    if len(actor) == 2 and _is_network(actor[0]):
        layer, head = actor[0], actor[1]
        names = list(layer.out_keys)
        if list(head.in_keys) == names:
            net, make, settings = layer.module, head.distribution_class, head.distribution_kwargs

            def direct(observation: Tensor) -> Distribution:
                out = net(observation)
                parameters = out if isinstance(out, tuple) else (out,)
                return make(**dict(zip(names, parameters, strict=True)), **settings)

            return direct

    def general(observation: Tensor) -> Distribution:
        return actor.get_dist(TensorDict({"observation": observation}, observation.shape[:-1]))

    return general


def value_of(critic: TensorDictModuleBase) -> Callable[[Tensor], Tensor]:
    """Return the function from observations [..., O] to the critic's values [...]."""
    if _is_network(critic):
        net = critic.module
        return lambda observation: net(observation).squeeze(-1)

    def general(observation: Tensor) -> Tensor:
        entries = TensorDict({"observation": observation}, observation.shape[:-1])
        return critic(entries)["state_value"].squeeze(-1)

    return general


@torch.no_grad()
def flatten(parameters: Iterable[nn.Parameter]) -> nn.Parameter:
    """Move parameters, and their gradients, into one tensor each, and return it.

    An optimiser over the one tensor trains them all in one call, where one over many small
    tensors spends its time between them. The parameters become views: write to them in
    place (`load_state_dict` does), and zero gradients with `set_to_none=False`.
    """
    parts = list(parameters)
    whole = nn.Parameter(torch.cat([p.flatten() for p in parts]))
    whole.grad = torch.zeros_like(whole)
    sizes = [p.numel() for p in parts]
    for part, value, grad in zip(
        parts, whole.detach().split(sizes), whole.grad.split(sizes), strict=True
    ):
        part.data = value.view_as(part)
        part.grad = grad.view_as(part)
    return whole


def _is_network(module: TensorDictModuleBase) -> bool:
    """Whether a module calls one network on the observation and does nothing else."""
    single = isinstance(module, TensorDictModule) and isinstance(module.module, nn.Module)
    sequence = isinstance(module, TensorDictSequential)
    return single and not sequence and list(module.in_keys) == ["observation"]


def _layers(widths: Sequence[int], *, last_gain: float, scaling: nn.Module | None) -> nn.Sequential:
    """Linear layers with tanh between them, orthogonal weights and zero biases."""
    layers: list[nn.Module] = [] if scaling is None else [scaling]
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        last = i == len(widths) - 2
        linear = nn.Linear(inputs, outputs)
        nn.init.orthogonal_(linear.weight, last_gain if last else math.sqrt(2))
        nn.init.zeros_(linear.bias)
        layers += [linear] if last else [linear, nn.Tanh()]
    return nn.Sequential(*layers)
