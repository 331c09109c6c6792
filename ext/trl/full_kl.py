"""The exact divergence from the reference policy, summed over the vocabulary at each token."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from trl.trainer.utils import use_adapter

from polopt.losses import full_kl

__all__ = ["FullKl"]

_LOGITS = 2**22  # made at a time, of each policy


class FullKl:
    """KL(policy ‖ reference) at each token, from the last hidden states of both models.

    Logits are made for some tokens at a time, and made again for the gradient: neither policy's
    logits of a micro-batch are ever kept.

    Args:
        policy: A causal language model of transformers, or one of peft.
        reference: The reference model; None for the policy without its adapters, or with those
            named "ref", as TRL has it.
        temperature: Logits are divided by it.
        autocast: Makes the context in which models compute.

    Raises:
        ValueError: If the model changes its logits behind the output layer.
    """

    def __init__(self, policy: Any, reference: Any, temperature: float, autocast: Any) -> None:  # noqa: ANN401
        self._peft = policy if hasattr(policy, "peft_config") else None
        self._policy = policy if self._peft is None else policy.get_base_model()
        self._ref, self._temperature, self._autocast = reference, temperature, autocast
        self._check()

    def _check(self) -> None:
        """Refuse a model whose logits are not those of its output layer (scaled, capped)."""
        model = self._policy
        training, device = model.training, next(model.parameters()).device
        ids = torch.arange(min(8, self._vocabulary()), device=device)[None]
        model.eval()
        with torch.no_grad(), self.watch() as hidden, self._autocast():
            logits = model(input_ids=ids, use_cache=False).logits.float()
            own = _head(model, hidden[0])
        model.train(training)
        if not torch.allclose(own, logits, rtol=1e-5, atol=1e-6 * float(logits.abs().max())):
            raise ValueError(
                f"{type(model).__name__} scales or caps the logits behind its output layer, which "
                "kl='full' does not follow: use 'k3'"
            )

    @contextlib.contextmanager
    def watch(self) -> Iterator[list[Tensor]]:
        """Collect the last hidden states of the policy's passes within, float [B, L, H] each."""
        found: list[Tensor] = []
        handle = self._policy.base_model.register_forward_hook(
            lambda _module, _args, output: found.append(output.last_hidden_state)
        )
        try:
            yield found
        finally:
            handle.remove()

    def __call__(self, hidden: Tensor, ids: Tensor, attention: Tensor, mask: Tensor) -> Tensor:
        """Return the divergence at each token, float [B, T], nats; zero outside the mask.

        Args:
            hidden: float [B, L, H], the policy's; carries the gradient.
            ids: int64 [B, L], tokens.
            attention: [B, L], zero at padding.
            mask: bool [B, T], of the last T tokens.
        """
        with torch.no_grad(), self._reference() as model, self._autocast():
            other = model.base_model(input_ids=ids, attention_mask=attention, use_cache=False)
        # The state before a token is the one that tells it.
        mine, theirs = (
            states[:, -mask.size(1) - 1 : -1][mask] for states in (hidden, other.last_hidden_state)
        )
        tokens = max(_LOGITS // self._vocabulary(), 1)
        parts = [
            checkpoint(self._divergence, a, b, use_reentrant=False)
            for a, b in zip(mine.split(tokens), theirs.split(tokens), strict=True)
        ]
        found = torch.cat(parts)  # type: ignore[arg-type]
        return found.new_zeros(mask.shape).masked_scatter(mask, found)

    def _vocabulary(self) -> int:
        return self._policy.get_output_embeddings().weight.size(0)

    def _divergence(self, mine: Tensor, theirs: Tensor) -> Tensor:
        with self._autocast():
            log_probs = self._log_probs(self._policy, mine)
            with torch.no_grad(), self._reference() as model:
                ref_log_probs = self._log_probs(model, theirs)
        return full_kl(log_probs, ref_log_probs)

    def _log_probs(self, model: Any, hidden: Tensor) -> Tensor:  # noqa: ANN401
        return (_head(model, hidden) / self._temperature).log_softmax(-1)

    @contextlib.contextmanager
    def _reference(self) -> Iterator[Any]:
        if self._ref is not None:
            yield self._ref
            return
        with use_adapter(self._peft, "ref" if "ref" in self._peft.peft_config else None):  # type: ignore[union-attr]
            yield self._policy


def _head(model: Any, hidden: Tensor) -> Tensor:  # noqa: ANN401
    return model.get_output_embeddings()(hidden).float()
