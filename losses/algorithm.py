"""A named algorithm: what a loop needs to know, and nothing about the loop."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from polopt.losses.objective import Objective
from polopt.losses.schedules import Coefficient, check_coefficient

__all__ = ["Advantage", "Algorithm", "Sampling", "ValueTerm"]


@dataclass(frozen=True, kw_only=True)
class Advantage:
    """A function that estimates advantages, with its settings.

    The loop hands in what the function names: see `needs`.

    Attributes:
        estimate: A function of `polopt.losses.advantages`, or one like it: tensors are
            positional parameters, settings are keyword-only.
        settings: Values of its keyword-only parameters.
        whiten: Normalise the advantages of the whole batch (all ranks) to mean zero and
            standard deviation one before the first update.

    Raises:
        ValueError: If a setting is not a parameter of the function, or one is missing.
    """

    estimate: Callable[..., Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    whiten: bool = False

    def __post_init__(self) -> None:
        name = getattr(self.estimate, "__name__", repr(self.estimate))
        known = {
            p.name: p
            for p in inspect.signature(self.estimate).parameters.values()
            if p.kind is p.KEYWORD_ONLY
        }
        for key in self.settings:
            if key not in known:
                raise ValueError(f"{name} has no setting {key!r}, expected one of {sorted(known)}")
        for key, parameter in known.items():
            if parameter.default is parameter.empty and key not in self.settings:
                raise ValueError(f"{name} needs the setting {key!r}")

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the tensors that the function reads, in order, without the optional ones."""
        return tuple(
            p.name
            for p in inspect.signature(self.estimate).parameters.values()
            if p.kind is not p.KEYWORD_ONLY and p.default is p.empty
        )

    def __call__(self, *tensors: Any, **named: Any) -> Any:  # noqa: ANN401
        """Call the function with its settings."""
        return self.estimate(*tensors, **named, **self.settings)


@dataclass(frozen=True, kw_only=True)
class ValueTerm:
    """How the value function is trained beside the policy.

    Attributes:
        coef: Weight of `value_loss` in the sum of the losses.
        clip: Largest change of the value that is credited, in units of the return, or none.
        loss: Squared error (halved) or Huber loss, see `polopt.losses.value_loss`.
    """

    coef: Coefficient = 0.5
    clip: Coefficient | None = None
    loss: Literal["mse", "huber"] = "mse"

    def __post_init__(self) -> None:
        check_coefficient("coef", self.coef)
        if self.clip is not None:
            check_coefficient(
                "clip", self.clip, allowed=lambda x: x > 0.0, expected="positive or none"
            )
        if self.loss not in ("mse", "huber"):
            raise ValueError(f"loss must be 'mse' or 'huber', got {self.loss!r}")


_KINDS: dict[str, tuple[type, ...]] = {
    "max_rounds": (int,),
    "oversample": (int, float),
    "overlong_cache": (int, type(None)),
    "drop_truncated": (bool,),
    "top_entropy": (int, float, type(None)),
}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which answers a batch is filled with, and what becomes of those that are too long.

    Source: DAPO, https://arxiv.org/abs/2503.14476, eq. 11 and section 3.4.

    Attributes:
        refill: Replace groups that carry no signal until the batch is full: those whose
            answers are all correct or all wrong (`"correct"`, the paper's rule), or those
            whose rewards are all equal (`"reward"`). None keeps every group.
        max_rounds: Further generation rounds for one batch, at most.
        oversample: A round draws so many times the groups that are expected to be needed, at
            most a whole batch: above one there are fewer rounds and more answers in vain.
        at_bound: What happens when groups are still missing then: the informative ones that
            were found are trained on, and the run goes on (`"train"`) or ends (`"stop"`).
        overlong_cache: Add `soft_overlong` to the reward: the last so many tokens before the
            longest answer cost up to 1. None adds nothing.
        drop_truncated: Leave answers that were cut at the longest length out of the loss.
        top_entropy: Train on this share of the tokens only, in (0, 1]: those at which the policy's
            entropy is highest (see `polopt.losses.top_entropy`), chosen over the batch of an
            optimizer step. None trains on all.
    """

    refill: Literal["correct", "reward"] | None = None
    max_rounds: int = 8
    oversample: float = 1.0
    at_bound: Literal["train", "stop"] = "train"
    overlong_cache: int | None = None
    drop_truncated: bool = False
    top_entropy: float | None = None

    def __post_init__(self) -> None:
        if self.refill not in ("correct", "reward", None):
            raise ValueError(f"refill must be 'correct', 'reward' or none, got {self.refill!r}")
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and kinds != (bool,)):
                wanted = " or ".join(kind.__name__ for kind in kinds).replace("NoneType", "none")
                raise ValueError(f"{name} must be {wanted}, got {value!r}")
        if not self.max_rounds >= 1:
            raise ValueError(f"max_rounds must be at least 1, got {self.max_rounds}")
        if not 1.0 <= self.oversample < float("inf"):
            raise ValueError(f"oversample must be at least 1, got {self.oversample}")
        if self.at_bound not in ("train", "stop"):
            raise ValueError(f"at_bound must be 'train' or 'stop', got {self.at_bound!r}")
        if self.overlong_cache is not None and self.overlong_cache < 1:
            raise ValueError(f"overlong_cache must be at least 1, got {self.overlong_cache}")
        if self.top_entropy is not None and not 0.0 < self.top_entropy <= 1.0:
            raise ValueError(f"top_entropy must be in (0, 1], got {self.top_entropy}")


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One named algorithm: a loss and what goes with it.

    Attributes:
        objective: The point on the axes of the policy loss.
        advantage: How advantages are estimated.
        value: How a critic is trained; None for algorithms without one.
        sampling: Which groups a batch is filled with.
    """

    objective: Objective
    advantage: Advantage
    value: ValueTerm | None = None
    sampling: Sampling = field(default_factory=Sampling)
