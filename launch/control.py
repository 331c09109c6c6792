"""The job of a control task: an actor and a critic trained by TorchRL's parts and our losses."""

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from polopt.envs.control import ControlTask
from polopt.launch.control_sections import (
    Batches,
    Checkpoints,
    Epochs,
    Evaluation,
    Network,
    ObservationScaling,
    Optimizer,
    RewardScaling,
    check_parts,
    check_ratio,
    read_sections,
    task_and_algorithm,
)
from polopt.launch.recipe import RecipeError, check_arguments, resolve
from polopt.losses import Algorithm, gae

if TYPE_CHECKING:
    from polopt.launch.control_loop import Learner
    from polopt.launch.run import Run

__all__ = ["ActorCritic", "Collection", "ControlJob", "prepare"]

_MEASURED = (
    "clip_fraction", "entropy", "episodes", "explained_variance", "grad_norm", "loss_critic",
    "loss_objective", "return_mean",
)  # fmt: skip
"""What a controller can react to in every control run."""


@dataclass(frozen=True, kw_only=True)
class Collection(Batches):
    """How data is collected.

    Attributes:
        use: `BatchedCollector`, TorchRL's `Collector`, or `module:name` of one like them.
        not_finite: What follows an observation or a reward that is not finite: `stop` ends the
            run, `drop` leaves that environment out of the batch and resets it.
    """

    use: str = "BatchedCollector"
    not_finite: Literal["stop", "drop"] = "stop"


@dataclass(frozen=True, kw_only=True)
class ActorCritic(Network):
    """As `Network`, with a choice of the actor's distribution.

    Attributes:
        policy: `standard`, a Gaussian or the probabilities of discrete actions, or `flow`, a
            normalising flow (see `polopt.ext.torchrl.flows`).
    """

    policy: Literal["standard", "flow"] = "standard"


@dataclass(frozen=True, kw_only=True)
class ControlJob:
    """A checked recipe for a control task; see `polopt.launch.job.Job`."""

    name: str
    tree: dict[str, Any]
    task: ControlTask
    algorithm: Algorithm
    collector: Collection
    update: Epochs
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

    def learner(self) -> "Learner":
        """Return what learns, before its first iteration."""
        from polopt.launch.control_run import learner

        return learner(self)

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
    sections = {
        "collector": Collection,
        "network": ActorCritic,
        "update": Epochs,
        "optimizer": Optimizer,
        "observation_scaling": ObservationScaling,
        "reward_scaling": RewardScaling,
        "evaluation": Evaluation,
        "checkpoints": Checkpoints,
    }
    needed = {"collector": "", "update": ""}
    task, algorithm = task_and_algorithm(tree, sections, needed)
    _check_algorithm(algorithm)
    settings = read_sections(tree, sections, task)
    _check_collector(tree["collector"]["use"])
    job = ControlJob(name=name, tree=tree, task=task, algorithm=algorithm, **settings)
    frames, size = job.collector.frames_per_batch, job.update.minibatch_size
    if frames % size:
        raise RecipeError(
            f"'update.minibatch_size' {size} must divide 'collector.frames_per_batch' {frames}"
        )
    check_ratio(algorithm, job.update, frames, "ppo")
    if job.network.policy == "flow":
        from polopt.ext.torchrl.flows import make_flow_actor

        with contextlib.closing(task.make(1, seed=0)) as env:
            make_flow_actor(env)  # tells what is missing or does not fit
    return job


def _check_collector(use: str) -> None:
    from polopt.launch.control_run import COLLECTOR_ARGUMENTS, collector_names

    collector = resolve(use, collector_names(), "collector")
    try:
        check_arguments(collector, dict.fromkeys(COLLECTOR_ARGUMENTS), "collector")
    except RecipeError as error:
        raise RecipeError(
            f"'collector.use' {use} is no collector, it must take {', '.join(COLLECTOR_ARGUMENTS)} "
            "as TorchRL's does"
        ) from error


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
