"""The update of an actor and a critic on one collected batch."""

from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.distributions import Distribution

from polopt.ext.metrics import Stopwatch
from polopt.ext.torchrl.optimize import Optimization, run_epochs
from polopt.losses.modules import PolicyLoss

__all__ = ["Update"]


class Update:
    """Epochs of minibatches through a `PolicyLoss`.

    Nothing is read back from the device between minibatches (with `target_kl`: epochs).

    Args:
        loss: Without actor and critic: it reads `log_prob`, `entropy` and `value`, which are
            evaluated here without a TensorDict per layer.
        distribution: From observations to the actor's distribution.
        value: From observations [B, O] to values [B].
        optimizer: Over all parameters, or over the one tensor of `networks.flatten`.
        epochs: Passes over the batch.
        minibatch_size: Steps per optimizer step.
        max_grad_norm: Gradients are scaled down to this norm; None leaves them.
        target_kl: No further epoch follows one whose mean `kl_approx` is above this many
            nats; None runs all.
        stopwatch: Books the phases loss, backward and optimizer.
    """

    def __init__(
        self,
        loss: PolicyLoss,
        distribution: Callable[[Tensor], Distribution],
        value: Callable[[Tensor], Tensor],
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
        self._distribution, self._value = distribution, value
        self._optimize = Optimization(optimizer, max_grad_norm=max_grad_norm, stopwatch=stopwatch)

    def __call__(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Train on a batch and return metrics, scalars averaged over the minibatches.

        Args:
            batch: [N, T], with the entries of `GAEAdvantage`.

        Raises:
            ValueError: If N·T is not a multiple of the minibatch size.
        """
        steps = batch.numel()
        if steps % self.minibatch_size:
            raise ValueError(
                f"minibatch_size must divide the {steps} steps of the batch, "
                f"got {self.minibatch_size}"
            )
        evaluated = ("log_prob", "entropy", "value")
        keys = [key for key in self.loss.in_keys if key not in evaluated]
        flat = batch.select("observation", "action", *keys).reshape(-1)
        for key in keys:  # once here instead of in every minibatch
            flat[key] = flat[key].reshape(len(flat))

        def epoch() -> list[dict[str, Tensor]]:
            return [self._step(minibatch) for minibatch in self._minibatches(flat)]

        return run_epochs(epoch, self.epochs, self.target_kl)

    def _minibatches(self, flat: TensorDictBase) -> list[TensorDictBase]:
        if self.minibatch_size == len(flat):
            return [flat.copy()]  # the order within a minibatch does not matter
        order = torch.randperm(len(flat), device=flat["advantage"].device)
        return [flat[index] for index in order.split(self.minibatch_size)]

    def _step(self, minibatch: TensorDictBase) -> dict[str, Tensor]:
        observation = minibatch["observation"]
        distribution = self._distribution(observation)
        minibatch["log_prob"] = distribution.log_prob(minibatch["action"])
        with torch.set_grad_enabled(self.loss.objective.uses_entropy):
            minibatch["entropy"] = distribution.entropy()
        minibatch["value"] = self._value(observation)
        terms = dict(self.loss(minibatch).items())
        self.stopwatch.lap("loss")
        return self._optimize(terms)
