"""Proportional prioritisation of stored items, and the weights that correct for it."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from polopt.ext.replay.tree import SumTree
from polopt.losses.schedules import Coefficient, check_unit, value_at

__all__ = ["Priorities"]


class Priorities:
    """Which slots of a storage to learn from, and how much each counts.

    P(i) = pᵢ^α / Σₖ pₖ^α with pᵢ = |δᵢ| + ε, drawn from equal parts of the total mass (one item
    from each), and wᵢ = (N·P(i))^−β / maxₖ wₖ, the maximum taken over all N stored items: so the
    expected update at β = 1 points where uniform replay points, which it does not when each
    batch is divided by its own maximum. New items take the largest priority seen so far.
    Source: https://arxiv.org/abs/1511.05952, section 3 and algorithm 1.

    Where the items are stored is the caller's business: a slot is any number below `capacity`.

    Args:
        capacity: Slots.
        alpha: How much priorities matter, within [0, 1]; 0 is uniform.
        beta: How much weights correct, within [0, 1]; a schedule follows `anneal`.
        eps: ε, positive: no item is forgotten for good.
        seed: Of the draws; None draws one from torch's global generator.
        device: Where priorities live.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        capacity: int,
        alpha: float = 0.6,
        beta: Coefficient = 0.4,
        eps: float = 1e-3,
        *,
        seed: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if not isinstance(alpha, float | int) or not 0.0 <= alpha <= 1.0:
            raise ValueError(f"alpha must be a number in [0, 1], got {alpha!r}")
        check_unit("beta", beta)
        if not 0.0 < eps < math.inf:
            raise ValueError(f"eps must be positive and finite, got {eps}")
        self.tree = SumTree(capacity, device=device)
        self.alpha, self.beta, self.eps = alpha, beta, eps
        self.generator = torch.Generator(device=self.tree.device)
        self.generator.manual_seed(int(torch.randint(2**31, ())) if seed is None else seed)
        self._stamps = torch.zeros(capacity, dtype=torch.int64, device=self.tree.device)
        self._writes = 0
        self._step = 0.0
        self.clear()

    def __len__(self) -> int:
        """Return how many slots hold an item."""
        return self._count

    @property
    def highest(self) -> float:
        """The largest priority given so far, which new items take; 1 before any."""
        return self._highest or 1.0

    def anneal(self, step: float) -> None:
        """Set β to its value at `step`, in the unit of its schedule."""
        self._step = step

    def add(self, slots: Tensor) -> None:
        """Give the items just written into `slots` the largest priority seen so far.

        Updates for what the slots held before are ignored from now on.

        Args:
            slots: int64 [B].

        Raises:
            ValueError: If slots have another shape, or one is outside the capacity.
        """
        slots = self._slots(slots)
        self._refuse(slots)
        if self._count < self.tree.capacity:
            self._count += int((self._stamps[slots.unique()] == 0).sum())
        self._writes += 1
        self._stamps[slots] = self._writes
        highest = torch.tensor(self.highest, dtype=torch.float64, device=self.tree.device)
        self.tree.write(slots, (highest**self.alpha).expand(slots.shape).contiguous())

    def clear(self) -> None:
        """Forget all items; stamps given out before stay invalid."""
        self._highest = 0.0
        self._stamps.zero_()
        self._count = 0
        self.tree.clear()

    def sample(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw items.

        Args:
            n: How many.
            generator: Drawn from instead of our own.

        Returns:
            Slots int64 [n] in rising order, weights float32 [n] in (0, 1], and stamps int64 [n],
            which `update` wants back.

        Raises:
            ValueError: If there are fewer than `n` items.
        """
        if not 1 <= n <= self._count:
            raise ValueError(
                f"n must be at least 1 and at most the number of stored items {self._count}, "
                f"got {n}: store more before sampling, or sample fewer"
            )
        device, beta = self.tree.device, value_at(self.beta, self._step)
        uniform = torch.rand(
            n, dtype=torch.float64, device=device, generator=generator or self.generator
        )
        if (kernels := self.tree.kernels) is not None:
            drawn = kernels.draw(*self.tree.arrays(), uniform.numpy(), beta, self._stamps.numpy())
            slots, weights, stamps = map(torch.from_numpy, drawn)
            return slots, weights, stamps
        parts = torch.arange(n, dtype=torch.float64, device=device) + uniform
        slots = self.tree.find(parts * (self.tree.total / n))
        # (N·P(i))^−β over its maximum: N and the total cancel.
        weights = (self.tree[slots] / self.tree.minimum) ** -beta
        return slots, weights.float(), self._stamps[slots]

    def update(self, slots: Tensor, td_error: Tensor, stamps: Tensor | None = None) -> None:
        """Give items the priority |td_error| + ε.

        Where a slot is given twice, the larger error counts.

        Args:
            slots: int64 [B].
            td_error: [B]; signs do not matter.
            stamps: int64 [B] as from `sample`: items overwritten since then keep the priority
                of what replaced them. None updates all that hold an item.

        Raises:
            ValueError: If an error is NaN or infinite (nothing is changed), a shape differs, or
                a slot is outside the capacity.
        """
        slots, errors = self._slots(slots), td_error.detach()
        errors = errors.to(self.tree.device, torch.float64)
        if errors.shape != slots.shape or (stamps is not None and stamps.shape != slots.shape):
            raise ValueError(
                f"td_error and stamps must have the shape of slots {tuple(slots.shape)}, got "
                f"{tuple(errors.shape)} and {None if stamps is None else tuple(stamps.shape)}"
            )
        if stamps is not None:
            stamps = stamps.to(self.tree.device)
        if (kernels := self.tree.kernels) is not None:
            if kernels.first_wrong(slots.numpy(), errors.numpy(), self.tree.capacity) >= 0:
                self._refuse(slots, errors)
            given = slots[:0] if stamps is None else stamps
            highest = kernels.renew(
                *self.tree.arrays(),
                *(x.numpy() for x in (slots, errors, given, self._stamps)),
                self.alpha,
                self.eps,
            )
            self._highest = max(self._highest, highest)
            return
        self._refuse(slots, errors)
        now = self._stamps[slots]
        keep = now > 0 if stamps is None else (now == stamps) & (now > 0)
        if not keep.all():
            slots, errors = slots[keep], errors[keep]
        if len(slots):
            priority = errors.abs() + self.eps
            self._highest = max(self._highest, float(priority.max()))
            self.tree.write(slots, priority**self.alpha)

    def state_dict(self) -> dict[str, Tensor]:
        """Return all that changes, as tensors that are copies."""
        return {
            "values": self.tree.values,
            "stamps": self._stamps.clone(),
            "highest": torch.tensor(self._highest, dtype=torch.float64),
            "writes": torch.tensor(self._writes),
            "step": torch.tensor(self._step, dtype=torch.float64),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue exactly where `state_dict` was taken.

        Raises:
            ValueError: If it is of another capacity.
        """
        values = state["values"].to(self.tree.device)
        if values.shape != self._stamps.shape:
            raise ValueError(
                f"the state is of capacity {len(values)}, this one has {self.tree.capacity}"
            )
        self.tree.write(torch.arange(len(values), device=self.tree.device), values)
        self._stamps = state["stamps"].to(self.tree.device, copy=True)
        self._highest = float(state["highest"])
        self._writes, self._step = int(state["writes"]), float(state["step"])
        self._count = int((self._stamps > 0).sum())
        self.generator.set_state(state["generator"].cpu())

    def _slots(self, slots: Tensor) -> Tensor:
        if slots.ndim != 1:
            raise ValueError(
                f"slots must have one dimension, got the shape {tuple(slots.shape)}: flatten them, "
                "and what goes with them"
            )
        return slots.to(self.tree.device, torch.int64)

    def _refuse(self, slots: Tensor, errors: Tensor | None = None) -> None:
        if not slots.numel():
            return
        low, high = torch.stack(slots.aminmax()).tolist()
        if low < 0 or high >= self.tree.capacity:
            raise ValueError(f"slots must be within [0, {self.tree.capacity}), got {low} to {high}")
        if errors is not None and not (finite := torch.isfinite(errors)).all():
            raise ValueError(
                f"td_error must be finite, got {errors[~finite][0].item()} for slot "
                f"{slots[~finite][0].item()}"
            )
