"""Optimizer steps from the terms of a loss, and epochs of them."""

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from polopt.ext.metrics import Stopwatch

__all__ = ["Optimization", "run_epochs"]


class Optimization:
    """Backward, bound on the norm of the gradient, optimizer step.

    Args:
        optimizer: Over all parameters, or over the one tensor of `networks.flatten`.
        max_grad_norm: Gradients are scaled down to this norm; None leaves them.
        stopwatch: Books the phases backward and optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float | None,
        stopwatch: Stopwatch,
    ) -> None:
        self.optimizer, self.max_grad_norm, self.stopwatch = optimizer, max_grad_norm, stopwatch
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def __call__(self, terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take a step down the sum of the terms named `loss_*`.

        Args:
            terms: Scalars by name, as `PolicyLoss` returns them.

        Returns:
            All terms without their graph, and `grad_norm`, the norm before the bound.
        """
        watch = self.stopwatch
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()  # in place: see `networks.flatten`
        losses = [term for name, term in terms.items() if name.startswith("loss_")]
        functools.reduce(torch.add, losses).backward()
        watch.lap("backward")
        norm = self._bound()
        self.optimizer.step()
        watch.lap("optimizer")
        return {name: term.detach() for name, term in terms.items()} | {"grad_norm": norm}

    def _bound(self) -> Tensor:
        if len(self._parameters) == 1:  # torch's functions would mostly sort it into groups
            gradient = self._parameters[0].grad
            norm = torch.linalg.vector_norm(gradient)
            if self.max_grad_norm is not None:
                gradient.mul_((self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
            return norm
        if self.max_grad_norm is not None:
            return torch.nn.utils.clip_grad_norm_(self._parameters, self.max_grad_norm)
        return torch.nn.utils.get_total_norm([p.grad for p in self._parameters])


def run_epochs(
    epoch: Callable[[], list[dict[str, Tensor]]], count: int, target_kl: float | None
) -> dict[str, Tensor]:
    """Run epochs, and return the means of their metrics over all minibatches.

    Args:
        epoch: Takes the steps of one pass, and returns the metrics of each, scalars.
        count: Epochs, at most.
        target_kl: No further epoch follows one whose mean `kl_approx` is above this many nats;
            None runs all.
    """
    history: list[dict[str, Tensor]] = []
    for _ in range(count):
        steps = epoch()
        history += steps
        if target_kl is not None:
            moved = torch.stack([step["kl_approx"] for step in steps]).mean()
            if moved > target_kl:
                break
    return {name: torch.stack([step[name] for step in history]).mean() for name in history[0]}
