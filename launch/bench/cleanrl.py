"""A script with the values of CleanRL's `ppo.py` and `ppo_continuous_action.py`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from polopt.launch.bench.meter import TASKS, Meter
from polopt.launch.bench.table import Trial

__all__ = ["ppo"]


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


def ppo(trial: Trial) -> dict[str, Any]:
    """Train it."""
    import gymnasium as gym
    import numpy as np

    name = TASKS[trial.task]().name
    discrete = trial.task != "pendulum"
    copies, steps, lr, pieces, epochs, bonus, total = (
        (4, 128, 2.5e-4, 4, 4, 0.01, 500_000)
        if discrete
        else (1, 2048, 3e-4, 32, 10, 0.0, 1_000_000)
    )
    gamma, lam, clip = 0.99, 0.95, 0.2

    def make() -> Any:  # noqa: ANN401
        env: Any = gym.wrappers.RecordEpisodeStatistics(gym.make(name))
        if not discrete:
            env = gym.wrappers.NormalizeObservation(gym.wrappers.ClipAction(env))
            env = gym.wrappers.TransformObservation(env, lambda o: np.clip(o, -10, 10), None)
            env = gym.wrappers.NormalizeReward(env, gamma=gamma)
            env = gym.wrappers.TransformReward(env, lambda r: max(-10.0, min(10.0, float(r))))
        return env

    same = gym.vector.AutoresetMode.SAME_STEP
    envs = gym.vector.SyncVectorEnv([make] * copies, autoreset_mode=same)
    torch.manual_seed(trial.seed)
    observation = torch.as_tensor(envs.reset(seed=trial.seed)[0], dtype=torch.float32)
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
    meter = Meter(trial, most=total)
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
