"""Distributions of actions where torch's own cost more than the network."""

import torch
from torch import Tensor
from torch.distributions import Distribution

__all__ = ["Categorical"]


class Categorical(Distribution):
    """Torch's `Categorical` over logits in half the time: no checks, no broadcasting.

    Args:
        logits: float [..., K], not normalised.
    """

    arg_constraints = {}  # noqa: RUF012  as in torch

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits.log_softmax(-1)
        super().__init__(logits.shape[:-1], validate_args=False)

    @property
    def probs(self) -> Tensor:
        """Probabilities [..., K]."""
        return self.logits.exp()

    @property
    def mode(self) -> Tensor:
        """The most likely actions, int64 [...]."""
        return self.logits.argmax(-1)

    @property
    def deterministic_sample(self) -> Tensor:
        """The same, under the name that TorchRL looks for."""
        return self.mode

    @torch.no_grad()
    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        """Draw actions, int64 [*sample_shape, ...]."""
        rows = self.probs.reshape(-1, self.logits.shape[-1])
        draws = torch.multinomial(rows, torch.Size(sample_shape).numel(), replacement=True)
        return draws.T.reshape(torch.Size(sample_shape) + self.batch_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probabilities [...] of actions, int64 [...]."""
        return self.logits.gather(-1, value.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Entropies [...], in nats."""
        return -(self.probs * self.logits).sum(-1)
