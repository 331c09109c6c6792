"""Batched environments for TorchRL that keep every transition whole."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from polopt.envs.classic import Physics

try:
    from torchrl.data import Binary, Bounded, Categorical, Composite, Unbounded
    from torchrl.envs import EnvBase
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "control environments need TorchRL: pip install 'polopt[torchrl]'", name=error.name
    ) from error

__all__ = ["BatchedEnv", "VectorEnv"]


class VectorEnv(EnvBase):
    """N copies of an environment that can be stepped with or without TensorDicts.

    A finished episode keeps its final observation in `("next", "observation")`, and
    `terminated` and `truncated` stay apart. Nothing resets by itself: TorchRL's collectors
    reset the rows that are done, and so does `BatchedCollector`.

    Subclasses implement `restart`, `advance`, `snapshot`, `restore` and `_observe`.

    Attributes:
        exact: Whether `restore` goes back into the middle of episodes.
    """

    exact = True

    def __init__(self, num_envs: int, *, device: torch.device | str = "cpu") -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, got {num_envs}")
        super().__init__(device=torch.device(device), batch_size=torch.Size([num_envs]))
        self._generator = torch.Generator(device=self.device)
        self._restored = False

    def _make_specs(self, low: Tensor, high: Tensor, actions: int | tuple[Tensor, Tensor]) -> None:
        """Make the specs from bounds [O] and a number of actions or their bounds [A]."""
        n = self.batch_size[0]
        low, high = (b.to(self.device).expand(n, len(b)) for b in (low, high))
        self.observation_spec = Composite(
            observation=Bounded(low, high, device=self.device), shape=self.batch_size
        )
        if isinstance(actions, int):
            self.action_spec = Categorical(
                actions, self.batch_size, device=self.device, dtype=torch.int64
            )
        else:
            low, high = (b.to(self.device).expand(n, len(b)) for b in actions)
            self.action_spec = Bounded(low, high, device=self.device, dtype=torch.float32)
        column = torch.Size([n, 1])
        self.reward_spec = Unbounded(column, device=self.device, dtype=torch.float32)
        flag = Binary(1, column, device=self.device, dtype=torch.bool)
        self.done_spec = Composite(
            {name: flag.clone() for name in ("done", "terminated", "truncated")},
            shape=self.batch_size,
        )

    def restart(self, mask: Tensor | None = None) -> Tensor:
        """Start new episodes.

        Args:
            mask: Rows to start anew, [N] bool; None starts all.

        Returns:
            The observations of all rows, [N, O] float32.
        """
        raise NotImplementedError

    def advance(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Step all rows, without resetting any.

        Args:
            action: [N] int64 where actions are discrete, [N, A] float where continuous.

        Returns:
            Observation [N, O] float32, reward [N] float32, terminated and truncated [N] bool.
        """
        raise NotImplementedError

    def snapshot(self) -> dict[str, Tensor]:
        """Everything that a later `restore` needs."""
        raise NotImplementedError

    def restore(self, snapshot: Mapping[str, Tensor]) -> Tensor:
        """Go back to a snapshot.

        Collectors begin with a full reset. The first one after this call therefore changes
        nothing and returns the restored observations, so that a stock collector continues.

        Args:
            snapshot: As from `snapshot`.

        Returns:
            The observations of all rows, [N, O] float32.

        Raises:
            ValueError: If the shapes are not those of this environment.
        """
        raise NotImplementedError

    def _observe(self) -> Tensor:
        """The observations of all rows, [N, O] float32."""
        raise NotImplementedError

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:  # noqa: ANN401
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None and self._restored:
            observation = self._observe()
        else:
            observation = self.restart(None if mask is None else mask.reshape(-1))
        self._restored = False
        flags = {name: spec.zero() for name, spec in self.full_done_spec.items()}
        return TensorDict({"observation": observation, **flags}, self.batch_size, self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        observation, *columns = self.advance(tensordict["action"])
        reward, terminated, truncated = (column.unsqueeze(-1) for column in columns)
        step = {
            "observation": observation,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "done": terminated | truncated,
        }
        return TensorDict(step, self.batch_size, self.device)

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self._generator.manual_seed(seed)


class BatchedEnv(VectorEnv):
    """N copies of a classic-control task, stepped together as tensors.

    Args:
        physics: The task, see `polopt.envs.classic`.
        num_envs: N.
        max_steps: Episodes are truncated after so many steps.
        seed: Of the starting states; None draws one from torch's global generator.
        device: Where states live.

    Raises:
        ValueError: If `num_envs` or `max_steps` is below one.
    """

    def __init__(
        self,
        physics: Physics,
        num_envs: int,
        *,
        max_steps: int,
        seed: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {max_steps}")
        super().__init__(num_envs, device=device)
        self.physics = physics
        self.max_steps = max_steps
        actions = physics.actions
        if not isinstance(actions, int):
            actions = torch.tensor(actions[:1]), torch.tensor(actions[1:])
        self._make_specs(torch.tensor(physics.low), torch.tensor(physics.high), actions)
        self.set_seed(int(torch.randint(2**31, ())) if seed is None else seed)
        # Held apart: a module looks long at each attribute that is set on it.
        steps = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._copies = SimpleNamespace(state=self._draw(), steps=steps, checked=False)

    def restart(self, mask: Tensor | None = None) -> Tensor:
        """See `VectorEnv`."""
        fresh, copies = self._draw(), self._copies
        if mask is None:
            copies.state, copies.steps = fresh, torch.zeros_like(copies.steps)
        else:
            copies.state = torch.where(mask.unsqueeze(-1), fresh, copies.state)
            copies.steps = copies.steps.masked_fill(mask, 0)
        return self.physics.observe(copies.state)

    def advance(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `VectorEnv`.

        Raises:
            ValueError: If the first discrete actions do not fit. Later ones are not looked at: it
                would hold up a GPU at each step.
        """
        copies, physics = self._copies, self.physics
        if not copies.checked:
            self._check(action)
            copies.checked = True
        copies.state, reward, terminated = physics.step(copies.state, action)
        copies.steps = copies.steps + 1
        truncated = copies.steps >= self.max_steps
        return physics.observe(copies.state), reward.float(), terminated, truncated

    def snapshot(self) -> dict[str, Tensor]:
        """States, steps taken, random numbers."""
        return {
            "state": self._copies.state.clone(),
            "steps": self._copies.steps.clone(),
            "generator": self._generator.get_state(),
        }

    def restore(self, snapshot: Mapping[str, Tensor]) -> Tensor:
        """See `VectorEnv`; `generator` may be missing: random numbers go on."""
        copies = self._copies
        for name, shape in (("state", copies.state.shape), ("steps", copies.steps.shape)):
            if snapshot[name].shape != shape:
                raise ValueError(
                    f"{name} of the snapshot must have shape {list(shape)}, "
                    f"got {list(snapshot[name].shape)}"
                )
        copies.state = snapshot["state"].to(copies.state)
        copies.steps = snapshot["steps"].to(copies.steps)
        if "generator" in snapshot:
            self._generator.set_state(snapshot["generator"])
        self._restored = True
        return self.physics.observe(self._copies.state)

    def _observe(self) -> Tensor:
        return self.physics.observe(self._copies.state)

    def _check(self, action: Tensor) -> None:
        count, shape = self.physics.actions, self.batch_size
        if not isinstance(count, int):  # those that are continuous are clipped, as by gymnasium
            return
        if action.shape != shape or not ((action >= 0) & (action < count)).all():
            raise ValueError(
                f"actions must be whole numbers from 0 to {count - 1} of shape {list(shape)}, got "
                f"{action.aminmax().min:g} to {action.aminmax().max:g} of shape "
                f"{list(action.shape)}"
            )

    def _draw(self) -> Tensor:
        shape = (self.batch_size[0], self.physics.state_size)
        noise = torch.rand(
            shape, generator=self._generator, dtype=torch.float64, device=self.device
        )
        return self.physics.start(noise)
