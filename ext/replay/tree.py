"""A tree of sums: draws a leaf in proportion to its value, in a walk from the root."""

import numpy as np
import torch
from torch import Tensor

__all__ = ["SumTree"]

_FANOUT = 16
"""Children of a node: two cache lines, and few levels for the vectorised walk."""


class SumTree:
    """Non-negative numbers that can be changed, summed and drawn from in O(log capacity).

    Every inner node holds the sum and the least positive value below it, always computed anew
    from its children, so that rounding errors do not pile up. All numbers are float64.

    Args:
        capacity: Number of leaves; all begin at zero.
        device: Where the numbers live.
        compiled: Walk the tree with numba, which needs the CPU; None does where it is installed.
            The results are the same to the bit.

    Attributes:
        kernels: The module of numba's loops, or None.

    Raises:
        ValueError: If `capacity` is below one, or numba is asked for away from the CPU.
        ImportError: If numba is asked for and missing.
    """

    def __init__(
        self,
        capacity: int,
        *,
        device: torch.device | str = "cpu",
        compiled: bool | None = None,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity, self.device = capacity, torch.device(device)
        on_cpu = self.device.type == "cpu"
        if compiled and not on_cpu:
            raise ValueError(f"compiled needs device 'cpu', got {str(device)!r}: leave it out")
        self.kernels = None
        if compiled or (compiled is None and on_cpu):
            try:
                from polopt.ext.replay import kernels

                self.kernels = kernels
            except ImportError:
                if compiled:
                    raise
        sizes = [_up(capacity)]
        while sizes[-1] > _FANOUT:
            sizes.append(_up(sizes[-1] // _FANOUT))
        sizes.append(1)
        offsets = [0]
        for size in sizes[:-1]:
            offsets.append(offsets[-1] + size)
        self._offsets = torch.tensor(offsets)
        self._sums = torch.zeros(offsets[-1] + 1, dtype=torch.float64, device=self.device)
        self._minima = torch.full_like(self._sums, torch.inf)
        spans = list(zip(offsets, sizes, strict=True))
        self._levels = [
            tuple(x[start : start + size] for x in (self._sums, self._minima))
            for start, size in spans
        ]
        self._families = [tuple(x.view(-1, _FANOUT) for x in pair) for pair in self._levels[:-1]]

    def __getitem__(self, slots: Tensor) -> Tensor:
        """Return the values of leaves, float64 like `slots`."""
        return self._sums[slots]

    @property
    def values(self) -> Tensor:
        """A copy of all leaves, float64 [capacity]."""
        return self._sums[: self.capacity].clone()

    @property
    def total(self) -> Tensor:
        """Sum of all leaves, float64 []."""
        return self._sums[-1]

    @property
    def minimum(self) -> Tensor:
        """The least leaf above zero, float64 []; infinity if there is none."""
        return self._minima[-1]

    def clear(self) -> None:
        """Set all leaves to zero."""
        self._sums.zero_()
        self._minima.fill_(torch.inf)

    def write(self, slots: Tensor, values: Tensor) -> None:
        """Set leaves. Where a slot is given twice, the largest value counts.

        Args:
            slots: int64 [B], within [0, capacity).
            values: [B], finite and at least zero.
        """
        values = values.to(self._sums.dtype)
        if self.kernels is not None:
            self.kernels.write(*self.arrays(), slots.numpy(), values.numpy())
            return
        leaves, minima = self._levels[0]
        leaves.scatter_reduce_(0, slots, values, "amax", include_self=False)
        written = leaves[slots]
        minima[slots] = torch.where(written > 0, written, torch.inf)
        nodes = slots
        for (sums, minima), above in zip(self._families, self._levels[1:], strict=True):
            nodes = nodes // _FANOUT
            above[0][nodes] = sums[nodes].cumsum(-1)[:, -1]  # in order, as numba adds
            above[1][nodes] = minima[nodes].amin(-1)

    def find(self, mass: Tensor) -> Tensor:
        """Return the leaf on which each mass falls, if leaves are laid end to end.

        A leaf of zero is never returned.

        Args:
            mass: float64 [B], within [0, total).

        Returns:
            Slots, int64 [B].
        """
        if self.kernels is not None:
            sums, _, offsets, fanout = self.arrays()
            return torch.from_numpy(self.kernels.find(sums, offsets, fanout, mass.numpy()))
        rest, nodes = mass.unsqueeze(-1), torch.zeros_like(mass, dtype=torch.int64)
        for sums, _ in reversed(self._families):
            ends = sums[nodes].cumsum(-1)
            # Rounding may lead past the end: then the last leaf that has mass.
            passed = (ends <= rest) & (ends < ends[:, -1:])
            rest = rest - torch.where(passed, ends, 0.0).amax(-1, keepdim=True)
            nodes = torch.add(passed.sum(-1), nodes, alpha=_FANOUT)
        return nodes

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Return what the kernels take: sums, minima, where each level begins, the fanout."""
        return self._sums.numpy(), self._minima.numpy(), self._offsets.numpy(), _FANOUT


def _up(size: int) -> int:
    """The next multiple of the fanout."""
    return -(-size // _FANOUT) * _FANOUT
