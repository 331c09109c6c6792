"""The libraries that `polopt bench control` trains, each in a process of its own.

Every function trains one library with the values that its own users take: stable-baselines3
with those of rl-zoo3, TorchRL with those of its PPO example for MuJoCo, the script with those
of CleanRL's `ppo.py` and `ppo_continuous_action.py`.
"""

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from polopt.envs.control import ControlTask, acrobot, cartpole, pendulum
from polopt.ext.torchrl.evaluate import play

__all__ = ["LIBRARIES", "TASKS", "Meter", "main"]

TASKS: dict[str, Callable[[], ControlTask]] = {
    "cartpole": cartpole,
    "acrobot": acrobot,
    "pendulum": pendulum,
}

_ZOO = ("collector.use=BatchedCollector", "collector.num_envs=8", "collector.frames_per_batch=256",
        "update.epochs=20", "update.minibatch_size=256", "algorithm.lam=0.8",
        "algorithm.value_clip=null", "reward_scaling=null",
        "optimizer.lr={use: Linear, start: 1e-3, end: 0.0, steps: 100000}",
        "algorithm.clip={use: Linear, start: 0.2, end: 1e-6, steps: 100000}")  # fmt: skip
"""What rl-zoo3 gives stable-baselines3 for CartPole, as settings of our recipe."""


class Meter:
    """Plays greedy episodes at the same frames for all libraries, and books training alone.

    Attributes:
        curve: Frames and greedy mean return of every evaluation.
        cpu: CPU seconds of training so far, without evaluations.
        solved: Whether the last evaluation reached the task's bar.
    """

    def __init__(self, task: ControlTask, seed: int, *, frames: int, every: int = 2048) -> None:
        self.task, self.seed, self.frames, self.every = task, seed, frames, every
        self.curve: list[tuple[int, float]] = []
        self.cpu, self.solved = 0.0, False
        self._env = task.make(100, seed=seed)
        self._due = every
        self._began = time.process_time()

    def ends(self, frames: int, act: Callable[[Tensor], Tensor]) -> bool:
        """Evaluate if it is time to, and return whether training ends here.

        Args:
            frames: Trained on so far.
            act: From observations [N, O] to the most likely actions.
        """
        self.cpu += time.process_time() - self._began
        over = frames >= self.frames
        if frames >= self._due or over:
            self._due = (frames // self.every + 1) * self.every
            generator = torch.get_rng_state()
            self._env.set_seed((self.seed * 1_000_003 + frames) % 2**31)
            value = float(play(self._env, act).mean())
            torch.set_rng_state(generator)
            self.curve.append((frames, value))
            bar = self.task.bar
            self.solved = bar is not None and value >= bar
        self._began = time.process_time()
        return over or self.solved

    def result(self) -> dict[str, Any]:
        """Return what came out, as `polopt bench` reads it."""
        frames, value = self.curve[-1]
        return {
            "solved": self.solved,
            "frames": frames,
            "cpu_seconds": round(self.cpu, 3),
            "final_return": value,
            "curve": self.curve,
        }


def _ours(name: str, seed: int, frames: int, settings: tuple[str, ...] = ()) -> dict[str, Any]:
    from polopt.launch.job import prepare
    from polopt.launch.recipe import load
    from polopt.launch.record import read_metrics
    from polopt.launch.run import Run
    from polopt.launch.train import find_recipe

    recipe = find_recipe(f"{name}-ppo")
    tree = load(recipe, (f"seed={seed}", *settings))
    tree["collector"]["total_frames"] = min(tree["collector"]["total_frames"], frames)
    job = prepare(tree, name=recipe.stem)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), job.tree)
        summary = run.finish(job.train(run))
        lines = read_metrics(run.path / "metrics.jsonl")
    return {
        "solved": summary["solved"],
        "frames": summary["frames"],
        "cpu_seconds": summary["train_cpu_seconds"],
        "final_return": summary["final_return"],
        "curve": [(m["step"], m["greedy_return"]) for m in lines if "greedy_return" in m],
    }


def _polopt(name: str, seed: int, frames: int) -> dict[str, Any]:
    return _ours(name, seed, frames)


def _polopt_zoo(name: str, seed: int, frames: int) -> dict[str, Any]:
    return _ours(name, seed, frames, _ZOO)


def _sb3(name: str, seed: int, frames: int) -> dict[str, Any]:
    library = importlib.import_module("stable_baselines3")
    callbacks = importlib.import_module("stable_baselines3.common.callbacks")
    vectors = importlib.import_module("stable_baselines3.common.vec_env")
    make_vec_env = importlib.import_module("stable_baselines3.common.env_util").make_vec_env
    copies, total, values = {
        "cartpole": (8, 100_000, {
            "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20,
            "ent_coef": 0.0, "learning_rate": lambda rest: rest * 1e-3,
            "clip_range": lambda rest: rest * 0.2,
        }),
        "acrobot": (16, 1_000_000, {
            "n_steps": 256, "gae_lambda": 0.94, "gamma": 0.99, "n_epochs": 4, "ent_coef": 0.0,
        }),
        "pendulum": (4, 100_000, {
            "n_steps": 1024, "gae_lambda": 0.95, "gamma": 0.9, "n_epochs": 10, "ent_coef": 0.0,
            "learning_rate": 1e-3, "clip_range": 0.2, "use_sde": True, "sde_sample_freq": 4,
        }),
    }[name]  # fmt: skip
    task = TASKS[name]()
    env = make_vec_env(task.name, n_envs=copies, seed=seed)
    if name == "acrobot":
        env = vectors.VecNormalize(env, gamma=0.99)
    model = library.PPO("MlpPolicy", env, seed=seed, device="cpu", **values)

    def act(observation: Tensor) -> Tensor:
        rows = observation.numpy()
        if name == "acrobot":
            rows = env.normalize_obs(rows)
        return torch.as_tensor(model.predict(rows, deterministic=True)[0])

    class Stop(callbacks.BaseCallback):
        over = False

        def _on_rollout_start(self) -> None:  # the update of the last rollout is done
            if model.num_timesteps:
                self.over = meter.ends(model.num_timesteps, act)

        def _on_step(self) -> bool:
            return not self.over

    meter = Meter(task, seed, frames=min(frames, total))
    stop = Stop()
    model.learn(total, callback=stop)
    if not stop.over:
        meter.ends(model.num_timesteps, act)
    return meter.result()


class _Agent(nn.Module):
    """Two networks of two tanh layers, as in CleanRL."""

    def __init__(self, inputs: int, actions: int, *, discrete: bool) -> None:
        super().__init__()
        self.actor, self.critic = self._net(inputs, actions, 0.01), self._net(inputs, 1, 1.0)
        self.log_std = None if discrete else nn.Parameter(torch.zeros(actions))

    @staticmethod
    def _net(inputs: int, outputs: int, gain: float) -> nn.Sequential:
        layers = [nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)]
        for layer, g in zip(layers, (2**0.5, 2**0.5, gain), strict=True):
            nn.init.orthogonal_(layer.weight, g)
            nn.init.zeros_(layer.bias)
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])

    def distribution(self, observation: Tensor) -> Distribution:
        out = self.actor(observation)
        if self.log_std is None:
            return Categorical(logits=out)
        return Independent(Normal(out, self.log_std.exp().expand_as(out)), 1)


def _cleanrl(name: str, seed: int, frames: int) -> dict[str, Any]:
    import gymnasium as gym
    import numpy as np

    task = TASKS[name]()
    discrete = name != "pendulum"
    copies, steps, lr, pieces, epochs, bonus, total = (
        (4, 128, 2.5e-4, 4, 4, 0.01, 500_000)
        if discrete
        else (1, 2048, 3e-4, 32, 10, 0.0, 1_000_000)
    )
    gamma, lam, clip = 0.99, 0.95, 0.2

    def make() -> Any:  # noqa: ANN401
        env: Any = gym.wrappers.RecordEpisodeStatistics(gym.make(task.name))
        if not discrete:
            env = gym.wrappers.NormalizeObservation(gym.wrappers.ClipAction(env))
            env = gym.wrappers.TransformObservation(env, lambda o: np.clip(o, -10, 10), None)
            env = gym.wrappers.NormalizeReward(env, gamma=gamma)
            env = gym.wrappers.TransformReward(env, lambda r: max(-10.0, min(10.0, float(r))))
        return env

    same = gym.vector.AutoresetMode.SAME_STEP
    envs = gym.vector.SyncVectorEnv([make] * copies, autoreset_mode=same)
    torch.manual_seed(seed)
    observation = torch.as_tensor(envs.reset(seed=seed)[0], dtype=torch.float32)
    width = observation.shape[-1]
    agent = _Agent(width, envs.single_action_space.n if discrete else 1, discrete=discrete)  # type: ignore[attr-defined]
    optimizer = torch.optim.Adam(agent.parameters(), lr=lr, eps=1e-5)

    @torch.no_grad()
    def act(observation: Tensor) -> Tensor:
        if not discrete:
            seen = envs.envs[0].get_wrapper_attr("obs_rms")
            scaled = (observation.numpy() - seen.mean) / np.sqrt(seen.var + 1e-8)
            observation = torch.as_tensor(scaled.clip(-10, 10), dtype=torch.float32)
        out = agent.actor(observation)
        return out.argmax(-1) if discrete else out

    size, done = copies * steps, 0
    meter = Meter(task, seed, frames=min(frames, total))
    ended = torch.zeros(copies)
    while True:
        optimizer.param_groups[0]["lr"] = lr * (1 - done / total)
        rows = []
        for _ in range(steps):
            with torch.no_grad():
                policy, value = agent.distribution(observation), agent.critic(observation)
                action = policy.sample()
                log_prob = policy.log_prob(action)
            reached, reward, terminated, truncated, _ = envs.step(action.numpy())
            paid = torch.as_tensor(reward, dtype=torch.float32)
            rows.append((observation, action, log_prob, paid, ended, value.squeeze(-1)))
            observation = torch.as_tensor(reached, dtype=torch.float32)
            ended = torch.as_tensor(terminated | truncated, dtype=torch.float32)
        o, a, old, reward, starts, value = (torch.stack(c) for c in zip(*rows, strict=True))
        with torch.no_grad():
            later, alive, tail = agent.critic(observation).squeeze(-1), 1 - ended, 0.0
            advantage = torch.zeros_like(reward)
            for t in reversed(range(steps)):
                delta = reward[t] + gamma * later * alive - value[t]
                advantage[t] = tail = delta + gamma * lam * alive * tail
                later, alive = value[t], 1 - starts[t]
        batch = [x.flatten(0, 1) for x in (o, a, old, advantage, advantage + value, value)]
        for _ in range(epochs):
            for index in torch.randperm(size).split(size // pieces):
                o, a, old, adv, target, before = (x[index] for x in batch)
                policy, now = agent.distribution(o), agent.critic(o).squeeze(-1)
                ratio = (policy.log_prob(a) - old).exp()
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                gain = torch.min(adv * ratio, adv * ratio.clamp(1 - clip, 1 + clip)).mean()
                near = before + (now - before).clamp(-clip, clip)
                error = 0.5 * torch.max((now - target) ** 2, (near - target) ** 2).mean()
                loss = 0.5 * error - gain - bonus * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        done += size
        if meter.ends(done, act):
            return meter.result()


def _torchrl(name: str, seed: int, frames: int) -> dict[str, Any]:
    from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
    from torchrl.envs import (
        ClipTransform,
        DoubleToFloat,
        GymEnv,
        RewardSum,
        StepCounter,
        TransformedEnv,
        VecNorm,
    )
    from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
    from torchrl.objectives import ClipPPOLoss, group_optimizers
    from torchrl.objectives.value import GAE

    task = TASKS[name]()
    gamma, lr, bonus = {"pendulum": (0.9, 1e-3, 0.0), "acrobot": (0.99, 3e-4, 0.01)}.get(
        name, (0.99, 3e-4, 0.0)
    )
    size, total, epochs, piece = 2048, 1_000_000, 10, 64
    torch.manual_seed(seed)
    discrete = name != "pendulum"
    base = GymEnv(task.name, **({"categorical_action_encoding": True} if discrete else {}))
    norm: Any = VecNorm(in_keys=["observation"], decay=0.99999, eps=1e-2)
    env = TransformedEnv(base)
    for transform in (norm, ClipTransform(in_keys=["observation"], low=-10, high=10), RewardSum(),
                      StepCounter(), DoubleToFloat()):  # fmt: skip
        env.append_transform(transform)
    env.set_seed(seed)
    width = env.observation_spec["observation"].shape[-1]
    net, critic_net = (
        MLP(in_features=width, out_features=outputs, num_cells=[64, 64], activation_class=nn.Tanh)
        for outputs in (base.action_spec.space.n if discrete else 1, 1)  # type: ignore[union-attr]
    )  # fmt: skip
    for layer in (*net.modules(), *critic_net.modules()):
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, 1.0)
            nn.init.zeros_(layer.bias)
    keys, head = ["logits"], net
    if not discrete:
        keys = ["loc", "scale"]
        head = nn.Sequential(net, AddStateIndependentNormalScale(1, scale_lb=1e-8))  # type: ignore[arg-type]
    bounds = {} if discrete else {"low": -2.0, "high": 2.0, "tanh_loc": False}
    actor = ProbabilisticActor(
        TensorDictModule(head, in_keys=["observation"], out_keys=keys),  # type: ignore[arg-type]
        in_keys=keys,
        distribution_class=Categorical if discrete else TanhNormal,
        distribution_kwargs=bounds,
        return_log_prob=True,
    )
    critic = ValueOperator(critic_net, in_keys=["observation"])
    collector = Collector(env, actor, frames_per_batch=size, total_frames=total)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(size), sampler=SamplerWithoutReplacement(), batch_size=piece
    )
    gae = GAE(gamma=gamma, lmbda=0.95, value_network=critic, average_gae=False)
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, loss_critic_type="l2",
                       entropy_coeff=bonus, critic_coeff=0.25,
                       normalize_advantage=True)  # fmt: skip
    optimizer = group_optimizers(
        *(torch.optim.Adam(part.parameters(), lr=lr, eps=1e-5) for part in (actor, critic))
    )

    @torch.no_grad()
    def act(observation: Tensor) -> Tensor:
        shift, scale = norm.loc["observation"], norm.scale["observation"]
        scaled = ((observation - shift) / scale).clamp(-10, 10).float()
        out = net(scaled)
        return out.argmax(-1) if discrete else 2.0 * out.tanh()

    meter, done = Meter(task, seed, frames=frames), 0
    batches: Iterator[Any] = iter(collector)
    while True:
        batch = next(batches)
        for _ in range(epochs):
            with torch.no_grad():
                batch = gae(batch)
            buffer.extend(batch.reshape(-1))
            for sample in buffer:
                for group in optimizer.param_groups:
                    group["lr"] = lr if name == "pendulum" else lr * (1 - done / total)
                terms = loss(sample)
                optimizer.zero_grad()
                sum(v for k, v in terms.items() if k.startswith("loss_")).backward()  # type: ignore[union-attr]
                optimizer.step()
        done += size
        collector.update_policy_weights_()
        if meter.ends(done, act):
            collector.shutdown()
            return meter.result()


LIBRARIES: dict[str, Callable[[str, int, int], dict[str, Any]]] = {
    "polopt": _polopt,
    "polopt-zoo": _polopt_zoo,
    "sb3": _sb3,
    "cleanrl": _cleanrl,
    "torchrl": _torchrl,
}
"""By name: from the task, the seed and the most frames to what came out."""


def main(library: str, task: str, seed: str, frames: str) -> None:
    """Train one library on one thread of one core, and print what came out as JSON."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    stdout = os.dup(1)
    os.dup2(2, 1)  # what libraries print is not the answer
    answer = LIBRARIES[library](task, int(seed), int(frames))
    os.write(stdout, json.dumps(answer).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
