"""Groups of rollouts from one state, for algorithms that compare them and need no critic."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.modules import ProbabilisticActor

from polopt.envs.batched import VectorEnv
from polopt.ext.torchrl.networks import distribution_of
from polopt.losses import Advantage, Sampling, discounted_return, informative, whiten

__all__ = ["DynamicSampling", "GroupAdvantage", "GroupCollector", "Sampled"]


class GroupCollector:
    """Collects G rollouts from one state, for N / G states at once.

    A rollout is a whole episode, or its first `segment` steps. A group whose first member is
    still in its episode then goes on from where that member stands, so that later states are
    met as often as the policy meets them (the vines of TRPO,
    https://arxiv.org/abs/1502.05477 section 5.2); otherwise it begins a new episode.

    Args:
        create_env_fn: The environment, which must be able to go back to any state; named as in
            TorchRL.
        policy: The actor. It is read at each step: updated weights need no copying.
        group_size: G, at least two.
        segment: Steps of a rollout, at most; None plays episodes to their end.
        gamma: Discount per step of a rollout's outcome, in [0, 1].

    Attributes:
        groups: N / G.

    Raises:
        ValueError: If the environment cannot be restored, G does not divide N, or a number is
            out of range.
    """

    def __init__(
        self,
        create_env_fn: VectorEnv,
        policy: ProbabilisticActor,
        *,
        group_size: int,
        segment: int | None = None,
        gamma: float = 1.0,
    ) -> None:
        if not isinstance(create_env_fn, VectorEnv) or not create_env_fn.exact:
            raise ValueError(
                "the rollouts of a group begin in one restored state, and this environment cannot "
                "go back to a state, as those of gymnasium cannot: use a BatchedEnv (cartpole, "
                "pendulum, …), or an algorithm with a critic, such as ppo"
            )
        envs = create_env_fn.batch_size[0]
        if group_size < 2:
            raise ValueError(
                f"group_size must be at least 2, got {group_size}: there is nothing to compare"
            )
        if envs % group_size:
            raise ValueError(
                f"group_size {group_size} must divide the {envs} copies of the environment"
            )
        if segment is not None and segment < 1:
            raise ValueError(f"segment must be at least 1 or none, got {segment}")
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma must be in [0, 1], got {gamma}")
        self.env, self.policy = create_env_fn, policy
        self.group_size, self.segment, self.gamma = group_size, segment, gamma
        self.groups = envs // group_size
        self._distribution = distribution_of(policy)
        self._group = torch.arange(self.groups, device=self.env.device).repeat_interleave(
            group_size
        )
        self._earned = torch.zeros(envs, device=self.env.device)
        self.env.reset()
        self._observation = self._gather(self._positions())

    @torch.no_grad()
    def collect(self, groups: Tensor | None = None) -> TensorDictBase:
        """Play one rollout in each member of some groups.

        Args:
            groups: bool [N / G], which; None plays all. The others stay where they are.

        Returns:
            Batch size [B], a row per rollout, with entries [B, T, ...], T the longest:
            `observation`, `action`, `action_log_prob`, and under `next` `reward` [B, T, 1] and
            the flags, as of `BatchedCollector`; `mask` [B, T], false behind the end of a
            rollout, where all entries are zero. And [B]: `group` int64; `outcome`, the
            discounted sum of the rewards; `episode_return`, the undiscounted one since the
            beginning of the episode, NaN where the episode goes on.

        Raises:
            ValueError: If no group is to be played.
        """
        if groups is None:
            groups = torch.ones(self.groups, dtype=torch.bool, device=self.env.device)
        if not groups.any():
            raise ValueError("groups must name at least one group to play, got none")
        chosen = groups[self._group]
        before = self._positions()
        playing, observation = chosen, self._observation
        rows: list[tuple[Tensor, ...]] = []
        while len(rows) != self.segment and playing.any():
            distribution = self._distribution(observation)
            action = distribution.sample()
            log_prob = distribution.log_prob(action)
            reached, *outcome = self.env.advance(action)
            rows.append((playing, observation, action, log_prob, *outcome))
            playing = playing & ~(outcome[1] | outcome[2])
            observation = reached
        batch = _batch([torch.stack(column, 1)[chosen] for column in zip(*rows, strict=True)])
        batch["group"] = self._group[chosen]
        reward, done = (batch["next", name].squeeze(-1) for name in ("reward", "done"))
        batch["outcome"] = discounted_return(reward, done, gamma=self.gamma)[:, 0]
        ended = done.any(1)
        earned = self._earned[chosen] + reward.sum(1)
        batch["episode_return"] = torch.where(ended, earned, torch.nan)
        self._earned[chosen] = torch.where(ended, 0.0, earned)
        self._go_on(before, chosen, fresh=chosen & ~playing)
        return batch

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a resumed collector needs, the environment included."""
        state = {f"env.{name}": value for name, value in self.env.snapshot().items()}
        return {**state, "earned": self._earned.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            ValueError: If the shapes are not those of the environment.
        """
        start = "env."
        env = {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}
        self._observation = self._restore(env)
        self._earned = state["earned"].clone()

    def _go_on(self, before: Mapping[str, Tensor], chosen: Tensor, *, fresh: Tensor) -> None:
        """Put every group where its next rollouts begin."""
        positions = self._positions()
        for name, value in positions.items():
            value[~chosen] = before[name][~chosen]
        self._restore(positions)
        if fresh.any():
            self.env.restart(fresh)
        self._observation = self._gather(self._positions())

    def _positions(self) -> dict[str, Tensor]:
        """The state of each copy, without the random numbers."""
        return {k: v for k, v in self.env.snapshot().items() if k != "generator"}

    def _gather(self, positions: Mapping[str, Tensor]) -> Tensor:
        """Put all members of a group where its first one stands."""
        first = self._group * self.group_size
        self._earned = self._earned[first]
        return self._restore({name: value[first] for name, value in positions.items()})

    def _restore(self, snapshot: Mapping[str, Tensor]) -> Tensor:
        self.env.restore(snapshot)
        return self.env.reset()["observation"]  # the one that changes nothing, see `restore`


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One batch for an update, and what it took to fill it.

    Attributes:
        batch: Rollouts as from `GroupCollector.collect`; there may be none.
        frames: Steps played, those of dropped groups included.
        rounds: Further rounds that were played to replace groups.
        played: Groups in all rounds.
        flat: Those of them without spread: all rollouts had the same outcome.
        dropped: Those of them that were left out.
        episode_return: float [E], of the episodes that ended, those of dropped groups included.
    """

    batch: TensorDictBase
    frames: int
    rounds: int
    played: int
    flat: int
    dropped: int
    episode_return: Tensor


class DynamicSampling:
    """Fills a batch with one group per place, and replaces those that carry no signal.

    Where all rollouts of a group have the same outcome, every advantage is zero. With
    `sampling.refill` such a group is left out, and its place plays the next start state, in at
    most `max_rounds` further rounds. Places that are still empty then stay so: the batch is
    smaller, never diluted.

    Source: DAPO, https://arxiv.org/abs/2503.14476, eq. 11.

    Args:
        collector: Plays the groups.
        sampling: Of the algorithm.

    Raises:
        ValueError: If the sampling asks for what only answers of language models have.
    """

    def __init__(self, collector: GroupCollector, sampling: Sampling) -> None:
        if sampling.refill == "correct":
            raise ValueError(
                "refill 'correct' goes by answers that are right or wrong, a rollout has an "
                "outcome: use refill='reward'"
            )
        if sampling.at_bound == "stop":
            raise ValueError(
                "at_bound 'stop' is for language models: use at_bound='train', a run whose groups "
                "never have spread ends by itself"
            )
        if sampling.top_entropy is not None:
            raise ValueError(
                f"top_entropy={sampling.top_entropy} chooses tokens of answers: leave it out"
            )
        for name in ("overlong_cache", "drop_truncated"):
            if value := getattr(sampling, name):
                raise ValueError(
                    f"{name}={value} is for answers with a length limit: leave it out, a rollout "
                    "that reaches the time limit is often the best one"
                )
        self.collector = collector
        self._rounds = sampling.max_rounds if sampling.refill else 0
        self._keep_all = sampling.refill is None

    def collect(self) -> Sampled:
        """Play rounds until every place has a group with spread, or the rounds are over."""
        missing = torch.ones(
            self.collector.groups, dtype=torch.bool, device=self.collector.env.device
        )
        parts: list[TensorDictBase] = []
        returns: list[Tensor] = []
        frames = played = flat = 0
        rounds = -1
        while missing.any() and rounds < self._rounds:
            rounds += 1
            batch = self.collector.collect(missing)
            frames += int(batch["mask"].sum())
            played += int(missing.sum())
            returns.append(batch["episode_return"])
            spread = torch.zeros_like(missing)
            found = informative(batch["outcome"], batch["group"])
            spread[: len(found)] = found
            flat += int((missing & ~spread).sum())
            kept = missing if self._keep_all else missing & spread
            parts.append(batch[kept[batch["group"]]])
            missing = missing & ~kept
        ended = torch.cat(returns)
        return Sampled(
            batch=_join(parts),
            frames=frames,
            rounds=rounds,
            played=played,
            flat=flat,
            dropped=0 if self._keep_all else flat,
            episode_return=ended[~ended.isnan()],
        )


class GroupAdvantage(TensorDictModuleBase):
    """Writes the `advantage` [B, T, 1] of rollouts from `GroupCollector`, zero behind their end.

    An advantage per rollout is that of each of its steps. The function may ask for `reward` (the
    outcome), `group` and `length`, each [B], and for `token_reward` and `mask`, [B, T] each.
    Also writes `group_tokens` [B], the steps of each row's group, for aggregation
    `"group_token_mean"`.

    Args:
        advantage: Of the algorithm; see `polopt.losses.Advantage`.

    Raises:
        ValueError: If the function asks for something else.
    """

    in_keys = (("next", "reward"), "mask", "group", "outcome")
    out_keys = ("advantage", "group_tokens")

    def __init__(self, advantage: Advantage) -> None:
        super().__init__()
        unknown = [name for name in advantage.needs if name not in _INPUTS]
        if unknown:
            estimate = getattr(advantage.estimate, "__name__", "the advantage")
            raise ValueError(
                f"{estimate} asks for {', '.join(unknown)}; of rollouts there are "
                f"{', '.join(_INPUTS)}"
            )
        self.advantage = advantage

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the entries to `tensordict` [B] and return it.

        Raises:
            ValueError: If an entry is missing or not finite.
        """
        mask, group = tensordict["mask"], tensordict["group"]
        length = mask.sum(1)
        inputs = {
            "reward": tensordict["outcome"],
            "group": group,
            "length": length,
            "token_reward": tensordict["next", "reward"].squeeze(-1),
            "mask": mask,
        }
        advantage = self.advantage(*(inputs[name] for name in self.advantage.needs))
        if advantage.ndim == 1:
            advantage = torch.where(mask, advantage.unsqueeze(-1), 0.0)
        if self.advantage.whiten:
            advantage = whiten(advantage, mask)
        tensordict["advantage"] = advantage.unsqueeze(-1)
        groups = int(group.max()) + 1 if len(group) else 0
        tensordict["group_tokens"] = length.new_zeros(groups).index_add(0, group, length)[group]
        return tensordict


_INPUTS = ("reward", "group", "length", "token_reward", "mask")


def _batch(columns: list[Tensor]) -> TensorDictBase:
    mask, observation, action, log_prob, *outcome = columns

    def padded(entry: Tensor) -> Tensor:
        return entry.masked_fill(~mask.reshape(mask.shape + (1,) * (entry.ndim - 2)), 0)

    reward, terminated, truncated = (padded(entry).unsqueeze(-1) for entry in outcome)
    flags = {"done": terminated | truncated, "terminated": terminated, "truncated": truncated}
    return TensorDict(
        {
            "observation": padded(observation),
            "action": padded(action),
            "action_log_prob": padded(log_prob),
            "mask": mask,
            "next": {"reward": reward, **flags},
        },
        mask.shape[:1],
        device=mask.device,
    )


def _join(parts: list[TensorDictBase]) -> TensorDictBase:
    """Put batches below each other, filled up with zeros to the longest rollout of all."""
    parts = [part for part in parts if len(part)] or parts[:1]
    steps = max(part["mask"].shape[1] for part in parts)

    def widened(entry: Tensor) -> Tensor:
        if entry.ndim == 1:  # an entry per row
            return entry
        missing = entry.new_zeros((len(entry), steps - entry.shape[1], *entry.shape[2:]))
        return torch.cat((entry, missing), 1)

    return torch.cat([part.apply(widened) for part in parts])
