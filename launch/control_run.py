"""The on-policy iteration of a control task: collect a batch, advantages, update."""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.collectors import Collector

from polopt.envs.finite import FiniteEnv
from polopt.ext.metrics import Stopwatch
from polopt.ext.torchrl.collector import BatchedCollector
from polopt.ext.torchrl.networks import distribution_of, flatten, make_actor, make_critic, value_of
from polopt.ext.torchrl.transforms import (
    GAEAdvantage,
    ObservationScaling,
    RewardScaling,
    running_return,
)
from polopt.ext.torchrl.update import Update
from polopt.launch import control_loop
from polopt.launch.control import ControlJob
from polopt.launch.control_loop import Diverged, check_update
from polopt.launch.recipe import RecipeError, build
from polopt.launch.record import read_metrics
from polopt.launch.run import Run
from polopt.losses import explained_variance, resolve
from polopt.losses.controllers import load_states, observe_all, states_of
from polopt.losses.modules import PolicyLoss
from polopt.losses.schedules import value_at

__all__ = ["COLLECTOR_ARGUMENTS", "collector_names", "learner", "train"]

COLLECTOR_ARGUMENTS = ("create_env_fn", "policy", "frames_per_batch", "total_frames")
"""What a collector is given, by name."""

_DROPPED = "environments_dropped"


def collector_names() -> dict[str, Callable[..., Any]]:
    """Return the short names for `collector.use`."""
    return {"BatchedCollector": BatchedCollector, "Collector": Collector}


def learner(job: ControlJob) -> control_loop.Learner:
    """Return what learns, before its first iteration."""
    return _OnPolicy(job)


def train(job: ControlJob, run: Run) -> dict[str, Any]:
    """Train until the bar or the last frame, and return the summary.

    Raises:
        FloatingPointError: If an observation, a reward or a loss is not finite. The newest
            checkpoint is from before the update that went wrong.
        RecipeError: If a collector of the user's gives no batches.
    """
    summary = control_loop.train(
        lambda: learner(job),
        run,
        task=job.task,
        total_frames=_last(job),
        evaluation=job.evaluation,
        checkpoints=job.checkpoints,
        seed=job.tree["seed"],
        drop=job.collector.not_finite == "drop",
    )
    dropped = sum(m.get(_DROPPED, 0) for m in read_metrics(run.path / "metrics.jsonl"))
    return {**summary, _DROPPED: int(dropped)} if dropped else summary


def _last(job: ControlJob) -> int:
    """Frames in the whole run: only whole batches are collected."""
    per_batch = job.collector.frames_per_batch
    return job.collector.total_frames // per_batch * per_batch


class _OnPolicy:
    """A `Learner` that throws a batch away once it has learnt from it."""

    def __init__(self, job: ControlJob) -> None:
        self.job = job
        self.watch = Stopwatch()
        torch.manual_seed(job.tree["seed"])
        envs, drop = job.collector.num_envs, job.collector.not_finite == "drop"
        self.env = FiniteEnv(job.task.make(envs, seed=job.tree["seed"]), drop=drop)
        self.observations = None
        if job.observation_scaling is not None:
            width = self.env.observation_spec["observation"].shape[-1]
            self.observations = ObservationScaling(width, clamp=job.observation_scaling.clamp)
        hidden, scaling = job.network.hidden, self.observations
        if job.network.policy == "flow":
            from polopt.ext.torchrl.flows import make_flow_actor

            self.actor = make_flow_actor(self.env, hidden, scaling=scaling)
        else:
            self.actor = make_actor(self.env, hidden, scaling=scaling)
        self.critic = make_critic(self.env, hidden, scaling=scaling)
        self.distribution = distribution_of(self.actor)
        self.parameters = flatten([*self.actor.parameters(), *self.critic.parameters()])
        self.optimizer = torch.optim.Adam(
            [self.parameters], lr=0.0, eps=job.optimizer.eps, fused=True
        )
        settings = resolve(job.algorithm.advantage, 0).settings
        self.scaling = None
        if (scaling := job.reward_scaling) is not None:
            self.scaling = RewardScaling(
                envs, gamma=settings["gamma"], clamp=scaling.clamp, constant=scaling.constant
            )
        self.advantage = GAEAdvantage(
            self.critic,
            **settings,
            whiten=job.algorithm.advantage.whiten,
            reward=("next", "reward" if self.scaling is None else "scaled_reward"),
        )
        self.algorithm = copy.deepcopy(job.algorithm)  # its controllers change
        self.loss = PolicyLoss(resolve(self.algorithm, 0))
        self.update = Update(
            self.loss,
            self.distribution,
            value_of(self.critic),
            self.optimizer,
            epochs=job.update.epochs,
            minibatch_size=job.update.minibatch_size,
            max_grad_norm=job.update.max_grad_norm,
            target_kl=job.update.target_kl,
            stopwatch=self.watch,
        )
        self.earned = torch.zeros(envs)
        self.batches: Iterator[TensorDictBase] | None = None

    def iterate(self, frames: int) -> tuple[int, dict[str, float]]:
        """See `Learner`."""
        if self.batches is None:
            self.batches = self._batches(_last(self.job) - frames)
        before = self.state()
        self.watch.start()
        try:
            self.env.begin(f"the batch that begins at frame {frames}")
            batch = next(self.batches, None)
            if not isinstance(batch, TensorDictBase):
                raise RecipeError(
                    f"'collector.use' {self.job.collector.use} gave {batch!r} at frame {frames}, "
                    f"expected a batch [N, T] of {self.job.collector.frames_per_batch} steps, "
                    f"again and again up to {_last(self.job)}"
                )
            self.watch.lap("collect")
            frames += batch.numel()
            metrics, lr = self._learn(batch, frames)
            numbers = dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))
            check_update(numbers, self.parameters, frames)
        except FloatingPointError as error:
            self.load(*before)
            raise Diverged(str(error)) from error
        observe_all(self.algorithm, numbers, batch.numel())
        return frames, {**numbers, "learning_rate": lr, **self.watch.take(), **self.env.times()}

    def act(self, observation: Tensor) -> Tensor:
        """See `Learner`."""
        return self.distribution(observation).mode

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """See `Learner`."""
        tensors: dict[str, Tensor] = {f"env.{k}": v for k, v in self.env.snapshot().items()}
        for name, module in self._modules().items():
            for key, value in module.state_dict().items():
                tensors[f"{name}.{key}"] = value.clone()
        for entries in self.optimizer.state.values():
            tensors |= {f"optimizer.{key}": value.clone() for key, value in entries.items()}
        tensors["earned"] = self.earned
        tensors["rng"] = torch.get_rng_state()
        return tensors, {"controllers": states_of(self.algorithm)}

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """See `Learner`."""

        def part(name: str) -> dict[str, Tensor]:
            start = name + "."
            return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}

        self.env.restore(part("env"))
        for name, module in self._modules().items():
            module.load_state_dict(part(name))
        groups = self.optimizer.state_dict()["param_groups"]
        moments = {0: part("optimizer")}
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.earned = tensors["earned"]
        if not self.env.exact:  # its episodes begin anew
            self.earned = torch.zeros_like(self.earned)
            if self.scaling is not None:
                self.scaling.running.zero_()
        torch.set_rng_state(tensors["rng"])
        load_states(self.algorithm, state["controllers"])

    def _batches(self, frames: int) -> Iterator[TensorDictBase]:
        generator = torch.get_rng_state()  # making a collector must not change what follows
        with warnings.catch_warnings():
            # TorchRL's would add a flag for recurrent policies, of which there are none here.
            warnings.filterwarnings(
                "ignore", "The env passed to Collector is missing transforms", FutureWarning
            )
            per_batch = self.job.collector.frames_per_batch
            given = (self.env, self.actor, per_batch, frames)
            section: dict[str, Any] = dict(zip(COLLECTOR_ARGUMENTS, given, strict=True))
            section["use"] = self.job.collector.use
            collector = build(section, collector_names(), "collector")
        torch.set_rng_state(generator)
        return iter(collector)

    def _learn(self, batch: TensorDictBase, frames: int) -> tuple[dict[str, Tensor], float]:
        """Learn from a batch [N, T], and return what was measured and the learning rate."""
        broken = self.env.broken
        if not broken.any():
            return self._learn_from(batch, frames)
        kept = ~broken
        if not kept.any():
            raise FloatingPointError(
                f"every environment gave numbers that are not finite before frame {frames}"
            )
        # What the others earned so far goes on; of a broken one it is not known.
        carried = [(self, "earned")]
        carried += [] if self.scaling is None else [(self.scaling, "running")]
        whole = [getattr(owner, name).masked_fill(broken, 0.0) for owner, name in carried]
        for (owner, name), carry in zip(carried, whole, strict=True):
            setattr(owner, name, carry[kept])
        metrics, lr = self._learn_from(batch[kept], frames)
        for (owner, name), carry in zip(carried, whole, strict=True):
            setattr(owner, name, carry.masked_scatter(kept, getattr(owner, name)))
        return {**metrics, _DROPPED: broken.sum().float()}, lr

    def _learn_from(self, batch: TensorDictBase, frames: int) -> tuple[dict[str, Tensor], float]:
        lr = self._schedule(frames)
        if self.scaling is not None:
            self.scaling(batch)
        self.advantage(batch)
        self.watch.lap("advantage")
        # Without its broken environments a batch has as many minibatches, a little smaller.
        count = self.job.collector.frames_per_batch // self.job.update.minibatch_size
        size = self.update.minibatch_size = max(batch.numel() // count, 1)
        whole = batch.numel() == count * size
        metrics = self.update(batch if whole else batch.reshape(-1)[: count * size])
        if self.observations is not None:
            self.observations.measure(batch["observation"])
        metrics["explained_variance"] = explained_variance(
            batch["state_value"], batch["value_target"]
        )
        return metrics | self._episodes(batch), lr

    def _schedule(self, frames: int) -> float:
        """Bring every coefficient to its value at `frames`, and return the learning rate."""
        algorithm = resolve(self.algorithm, frames)
        self.loss.objective, self.loss.value_term = algorithm.objective, algorithm.value
        for name, value in algorithm.advantage.settings.items():
            setattr(self.advantage, name, value)
        lr = value_at(self.job.optimizer.lr, frames)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _episodes(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Mean return of the episodes that ended in the batch, NaN if none did."""
        reward = batch["next", "reward"].squeeze(-1)
        done = batch["next", "done"].squeeze(-1)
        earned = running_return(reward, done, self.earned, gamma=1.0)
        self.earned = torch.where(done[:, -1], 0.0, earned[:, -1])
        count = done.sum()
        return {
            "return_mean": torch.where(done, earned, 0.0).sum() / count,
            "episodes": count.float(),
        }

    def _modules(self) -> dict[str, torch.nn.Module]:
        modules = {"actor": self.actor, "critic": self.critic}
        return modules if self.scaling is None else {**modules, "scaling": self.scaling}
