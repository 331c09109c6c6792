"""The job of a control task whose algorithm learns from replayed transitions."""

import contextlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from polopt.envs.control import ControlTask
from polopt.launch.control_sections import (
    Batches,
    Checkpoints,
    Evaluation,
    Network,
    ObservationScaling,
    Optimizer,
    RewardScaling,
    check_positive,
    read_sections,
    task_and_algorithm,
)
from polopt.launch.job import exploration_names, loss_names
from polopt.launch.recipe import RecipeError, build, call, check_keys, complete
from polopt.losses import OffPolicy
from polopt.losses.schedules import Coefficient, check_unit

if TYPE_CHECKING:
    from polopt.ext.torchrl.exploration import Rule
    from polopt.launch.control_loop import Learner
    from polopt.launch.run import Run

__all__ = ["OffPolicyJob", "Prioritised", "Replay", "Updates", "prepare"]


@dataclass(frozen=True, kw_only=True)
class Prioritised:
    """See `polopt.ext.replay.Priorities`.

    Attributes:
        alpha: How much priorities matter, within [0, 1]; 0 is uniform.
        beta: How much weights correct, within [0, 1], or its schedule in frames.
        eps: Added to |δ|.
    """

    alpha: float = 0.6
    beta: Coefficient = 0.4
    eps: float = 1e-3

    def __post_init__(self) -> None:
        check_unit("alpha", self.alpha)
        check_unit("beta", self.beta)
        check_positive(self, "eps")


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What is kept, and how it is drawn.

    Attributes:
        capacity: Transitions; the oldest make room.
        batch_size: Transitions of one optimizer step.
        learning_starts: Frames collected with uniformly random actions before the first
            optimizer step; Ornstein-Uhlenbeck noise is added to them too.
        n_step: Steps in one transition, see `polopt.ext.torchrl.transitions.NStep`.
        prioritised: Draw by TD error; none draws uniformly.
    """

    capacity: int
    batch_size: int
    learning_starts: int = 1000
    n_step: int = 1
    prioritised: Prioritised | None = None

    def __post_init__(self) -> None:
        check_positive(self, "capacity", "batch_size", "learning_starts", "n_step")
        if self.capacity < self.batch_size:
            raise ValueError(
                f"capacity {self.capacity} is less than batch_size {self.batch_size}: keep more, "
                "or draw fewer"
            )
        if self.learning_starts > self.capacity:
            raise ValueError(
                f"learning_starts {self.learning_starts} is more than the buffer's capacity "
                f"{self.capacity}: start earlier, or keep more"
            )
        if self.learning_starts < self.batch_size:
            raise ValueError(
                f"learning_starts {self.learning_starts} is less than batch_size "
                f"{self.batch_size}: start later, or draw fewer"
            )


@dataclass(frozen=True, kw_only=True)
class Updates:
    """How much is learnt from what was collected.

    Attributes:
        steps_per_batch: Optimizer steps after each batch of `collector.frames_per_batch`.
        max_grad_norm: Gradients of the policy, and of the critics together, are scaled down to
            this norm; none leaves them.
    """

    steps_per_batch: int
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        check_positive(self, "steps_per_batch", "max_grad_norm")


@dataclass(frozen=True, kw_only=True)
class OffPolicyJob:
    """A checked recipe; see `polopt.launch.job.Job`."""

    name: str
    tree: dict[str, Any]
    task: ControlTask
    algorithm: OffPolicy
    collector: Batches
    replay: Replay
    update: Updates
    exploration: "Rule | None" = None
    network: Network = field(default_factory=Network)
    optimizer: Optimizer = field(default_factory=Optimizer)
    observation_scaling: ObservationScaling | None = None
    reward_scaling: RewardScaling | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    processes: int = 1

    @property
    def batches_before_learning(self) -> int:
        """Batches collected before the one after which the first optimizer steps follow."""
        c, r = self.collector, self.replay
        started = -(-r.learning_starts // c.frames_per_batch)
        stored = -(-r.batch_size // c.num_envs) + r.n_step - 1  # steps of each environment
        return max(started, -(-stored * c.num_envs // c.frames_per_batch)) - 1

    def arithmetic(self) -> dict[str, Any]:
        """See `Job`."""
        c, u = self.collector, self.update
        batches = c.total_frames // c.frames_per_batch
        waiting = self.batches_before_learning
        steps = u.steps_per_batch * max(batches - waiting, 0)
        return {
            "environments": c.num_envs,
            "frames_per_batch": c.frames_per_batch,
            "batches": batches,
            "batches_before_learning": waiting,
            "optimizer_steps_per_batch": u.steps_per_batch,
            "optimizer_steps": steps,
            "target_updates": steps // self.algorithm.target_every,
            "times_a_transition_is_drawn": u.steps_per_batch
            * self.replay.batch_size
            / c.frames_per_batch,
            "evaluations": batches * c.frames_per_batch // self.evaluation.every + 1,
            "episodes_per_evaluation": self.evaluation.episodes,
        }

    def check_inputs(self) -> None:
        """Refuse a buffer that the machine has no memory for; see `Job`."""
        with contextlib.closing(self.task.make(1, seed=0)) as env:
            width = env.observation_spec["observation"].shape[-1]
            actions = math.prod(env.action_spec_unbatched.shape)
        need = 4 * self.replay.capacity * (2 * width + actions + 2)  # the least that it takes
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if need > have:
            raise RecipeError(
                f"'replay.capacity' {self.replay.capacity:,} needs {need / 2**30:,.0f} GiB, this "
                f"machine has {have / 2**30:,.0f}: keep fewer transitions"
            )

    def learner(self) -> "Learner":
        """Return what learns, before its first iteration."""
        from polopt.launch.off_policy_run import learner

        return learner(self)

    def train(self, run: "Run") -> dict[str, Any]:
        """See `Job`."""
        from polopt.launch.off_policy_run import train

        return train(self, run)


def prepare(tree: dict[str, Any], *, name: str) -> OffPolicyJob:
    """Check the recipe of a control task with an off-policy algorithm.

    Args:
        tree: As from `polopt.launch.recipe.load`; defaults are filled in.
        name: Names the run.

    Raises:
        RecipeError: If the recipe is wrong.
    """
    sections = {
        "collector": Batches,
        "replay": Replay,
        "update": Updates,
        "network": Network,
        "optimizer": Optimizer,
        "observation_scaling": ObservationScaling,
        "reward_scaling": RewardScaling,
        "evaluation": Evaluation,
        "checkpoints": Checkpoints,
    }
    needed = {"collector": "", "replay": "", "update": ""}
    task, algorithm = task_and_algorithm(tree, (*sections, "exploration"), needed)
    _check_actions(task, algorithm)
    settings = read_sections(tree, sections, task)
    if (prioritised := tree["replay"]["prioritised"]) is not None:
        defaults = {f.name: f.default for f in fields(Prioritised)}
        check_keys(prioritised, defaults, "replay.prioritised")
        # pydantic 2.10 leaves a mapping within a section as it is.
        values = build(prioritised, loss_names(), "replay.prioritised")
        built = call(Prioritised, values, "replay.prioritised")
        settings["replay"] = replace(settings["replay"], prioritised=built)
        tree["replay"]["prioritised"] = {**defaults, **prioritised}
    tree.setdefault("exploration", None)
    rule = _exploration(tree, algorithm, exploration_names())
    job = OffPolicyJob(
        name=name, tree=tree, task=task, algorithm=algorithm, exploration=rule, **settings
    )
    _check_learning(job)
    return job


def _check_learning(job: OffPolicyJob) -> None:
    """Refuse a run that never learns, or throws away what it has just collected."""
    c, r = job.collector, job.replay
    if r.learning_starts >= c.total_frames:
        raise RecipeError(
            f"'replay.learning_starts' {r.learning_starts} is not below 'collector.total_frames' "
            f"{c.total_frames}: nothing would be learnt"
        )
    if c.frames_per_batch > r.capacity:
        raise RecipeError(
            f"'collector.frames_per_batch' {c.frames_per_batch} is more than 'replay.capacity' "
            f"{r.capacity}: part of each batch would never be drawn, collect less at a time or "
            "keep more"
        )
    numbers = job.arithmetic()
    if not numbers["optimizer_steps"]:
        raise RecipeError(
            f"nothing would be learnt: the first optimizer step needs 'replay.learning_starts' "
            f"{r.learning_starts} frames and {r.batch_size} whole transitions of 'replay.n_step' "
            f"{r.n_step} steps from {c.num_envs} environments, the run has {numbers['batches']} "
            f"batches of {c.frames_per_batch} frames: set a higher collector.total_frames"
        )
    if numbers["optimizer_steps"] < job.algorithm.policy_every:
        raise RecipeError(
            f"'algorithm.policy_delay' {job.algorithm.policy_every} is more than the "
            f"{numbers['optimizer_steps']} optimizer steps of the run: the policy would learn "
            "nothing, set a lower one"
        )


def _check_actions(task: ControlTask, algorithm: OffPolicy) -> None:
    """Refuse an algorithm for the other kind of actions, or one that their range does not suit."""
    from polopt.envs.finite import FiniteEnv

    with contextlib.closing(FiniteEnv(task.make(1, seed=0))) as env:
        spec = env.action_spec_unbatched
    space: Any = spec.space
    discrete = not spec.shape
    if discrete == algorithm.discrete:
        low: Any = None
        high: Any = None
        if not discrete:
            low, high = space.low, space.high
            if not ((high > low) & (high - low).isfinite()).all():
                raise RecipeError(
                    f"'algorithm': {algorithm.loss} needs actions between two finite bounds that "
                    f"differ, those of {task.name} are {low.tolist()} and {high.tolist()}: give "
                    "its action_space others, or use ppo"
                )
        if algorithm.entropy is not None and algorithm.entropy.tuned:
            most = math.log(space.n) if discrete else float((high - low).log().sum())
            target = algorithm.entropy.target  # the defaults are below, whatever the actions
            if target is not None and target >= most:
                raise RecipeError(
                    f"'algorithm.target_entropy' {target:g} is out of reach, the uniform policy on "
                    f"the actions of {task.name} has {most:.3g} nats: set a lower one"
                )
        return
    if discrete:
        other = "discrete_sac" if algorithm.loss == "sac" else "dqn"
        raise RecipeError(
            f"'algorithm': {algorithm.loss} takes continuous actions, those of {task.name} are "
            f"discrete: use {other}"
        )
    other = "sac" if algorithm.loss == "discrete_sac" else "sac, td3 or ddpg"
    raise RecipeError(
        f"'algorithm': {algorithm.loss} takes discrete actions, those of {task.name} are "
        f"continuous: use {other}"
    )


def _exploration(
    tree: dict[str, Any], algorithm: OffPolicy, names: Mapping[str, Callable[..., Any]]
) -> "Rule | None":
    from polopt.ext.torchrl.exploration import Rule

    section = tree["exploration"]
    example = (
        "{use: EpsilonGreedy, epsilon: 0.1}"
        if algorithm.discrete
        else "{use: GaussianNoise, sigma: 0.1}"
    )
    if section is None:
        if algorithm.entropy is not None:
            return None
        raise RecipeError(
            f"the section 'exploration' is missing, {algorithm.loss} has no randomness of its own: "
            f"exploration: {example}"
        )
    if algorithm.loss == "discrete_sac":
        raise RecipeError(
            "'exploration': discrete_sac draws its actions from its policy: leave it out, and set "
            "algorithm.target_entropy"
        )
    tree["exploration"] = complete(section, names, "exploration")
    rule = build(tree["exploration"], names, "exploration")
    if not isinstance(rule, Rule):
        raise RecipeError(f"'exploration' must name a rule, for example {example}, got {rule!r}")
    if rule.discrete != algorithm.discrete:
        kind = "discrete" if rule.discrete else "continuous"
        raise RecipeError(
            f"'exploration': {type(rule).__name__} is for {kind} actions, and {algorithm.loss} "
            f"takes {'discrete' if algorithm.discrete else 'continuous'} ones"
        )
    return rule
