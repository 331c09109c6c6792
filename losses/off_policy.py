"""Off-policy algorithms: which loss a critic and a policy learn from replayed transitions.

The losses themselves are TorchRL's; `polopt.ext.torchrl.off_policy` wires them.
"""

import math
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "EntropyTerm",
    "OffPolicy",
    "Smoothing",
    "ddpg",
    "discrete_sac",
    "double_dqn",
    "dqn",
    "sac",
    "td3",
]

ValueLoss = Literal["l2", "smooth_l1"]


@dataclass(frozen=True, kw_only=True)
class EntropyTerm:
    """The entropy that SAC adds to the reward.

    Attributes:
        alpha: Temperature at the start: what one nat is worth, in units of the reward.
        tuned: Whether the temperature is tuned until the policy has the target entropy.
        target: Target entropy in nats, a constant. None: −1 for each continuous action, which
            is measured in half its range, or 0.98·log(number of actions) for discrete ones.
    """

    alpha: float = 1.0
    tuned: bool = True
    target: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha < math.inf:
            raise ValueError(f"alpha must be positive and finite, got {self.alpha}")
        if self.target is not None and not math.isfinite(self.target):
            raise ValueError(f"target_entropy must be finite or none, got {self.target}")
        if self.target is not None and not self.tuned:
            raise ValueError(
                f"target_entropy {self.target} needs a temperature that is tuned: leave it out, "
                "or set tune_alpha=true"
            )


@dataclass(frozen=True, kw_only=True)
class Smoothing:
    """Noise on the target policy's actions, in shares of half the range of each action.

    Attributes:
        noise: Standard deviation.
        clip: Bound of the noise.
    """

    noise: float = 0.2
    clip: float = 0.5

    def __post_init__(self) -> None:
        for name, value in (("smoothing_noise", self.noise), ("smoothing_clip", self.clip)):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} must not be negative, got {value}")


@dataclass(frozen=True, kw_only=True)
class OffPolicy:
    """One named off-policy algorithm: a loss and what goes with it.

    Attributes:
        loss: Which loss of TorchRL's.
        gamma: Discount per step.
        value_loss: Of the TD error δ: δ², or Huber's with threshold 1.
        tau: How far a target network moves towards the online one at an update; 1 copies.
        target_every: Optimizer steps of the critic between updates of the targets.
        policy_every: Optimizer steps of the critic for one of the policy.
        double: Choose the next action by the online network (DQN).
        smoothing: Of the target policy (TD3).
        entropy: Added to the reward (SAC).
    """

    loss: Literal["sac", "discrete_sac", "td3", "ddpg", "dqn"]
    gamma: float
    value_loss: ValueLoss
    tau: float
    target_every: int
    policy_every: int = 1
    double: bool = False
    smoothing: Smoothing | None = None
    entropy: EntropyTerm | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.gamma <= 1.0:
            raise ValueError(f"gamma must be within [0, 1], got {self.gamma}")
        if self.value_loss not in ("l2", "smooth_l1"):
            raise ValueError(f"value_loss must be 'l2' or 'smooth_l1', got {self.value_loss!r}")
        if not 0.0 < self.tau <= 1.0:
            raise ValueError(f"tau must be within (0, 1], got {self.tau}")
        for name in ("target_every", "policy_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def discrete(self) -> bool:
        """Whether it takes discrete actions; otherwise it takes continuous ones."""
        return self.loss in ("discrete_sac", "dqn")


def sac(
    *,
    gamma: float = 0.99,
    tau: float = 0.005,
    target_every: int = 1,
    alpha: float = 1.0,
    tune_alpha: bool = True,
    target_entropy: float | None = None,
    value_loss: ValueLoss = "l2",
) -> OffPolicy:
    """SAC, soft actor-critic, for continuous actions, https://arxiv.org/abs/1812.05905.

    Two critics, of which the lower one counts; no value network. The loss of the temperature
    is −log α·(log π + H̄), as in the authors' code; the paper's has α in place of log α.

    Args:
        gamma: Discount per step.
        tau: How far the target critics move at an update.
        target_every: Optimizer steps between updates of the targets.
        alpha: Temperature at the start.
        tune_alpha: Tune the temperature until the policy has the target entropy.
        target_entropy: H̄ in nats, a constant, of actions in their own units. By default −1
            for each action measured in half its range, the paper's, whose actions are in ±1: for
            a range of ±h that is log h − 1.
        value_loss: Of the TD error: δ², or Huber's with threshold 1.
    """
    return OffPolicy(
        loss="sac",
        gamma=gamma,
        value_loss=value_loss,
        tau=tau,
        target_every=target_every,
        entropy=EntropyTerm(alpha=alpha, tuned=tune_alpha, target=target_entropy),
    )


def discrete_sac(
    *,
    gamma: float = 0.99,
    tau: float = 0.005,
    target_every: int = 1,
    alpha: float = 1.0,
    tune_alpha: bool = True,
    target_entropy: float | None = None,
    value_loss: ValueLoss = "l2",
) -> OffPolicy:
    """SAC for discrete actions, with expectations in place of samples, https://arxiv.org/abs/1910.07207.

    Args:
        gamma: Discount per step.
        tau: How far the target critics move at an update.
        target_every: Optimizer steps between updates of the targets.
        alpha: Temperature at the start.
        tune_alpha: Tune the temperature until the policy has the target entropy.
        target_entropy: H̄ in nats, a constant. By default 0.98·log(number of actions), the
            paper's: nearly uniform, so that only the greedy policy is worth something.
        value_loss: Of the TD error: δ², or Huber's with threshold 1.
    """
    return OffPolicy(
        loss="discrete_sac",
        gamma=gamma,
        value_loss=value_loss,
        tau=tau,
        target_every=target_every,
        entropy=EntropyTerm(alpha=alpha, tuned=tune_alpha, target=target_entropy),
    )


def td3(
    *,
    gamma: float = 0.99,
    tau: float = 0.005,
    policy_delay: int = 2,
    smoothing_noise: float = 0.2,
    smoothing_clip: float = 0.5,
    value_loss: ValueLoss = "l2",
) -> OffPolicy:
    """TD3, twin delayed deep deterministic policy gradient, https://arxiv.org/abs/1802.09477.

    The policy and all targets move at every `policy_delay`-th optimizer step of the critics.

    Args:
        gamma: Discount per step.
        tau: How far the targets move at an update.
        policy_delay: Optimizer steps of the critics for one of the policy.
        smoothing_noise: Standard deviation of the noise on the target policy's actions, in
            shares of half the range of each action.
        smoothing_clip: Bound of that noise, in the same unit.
        value_loss: Of the TD error: δ², or Huber's with threshold 1.

    Raises:
        ValueError: If `policy_delay` is below one.
    """
    if policy_delay < 1:
        raise ValueError(f"policy_delay must be at least 1, got {policy_delay}")
    return OffPolicy(
        loss="td3",
        gamma=gamma,
        value_loss=value_loss,
        tau=tau,
        target_every=policy_delay,
        policy_every=policy_delay,
        smoothing=Smoothing(noise=smoothing_noise, clip=smoothing_clip),
    )


def ddpg(
    *,
    gamma: float = 0.99,
    tau: float = 0.005,
    target_every: int = 1,
    value_loss: ValueLoss = "l2",
) -> OffPolicy:
    """DDPG, deep deterministic policy gradient, https://arxiv.org/abs/1509.02971.

    Args:
        gamma: Discount per step.
        tau: How far the targets move at an update.
        target_every: Optimizer steps between updates of the targets.
        value_loss: Of the TD error: δ², or Huber's with threshold 1.
    """
    return OffPolicy(
        loss="ddpg", gamma=gamma, value_loss=value_loss, tau=tau, target_every=target_every
    )


def dqn(
    *,
    gamma: float = 0.99,
    target_every: int = 500,
    tau: float = 1.0,
    value_loss: ValueLoss = "smooth_l1",
) -> OffPolicy:
    """DQN, Q-learning with a target network, https://www.nature.com/articles/nature14236.

    Args:
        gamma: Discount per step.
        target_every: Optimizer steps between updates of the target network.
        tau: How far it moves at an update; 1 copies the online network.
        value_loss: Of the TD error: δ², or Huber's with threshold 1 (the paper clips the
            gradient of δ² to ±1, which is Huber's up to a factor of 2).
    """
    return OffPolicy(
        loss="dqn", gamma=gamma, value_loss=value_loss, tau=tau, target_every=target_every
    )


def double_dqn(
    *,
    gamma: float = 0.99,
    target_every: int = 500,
    tau: float = 1.0,
    value_loss: ValueLoss = "smooth_l1",
) -> OffPolicy:
    """Double DQN: the online network chooses the next action, the target network values it.

    Source: https://arxiv.org/abs/1509.06461.

    Args:
        gamma: Discount per step.
        target_every: Optimizer steps between updates of the target network.
        tau: How far it moves at an update; 1 copies the online network.
        value_loss: Of the TD error: δ², or Huber's with threshold 1.
    """
    return OffPolicy(
        loss="dqn",
        gamma=gamma,
        value_loss=value_loss,
        tau=tau,
        target_every=target_every,
        double=True,
    )
