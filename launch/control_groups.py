"""The job of a control task whose algorithm compares rollouts from one state: GRPO and its kin."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polopt.envs.control import ControlTask
from polopt.launch.control_sections import (
    Checkpoints,
    Epochs,
    Evaluation,
    Network,
    Optimizer,
    check_most,
    check_parts,
    check_positive,
    check_ratio,
    read_sections,
    task_and_algorithm,
)
from polopt.launch.recipe import RecipeError
from polopt.losses import Algorithm

if TYPE_CHECKING:
    from polopt.launch.control_loop import Learner
    from polopt.launch.run import Run

__all__ = ["MEASURED", "Collection", "GroupJob", "Groups", "prepare"]

MEASURED = (
    "clip_fraction", "entropy", "episodes", "grad_norm", "groups_dropped", "groups_flat",
    "groups_played", "loss_objective", "refill_rounds", "return_mean",
)  # fmt: skip
"""What a controller can react to in every run, besides the metrics of the ratio."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """How rollouts are grouped; see `polopt.ext.torchrl.groups.GroupCollector`.

    Attributes:
        size: Rollouts from one state.
        segment: Steps of a rollout, at most; none plays episodes to their end.
        gamma: Discount per step of a rollout's outcome.
    """

    size: int
    segment: int | None = None
    gamma: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Collection:
    """How data is collected.

    Attributes:
        num_envs: Copies of the environment, and so rollouts in one batch.
        total_frames: Steps in the whole run; the last batch may go beyond.
    """

    num_envs: int
    total_frames: int

    def __post_init__(self) -> None:
        check_positive(self, "num_envs", "total_frames")
        check_most(self, "num_envs")


@dataclass(frozen=True, kw_only=True)
class GroupJob:
    """A checked recipe; see `polopt.launch.job.Job`."""

    name: str
    tree: dict[str, Any]
    task: ControlTask
    algorithm: Algorithm
    groups: Groups
    collector: Collection
    update: Epochs
    network: Network = field(default_factory=Network)
    optimizer: Optimizer = field(default_factory=Optimizer)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    processes: int = 1

    def arithmetic(self) -> dict[str, Any]:
        """See `Job`."""
        rollouts, update = self.collector.num_envs, self.update
        steps = min(self.groups.segment or self.task.max_steps, self.task.max_steps)
        minibatches = rollouts // update.minibatch_size
        refills = self.algorithm.sampling.max_rounds if self.algorithm.sampling.refill else 0
        return {
            "rollouts_per_batch": rollouts,
            "groups_per_batch": rollouts // self.groups.size,
            "steps_per_rollout_at_most": steps,
            "refill_rounds_per_batch_at_most": refills,
            "frames_per_batch_at_most": rollouts * steps * (1 + refills),
            "minibatches_per_epoch": minibatches,
            "optimizer_steps_per_batch": update.epochs * minibatches,
            "evaluations_at_most": self.collector.total_frames // self.evaluation.every + 2,
            "episodes_per_evaluation": self.evaluation.episodes,
        }

    def learner(self) -> "Learner":
        """Return what learns, before its first iteration."""
        from polopt.launch.control_groups_run import learner

        return learner(self)

    def train(self, run: "Run") -> dict[str, Any]:
        """See `Job`."""
        from polopt.launch.control_groups_run import train

        return train(self, run)


def prepare(tree: dict[str, Any], *, name: str) -> GroupJob:
    """Check the recipe of a control task with an algorithm that has no critic.

    Args:
        tree: As from `polopt.launch.recipe.load`; defaults are filled in.
        name: Names the run.

    Raises:
        RecipeError: If the recipe is wrong.
    """
    from polopt.launch.control_groups_run import check_pieces  # a missing extra is told now

    sections = {
        "groups": Groups,
        "collector": Collection,
        "update": Epochs,
        "network": Network,
        "optimizer": Optimizer,
        "evaluation": Evaluation,
        "checkpoints": Checkpoints,
    }
    needed = {"groups": "groups: {size: 16}", "collector": "", "update": ""}
    task, algorithm = task_and_algorithm(tree, sections, needed)
    check_parts(algorithm, MEASURED)
    settings = read_sections(tree, sections, task)
    job = GroupJob(name=name, tree=tree, task=task, algorithm=algorithm, **settings)
    rollouts, size = job.collector.num_envs, job.update.minibatch_size
    if rollouts % size:
        raise RecipeError(
            f"'update.minibatch_size' {size} must divide 'collector.num_envs' {rollouts}: both "
            "count rollouts"
        )
    check_ratio(algorithm, job.update, rollouts, "dapo")
    check_pieces(job)
    return job
