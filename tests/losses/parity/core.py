"""Compares a record of a peer with the same computation of ours, and judges the difference.

A difference counts as explained only if our result, changed in the way the explanation says,
equals the peer's. Conditions are computed from the inputs, so an explanation cannot hide a
record that it does not concern.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from golden import DATA
from torch import Tensor

from polopt.losses import corrections, divergences, numerics, objective

LEDGER = DATA / "ledger.csv"
# Relative and absolute, as the peers' own constants (1e-8 in denominators) allow.
TOLERANCE = {"float64": (1e-6, 1e-8), "float32": (1e-5, 1e-7), "bfloat16": (2e-2, 0.0)}

Values = Mapping[str, Tensor]
Ours = Callable[[frozenset[str]], Values]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One record: what the peer got, how to compute ours, and what may differ.

    Attributes:
        id: File and number of the record, and what it is.
        peer: Library.
        loss: What was computed.
        case: Name of its inputs.
        theirs: The peer's numbers.
        ours: Computes ours under the same names; handed deviations to imitate.
        deviations: Names in `REASONS` whose condition holds on these inputs.
        dtype: Of the computation.
        out_of_scope: Why there is nothing to compare, a name in `REASONS`.
    """

    id: str
    peer: str
    loss: str
    case: str
    theirs: Values = field(default_factory=dict)
    ours: Ours | None = None
    deviations: tuple[str, ...] = ()
    dtype: str = "float64"
    out_of_scope: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What became of a record, as a row of the ledger."""

    id: str
    peer: str
    loss: str
    case: str
    status: str  # agrees, explained, out of scope, DIFFERS
    reason: str = ""  # names in `REASONS`, joined by +
    quantity: str = ""  # where the largest difference is
    ours: str = ""
    theirs: str = ""


def judge(case: Case) -> Verdict:
    """Compare one record."""
    row = (case.id, case.peer, case.loss, case.case)
    if case.out_of_scope is not None:
        return Verdict(*row, "out of scope", case.out_of_scope)
    assert case.ours is not None
    plain = case.ours(frozenset())
    gap = difference(plain, case.theirs, case.dtype)
    if gap is None:
        return Verdict(*row, "agrees")
    for n in range(1, len(case.deviations) + 1):
        for subset in itertools.combinations(case.deviations, n):
            imitated = case.ours(frozenset(subset))
            if difference(imitated, case.theirs, case.dtype) is None:
                return Verdict(*row, "explained", "+".join(subset), *gap)
    return Verdict(*row, "DIFFERS", "", *gap)


def difference(ours: Values, theirs: Values, dtype: str) -> tuple[str, str, str] | None:
    """Return quantity, ours and theirs where they differ most, or None if they agree."""
    assert ours.keys() == theirs.keys(), (sorted(ours), sorted(theirs))
    worst, where = 0.0, None
    for name, expected in theirs.items():
        a, b = ours[name].double(), expected.double()
        assert a.shape == b.shape, (name, a.shape, b.shape)
        rtol, atol = TOLERANCE[dtype]
        if dtype == "bfloat16":
            # Rounding is relative to the terms, and the terms of a sum are of the order of one.
            atol = rtol * (1.0 if b.ndim == 0 else b.abs().nan_to_num(0.0).max().item())
        bad = ~torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
        if bad.any():
            size = ((a - b).abs() / b.abs().clamp(min=1e-12)).nan_to_num(torch.inf)
            # The first of the largest: where all are off by one factor, rounding, which is the
            # machine's, would choose.
            sizes = torch.where(bad, size, -1.0).flatten()
            at = (sizes >= 0.99 * sizes.max()).int().argmax()
            # Scalars (losses) tell more than an element of a gradient.
            rank = 1e300 if b.ndim == 0 else size.flatten()[at].clamp(max=1e299).item()
            if where is None or rank > worst:
                worst, where = rank, (name, a.flatten()[at].item(), b.flatten()[at].item())
    return where and (where[0], f"{where[1]:.6g}", f"{where[2]:.6g}")


@contextmanager
def unbounded() -> Iterator[None]:
    """Imitate peers that do not bound the log-ratio before `exp`."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (numerics, corrections, divergences, objective):
            patch.setattr(module, "MAX_LOG_RATIO", 1e9)
        yield


def cast(inputs: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the inputs with their floating tensors in `dtype`."""
    kind = getattr(torch, dtype)
    return {
        key: x.to(kind) if isinstance(x, Tensor) and x.is_floating_point() else x
        for key, x in inputs.items()
    }
