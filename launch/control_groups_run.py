"""The iteration of a group algorithm: rollouts from shared states, advantages, update."""

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polopt.envs.finite import FiniteEnv
from polopt.ext.metrics import Stopwatch
from polopt.ext.torchrl.group_update import GroupUpdate
from polopt.ext.torchrl.groups import DynamicSampling, GroupAdvantage, GroupCollector, Sampled
from polopt.ext.torchrl.networks import distribution_of, flatten, make_actor
from polopt.launch import control_loop
from polopt.launch.control_groups import MEASURED, GroupJob
from polopt.launch.control_loop import Diverged, check_update
from polopt.launch.recipe import RecipeError
from polopt.launch.record import read_metrics
from polopt.launch.run import Run
from polopt.losses import resolve
from polopt.losses.controllers import load_states, observe_all, states_of
from polopt.losses.modules import PolicyLoss
from polopt.losses.schedules import value_at

__all__ = ["check_pieces", "learner", "train"]

_COUNTS = ("groups_played", "groups_flat", "groups_dropped", "refill_rounds")


def check_pieces(job: GroupJob) -> None:
    """Make the learner once, so that a setting that does not fit is told before a run begins.

    Raises:
        RecipeError: If the task cannot be restored, or a setting does not fit.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            _Grouped(job).env.close()
        except ValueError as error:
            raise RecipeError(str(error)) from error


def learner(job: GroupJob) -> control_loop.Learner:
    """Return what learns, before its first iteration."""
    return _Grouped(job)


def train(job: GroupJob, run: Run) -> dict[str, Any]:
    """Train until the bar or the last frame, and return the summary.

    Raises:
        FloatingPointError: If an observation, a reward or a loss is not finite. The newest
            checkpoint is from before the update that went wrong.
        RecipeError: If no group has spread from the beginning on.
    """
    summary = control_loop.train(
        lambda: learner(job),
        run,
        task=job.task,
        total_frames=job.collector.total_frames,
        evaluation=job.evaluation,
        checkpoints=job.checkpoints,
        seed=job.tree["seed"],
    )
    lines = read_metrics(run.path / "metrics.jsonl")
    return summary | {name: int(sum(m.get(name, 0) for m in lines)) for name in _COUNTS}


class _Grouped:
    """A `Learner` that compares rollouts and throws them away once it has learnt from them."""

    def __init__(self, job: GroupJob) -> None:
        self.job = job
        self.watch = Stopwatch()
        torch.manual_seed(job.tree["seed"])
        self.env = FiniteEnv(job.task.make(job.collector.num_envs, seed=job.tree["seed"]))
        self.actor = make_actor(self.env, job.network.hidden)
        self.distribution = distribution_of(self.actor)
        self.parameters = flatten(self.actor.parameters())
        self.optimizer = torch.optim.Adam(
            [self.parameters], lr=0.0, eps=job.optimizer.eps, fused=True
        )
        self.algorithm = copy.deepcopy(job.algorithm)  # its controllers change
        first = resolve(self.algorithm, 0)
        self.collector = GroupCollector(
            self.env,
            self.actor,
            group_size=job.groups.size,
            segment=job.groups.segment,
            gamma=job.groups.gamma,
        )
        self.sampling = DynamicSampling(self.collector, first.sampling)
        self.advantage = GroupAdvantage(first.advantage)
        self.loss = PolicyLoss(first)
        self.update = GroupUpdate(
            self.loss,
            self.distribution,
            self.optimizer,
            epochs=job.update.epochs,
            minibatch_size=job.update.minibatch_size,
            max_grad_norm=job.update.max_grad_norm,
            target_kl=job.update.target_kl,
            stopwatch=self.watch,
        )
        # Rounds from the beginning without any spread; None once there was some.
        self.barren: int | None = 0

    def iterate(self, frames: int) -> tuple[int, dict[str, float]]:
        """See `Learner`."""
        before = self.state()
        self.watch.start()
        try:
            self.env.begin(f"the batch that begins at frame {frames}")
            sampled = self.sampling.collect()
            self.watch.lap("collect")
            frames += sampled.frames
            lr = self._schedule(frames)
            metrics: dict[str, Tensor] = {}
            if len(sampled.batch):
                self.advantage(sampled.batch)
                self.watch.lap("advantage")
                metrics = self.update(sampled.batch)
            numbers = {name: float(value) for name, value in metrics.items()}
            check_update(numbers, self.parameters, frames)
        except FloatingPointError as error:
            self.load(*before)
            raise Diverged(str(error)) from error
        self._refuse_without_spread(sampled)
        ended = sampled.episode_return
        numbers |= {
            "return_mean": float(ended.mean()),  # NaN where no episode ended
            "episodes": len(ended),
            "groups_played": sampled.played,
            "groups_flat": sampled.flat,
            "groups_dropped": sampled.dropped,
            "refill_rounds": sampled.rounds,
        }
        measured = {**dict.fromkeys((*MEASURED, "kl_approx", "ratio_mean"), math.nan), **numbers}
        observe_all(self.algorithm, measured, len(sampled.batch))
        return frames, {**numbers, "learning_rate": lr, **self.watch.take(), **self.env.times()}

    def act(self, observation: Tensor) -> Tensor:
        """See `Learner`."""
        return self.distribution(observation).mode

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """See `Learner`."""
        parts: dict[str, Mapping[str, Tensor]] = {
            "collector": self.collector.state_dict(),
            "actor": self.actor.state_dict(),
            "optimizer": self.optimizer.state.get(self.parameters, {}),
        }
        tensors = {f"{n}.{k}": v.clone() for n, part in parts.items() for k, v in part.items()}
        tensors["rng"] = torch.get_rng_state()
        return tensors, {"controllers": states_of(self.algorithm), "barren": self.barren}

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """See `Learner`."""

        def part(name: str) -> dict[str, Tensor]:
            start = name + "."
            return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}

        self.collector.load_state_dict(part("collector"))
        self.actor.load_state_dict(part("actor"))
        groups = self.optimizer.state_dict()["param_groups"]
        moments = {0: part("optimizer")}
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        torch.set_rng_state(tensors["rng"])
        load_states(self.algorithm, state["controllers"])
        self.barren = state["barren"]

    def _schedule(self, frames: int) -> float:
        """Bring every coefficient to its value at `frames`, and return the learning rate."""
        algorithm = resolve(self.algorithm, frames)
        self.loss.objective, self.advantage.advantage = algorithm.objective, algorithm.advantage
        lr = value_at(self.job.optimizer.lr, frames)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _refuse_without_spread(self, sampled: Sampled) -> None:
        """End a run in which there was never anything to compare."""
        if self.barren is None:
            return
        if sampled.flat < sampled.played:
            self.barren = None
            return
        self.barren += 1 + sampled.rounds
        # Every group has then been through a whole episode, and its refills besides.
        steps, longest = self.job.groups.segment, self.job.task.max_steps
        episode = 1 if steps is None else math.ceil(longest / steps)
        if self.barren >= episode + self.job.algorithm.sampling.max_rounds:
            raise RecipeError(
                f"{self.job.task.name}: in the first {self.barren} rounds no group had spread, the "
                f"{self.job.groups.size} rollouts from each state had the same outcome, so that "
                "there is nothing to learn from: use an algorithm with a critic, such as ppo, or "
                "a longer groups.segment"
            )
