"""Exploration: how the actions that are tried differ from those that look best.

A rule (a frozen dataclass) says how; an `Explorer` holds what changes while it is followed.
TorchRL's EGreedyModule, AdditiveGaussianModule and OrnsteinUhlenbeckProcessModule do the same on
TensorDicts. These work on tensors, follow the schedules of `polopt.losses`, measure noise in
half the action range and resume exactly; what they share with TorchRL's is tested to be equal.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from polopt.losses.schedules import Coefficient, check_coefficient, check_unit, value_at

__all__ = [
    "Boltzmann",
    "EpsilonGreedy",
    "Explorer",
    "GaussianNoise",
    "GumbelSoftmax",
    "OrnsteinUhlenbeck",
    "Rule",
    "Ucb",
]

State = dict[str, Tensor]


class Rule(ABC):
    """How to explore. Subclasses are frozen dataclasses; their schedules count frames.

    Attributes:
        discrete: Whether it chooses among values [N, A], or else disturbs actions [N, A].
    """

    discrete: bool

    @abstractmethod
    def __call__(self, x: Tensor, frames: float, state: State, generator: Generator) -> Tensor:
        """Return actions int64 [N] for values [N, A], or noise [N, A] for actions [N, A].

        Noise is in units of half the action range. `state` is changed in place.
        """

    def start(self, x: Tensor) -> State:
        """Return the state before the first call, made for `x`."""
        return {}

    def restart(self, state: State, done: Tensor) -> None:
        """Begin anew where an episode ended, bool [N]; most rules remember nothing of it."""
        return


@dataclass(frozen=True, kw_only=True)
class EpsilonGreedy(Rule):
    """The best action, or with probability ε any.

    Attributes:
        epsilon: ε in [0, 1], for example `Linear(start=1.0, end=0.05, steps=10_000)` or
            `Exponential`.
    """

    epsilon: Coefficient
    discrete = True

    def __post_init__(self) -> None:
        check_unit("epsilon", self.epsilon)

    def __call__(self, x: Tensor, frames: float, state: State, generator: Generator) -> Tensor:
        """See `Rule`."""
        rows, device = x.shape[:-1], x.device
        explore = torch.rand(rows, generator=generator, device=device)
        other = torch.randint(x.shape[-1], rows, generator=generator, device=device)
        return torch.where(explore < value_at(self.epsilon, frames), other, x.argmax(-1))


@dataclass(frozen=True, kw_only=True)
class Boltzmann(Rule):
    """Actions with probability softmax(value / temperature).

    Attributes:
        temperature: Positive, in the unit of the values.
    """

    temperature: Coefficient
    discrete = True

    def __post_init__(self) -> None:
        check_coefficient(
            "temperature",
            self.temperature,
            allowed=lambda t: 0.0 < t < math.inf,
            expected="positive and finite",
        )

    def __call__(self, x: Tensor, frames: float, state: State, generator: Generator) -> Tensor:
        """See `Rule`."""
        ahead = x - x.amax(-1, keepdim=True)  # before dividing: a low temperature overflows
        temperature = max(value_at(self.temperature, frames), torch.finfo(x.dtype).tiny)
        weights = (ahead / temperature).softmax(-1)
        return torch.multinomial(weights, 1, generator=generator).squeeze(-1)


@dataclass(frozen=True, kw_only=True)
class Ucb(Rule):
    """The action with the largest value + c·√(ln t / n), n of its t choices so far.

    Each row counts its own choices, whatever the observation, and tries every action once
    first. On a bandit, with values that are mean rewards in [0, 1], c = √2 is UCB1; on a head
    whose values depend on the observation it keeps actions from being forgotten, no more.
    Source: https://doi.org/10.1023/A:1013689704352, figure 1.

    Attributes:
        c: At least zero, in the unit of the values.
    """

    c: Coefficient = 2.0**0.5
    discrete = True

    def __post_init__(self) -> None:
        check_coefficient("c", self.c)

    def __call__(self, x: Tensor, frames: float, state: State, generator: Generator) -> Tensor:
        """See `Rule`."""
        counts = state["counts"]
        plays = counts.sum(-1, keepdim=True).clamp(min=1.0)
        bonus = value_at(self.c, frames) * (plays.log() / counts.clamp(min=1.0)).sqrt()
        action = torch.where(counts > 0, x + bonus, torch.inf).argmax(-1, keepdim=True)
        counts.scatter_add_(-1, action, torch.ones_like(counts[..., :1]))
        return action.squeeze(-1)

    def start(self, x: Tensor) -> State:
        """See `Rule`."""
        return {"counts": torch.zeros_like(x)}


@dataclass(frozen=True, kw_only=True)
class GaussianNoise(Rule):
    """Independent normal noise.

    Attributes:
        sigma: Its standard deviation in half the action range: 0.1 in TD3,
            https://arxiv.org/abs/1802.09477, section 6.1.
    """

    sigma: Coefficient = 0.1
    discrete = False

    def __post_init__(self) -> None:
        check_coefficient("sigma", self.sigma)

    def __call__(self, x: Tensor, frames: float, state: State, generator: Generator) -> Tensor:
        """See `Rule`."""
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
        return value_at(self.sigma, frames) * noise


@dataclass(frozen=True, kw_only=True)
class OrnsteinUhlenbeck(Rule):
    """Noise that remembers: x ← x − θ·x·dt + σ·√dt·N(0, 1), zero when an episode begins.

    Its deviation settles at about σ / √(2θ) and its memory at 1 / (θ·dt) steps.
    Source: https://arxiv.org/abs/1509.02971, section 7, whose θ and σ are the defaults.

    Attributes:
        sigma: σ, in half the action range.
        theta: θ, positive.
        dt: Time of a step, positive, θ·dt below 2 (beyond, the noise grows without end).
    """

    sigma: Coefficient = 0.2
    theta: float = 0.15
    dt: float = 1.0
    discrete = False

    def __post_init__(self) -> None:
        check_coefficient("sigma", self.sigma)
        for name in ("theta", "dt"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if not self.theta * self.dt < 2.0:
            raise ValueError(
                f"theta times dt must be below 2, or the noise grows without end, got "
                f"{self.theta * self.dt}"
            )

    def __call__(self, x: Tensor, frames: float, state: State, generator: Generator) -> Tensor:
        """See `Rule`."""
        push = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
        scale = value_at(self.sigma, frames) * math.sqrt(self.dt)
        state["noise"].mul_(1.0 - self.theta * self.dt).add_(push, alpha=scale)
        return state["noise"]

    def start(self, x: Tensor) -> State:
        """See `Rule`."""
        return {"noise": torch.zeros_like(x)}

    def restart(self, state: State, done: Tensor) -> None:
        """See `Rule`."""
        state["noise"].masked_fill_(done.unsqueeze(-1), 0.0)


class Explorer:
    """Follows a rule in N environments.

    Args:
        rule: How to explore.
        low: Least actions [A]; for rules that disturb actions.
        high: Greatest actions [A].
        seed: Of its own draws; None draws one from torch's global generator.
        device: Where values and actions live.

    Raises:
        ValueError: If the rule disturbs actions and there are no finite bounds.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        low: Tensor | None = None,
        high: Tensor | None = None,
        seed: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.rule = rule
        self._low, self._high = low, high
        if not rule.discrete:
            if low is None or high is None or not (torch.isfinite(high - low)).all():
                raise ValueError(
                    f"{type(rule).__name__} measures noise in the range of actions, which must "
                    f"be bounded, got low={low} high={high}"
                )
            self._half = (high - low) / 2.0
        self._generator = Generator(device=device)
        self._generator.manual_seed(int(torch.randint(2**31, ())) if seed is None else seed)
        self._state: State | None = None

    @torch.no_grad()
    def __call__(self, x: Tensor, frames: float) -> Tensor:
        """Return the actions to take.

        Args:
            x: Values [N, A] of discrete actions, or continuous actions [N, A].
            frames: Seen so far, which the rule's schedules count.

        Returns:
            int64 [N], or [N, A] within the bounds.
        """
        if self._state is None:
            self._state = self.rule.start(x)
        out = self.rule(x, frames, self._state, self._generator)
        if self.rule.discrete:
            return out
        return torch.clamp(x + out * self._half, self._low, self._high)

    def restart(self, done: Tensor) -> None:
        """Tell where episodes ended, bool [N]: their next call begins a new one."""
        if self._state is not None:
            self.rule.restart(self._state, done)

    def state_dict(self) -> State:
        """Return all that changes, as tensors that are copies."""
        state = {key: value.clone() for key, value in (self._state or {}).items()}
        return {**state, "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue exactly where `state_dict` was taken."""
        rest = {key: value.clone() for key, value in state.items() if key != "generator"}
        self._state = rest or None
        self._generator.set_state(state["generator"])


class GumbelSoftmax(nn.Module):
    """A policy head: logits to one-hot actions through which gradients flow.

    Forward, exact samples of softmax(logits); backward, the gradient of
    softmax((logits + Gumbel noise) / temperature): biased, less so the lower the temperature,
    at the price of variance. Draws come from torch's global generator.
    Source: https://arxiv.org/abs/1611.01144, section 2.2 (straight-through).

    Args:
        temperature: Positive; a schedule follows `anneal`.
    """

    def __init__(self, temperature: Coefficient = 1.0) -> None:
        super().__init__()
        self.rule = Boltzmann(temperature=temperature)  # checks it
        self.step = 0.0

    def anneal(self, step: float) -> None:
        """Set the temperature to its value at `step`, in the unit of its schedule."""
        self.step = step

    def forward(self, logits: Tensor) -> Tensor:
        """Return one-hot actions [..., A] for logits [..., A]; the best ones in `eval` mode."""
        if not self.training:
            return nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits)
        temperature = value_at(self.rule.temperature, self.step)
        return nn.functional.gumbel_softmax(logits, tau=temperature, hard=True)
