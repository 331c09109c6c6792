"""Prioritised replay for TorchRL's buffers, on the priorities of `polopt.ext.replay`."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import PrioritizedSampler as TorchRLPrioritizedSampler
from torchrl.data import Storage, TensorDictReplayBuffer

from polopt.ext.replay import Priorities
from polopt.losses.schedules import Coefficient

__all__ = ["PrioritizedReplayBuffer", "PrioritizedSampler"]

_FILE = "priorities.safetensors"


class PrioritizedSampler(TorchRLPrioritizedSampler):
    """Takes the place of TorchRL's sampler of this name, whose tree needs a compiled extension.

    Samples carry `priority_weight`, which TorchRL's losses apply, and `stamp`, which tells
    `PrioritizedReplayBuffer` what was overwritten meanwhile. Nothing of the base class is used
    but its name: `TensorDictReplayBuffer` updates priorities for samplers of that type alone.

    Args:
        capacity: Of the buffer, whose storage has one dimension.
        alpha: See `Priorities`.
        beta: See `Priorities`; a schedule follows `anneal`.
        eps: See `Priorities`.
        squared: Whether what arrives as TD error is its square, as TorchRL's DQNLoss, DDPGLoss
            and TD3Loss write it (SACLoss and DiscreteSACLoss write |δ|): the root is taken.
        seed: Of the draws, unless the buffer was given a generator with `set_rng`.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        capacity: int,
        *,
        alpha: float = 0.6,
        beta: Coefficient = 0.4,
        eps: float = 1e-3,
        squared: bool = False,
        seed: int | None = None,
    ) -> None:
        self.priorities = Priorities(capacity, alpha, beta, eps, seed=seed)
        self.squared = squared
        self.reduction = "max"  # of the errors of one item

    def __repr__(self) -> str:
        """Return the settings."""
        p = self.priorities
        return f"{type(self).__name__}(alpha={p.alpha}, beta={p.beta}, eps={p.eps})"

    @property
    def alpha(self) -> float:
        """See `Priorities`."""
        return self.priorities.alpha

    @property
    def beta(self) -> Coefficient:
        """See `Priorities`."""
        return self.priorities.beta

    @property
    def device(self) -> torch.device:
        """Where priorities live."""
        return self.priorities.tree.device

    @property
    def default_priority(self) -> float:
        """The error that leads to the priority of a new item."""
        error = self.priorities.highest - self.priorities.eps
        return error**2 if self.squared else error

    def anneal(self, step: float) -> None:
        """Set β to its value at `step`, in the unit of its schedule."""
        self.priorities.anneal(step)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return slots int64 [B], and `priority_weight` float32 [B] and `stamp` int64 [B].

        Raises:
            ValueError: If the storage has more than one dimension, fewer items than
                `batch_size`, or items that this sampler was not told of.
        """
        if storage.ndim > 1:
            raise ValueError(
                f"the storage must have one dimension, got {storage.ndim}: flatten the data and "
                "leave ndim out"
            )
        if len(storage) != len(self.priorities):
            raise ValueError(
                f"the storage holds {len(storage)} items and the sampler knows "
                f"{len(self.priorities)}: give each buffer a sampler of its own, and fill it "
                "through the buffer"
            )
        slots, weights, stamps = self.priorities.sample(batch_size, self._rng)
        return slots, {"priority_weight": weights, "stamp": stamps}

    def add(self, index: int | Tensor) -> None:
        """See `Priorities.add`."""
        self.priorities.add(torch.as_tensor(index).reshape(-1))

    def extend(self, index: Tensor) -> None:
        """See `Priorities.add`."""
        self.add(index)

    def update_priority(
        self,
        index: int | Tensor,
        priority: float | Tensor,
        *,
        storage: Storage | None = None,
        stamp: Tensor | None = None,
    ) -> None:
        """See `Priorities.update`.

        Args:
            index: Slots [B].
            priority: The TD error [B] or [B, 1], or its square (see `squared`).
            storage: Not needed.
            stamp: int64 [B] as sampled; None updates whatever the slots hold now.
        """
        slots = torch.as_tensor(index).reshape(-1)
        error = torch.as_tensor(priority).detach().reshape(-1).expand(slots.shape)
        if stamp is not None:
            stamp = stamp.reshape(-1)
        self.priorities.update(slots, error.sqrt() if self.squared else error, stamp)

    def state_dict(self) -> dict[str, Any]:
        """See `Priorities.state_dict`."""
        return self.priorities.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Priorities.load_state_dict`."""
        self.priorities.load_state_dict(state_dict)

    def dumps(self, path: str | Path) -> None:
        """Write the state into a folder."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), path / _FILE)

    def loads(self, path: str | Path) -> None:
        """Read the state that `dumps` wrote."""
        self.load_state_dict(load_file(Path(path) / _FILE))

    def _empty(self) -> None:
        self.priorities.clear()


class PrioritizedReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` that ignores updates for items that were overwritten.

    It takes the same arguments, with a `PrioritizedSampler` as `sampler`. Updates may arrive
    at any time: with prefetching, or from another thread.
    """

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set priorities from the entry `priority_key` of a sample.

        Args:
            data: [B] as sampled, with the TD errors added. Data without TD errors changes
                nothing: new items have their priority already.
        """
        error = data.get(self.priority_key, None)
        if error is None:
            return
        with self._replay_lock, self._write_lock:
            self.sampler.update_priority(data.get("index"), error, stamp=data.get("stamp", None))
