"""A collector for batched environments that builds one TensorDict per batch."""

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.modules import ProbabilisticActor

from polopt.envs.batched import VectorEnv
from polopt.envs.guard import check_transitions
from polopt.ext.torchrl.networks import distribution_of

__all__ = ["BatchedCollector"]


class BatchedCollector:
    """Collects batches [N, T] with the layout of TorchRL's `Collector`, several times faster.

    TorchRL's collector handles TensorDicts at each step; this one handles tensors, and
    gathers them at the end of a batch. Entries: `observation`, `action`, `action_log_prob`,
    the flags of the step before, `("collector", "traj_ids")`, and under `next` the
    observation reached (the final one where an episode ends), the reward and the flags.
    Parameters of the distribution (`logits`) are left out. The first frames are the policy's, too:
    TorchRL's `init_random_frames` is for off-policy algorithms, which have `TransitionCollector`.

    Args:
        create_env_fn: The environment; named as in TorchRL.
        policy: The actor. It is read at each step: updated weights need no copying.
        frames_per_batch: N·T.
        total_frames: The iterator stops after so many.

    Raises:
        ValueError: If `frames_per_batch` is not a multiple of N, or the environment is of
            another kind: those need TorchRL's `Collector`. One that corrupts transitions
            there too is refused with the reason.
    """

    def __init__(
        self,
        create_env_fn: VectorEnv,
        policy: ProbabilisticActor,
        *,
        frames_per_batch: int,
        total_frames: int,
    ) -> None:
        check_transitions(create_env_fn)
        if not isinstance(create_env_fn, VectorEnv):
            raise ValueError(
                f"BatchedCollector steps a VectorEnv, got a {type(create_env_fn).__name__}: "
                "use torchrl.collectors.Collector"
            )
        envs = create_env_fn.batch_size[0]
        if frames_per_batch < 1 or frames_per_batch % envs:
            raise ValueError(
                f"frames_per_batch must be a multiple of the {envs} environments, "
                f"got {frames_per_batch}"
            )
        self.env, self.policy = create_env_fn, policy
        self.frames_per_batch, self.total_frames = frames_per_batch, total_frames
        self._distribution = distribution_of(policy)
        self._steps = frames_per_batch // envs
        self._frames = 0
        self._trajectories = envs
        self._ids = torch.arange(envs, device=self.env.device)
        self._observation: Tensor = self.env.reset()["observation"]

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield batches until `total_frames` are collected."""
        while self._frames < self.total_frames:
            yield self.collect()

    @torch.no_grad()
    def collect(self) -> TensorDictBase:
        """Return the next batch, [N, T]."""
        rows: list[tuple[Tensor, ...]] = []
        observation = self._observation
        for _ in range(self._steps):
            distribution = self._distribution(observation)
            action = distribution.sample()
            log_prob = distribution.log_prob(action)
            reached, *outcome = self.env.advance(action)
            done = outcome[1] | outcome[2]
            rows.append((observation, action, log_prob, reached, *outcome, done))
            observation = self.env.restart(done) if done.any() else reached
        self._observation = observation
        self._frames += self.frames_per_batch
        return self._gather(rows)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed collector needs, the environment included."""
        return {
            "frames": self._frames,
            "trajectories": self._trajectories,
            "traj_ids": self._ids,
            "env": self.env.snapshot(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self._frames, self._trajectories = state["frames"], state["trajectories"]
        self._ids = state["traj_ids"]
        self._observation = self.env.restore(state["env"])

    def update_policy_weights_(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Do nothing: the policy is used in place."""

    def shutdown(self, **_: Any) -> None:  # noqa: ANN401
        """Close the environment."""
        if not self.env.is_closed:
            self.env.close()

    def _trajectories_of(self, done: Tensor) -> Tensor:
        """Number trajectories in the order in which they begin, [N, T]."""
        begins = done.T.reshape(-1).cumsum(0).reshape(done.T.shape).T + self._trajectories - 1
        self._trajectories += int(done.sum())
        # Numbers only grow: each step has the newest one that its environment was given.
        numbers = torch.cat((self._ids.unsqueeze(1), torch.where(done, begins, -1)), 1)
        numbers = numbers.cummax(1).values
        self._ids = numbers[:, -1]
        return numbers[:, :-1]

    def _gather(self, rows: list[tuple[Tensor, ...]]) -> TensorDictBase:
        columns = [torch.stack(column, 1) for column in zip(*rows, strict=True)]
        observation, action, log_prob, reached, *outcome = columns
        ids = self._trajectories_of(outcome[-1])
        reward, terminated, truncated, done = (entry.unsqueeze(-1) for entry in outcome)
        flags = {"done": done, "terminated": terminated, "truncated": truncated}
        shape, device = observation.shape[:2], observation.device
        step = {"observation": reached, "reward": reward, **flags}
        start = {name: torch.zeros_like(flag) for name, flag in flags.items()}
        batch = TensorDict(
            {
                "observation": observation,
                "action": action,
                "action_log_prob": log_prob,
                "collector": {"traj_ids": ids},
                "next": step,
                **start,
            },
            shape,
            device=device,
        )
        batch.names = [None, "time"]
        return batch
