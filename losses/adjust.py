"""A named algorithm with some of its choices changed: every point on the axes, for recipes."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from polopt.losses.algorithm import Algorithm
from polopt.losses.corrections import Correction
from polopt.losses.surrogates import SelectingSurrogate, Surrogate

__all__ = ["adjusted"]


def adjusted(
    *,
    base: Algorithm,
    surrogate: Surrogate | SelectingSurrogate | None = None,
    objective: Mapping[str, Any] | None = None,
    corrections: Sequence[Correction] | None = None,
    advantage: Mapping[str, Any] | None = None,
    whiten: bool | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> Algorithm:
    """Return `base` with other choices on some axes; what is None stays as it is.

    In a recipe: `{use: adjusted, base: {use: dapo}, sampling: {top_entropy: 0.2}}`.

    Args:
        base: A named algorithm.
        surrogate: What a step contributes.
        objective: Further fields of `Objective`, such as `aggregation`.
        corrections: Weights for a sampler that is not the old policy.
        advantage: Settings of the advantage estimator, such as `scale`.
        whiten: Normalise advantages over the batch.
        sampling: Fields of `Sampling`, such as `refill`.

    Raises:
        ValueError: If a field or setting is unknown.
    """
    choices: dict[str, Any] = dict(objective or {})
    if surrogate is not None:
        choices["surrogate"] = surrogate
    if corrections is not None:
        choices["corrections"] = tuple(corrections)
    estimator = base.advantage
    if advantage is not None:
        estimator = replace(estimator, settings={**estimator.settings, **advantage})
    if whiten is not None:
        estimator = replace(estimator, whiten=whiten)
    return replace(
        base,
        objective=_replaced("objective", base.objective, choices),
        advantage=estimator,
        sampling=_replaced("sampling", base.sampling, sampling or {}),
    )


def _replaced(name: str, part: Any, choices: Mapping[str, Any]) -> Any:  # noqa: ANN401
    known = {field.name for field in fields(part)}
    unknown = sorted(set(choices) - known)
    if unknown:
        raise ValueError(f"{name} has no field {unknown[0]!r}, expected one of {sorted(known)}")
    return replace(part, **choices)
