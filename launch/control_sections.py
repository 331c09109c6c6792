"""What the recipes of all control tasks have in common: sections, and how they are checked."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, TypeVar

from polopt.envs.control import ControlTask
from polopt.launch.job import COMMON, loss_names, processes, seed, task_names
from polopt.launch.recipe import RecipeError, build, call, check_keys, complete
from polopt.losses import Algorithm
from polopt.losses.controllers import observe_all, states_of
from polopt.losses.schedules import Coefficient, check_coefficient

__all__ = [
    "Batches",
    "Checkpoints",
    "Epochs",
    "Evaluation",
    "Network",
    "ObservationScaling",
    "Optimizer",
    "RewardScaling",
    "check_most",
    "check_parts",
    "check_positive",
    "check_ratio",
    "read_sections",
    "task_and_algorithm",
]

T = TypeVar("T")

_MOST_WEIGHTS = 100_000_000
_MOST = {"num_envs": 1_000_000, "episodes": 1_000_000, "frames_per_batch": 100_000_000}
_OPTIONAL = ("observation_scaling", "reward_scaling")


@dataclass(frozen=True, kw_only=True)
class Batches:
    """How data is collected.

    Attributes:
        num_envs: Copies of the environment.
        frames_per_batch: Steps, over all copies, between rounds of optimizer steps.
        total_frames: Steps in the whole run, at most; only whole batches are collected.
    """

    num_envs: int
    frames_per_batch: int
    total_frames: int

    def __post_init__(self) -> None:
        check_positive(self, "num_envs", "frames_per_batch", "total_frames")
        check_most(self, "num_envs", "frames_per_batch")
        if self.frames_per_batch % self.num_envs:
            raise ValueError(
                f"frames_per_batch {self.frames_per_batch} must be a multiple of num_envs "
                f"{self.num_envs}"
            )
        if self.total_frames < self.frames_per_batch:
            raise ValueError(
                f"total_frames {self.total_frames} is less than one batch of "
                f"{self.frames_per_batch}"
            )


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """How a batch is used.

    Attributes:
        epochs: Passes over it.
        minibatch_size: Steps, or rollouts in groups, per optimizer step.
        max_grad_norm: Gradients are scaled down to this norm; none leaves them.
        target_kl: No further pass follows one in which the policy moved by more nats
            (`kl_approx`) from the one that collected; none makes all passes.
    """

    epochs: int
    minibatch_size: int
    max_grad_norm: float | None = 0.5
    target_kl: float | None = None

    def __post_init__(self) -> None:
        check_positive(self, "epochs", "minibatch_size", "max_grad_norm", "target_kl")


@dataclass(frozen=True, kw_only=True)
class Network:
    """Actor and critic, each with its own layers.

    Attributes:
        hidden: Widths of the layers.
    """

    hidden: tuple[int, ...] = (64, 64)

    def __post_init__(self) -> None:
        if any(width < 1 for width in self.hidden):
            raise ValueError(f"hidden must be positive widths, got {list(self.hidden)}")
        weights = sum(a * b for a, b in pairwise((1, *self.hidden, 1)))
        if weights > _MOST_WEIGHTS:
            raise ValueError(
                f"hidden {list(self.hidden)} makes layers of {weights:,} weights, more than the "
                f"{_MOST_WEIGHTS:,} that fit a network of control: use narrower layers"
            )


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Adam.

    Attributes:
        lr: Learning rate, or its schedule in frames.
        eps: Added to the root of the second moment.
    """

    lr: Coefficient = 3e-4
    eps: float = 1e-5

    def __post_init__(self) -> None:
        check_positive(self, "eps")
        check_positive(self, "lr")
        check_coefficient("lr", self.lr)


@dataclass(frozen=True, kw_only=True)
class ObservationScaling:
    """How observations are scaled; see `polopt.ext.torchrl.transforms.ObservationScaling`.

    Attributes:
        clamp: Scaled observations are clamped to ± this; none leaves them.
    """

    clamp: float | None = 10.0

    def __post_init__(self) -> None:
        check_positive(self, "clamp")


@dataclass(frozen=True, kw_only=True)
class RewardScaling:
    """How rewards are scaled; see `polopt.ext.torchrl.transforms.RewardScaling`.

    Attributes:
        clamp: Scaled rewards are clamped to ± this; none leaves them.
        constant: Divide by this number instead of the measured deviation.
    """

    clamp: float | None = 10.0
    constant: float | None = None

    def __post_init__(self) -> None:
        check_positive(self, "clamp", "constant")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Greedy episodes, played in environments of their own.

    Attributes:
        every: Frames between evaluations.
        episodes: Episodes in each.
        stop_at: Mean return that ends the run; by default the task's bar, none goes on.
    """

    every: int = 2048
    episodes: int = 100
    stop_at: float | None = None

    def __post_init__(self) -> None:
        check_positive(self, "every", "episodes")
        check_most(self, "episodes")
        if self.stop_at is not None and not math.isfinite(self.stop_at):
            raise ValueError(
                f"stop_at must be a number, or null to go on to the last frame, got {self.stop_at}"
            )


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When the run is saved, besides at its end.

    Attributes:
        every: Frames between checkpoints.
    """

    every: int = 20_480

    def __post_init__(self) -> None:
        check_positive(self, "every")


def task_and_algorithm(
    tree: dict[str, Any], sections: Iterable[str], needed: Mapping[str, str]
) -> tuple[ControlTask, Any]:
    """Check which sections a recipe has, and build the two that every one needs.

    Args:
        tree: The recipe.
        sections: What may stand in it besides the common ones.
        needed: The sections that must, and an example of each, which may be empty.

    Raises:
        RecipeError: If a section is unknown or missing, or it asks for several processes.
    """
    check_keys(tree, (*COMMON, *sections))
    for key, example in {"algorithm": "", **needed}.items():
        if key not in tree:
            example = f", for example {example}" if example else ""
            raise RecipeError(f"the section {key!r} is missing{example}")
    seed(tree)
    world = processes(tree)
    if world != 1:
        raise RecipeError(f"'launch.processes' must be 1 for a control task, got {world}")
    task = build(tree["task"], task_names(), "task")
    return task, build(tree["algorithm"], loss_names(), "algorithm")


def read_sections(
    tree: dict[str, Any], sections: Mapping[str, type], task: ControlTask
) -> dict[str, Any]:
    """Build the sections of a recipe, and write their defaults into the recipe.

    Args:
        tree: The recipe, which is changed.
        sections: Dataclasses by key.
        task: Whose bar ends the run, unless the recipe says otherwise.

    Raises:
        RecipeError: If a setting is unknown, missing or out of range.
    """
    evaluation = tree.setdefault("evaluation", {})
    check_keys(evaluation, Evaluation.__dataclass_fields__, "evaluation")
    evaluation.setdefault("stop_at", task.bar)
    settings: dict[str, Any] = {}
    for key, kind in sections.items():
        optional = key in _OPTIONAL
        tree.setdefault(key, None if optional else {})
        if not (optional and tree[key] is None):
            settings[key] = _read(tree, key, kind)
    if states_of(settings["optimizer"]):
        raise RecipeError(
            "'optimizer.lr' must be a number or a schedule; a controller adapts coefficients of "
            "the algorithm"
        )
    return settings


def _read(tree: dict[str, Any], key: str, kind: type[T]) -> T:
    """Build one section of a recipe, and write its defaults into the recipe."""
    check_keys(tree[key], kind.__dataclass_fields__, key)  # type: ignore[attr-defined]
    given = {k: complete(v, loss_names(), f"{key}.{k}") for k, v in tree[key].items()}
    # The collector's `use` is looked up when the run begins.
    values = given if key == "collector" else build(given, loss_names(), key)
    section = call(kind, values, key)
    defaults = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(section).items()}  # type: ignore[call-overload]
    tree[key] = {**defaults, **given}
    return section


def check_parts(algorithm: Algorithm, measured: Iterable[str]) -> None:
    """Refuse parts of an algorithm that no loop of a control task has a use for.

    Args:
        algorithm: Of the recipe.
        measured: Metrics that its controllers can react to, besides those of the ratio.

    Raises:
        RecipeError: If it needs a reference policy or corrects a sampler, or a controller reacts
            to another metric.
    """
    objective = algorithm.objective
    for name, used, mend in (
        ("kl_coef", objective.uses_reference, "set algorithm.kl_coef=0"),
        ("corrections", bool(objective.corrections), "leave it out"),
    ):
        if used:
            raise RecipeError(
                f"'algorithm': {name} is set, but a control task has no reference policy and no "
                f"sampler of its own: {mend}"
            )
    measured = [*measured, *(("kl_approx", "ratio_mean") if objective.ratio != "none" else ())]
    try:  # not a number: asks only whether every controller finds its metric
        observe_all(algorithm, dict.fromkeys(measured, math.nan), 0)
    except ValueError as error:
        raise RecipeError(f"'algorithm': {error}") from error


def check_ratio(algorithm: Algorithm, update: Epochs, whole: int, other: str) -> None:
    """Refuse to use a batch more than once where the algorithm has no importance ratio.

    Args:
        algorithm: Of the recipe.
        update: Of the recipe.
        whole: The minibatch size that takes the batch whole.
        other: An algorithm that has one.

    Raises:
        RecipeError: With the mend.
    """
    if algorithm.objective.ratio != "none":
        return
    if update.epochs > 1 or update.minibatch_size < whole:
        raise RecipeError(
            "the algorithm has no importance ratio, so only its first update of a batch is right: "
            f"set update.epochs=1 update.minibatch_size={whole}, or use {other}"
        )
    if update.target_kl is not None:
        raise RecipeError(
            "'update.target_kl' needs an importance ratio, which the algorithm does not have: "
            f"leave it out, or use {other}"
        )


def check_most(section: object, *names: str) -> None:
    """Raise a ValueError if a section asks for more than fits into memory at a time."""
    for name in names:
        value = getattr(section, name)
        if value > _MOST[name]:
            raise ValueError(
                f"{name} {value:,} is more than the {_MOST[name]:,} that a run can hold at a time: "
                "use fewer"
            )


def check_positive(section: object, *names: str) -> None:
    """Raise a ValueError if a number of a section is not positive and finite."""
    for name in names:
        value = getattr(section, name)
        if isinstance(value, float | int) and not 0 < value < math.inf:
            what = "finite" if value == math.inf else "positive"
            raise ValueError(f"{name} must be {what}, got {value}")
