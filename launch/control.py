"""The job of a control task: an actor and a critic trained by TorchRL's parts and our losses."""

import contextlib
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from polopt.envs.control import ControlTask
from polopt.launch.job import COMMON, loss_names, processes, seed, task_names
from polopt.launch.recipe import RecipeError, build, call, check_keys, complete
from polopt.losses import Algorithm, gae
from polopt.losses.controllers import observe_all, states_of
from polopt.losses.schedules import Coefficient, check_coefficient

if TYPE_CHECKING:
    from polopt.launch.run import Run

__all__ = [
    "ActorCritic",
    "Checkpoints",
    "Collection",
    "ControlJob",
    "Evaluation",
    "Network",
    "ObservationScaling",
    "Optimizer",
    "RewardScaling",
    "Updates",
    "check_most",
    "check_parts",
    "check_positive",
    "prepare",
    "read_section",
]

T = TypeVar("T")

_MOST_WEIGHTS = 100_000_000
_MOST = {"num_envs": 1_000_000, "episodes": 1_000_000, "frames_per_batch": 100_000_000}

_MEASURED = (
    "clip_fraction", "entropy", "episodes", "explained_variance", "grad_norm", "loss_critic",
    "loss_objective", "return_mean",
)  # fmt: skip
"""What a controller can react to in every control run."""


@dataclass(frozen=True, kw_only=True)
class Collection:
    """How data is collected.

    Attributes:
        num_envs: Copies of the environment.
        frames_per_batch: Steps in one batch, over all copies.
        total_frames: Steps in the whole run, at most; only whole batches are collected.
        use: `BatchedCollector`, TorchRL's `Collector`, or `module:name` of one like them.
        not_finite: What follows an observation or a reward that is not finite: `stop` ends the
            run, `drop` leaves that environment out of the batch and resets it.
    """

    num_envs: int
    frames_per_batch: int
    total_frames: int
    use: str = "BatchedCollector"
    not_finite: Literal["stop", "drop"] = "stop"

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
class ActorCritic(Network):
    """As `Network`, with a choice of the actor's distribution.

    Attributes:
        policy: `standard`, a Gaussian or the probabilities of discrete actions, or `flow`, a
            normalising flow (see `polopt.ext.torchrl.flows`).
    """

    policy: Literal["standard", "flow"] = "standard"


@dataclass(frozen=True, kw_only=True)
class Updates:
    """How a batch is used.

    Attributes:
        epochs: Passes over it.
        minibatch_size: Steps per optimizer step.
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


@dataclass(frozen=True, kw_only=True)
class ControlJob:
    """A checked recipe for a control task; see `polopt.launch.job.Job`."""

    name: str
    tree: dict[str, Any]
    task: ControlTask
    algorithm: Algorithm
    collector: Collection
    update: Updates
    network: ActorCritic = field(default_factory=ActorCritic)
    optimizer: Optimizer = field(default_factory=Optimizer)
    observation_scaling: ObservationScaling | None = None
    reward_scaling: RewardScaling | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    processes: int = 1

    def arithmetic(self) -> dict[str, Any]:
        """See `Job`."""
        c, u = self.collector, self.update
        batches = c.total_frames // c.frames_per_batch
        per_batch = u.epochs * c.frames_per_batch // u.minibatch_size
        return {
            "environments": c.num_envs,
            "steps_per_environment_and_batch": c.frames_per_batch // c.num_envs,
            "frames_per_batch": c.frames_per_batch,
            "batches": batches,
            "minibatches_per_epoch": c.frames_per_batch // u.minibatch_size,
            "optimizer_steps_per_batch": per_batch,
            "optimizer_steps": per_batch * batches,
            "evaluations": batches * c.frames_per_batch // self.evaluation.every + 1,
            "episodes_per_evaluation": self.evaluation.episodes,
        }

    def train(self, run: "Run") -> dict[str, Any]:
        """See `Job`."""
        from polopt.launch.control_run import train

        return train(self, run)


def prepare(tree: dict[str, Any], *, name: str) -> ControlJob:
    """Check the recipe of a control task.

    Args:
        tree: As from `polopt.launch.recipe.load`; defaults are filled in.
        name: Names the run.

    Raises:
        RecipeError: If the recipe is wrong.
    """
    from polopt.launch.control_run import collector_names  # a missing extra is told now

    sections = {
        "collector": Collection,
        "network": ActorCritic,
        "update": Updates,
        "optimizer": Optimizer,
        "observation_scaling": ObservationScaling,
        "reward_scaling": RewardScaling,
        "evaluation": Evaluation,
        "checkpoints": Checkpoints,
    }
    check_keys(tree, (*COMMON, *sections))
    for key in ("algorithm", "collector", "update"):
        if key not in tree:
            raise RecipeError(f"the section {key!r} is missing")
    seed(tree)
    world = processes(tree)
    if world != 1:
        raise RecipeError(f"'launch.processes' must be 1 for a control task, got {world}")
    task = build(tree["task"], task_names(), "task")
    algorithm = build(tree["algorithm"], loss_names(), "algorithm")
    _check_algorithm(algorithm)
    evaluation = tree.setdefault("evaluation", {})
    check_keys(evaluation, Evaluation.__dataclass_fields__, "evaluation")
    evaluation.setdefault("stop_at", task.bar)
    settings: dict[str, Any] = {}
    for key, kind in sections.items():
        optional = key in ("observation_scaling", "reward_scaling")
        tree.setdefault(key, None if optional else {})
        if optional and tree[key] is None:
            continue
        settings[key] = read_section(tree, key, kind)
    complete({"use": tree["collector"]["use"]}, collector_names(), "collector")
    job = ControlJob(name=name, tree=tree, task=task, algorithm=algorithm, **settings)
    frames, size = job.collector.frames_per_batch, job.update.minibatch_size
    if frames % size:
        raise RecipeError(
            f"'update.minibatch_size' {size} must divide 'collector.frames_per_batch' {frames}"
        )
    if algorithm.objective.ratio == "none" and (job.update.epochs > 1 or size < frames):
        raise RecipeError(
            "the algorithm has no importance ratio, so only its first update of a batch is right: "
            f"set update.epochs=1 update.minibatch_size={frames}, or use ppo"
        )
    if algorithm.objective.ratio == "none" and job.update.target_kl is not None:
        raise RecipeError(
            "'update.target_kl' needs an importance ratio, which the algorithm does not have: "
            "leave it out, or use ppo"
        )
    if job.network.policy == "flow":
        from polopt.ext.torchrl.flows import make_flow_actor

        with contextlib.closing(task.make(1, seed=0)) as env:
            make_flow_actor(env)  # tells what is missing or does not fit
    if states_of(job.optimizer):
        raise RecipeError(
            "'optimizer.lr' must be a number or a schedule; a controller adapts coefficients of "
            "the algorithm"
        )
    return job


def read_section(tree: dict[str, Any], key: str, kind: type[T]) -> T:
    """Build one section of a recipe, and write its defaults into the recipe.

    Args:
        tree: The recipe, which is changed.
        key: The section.
        kind: A dataclass.

    Raises:
        RecipeError: If a setting is unknown, missing or out of range.
    """
    check_keys(tree[key], kind.__dataclass_fields__, key)  # type: ignore[attr-defined]
    given = {k: complete(v, loss_names(), f"{key}.{k}") for k, v in tree[key].items()}
    # The collector's `use` is looked up when the run begins.
    values = given if key == "collector" else build(given, loss_names(), key)
    section = call(kind, values, key)
    defaults = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(section).items()}  # type: ignore[call-overload]
    tree[key] = {**defaults, **given}
    return section


def _check_algorithm(algorithm: Any) -> None:  # noqa: ANN401
    if not isinstance(algorithm, Algorithm):
        raise RecipeError(
            f"'algorithm' must build an Algorithm, for example {{use: ppo}}, got {algorithm!r}"
        )
    objective = algorithm.objective
    if algorithm.value is None or algorithm.advantage.estimate is not gae:
        estimate = getattr(algorithm.advantage.estimate, "__name__", "another function")
        raise RecipeError(
            "'algorithm': control tasks need a critic and gae, this algorithm estimates its "
            f"advantages with {estimate}: use ppo"
        )
    if objective.ratio not in ("token", "none") or objective.aggregation != "token_mean":
        raise RecipeError(
            "'algorithm': control tasks train on single steps, so ratio must be 'token' or 'none' "
            f"and aggregation 'token_mean', got {objective.ratio!r} and {objective.aggregation!r}"
        )
    check_parts(algorithm, _MEASURED)


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
