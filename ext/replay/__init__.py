"""Prioritised replay: which stored items to learn from again, and with which weight.

Needs torch and numpy only; where numba is installed, the tree of priorities runs compiled.
"""

from polopt.ext.replay.priorities import Priorities
from polopt.ext.replay.tree import SumTree

__all__ = ["Priorities", "SumTree"]
