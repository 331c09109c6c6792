"""A named algorithm with some of its choices changed, for recipes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polopt.losses import Algorithm, Correction, Sampling
from polopt.losses.surrogates import SelectingSurrogate, Surrogate

__all__ = ["adjusted"]


def adjusted(
    *,
    base: Algorithm,
    surrogate: Surrogate | SelectingSurrogate | None = None,
    objective: Mapping[str, Any] | None = None,
    corrections: list[Correction] | None = None,
    advantage: Mapping[str, Any] | None = None,
    whiten: bool | None = None,
    sampling: Sampling | None = None,
) -> Algorithm:
    """Return `base` with other choices on some axes; what is None stays as it is.

    Args:
        base: A named algorithm.
        surrogate: What a step contributes.
        objective: Further fields of `polopt.losses.Objective`, such as `aggregation`.
        corrections: Weights for a sampler that is not the old policy.
        advantage: Settings of the advantage estimator, such as `scale`.
        whiten: Normalise advantages over the batch.
        sampling: Which groups a batch is filled with.

    Raises:
        ValueError: If a field or setting is unknown.
    """
    fields: dict[str, Any] = dict(objective or {})
    if surrogate is not None:
        fields["surrogate"] = surrogate
    if corrections is not None:
        fields["corrections"] = tuple(corrections)
    known = base.objective.__dataclass_fields__
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise ValueError(f"objective has no field {unknown[0]!r}, expected one of {sorted(known)}")
    estimator = base.advantage
    if advantage is not None:
        estimator = replace(estimator, settings={**estimator.settings, **advantage})
    if whiten is not None:
        estimator = replace(estimator, whiten=whiten)
    return replace(
        base,
        objective=replace(base.objective, **fields),
        advantage=estimator,
        sampling=base.sampling if sampling is None else sampling,
    )
