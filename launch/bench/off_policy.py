"""Off-policy algorithms in `polopt bench control`: stable-baselines3 with the values of ours."""

import contextlib
import importlib
import math
from typing import Any

import torch
from torch import Tensor

from polopt.launch.bench.meter import TASKS, Meter
from polopt.launch.bench.table import Trial
from polopt.launch.job import prepare
from polopt.launch.off_policy import OffPolicyJob
from polopt.launch.recipe import load
from polopt.launch.train import find_recipe
from polopt.losses.schedules import Linear, value_at

__all__ = ["sb3", "scaling_of", "values_of"]


def sb3(trial: Trial) -> dict[str, Any]:
    """Train stable-baselines3 with the values of the recipe `<task>-<algorithm>`.

    It has no prioritised replay, and its DQN copies targets after frames, not optimizer steps:
    the interval is converted. Its Q-learning loss is Huber's for DQN, δ² for the others, as ours.
    """
    library = importlib.import_module("stable_baselines3")
    callbacks = importlib.import_module("stable_baselines3.common.callbacks")
    make_vec_env = importlib.import_module("stable_baselines3.common.env_util").make_vec_env
    name = f"{trial.task}-{trial.algorithm}"
    job = prepare(load(find_recipe(name), (f"seed={trial.seed}",)), name=name)
    if not isinstance(job, OffPolicyJob):
        raise ValueError(f"{name} is not an off-policy recipe")
    env = make_vec_env(TASKS[trial.task]().name, n_envs=job.collector.num_envs, seed=trial.seed)
    normalize: Any = None
    if scaling := scaling_of(job):
        vec_env = importlib.import_module("stable_baselines3.common.vec_env")
        env = normalize = vec_env.VecNormalize(env, **scaling)
    model = getattr(library, job.algorithm.loss.upper())(
        "MlpPolicy", env, seed=trial.seed, device="cpu", **values_of(job)
    )

    def act(observation: Tensor) -> Tensor:
        seen = observation.numpy()
        seen = seen if normalize is None else normalize.normalize_obs(seen)
        return torch.as_tensor(model.predict(seen, deterministic=True)[0])

    class Stop(callbacks.BaseCallback):
        over = False

        def _on_rollout_start(self) -> None:  # the steps after the last rollout are done
            if model.num_timesteps:
                self.over = meter.ends(model.num_timesteps, act)

        def _on_step(self) -> bool:
            return not self.over

    meter = Meter(trial, most=job.collector.total_frames)
    stop = Stop()
    model.learn(job.collector.total_frames, callback=stop)
    if not stop.over:
        meter.ends(model.num_timesteps, act)
    return meter.result()


def values_of(job: OffPolicyJob) -> dict[str, Any]:
    """Return the arguments of stable-baselines3's algorithm that say what a recipe says.

    Raises:
        ValueError: If the recipe says what it has no word for.
    """
    a, c, r = job.algorithm, job.collector, job.replay
    if r.prioritised is not None or a.double:
        raise ValueError(f"stable-baselines3 cannot be given the values of {job.name}")
    lr, total = job.optimizer.lr, c.total_frames
    values: dict[str, Any] = {
        "learning_rate": lambda rest: value_at(lr, (1.0 - rest) * total),
        "buffer_size": r.capacity,
        "learning_starts": r.learning_starts,
        "batch_size": r.batch_size,
        "tau": a.tau,
        "gamma": a.gamma,
        "train_freq": c.frames_per_batch // c.num_envs,
        "gradient_steps": job.update.steps_per_batch,
        "n_steps": r.n_step,
        "policy_kwargs": {
            "net_arch": list(job.network.hidden),
            "optimizer_kwargs": {"eps": job.optimizer.eps},
        },
    }
    if a.loss == "dqn":
        epsilon = getattr(job.exploration, "epsilon", None)
        if not isinstance(epsilon, Linear) or a.value_loss != "smooth_l1":
            raise ValueError(f"stable-baselines3 cannot be given the values of {job.name}")
        return values | {
            "target_update_interval": a.target_every
            * c.frames_per_batch
            // job.update.steps_per_batch,
            "exploration_initial_eps": epsilon.start,
            "exploration_final_eps": epsilon.end,
            "exploration_fraction": epsilon.steps / total,
            "max_grad_norm": job.update.max_grad_norm or math.inf,
        }
    if a.smoothing is not None:
        values |= {
            "policy_delay": a.policy_every,
            "target_policy_noise": a.smoothing.noise,
            "target_noise_clip": a.smoothing.clip,
        }
    if a.entropy is not None:
        values["ent_coef"] = f"auto_{a.entropy.alpha}" if a.entropy.tuned else a.entropy.alpha
        target = a.entropy.target
        values["target_entropy"] = "auto" if target is None else target - _scale(job)
        values["target_update_interval"] = a.target_every
    if job.exploration is not None:
        values["action_noise"] = _noise(job)
    return values


def scaling_of(job: OffPolicyJob) -> dict[str, Any]:
    """Return the arguments of `VecNormalize` that say what a recipe says, {} if that is nothing.

    It too keeps what was observed and paid, and scales what is drawn. Its statistics change with
    each step, ours with each batch.

    Raises:
        ValueError: If the recipe says what it has no word for.
    """
    seen, paid = job.observation_scaling, job.reward_scaling
    if paid is not None and paid.constant is not None:
        raise ValueError(f"stable-baselines3 cannot be given the values of {job.name}")
    if seen is None and paid is None:
        return {}
    return {
        "norm_obs": seen is not None,
        "norm_reward": paid is not None,
        "clip_obs": (seen and seen.clamp) or math.inf,
        "clip_reward": (paid and paid.clamp) or math.inf,
        "gamma": job.algorithm.gamma,
    }


def _scale(job: OffPolicyJob) -> float:
    """The entropy of actions in their own units, less that in half their range as it counts."""
    with contextlib.closing(job.task.make(1, seed=0)) as env:
        space: Any = env.action_spec_unbatched.space
        return float(((space.high - space.low) / 2).log().sum())


def _noise(job: OffPolicyJob) -> Any:  # noqa: ANN401
    """Both measure noise in half the range of actions."""
    import numpy as np

    from polopt.ext.torchrl.exploration import GaussianNoise, OrnsteinUhlenbeck

    module = importlib.import_module("stable_baselines3.common.noise")
    env = job.task.make(1, seed=0)
    zero = np.zeros(env.action_spec_unbatched.shape)
    rule = job.exploration
    if isinstance(rule, GaussianNoise) and isinstance(rule.sigma, float):
        noise = module.NormalActionNoise(zero, zero + rule.sigma)
    elif isinstance(rule, OrnsteinUhlenbeck) and isinstance(rule.sigma, float):
        noise = module.OrnsteinUhlenbeckActionNoise(
            zero, zero + rule.sigma, theta=rule.theta, dt=rule.dt
        )
    else:
        raise ValueError(f"stable-baselines3 cannot be given the noise of {job.name}")
    return module.VectorizedActionNoise(noise, job.collector.num_envs)
