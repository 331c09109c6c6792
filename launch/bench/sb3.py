"""Stable-baselines3 in `polopt bench control`, with the values of rl-zoo3."""

import importlib
from typing import Any

import torch
from torch import Tensor

from polopt.launch.bench.meter import TASKS, Meter
from polopt.launch.bench.table import Trial

__all__ = ["ppo"]

# Copies of the environment, frames of the whole run, normalisation (of observations and rewards),
# and arguments of PPO.
_PPO: dict[str, tuple[int, int, bool, dict[str, Any]]] = {
    "cartpole": (8, 100_000, False, {
        "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20,
        "ent_coef": 0.0, "learning_rate": lambda rest: rest * 1e-3,
        "clip_range": lambda rest: rest * 0.2,
    }),
    "acrobot": (16, 1_000_000, True, {
        "n_steps": 256, "gae_lambda": 0.94, "gamma": 0.99, "n_epochs": 4, "ent_coef": 0.0,
    }),
    "pendulum": (4, 100_000, False, {
        "n_steps": 1024, "gae_lambda": 0.95, "gamma": 0.9, "n_epochs": 10, "ent_coef": 0.0,
        "learning_rate": 1e-3, "clip_range": 0.2, "use_sde": True, "sde_sample_freq": 4,
    }),
    "mountaincar": (16, 1_000_000, True, {
        "n_steps": 16, "gae_lambda": 0.98, "gamma": 0.99, "n_epochs": 4, "ent_coef": 0.0,
    }),
    "mountaincar-continuous": (1, 20_000, True, {
        "n_steps": 8, "batch_size": 256, "gae_lambda": 0.9, "gamma": 0.9999, "n_epochs": 10,
        "ent_coef": 0.00429, "learning_rate": 7.77e-5, "clip_range": 0.1, "max_grad_norm": 5,
        "vf_coef": 0.19, "use_sde": True,
        "policy_kwargs": {"log_std_init": -3.29, "ortho_init": False},
    }),
    "lunarlander": (16, 1_000_000, False, {
        "n_steps": 1024, "batch_size": 64, "gae_lambda": 0.98, "gamma": 0.999, "n_epochs": 4,
        "ent_coef": 0.01,
    }),
}  # fmt: skip


def ppo(trial: Trial) -> dict[str, Any]:
    """Train its PPO."""
    library = importlib.import_module("stable_baselines3")
    callbacks = importlib.import_module("stable_baselines3.common.callbacks")
    vectors = importlib.import_module("stable_baselines3.common.vec_env")
    make_vec_env = importlib.import_module("stable_baselines3.common.env_util").make_vec_env
    copies, total, normalised, values = _PPO[trial.task]
    env = make_vec_env(TASKS[trial.task]().name, n_envs=copies, seed=trial.seed)
    if normalised:
        env = vectors.VecNormalize(env, gamma=values["gamma"])
    model = library.PPO("MlpPolicy", env, seed=trial.seed, device="cpu", **values)

    def act(observation: Tensor) -> Tensor:
        rows = observation.numpy()
        if normalised:
            rows = env.normalize_obs(rows)
        return torch.as_tensor(model.predict(rows, deterministic=True)[0])

    class Stop(callbacks.BaseCallback):
        over = False

        def _on_rollout_start(self) -> None:  # the update of the last rollout is done
            if model.num_timesteps:
                self.over = meter.ends(model.num_timesteps, act)

        def _on_step(self) -> bool:
            return not self.over

    meter = Meter(trial, most=total)
    stop = Stop()
    model.learn(total, callback=stop)
    if not stop.over:
        meter.ends(model.num_timesteps, act)
    return meter.result()
