"""What a collected batch gets before the loss sees it: scaled rewards and advantages."""

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from polopt.ext.torchrl.networks import value_of
from polopt.losses import discounted_return, gae, whiten
from polopt.losses.schedules import check_unit

__all__ = [
    "GAEAdvantage",
    "ObservationScaling",
    "RewardScaling",
    "running_return",
]


def running_return(reward: Tensor, done: Tensor, carry: Tensor, *, gamma: float) -> Tensor:
    """Return R_t = r_t + γ·(1 − done_{t−1})·R_{t−1}: what has been earned so far.

    Args:
        reward: float [N, T].
        done: bool [N, T], whether the episode ends with this step.
        carry: float [N], R before the first step, zero where an episode begins.
        gamma: Discount of what was earned earlier.

    Returns:
        float [N, T].
    """
    before = torch.cat((torch.zeros_like(done[:, :1]), done[:, :-1]), -1)
    first = torch.cat((reward[:, :1] + gamma * carry.unsqueeze(-1), reward[:, 1:]), -1)
    return discounted_return(first.flip(-1), before.flip(-1), gamma=gamma).flip(-1)


def _counted(moments: Tensor, sample: Tensor) -> Tensor:
    """Return count, mean and sum of squared deviations with a sample counted in.

    Chan's update: the result does not depend on how the data are cut.

    Args:
        moments: float64 [3, ...].
        sample: float [M, ...].
    """
    sample = sample.double()
    count, mean, squares = moments
    added, average = len(sample), sample.mean(0)
    shift, total = average - mean, count + added
    squares = squares + (sample - average).square().sum(0) + shift.square() * count * added / total
    return torch.stack((total, mean + shift * added / total, squares))


class ObservationScaling(nn.Module):
    """The first layer of an actor and its critic: (x − running mean) / running deviation.

    Inside the networks, and not in the environment, so that one observation means the same
    when it is collected, learnt from and evaluated. `measure` counts observations in; call it
    with each training batch once the policy has learnt from it, since statistics that change
    between collecting and learning would move the ratio away from one. Nothing else changes
    the statistics, so evaluation leaves them alone. They are buffers, so they are part of the
    `state_dict`. Before the first `measure` observations pass unchanged.

    Args:
        width: O.
        clamp: Scaled observations are clamped to ± this; None leaves them.

    Raises:
        ValueError: If `clamp` is not positive.
    """

    def __init__(self, width: int, *, clamp: float | None = 10.0) -> None:
        super().__init__()
        _check_positive(clamp=clamp)
        self.clamp = clamp
        self.moments: Tensor
        self.mean: Tensor
        self.deviation: Tensor
        self.register_buffer("moments", torch.zeros(3, width, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("deviation", torch.ones(width))

    def forward(self, observation: Tensor) -> Tensor:
        """Return scaled observations, [..., O]."""
        scaled = (observation - self.mean) / self.deviation
        return scaled if self.clamp is None else scaled.clamp(-self.clamp, self.clamp)

    @torch.no_grad()
    def measure(self, observation: Tensor) -> None:
        """Count observations [..., O] in."""
        self.moments.copy_(_counted(self.moments, observation.flatten(0, -2)))
        count, mean, squares = self.moments
        self.mean.copy_(mean)
        self.deviation.copy_((squares / count + 1e-8).sqrt())


class RewardScaling(TensorDictModuleBase):
    """Divides rewards by the running standard deviation of the discounted return.

    The mean is not subtracted: that would change what is optimal. In training mode each
    batch first updates the statistics; after `eval()` they stay. They are buffers, so they
    are part of the `state_dict`. Reads `("next", "reward")`, writes
    `("next", "scaled_reward")`.

    Order as in stable-baselines3's `VecNormalize`: the return is updated, counted, and then
    set to zero where an episode ended. (Gymnasium's `NormalizeReward` forgets the past before
    it counts the last reward, and does not reset at truncations.)

    Args:
        num_envs: N.
        gamma: Discount of the return.
        clamp: Scaled rewards are clamped to ± this; None leaves them.
        constant: Divide by this number instead; nothing is measured then.

    Raises:
        ValueError: If `clamp` or `constant` is not positive, or `gamma` not within [0, 1]; in use,
            if a batch is not of N environments.
    """

    in_keys = (("next", "reward"), ("next", "done"))
    out_keys = (("next", "scaled_reward"),)

    def __init__(
        self,
        num_envs: int,
        *,
        gamma: float,
        clamp: float | None = 10.0,
        constant: float | None = None,
    ) -> None:
        super().__init__()
        check_unit("gamma", gamma)
        _check_positive(clamp=clamp, constant=constant)
        self.gamma, self.clamp, self.constant = gamma, clamp, constant
        self.running: Tensor
        self.moments: Tensor
        self.register_buffer("running", torch.zeros(num_envs))
        self.register_buffer("moments", torch.zeros(3, dtype=torch.float64))

    @property
    def scale(self) -> Tensor:
        """What rewards are divided by, a scalar; 1 before anything was measured."""
        if self.constant is not None:
            return self.moments.new_tensor(self.constant)
        count, mean, squares = self.moments
        variance = squares / count.clamp(min=1)
        return torch.where(count > 1, (variance + 1e-8).sqrt(), torch.ones_like(mean))

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the scaled reward to `tensordict` [N, T] and return it."""
        reward = tensordict["next", "reward"]
        if self.training and self.constant is None:
            self._measure(reward.squeeze(-1), tensordict["next", "done"].squeeze(-1))
        scaled = reward / self.scale.to(reward.dtype)
        if self.clamp is not None:
            scaled = scaled.clamp(-self.clamp, self.clamp)
        tensordict["next", "scaled_reward"] = scaled
        return tensordict

    def _measure(self, reward: Tensor, done: Tensor) -> None:
        if len(reward) != len(self.running):
            raise ValueError(
                f"the batch is of {len(reward)} environments, the scaling was made for "
                f"{len(self.running)}: make it with num_envs={len(reward)}"
            )
        earned = running_return(reward, done, self.running, gamma=self.gamma)
        self.running = torch.where(done[:, -1], 0.0, earned[:, -1])
        self.moments = _counted(self.moments, earned.flatten())


class GAEAdvantage(TensorDictModuleBase):
    """Writes `state_value`, `advantage` and `value_target` of a collected batch [N, T].

    The critic runs once over all observations. Mistakes of layout that would silently give
    wrong advantages are errors.

    Args:
        critic: Reads `observation`, writes `state_value`.
        gamma: Discount per step.
        lam: λ of the advantage.
        target_lam: λ of the value target, if another one.
        whiten: Normalise the advantages of the batch.
        reward: Entry that holds the reward, [N, T, 1].

    Raises:
        ValueError: If γ or a λ is not within [0, 1].
    """

    out_keys = ("state_value", "advantage", "value_target")

    def __init__(
        self,
        critic: TensorDictModuleBase,
        *,
        gamma: float = 0.99,
        lam: float = 0.95,
        target_lam: float | None = None,
        whiten: bool = False,
        reward: NestedKey = ("next", "reward"),
    ) -> None:
        super().__init__()
        for name, value in (("gamma", gamma), ("lam", lam), ("target_lam", target_lam)):
            if value is not None:
                check_unit(name, value)
        self.critic = critic
        self.gamma, self.lam, self.target_lam = gamma, lam, target_lam
        self.whiten, self.reward = whiten, reward
        self.in_keys = ["observation", ("next", "observation"), reward,
                        ("next", "done"), ("next", "terminated")]  # fmt: skip
        self._value = value_of(critic)

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the entries, [N, T, 1] each, to `tensordict` and return it.

        Raises:
            ValueError: If the batch is empty, time is not its last dimension, an entry is
                missing or the flags contradict each other.
        """
        if not tensordict.numel():
            raise ValueError(
                f"the batch {list(tensordict.batch_size)} has no steps to estimate advantages of"
            )
        reward, done, terminated = (
            _column(tensordict, key) for key in (self.reward, ("next", "done"),
                                                 ("next", "terminated"))
        )  # fmt: skip
        observation, reached = tensordict["observation"], tensordict["next", "observation"]
        _check_flags(done, terminated, tensordict.get(("next", "truncated"), None))
        _check_time(tensordict, observation, reached, done)
        value, next_value = self._value(torch.stack((observation, reached))).unbind(0)
        advantage, target = gae(
            reward, value, next_value, terminated, done,
            gamma=self.gamma, lam=self.lam, target_lam=self.target_lam,
        )  # fmt: skip
        if self.whiten:
            advantage = whiten(advantage)
        for key, entry in zip(self.out_keys, (value, advantage, target), strict=True):
            tensordict[key] = entry.unsqueeze(-1)
        return tensordict


def _column(tensordict: TensorDictBase, key: NestedKey) -> Tensor:
    entry = tensordict.get(key, None)
    if entry is None:
        raise ValueError(
            f"the advantage needs the entry {key!r}; without 'terminated' a time limit cannot "
            "be told from an end"
        )
    if entry.shape != (*tensordict.batch_size, 1) or entry.ndim != 3:
        raise ValueError(
            f"{key!r} must have shape [N, T, 1] in a batch [N, T], got {list(entry.shape)} in "
            f"a batch {list(tensordict.batch_size)}"
        )
    return entry.squeeze(-1)


def _check_flags(done: Tensor, terminated: Tensor, truncated: Tensor | None) -> None:
    if (terminated & ~done).any():
        raise ValueError("a step is terminated but not done: the flags were mixed up")
    if truncated is None:
        return
    truncated = truncated.squeeze(-1)
    # A pole may fall in the very step of the time limit, but not in every one.
    if truncated.sum() >= 4 and not (truncated & ~terminated).any():
        raise ValueError(
            "every truncated step is also terminated: `done` was written into `terminated`, "
            "which would value the state at each time limit as zero"
        )


def _check_time(
    tensordict: TensorDictBase, observation: Tensor, reached: Tensor, done: Tensor
) -> None:
    names = list(tensordict.names)
    if "time" in names:
        if names[-1] != "time":
            raise ValueError(
                f"time must be the last batch dimension, [N, T], got {names}: transpose the batch"
            )
        return

    def continues(now: Tensor, later: Tensor, end: Tensor) -> bool:
        moved = (now - later).abs().flatten(end.ndim).amax(-1) > 1e-6
        return not (moved & ~end).any()

    if done.shape[0] > 1 and not continues(reached[:, :-1], observation[:, 1:], done[:, :-1]):
        order = "[T, N]" if continues(reached[:-1], observation[1:], done[:-1]) else "shuffled"
        raise ValueError(
            "steps do not follow each other along the last batch dimension: the batch looks "
            f"{order}, advantages need [N, T]"
        )


def _check_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not value > 0.0:
            raise ValueError(f"{name} must be positive or none, got {value}")
