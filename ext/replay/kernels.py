"""The loops of `SumTree` and `Priorities` in numba: the arithmetic of torch, in the same order."""

import math

import numpy as np
from numba import njit

__all__ = ["draw", "find", "first_wrong", "renew", "write"]


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
            if node != last:  # slots of `find` come in order
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
    rest = mass.copy()
    nodes = np.zeros(len(mass), np.int64)
    for level in range(len(offsets) - 2, -1, -1):
        for i in range(len(mass)):  # the walks side by side: no branch depends on a mass
            first = offsets[level] + nodes[i] * fanout
            end, before, child = 0.0, 0.0, 0
            for j in range(first, first + fanout):
                end += sums[j]
                child += end <= rest[i]
                before = end if end <= rest[i] else before
            if child == fanout:  # rounding led past the end: the last leaf that has mass
                last, end, before, child = end, 0.0, 0.0, 0
                while end + sums[first + child] < last:
                    end += sums[first + child]
                    before = end
                    child += 1
            rest[i] -= before
            nodes[i] = nodes[i] * fanout + child
    return nodes


@njit(cache=True)
def draw(
    sums: np.ndarray,
    minima: np.ndarray,
    offsets: np.ndarray,
    fanout: int,
    uniform: np.ndarray,
    beta: float,
    generations: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return slots, weights and stamps for `uniform`, a number in [0, 1) for each part."""
    n = len(uniform)
    part = sums[-1] / n
    mass = np.empty(n)
    for i in range(n):
        mass[i] = (i + uniform[i]) * part
    slots = find(sums, offsets, fanout, mass)
    weights, stamps = np.empty(n, np.float32), np.empty(n, np.int64)
    for i in range(n):
        weights[i] = (sums[slots[i]] / minima[-1]) ** -beta
        stamps[i] = generations[slots[i]]
    return slots, weights, stamps


@njit(cache=True)
def renew(
    sums: np.ndarray,
    minima: np.ndarray,
    offsets: np.ndarray,
    fanout: int,
    slots: np.ndarray,
    errors: np.ndarray,
    stamps: np.ndarray,
    generations: np.ndarray,
    alpha: float,
    eps: float,
) -> float:
    """Write the priorities of errors whose stamps are current, and return the largest, or 0."""
    kept, values = np.empty(len(slots), np.int64), np.empty(len(slots))
    count, highest = 0, 0.0
    for i in range(len(slots)):
        now = generations[slots[i]]
        if now > 0 and (len(stamps) == 0 or now == stamps[i]):
            priority = math.fabs(errors[i]) + eps
            kept[count] = slots[i]
            values[count] = priority**alpha
            highest = max(highest, priority)
            count += 1
    write(sums, minima, offsets, fanout, kept[:count], values[:count])
    return highest


@njit(cache=True)
def first_wrong(slots: np.ndarray, errors: np.ndarray, capacity: int) -> int:
    """Return the position of the first slot out of range or error not finite, or -1."""
    for i in range(len(slots)):
        if not (0 <= slots[i] < capacity and math.isfinite(errors[i])):
            return i
    return -1
