"""The training loop of a control task."""

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.collectors import Collector

from polopt.ext.metrics import PHASES, Stopwatch
from polopt.ext.torchrl.collector import BatchedCollector
from polopt.ext.torchrl.evaluate import greedy_returns
from polopt.ext.torchrl.networks import distribution_of, flatten, make_actor, make_critic, value_of
from polopt.ext.torchrl.transforms import GAEAdvantage, RewardScaling, running_return
from polopt.ext.torchrl.update import Update
from polopt.launch.control import ControlJob
from polopt.launch.curve import write_curves
from polopt.launch.recipe import build
from polopt.launch.record import read_metrics
from polopt.launch.run import Run
from polopt.losses import explained_variance, resolve
from polopt.losses.controllers import load_states, observe_all, states_of
from polopt.losses.modules import PolicyLoss
from polopt.losses.schedules import value_at

__all__ = ["collector_names", "train"]

_COUNTERS = ("frames", "greedy", "solved", "train_cpu")


def collector_names() -> dict[str, Callable[..., Any]]:
    """Return the short names for `collector.use`."""
    return {"BatchedCollector": BatchedCollector, "Collector": Collector}


def train(job: ControlJob, run: Run) -> dict[str, Any]:
    """Train until the bar or the last frame, and return the summary.

    Raises:
        FloatingPointError: If an observation, a reward or a loss is not finite. The newest
            checkpoint is from before the update that went wrong.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # networks this small only lose by sharing work
    try:
        loop = _Loop(job, run)
        loop.run_to_end()
        return loop.summary()
    finally:
        torch.set_num_threads(threads)


class _Loop:
    """Everything that changes while training, and how one iteration changes it."""

    def __init__(self, job: ControlJob, run: Run) -> None:
        self.job, self.run = job, run
        self.watch = Stopwatch()
        self.seed = job.tree["seed"]
        torch.manual_seed(self.seed)
        envs = job.collector.num_envs
        self.env = job.task.make(envs, seed=self.seed)
        self.evaluation_env = job.task.make(job.evaluation.episodes, seed=self.seed)
        self.actor = make_actor(self.env, job.network.hidden)
        self.critic = make_critic(self.env, job.network.hidden)
        self.distribution = distribution_of(self.actor)
        parameters = flatten([*self.actor.parameters(), *self.critic.parameters()])
        self.optimizer = torch.optim.Adam([parameters], lr=0.0, eps=job.optimizer.eps, fused=True)
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
        self.frames = 0
        self.greedy = -math.inf
        self.solved = False
        self.train_cpu = 0.0
        if (found := run.latest()) is not None:
            self._load(*found[1:])

    def run_to_end(self) -> None:
        """Iterate until the bar, the last frame, or a signal."""
        job, per_batch = self.job, self.job.collector.frames_per_batch
        last = job.collector.total_frames // per_batch * per_batch
        if self.frames == 0:
            self._evaluate()
        batches = self._batches(last - self.frames)
        evaluate_at = _next(self.frames, job.evaluation.every)
        save_at = _next(self.frames, job.checkpoints.every)
        while self.frames < last and not self.solved and not self.run.should_stop():
            start = time.process_time()
            self._iterate(batches)
            self.train_cpu += time.process_time() - start
            if self.frames >= evaluate_at:
                self._evaluate()
                # Not asked before training: some untrained policies balance the pole.
                self.solved = self._at_bar()
                evaluate_at = _next(self.frames, job.evaluation.every)
            if self.frames >= save_at:
                self.run.save(self.frames, *self._state())
                save_at = _next(self.frames, job.checkpoints.every)
        self.run.save(self.frames, *self._state())

    def _at_bar(self) -> bool:
        bar = self.job.evaluation.stop_at
        return bar is not None and self.greedy >= bar

    def summary(self) -> dict[str, Any]:
        """Draw the learning curve, and return what came out."""
        lines = read_metrics(self.run.path / "metrics.jsonl")
        curves = {
            label: [(m["step"], m[name]) for m in lines if name in m]
            for label, name in (("training", "return_mean"), ("greedy", "greedy_return"))
        }
        title = f"{self.job.task.name}, seed {self.seed}"
        picture = self.run.path / "learning_curve.svg"
        write_curves(picture, curves, title=title, x="frames", y="return")
        phases = {p: sum(m.get(f"time_{p}", 0.0) for m in lines) for p in PHASES}
        return {
            "task": self.job.task.name,
            "solved": self.solved,
            "final_return": self.greedy,
            "frames": self.frames,
            "train_cpu_seconds": round(self.train_cpu, 3),
            "frames_per_cpu_second": round(self.frames / max(self.train_cpu, 1e-9), 1),
            "frames_per_second": round(self.frames / max(self.run.seconds, 1e-9), 1),
            "phase_seconds": {name: round(seconds, 3) for name, seconds in phases.items()},
        }

    def _batches(self, frames: int) -> Iterator[TensorDictBase]:
        generator = torch.get_rng_state()  # making a collector must not change what follows
        collector = build(
            {
                "use": self.job.collector.use,
                "create_env_fn": self.env,
                "policy": self.actor,
                "frames_per_batch": self.job.collector.frames_per_batch,
                "total_frames": frames,
            },
            collector_names(),
            "collector",
        )
        torch.set_rng_state(generator)
        return iter(collector)

    def _iterate(self, batches: Iterator[TensorDictBase]) -> None:
        began = time.perf_counter()
        before = self._state()
        self.watch.start()
        batch = next(batches)
        self.watch.lap("collect")
        frames = self.frames + batch.numel()
        _check_batch(batch)
        algorithm = resolve(self.algorithm, frames)
        self.loss.objective, self.loss.value_term = algorithm.objective, algorithm.value
        for name, value in algorithm.advantage.settings.items():
            setattr(self.advantage, name, value)
        lr = value_at(self.job.optimizer.lr, frames)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.scaling is not None:
            self.scaling(batch)
        self.advantage(batch)
        self.watch.lap("advantage")
        metrics = self.update(batch)
        metrics["explained_variance"] = explained_variance(
            batch["state_value"], batch["value_target"]
        )
        metrics |= self._episodes(batch)
        numbers = dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))
        for name, value in numbers.items():
            if name.startswith("loss_") and not math.isfinite(value):
                self.run.save(self.frames, *before)
                raise FloatingPointError(
                    f"{name} became {value} in the update at frame {frames}; the checkpoint of "
                    f"frame {self.frames} is from before it: try a lower optimizer.lr"
                )
        observe_all(self.algorithm, numbers, batch.numel())
        self.frames = frames
        elapsed = time.perf_counter() - began
        extra = {"learning_rate": lr, "steps_per_second": batch.numel() / elapsed}
        numbers = {k: v for k, v in numbers.items() if not math.isnan(v)}
        self.run.log(frames, {**numbers, **extra, **self.watch.take()})
        text = f"greedy return {self.greedy:.1f}"
        self.run.progress(frames, self.job.collector.total_frames, text)

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

    def _evaluate(self) -> None:
        # Starts differ between evaluations and are the same for a resumed run.
        self.evaluation_env.set_seed((self.seed * 1_000_003 + self.frames) % 2**31)
        began = time.perf_counter()
        returns = greedy_returns(self.evaluation_env, self.distribution)
        self.greedy = float(returns.mean())
        self.run.log(
            self.frames,
            {
                "greedy_return": self.greedy,
                "greedy_return_std": float(returns.std(unbiased=False)),
                "time_evaluate": time.perf_counter() - began,
            },
        )

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Copies of everything that a resumed run needs: tensors by name, and the rest."""
        tensors: dict[str, Tensor] = {f"env.{k}": v for k, v in self.env.snapshot().items()}
        for name, module in self._modules().items():
            for key, value in module.state_dict().items():
                tensors[f"{name}.{key}"] = value.clone()
        for entries in self.optimizer.state.values():
            tensors |= {f"optimizer.{key}": value.clone() for key, value in entries.items()}
        tensors["earned"] = self.earned
        tensors["rng"] = torch.get_rng_state()
        state = {name: getattr(self, name) for name in _COUNTERS}
        state["controllers"] = states_of(self.algorithm)
        return tensors, state

    def _load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
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
        for name in _COUNTERS:
            setattr(self, name, state[name])
        load_states(self.algorithm, state["controllers"])
        self.solved = self.solved and self._at_bar()  # the bar may have been raised

    def _modules(self) -> dict[str, torch.nn.Module]:
        modules = {"actor": self.actor, "critic": self.critic}
        return modules if self.scaling is None else {**modules, "scaling": self.scaling}


def _next(frames: int, every: int) -> int:
    return (frames // every + 1) * every


def _check_batch(batch: TensorDictBase) -> None:
    """Refuse a batch with a number that is not finite, and say where it came from."""
    for name in ("reward", "observation"):
        entry = batch["next", name]
        if not torch.isfinite(entry.sum()):
            wrong = (~torch.isfinite(entry)).flatten(2).any(-1).nonzero()
            if len(wrong):
                env, step = wrong[0].tolist()
                raise FloatingPointError(
                    f"the {name} of environment {env} is {entry[env, step].tolist()} at step "
                    f"{step} of the batch; nothing was learnt from this batch"
                )
