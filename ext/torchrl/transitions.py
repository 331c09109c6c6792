"""Transitions for replay: collected step by step, and joined to several steps."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data.postprocs import MultiStep

from polopt.envs.batched import VectorEnv
from polopt.ext.torchrl.transforms import running_return

__all__ = ["NStep", "TransitionCollector"]


class TransitionCollector:
    """Steps a batched environment with a function of tensors.

    Batches are [N, T] with `observation`, `action`, and under `next` the observation reached
    (the final one where an episode ends), `reward`, `done` and `terminated`, [N, T, 1] each.

    Args:
        env: N copies.
    """

    def __init__(self, env: VectorEnv) -> None:
        self.env = env
        self._observation = env.restart()
        self._earned = torch.zeros(env.batch_size[0], device=env.device)

    @torch.no_grad()
    def collect(
        self,
        act: Callable[[Tensor], Tensor],
        steps: int,
        end: Callable[[Tensor], None] | None = None,
    ) -> TensorDictBase:
        """Return the next batch.

        Args:
            act: From observations [N, O] to actions.
            steps: T.
            end: Is told where episodes ended, bool [N].
        """
        rows: list[tuple[Tensor, ...]] = []
        observation = self._observation
        for _ in range(steps):
            action = act(observation)
            reached, reward, terminated, truncated = self.env.advance(action)
            done = terminated | truncated
            rows.append((observation, action, reached, reward, done, terminated))
            observation = reached
            if done.any():
                observation = self.env.restart(done)
                if end is not None:
                    end(done)
        self._observation = observation
        observation, action, reached, *outcome = (
            torch.stack(column, 1) for column in zip(*rows, strict=True)
        )
        names = ("reward", "done", "terminated")
        entries = {name: e.unsqueeze(-1) for name, e in zip(names, outcome, strict=True)}
        return TensorDict(
            {
                "observation": observation,
                "action": action,
                "next": {"observation": reached, **entries},
            },
            observation.shape[:2],
            device=observation.device,
        )

    def returns(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the mean return of the episodes that ended in the next batch, and their number.

        Args:
            batch: As collected, each in its turn. The mean is NaN if none ended.
        """
        reward, done = (batch["next", name].squeeze(-1) for name in ("reward", "done"))
        earned = running_return(reward, done, self._earned, gamma=1.0)
        self._earned = torch.where(done[:, -1], 0.0, earned[:, -1])
        count = done.sum()
        mean = torch.where(done, earned, 0.0).sum() / count
        return {"return_mean": mean, "episodes": count.float()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a resumed collector needs, the environment included."""
        return {"earned": self._earned, **{f"env.{k}": v for k, v in self.env.snapshot().items()}}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue where `state_dict` was taken."""
        start = "env."
        env = {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}
        self._observation = self.env.restore(env)
        # Where episodes begin anew, nothing is earned yet.
        self._earned = state["earned"] if self.env.exact else torch.zeros_like(state["earned"])


class NStep:
    """Joins steps to n-step transitions by TorchRL's `MultiStep`, across batches.

    The reward becomes Σ γᵏ·r over the next n steps or to the end of the episode, the next
    observation and the flags those of the last of these steps, and `steps_to_next_obs` says how
    many they were, which TorchRL's losses discount by. The last n − 1 steps of a batch wait for
    the next one. (`MultiStep` and `MultiStepTransform` keep the flags of the first step unless
    told otherwise: values beyond the end of an episode would count.)

    Args:
        n: Steps.
        gamma: Discount per step.
    """

    def __init__(self, n: int, *, gamma: float) -> None:
        self.n = n
        self._join = MultiStep(gamma, n)
        self._join.done_keys = ()  # flags are shifted as observations are
        self._waiting: TensorDictBase | None = None

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the transitions [N, T'] that are complete with this batch [N, T]."""
        if self.n == 1:
            return batch
        if self._waiting is not None:
            batch = torch.cat((self._waiting, batch), 1)
        complete = max(batch.shape[1] - (self.n - 1), 0)
        self._waiting = batch[:, complete:].clone()
        joined = self._join(batch)[:, :complete]
        return joined.select(*batch.keys(True, True), "steps_to_next_obs")

    def state_dict(self) -> dict[str, Any]:
        """Return the steps that wait, by name."""
        return {} if self._waiting is None else self._waiting.flatten_keys(".").to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; nothing waits if it is empty."""
        self._waiting = None
        if state:
            size = state["observation"].shape[:2]
            self._waiting = TensorDict(dict(state), size).unflatten_keys(".")
