"""The off-policy iteration of a control task: collect, replay, learn."""

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler

from polopt.envs.finite import FiniteEnv
from polopt.ext.metrics import Stopwatch
from polopt.ext.torchrl.exploration import Explorer, OrnsteinUhlenbeck
from polopt.ext.torchrl.off_policy import OffPolicyUpdate
from polopt.ext.torchrl.replay import PrioritizedReplayBuffer, PrioritizedSampler
from polopt.ext.torchrl.transforms import ObservationScaling, RewardScaling
from polopt.ext.torchrl.transitions import NStep, TransitionCollector
from polopt.launch import control_loop
from polopt.launch.off_policy import OffPolicyJob, Replay
from polopt.launch.run import Run
from polopt.losses.schedules import Schedule, value_at

__all__ = ["learner", "train"]

_MOST_DRAWN = 65_536
"""Transitions drawn at once: those of many optimizer steps may not fit into memory."""


def learner(job: OffPolicyJob) -> control_loop.Learner:
    """Return what learns, before its first iteration."""
    logging.getLogger("torchrl").setLevel(logging.WARNING)  # it tells that a buffer was made
    return _OffPolicy(job)


def train(job: OffPolicyJob, run: Run) -> dict[str, Any]:
    """Train until the bar or the last frame, and return the summary.

    Raises:
        FloatingPointError: If an observation, a reward or a loss is not finite. The newest
            checkpoint is from before.
    """
    per_batch = job.collector.frames_per_batch
    return control_loop.train(
        lambda: learner(job),
        run,
        task=job.task,
        total_frames=job.collector.total_frames // per_batch * per_batch,
        evaluation=job.evaluation,
        checkpoints=job.checkpoints,
        seed=job.tree["seed"],
    )


class _OffPolicy:
    """A `Learner` that keeps what was collected and learns from draws of it."""

    def __init__(self, job: OffPolicyJob) -> None:
        self.job = job
        self.watch = Stopwatch()
        seed = job.tree["seed"]
        torch.manual_seed(seed)
        self.env = FiniteEnv(job.task.make(job.collector.num_envs, seed=seed))
        self.update = OffPolicyUpdate(
            job.algorithm,
            self.env,
            hidden=job.network.hidden,
            eps=job.optimizer.eps,
            max_grad_norm=job.update.max_grad_norm,
            reward="reward" if job.reward_scaling is None else "scaled_reward",
            stopwatch=self.watch,
        )
        self.collector = TransitionCollector(self.env)
        self.n_step = NStep(job.replay.n_step, gamma=job.algorithm.gamma)
        self.buffer = _make_buffer(job.replay)
        space: Any = self.env.action_spec_unbatched.space
        self.bounds = None if job.algorithm.discrete else (space.low, space.high)
        self.explorer = None
        if job.exploration is not None:
            low, high = self.bounds or (None, None)
            self.explorer = Explorer(job.exploration, low=low, high=high)
        self.observations = None
        if job.observation_scaling is not None:
            width = self.env.observation_spec["observation"].shape[-1]
            self.observations = ObservationScaling(width, clamp=job.observation_scaling.clamp)
        self.scaling = None
        if (scaling := job.reward_scaling) is not None:
            self.scaling = RewardScaling(
                job.collector.num_envs,
                gamma=job.algorithm.gamma,
                clamp=scaling.clamp,
                constant=scaling.constant,
            )
        self.frames = 0

    def iterate(self, frames: int) -> tuple[int, dict[str, float]]:
        """See `Learner`."""
        job, watch = self.job, self.watch
        self.frames = frames
        watch.start()
        steps = job.collector.frames_per_batch // job.collector.num_envs
        self.env.begin(f"the batch that begins at frame {frames}")
        starting = frames < job.replay.learning_starts
        batch = self.collector.collect(self._start if starting else self._try, steps, self._end)
        watch.lap("collect")
        frames += batch.numel()
        metrics = self.collector.returns(batch)
        self._store(batch)
        lr = value_at(job.optimizer.lr, frames)
        self.update.set_lr(lr)
        if frames >= job.replay.learning_starts and len(self.buffer) >= job.replay.batch_size:
            metrics |= self._learn(frames)
        numbers = dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))
        control_loop.check_update(numbers, self.update.largest_weight(), frames)
        numbers |= {
            "learning_rate": lr,
            "replay_size": len(self.buffer),
            "updates": self.update.updates,
            **self._schedules(frames),
        }
        return frames, {**numbers, **watch.take(), **self.env.times()}

    def act(self, observation: Tensor) -> Tensor:
        """See `Learner`."""
        return self.update.act(self._scaled(observation))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """See `Learner`."""
        stored = self.buffer[:] if len(self.buffer) else TensorDict()
        parts: dict[str, Mapping[str, Any]] = {
            "loss": self.update.loss.state_dict(),
            "collector": self.collector.state_dict(),
            "waiting": self.n_step.state_dict(),
            "replay": stored.flatten_keys(".").to_dict(),
            "sampler": self.buffer.sampler.state_dict(),
        }
        if self.explorer is not None:
            parts["explorer"] = self.explorer.state_dict()
        if self.observations is not None:
            parts["observations"] = self.observations.state_dict()
        if self.scaling is not None:
            parts["scaling"] = self.scaling.state_dict()
        tensors = {f"{n}.{k}": v.clone() for n, part in parts.items() for k, v in part.items()}
        tensors["rng"] = torch.get_rng_state()
        state = {
            "updates": self.update.updates,
            "optimizer": copy.deepcopy(self.update.optimizer.state_dict()),
            "writer": self.buffer.writer.state_dict(),
        }
        return tensors, state

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """See `Learner`."""

        def part(name: str) -> dict[str, Tensor]:
            start = name + "."
            return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}

        self.update.loss.load_state_dict(part("loss"))
        self.update.optimizer.load_state_dict(state["optimizer"])
        self.update.updates = state["updates"]
        self.collector.load_state_dict(part("collector"))
        self.n_step.load_state_dict(part("waiting") if self.env.exact else {})
        if stored := part("replay"):
            count = len(stored["observation"])
            self.buffer.extend(TensorDict(stored, [count]).unflatten_keys("."))
        self.buffer.writer.load_state_dict(state["writer"])
        self.buffer.sampler.load_state_dict(part("sampler"))
        if self.explorer is not None:
            self.explorer.load_state_dict(part("explorer"))
        if self.observations is not None:
            self.observations.load_state_dict(part("observations"))
        if self.scaling is not None:
            self.scaling.load_state_dict(part("scaling"))
            if not self.env.exact:  # its episodes begin anew
                self.scaling.running.zero_()
        torch.set_rng_state(tensors["rng"])

    def _start(self, observation: Tensor) -> Tensor:
        """Return the actions before learning starts.

        Noise that remembers is added to random actions, whose effects cancel otherwise: where only
        a long push gets anywhere, nothing would be found before the policy is learnt.
        """
        actions = self._anything(observation)
        if self.explorer is None or not isinstance(self.explorer.rule, OrnsteinUhlenbeck):
            return actions
        return self.explorer(actions, self.frames)

    def _anything(self, observation: Tensor) -> Tensor:
        """Return uniformly random actions."""
        if self.bounds is None:
            space: Any = self.env.action_spec_unbatched.space
            count = space.n
            return torch.randint(count, observation.shape[:1])
        low, high = self.bounds
        return low + (high - low) * torch.rand(len(observation), len(low))

    def _try(self, observation: Tensor) -> Tensor:
        """Return the actions to collect with."""
        observation = self._scaled(observation)
        values = self.job.algorithm.loss == "dqn"
        x = self.update.values(observation) if values else self.update.explore(observation)
        return x if self.explorer is None else self.explorer(x, self.frames)

    def _scaled(self, observation: Tensor) -> Tensor:
        return observation if self.observations is None else self.observations(observation)

    def _end(self, done: Tensor) -> None:
        if self.explorer is not None:
            self.explorer.restart(done)

    def _store(self, batch: TensorDictBase) -> None:
        if self.scaling is not None:  # measures; what is stored stays as it was paid
            self.scaling.train()(batch.copy())
        if self.observations is not None:
            self.observations.measure(batch["observation"])
        transitions = self.n_step(batch).flatten(0, 1)  # there may be none
        if len(transitions):
            self.buffer.extend(transitions)
        self.watch.lap("replay")

    def _learn(self, frames: int) -> dict[str, Tensor]:
        replay, count = self.job.replay, self.job.update.steps_per_batch
        history = []
        if replay.prioritised is None:
            draws = min(-(-count * replay.batch_size // _MOST_DRAWN), count)
            for i in range(draws):
                steps = count * (i + 1) // draws - count * i // draws  # alike, to one step
                batch = self._draw(steps * replay.batch_size)
                history.append(self.update(batch, replay.batch_size))
            return _means(history)
        sampler: Any = self.buffer.sampler  # ours
        sampler.anneal(frames)
        for _ in range(count):
            batch = self._draw(replay.batch_size)
            history.append(self.update(batch, replay.batch_size))
            try:
                self.buffer.update_tensordict_priority(batch)
            except ValueError as error:
                if batch["td_error"].isfinite().all():
                    raise
                raise FloatingPointError(
                    f"a TD error is not finite in the updates at frame {frames}: try a lower "
                    "optimizer.lr"
                ) from error
            self.watch.lap("replay")
        return _means(history)

    def _draw(self, count: int) -> TensorDictBase:
        batch = self.buffer.sample(count)
        if self.observations is not None:
            for key in ("observation", ("next", "observation")):
                batch[key] = self.observations(batch[key])
        if self.scaling is not None:
            self.scaling.eval()(batch)
        self.watch.lap("replay")
        return batch

    def _schedules(self, frames: int) -> dict[str, float]:
        """What of the exploration is scheduled."""
        rule: Any = self.job.exploration
        settings = {} if rule is None else {f.name: getattr(rule, f.name) for f in fields(rule)}
        return {
            name: value_at(setting, frames)
            for name, setting in settings.items()
            if isinstance(setting, Schedule)
        }


def _means(history: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for step in history for name in step)
    return {n: torch.stack([s[n] for s in history if n in s]).mean() for n in names}


def _make_buffer(replay: Replay) -> TensorDictReplayBuffer:
    storage = LazyTensorStorage(replay.capacity)
    if replay.prioritised is None:
        return TensorDictReplayBuffer(storage=storage, sampler=RandomSampler())
    p = replay.prioritised
    sampler = PrioritizedSampler(replay.capacity, alpha=p.alpha, beta=p.beta, eps=p.eps)
    return PrioritizedReplayBuffer(
        storage=storage, sampler=sampler, batch_size=replay.batch_size, priority_key="td_error"
    )
