"""Pieces of dynamic sampling: more prompts, and batches whose groups can be replaced."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["PromptStream", "Rollout"]


class PromptStream:
    """Endless shuffled passes over the rows of a dataset, restored by one number.

    Args:
        size: Number of rows.
        seed: Of the shuffles; the same on all ranks.

    Attributes:
        position: Rows drawn so far.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.position = 0
        self._size, self._seed = size, seed
        self._pass, self._order = -1, []

    def take(self, count: int) -> list[int]:
        """Return the indices of the next `count` rows."""
        return [self._next() for _ in range(count)]

    def _next(self) -> int:
        number, offset = divmod(self.position, self._size)
        if number != self._pass:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
            self._order = torch.randperm(self._size, generator=generator).tolist()
            self._pass = number
        self.position += 1
        return self._order[offset]


@dataclass
class Rollout:
    """Generated completions of this rank, and the rewards of all ranks.

    Attributes:
        columns: Lists with one entry per row of this rank: rows, prompts, and whatever
            generation returned.
        rewards: float [W·n, F], of all ranks in the order of ranks; F reward functions.
    """

    columns: dict[Any, list[Any]]
    rewards: Tensor

    def replace(
        self, bad: Sequence[Sequence[int]], other: "Rollout", good: Sequence[Sequence[int]],
        *, rank: int, size: int,
    ) -> None:  # fmt: skip
        """Replace groups by groups of another rollout, as far as both lists reach.

        Args:
            bad: For each rank the groups to replace, counted within the rank.
            other: Where the new groups come from.
            good: For each rank the groups of `other` to take.
            rank: This rank.
            size: Samples in a group.
        """
        ranks = len(bad)
        mine = self.rewards.view(ranks, -1, size, self.rewards.size(1))
        theirs = other.rewards.view(ranks, -1, size, self.rewards.size(1))
        for r in range(ranks):
            for b, g in zip(bad[r], good[r], strict=False):
                mine[r, b] = theirs[r, g]
                if r == rank:
                    to, of = slice(b * size, (b + 1) * size), slice(g * size, (g + 1) * size)
                    for key, column in self.columns.items():
                        fresh = other.columns.get(key)  # what a reward logs only sometimes
                        column[to] = fresh[of] if fresh else [None] * size
