"""The walks of `SumTree` in numba: the same arithmetic as in torch, in the same order."""

import numpy as np
from numba import njit

__all__ = ["find", "write"]


@njit(cache=True)
def write(
    sums: np.ndarray,
    minima: np.ndarray,
    offsets: np.ndarray,
    fanout: int,
    slots: np.ndarray,
    values: np.ndarray,
) -> None:
    """Set leaves (the largest of equal slots wins), and renew the nodes above them."""
    for i in range(len(slots)):
        sums[slots[i]] = -1.0
    for i in range(len(slots)):
        slot = slots[i]
        if values[i] > sums[slot]:
            sums[slot] = values[i]
            minima[slot] = values[i] if values[i] > 0.0 else np.inf
    nodes = slots // fanout
    for level in range(1, len(offsets)):
        below, here = offsets[level - 1], offsets[level]
        last = -1
        for i in range(len(nodes)):
            node = nodes[i]
            if node != last:  # batches come sorted from `find`
                first = below + node * fanout
                total, least = 0.0, np.inf
                for child in range(first, first + fanout):
                    total += sums[child]
                    least = min(least, minima[child])
                sums[here + node] = total
                minima[here + node] = least
                last = node
            nodes[i] = node // fanout


@njit(cache=True)
def find(sums: np.ndarray, offsets: np.ndarray, fanout: int, mass: np.ndarray) -> np.ndarray:
    """Walk down from the root to the leaf that each mass falls on."""
    found = np.empty(len(mass), np.int64)
    top = len(offsets) - 1
    for i in range(len(mass)):
        rest, node = mass[i], 0
        for level in range(top - 1, -1, -1):
            first = offsets[level] + node * fanout
            before, total, child = 0.0, 0.0, 0
            while child < fanout:
                total = before + sums[first + child]
                if total > rest:
                    break
                before = total
                child += 1
            if child == fanout:  # rounding led past the end: the last leaf that has mass
                rest = np.nextafter(total, 0.0)
                before, child = 0.0, 0
                while before + sums[first + child] <= rest:
                    before += sums[first + child]
                    child += 1
            rest -= before
            node = node * fanout + child
        found[i] = node
    return found
