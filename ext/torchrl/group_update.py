"""The update of an actor on groups of rollouts."""

from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.distributions import Distribution

from polopt.ext.metrics import Stopwatch
from polopt.ext.torchrl.optimize import Optimization, run_epochs
from polopt.losses.modules import PolicyLoss

__all__ = ["GroupUpdate"]


class GroupUpdate:
    """Epochs of minibatches of whole rollouts through a `PolicyLoss`, without a critic.

    Rollouts stay whole, since ratios and means may be those of a sequence. The actor sees only
    steps that were played, not the padding behind them.

    Args:
        loss: Without actor and critic.
        distribution: From observations to the actor's distribution.
        optimizer: Over all parameters, or over the one tensor of `networks.flatten`.
        epochs: Passes over the batch.
        minibatch_size: Rollouts per optimizer step. A batch that is no multiple of it is dealt
            evenly to as many minibatches as it would begin.
        max_grad_norm: Gradients are scaled down to this norm; None leaves them.
        target_kl: No further epoch follows one whose mean `kl_approx` is above this many
            nats; None runs all.
        stopwatch: Books the phases loss, backward and optimizer.
    """

    def __init__(
        self,
        loss: PolicyLoss,
        distribution: Callable[[Tensor], Distribution],
        optimizer: torch.optim.Optimizer,
        *,
        epochs: int,
        minibatch_size: int,
        max_grad_norm: float | None,
        target_kl: float | None = None,
        stopwatch: Stopwatch,
    ) -> None:
        self.loss, self.stopwatch = loss, stopwatch
        self.epochs, self.minibatch_size = epochs, minibatch_size
        self.target_kl = target_kl
        self._distribution = distribution
        self._optimize = Optimization(optimizer, max_grad_norm=max_grad_norm, stopwatch=stopwatch)

    def __call__(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Train on rollouts and return metrics, scalars averaged over the minibatches.

        Args:
            batch: [B], with the entries of `GroupAdvantage`, B at least one.
        """
        count = -(-len(batch) // self.minibatch_size)

        def epoch() -> list[dict[str, Tensor]]:
            order = torch.randperm(len(batch), device=batch["mask"].device)
            parts = order.tensor_split(count)
            return [self._step(batch[rows] if count > 1 else batch.copy()) for rows in parts]

        return run_epochs(epoch, self.epochs, self.target_kl)

    def _step(self, minibatch: TensorDictBase) -> dict[str, Tensor]:
        mask = minibatch["mask"]
        distribution = self._distribution(minibatch["observation"][mask])
        entries = {
            "log_prob": distribution.log_prob(minibatch["action"][mask]),
            "entropy": distribution.entropy(),
        }
        for name, entry in entries.items():
            minibatch[name] = entry.new_zeros(mask.shape).masked_scatter(mask, entry)
        terms = dict(self.loss(minibatch).items())
        self.stopwatch.lap("loss")
        return self._optimize(terms)
