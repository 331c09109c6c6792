"""Optimizer steps and frames per CPU second, ours against stable-baselines3's, same values.

    pip install stable-baselines3
    python tests/bench/off_policy.py

Both run in one process on one thread, in turns, so that both meet the same machine. Values are
rl-zoo3's: SAC on Pendulum with two layers of 256, batches of 256 and a step for every frame; DQN
on CartPole with two layers of 256, batches of 64, 128 steps after every 256 frames and a target
that is copied after every 10 steps. One environment each.

`steps` is the optimizer step alone, from the draw to the target update; `frames` is the whole
loop, environment included. The ratio is of the sums over all rounds; beside it stand the lowest
and the highest ratio of one round.
"""

import argparse
import json
import logging
import time
import warnings

import torch
from stable_baselines3 import DQN, SAC

from polopt.launch.job import prepare
from polopt.launch.off_policy_run import _OffPolicy

RECIPES = {
    "sac": {
        "task": {"use": "pendulum"},
        "algorithm": {"use": "sac", "gamma": 0.99, "tau": 0.005},
        "collector": {"num_envs": 1, "frames_per_batch": 1, "total_frames": 20_000},
        "replay": {"capacity": 20_000, "batch_size": 256, "learning_starts": 1000},
        "update": {"steps_per_batch": 1},
        "network": {"hidden": [256, 256]},
        "optimizer": {"lr": 1e-3},
    },
    "dqn": {
        "task": {"use": "cartpole"},
        "algorithm": {"use": "dqn", "gamma": 0.99, "target_every": 10},
        "collector": {"num_envs": 1, "frames_per_batch": 256, "total_frames": 20_000},
        "replay": {"capacity": 20_000, "batch_size": 64, "learning_starts": 1000},
        "exploration": {"use": "EpsilonGreedy", "epsilon": 0.04},
        "update": {"steps_per_batch": 128, "max_grad_norm": 10.0},
        "network": {"hidden": [256, 256]},
        "optimizer": {"lr": 2.3e-3},
    },
}
COUNTS = {"sac": (8, 8), "dqn": (128, 256)}
"""Optimizer steps, and frames, in one round."""


def ours(name):
    """Return functions that take so many optimizer steps, and so many frames of the whole loop."""
    recipe = RECIPES[name]
    learner = _OffPolicy(prepare(json.loads(json.dumps(recipe)), name=name))
    learner.buffer.extend(learner.collector.collect(learner._anything, 1000).reshape(-1))
    learner.update.set_lr(recipe["optimizer"]["lr"])
    size, per_batch = recipe["replay"]["batch_size"], recipe["collector"]["frames_per_batch"]

    def steps(count):
        together = recipe["update"]["steps_per_batch"]  # drawn at once, as the loop does
        for _ in range(count // together):
            learner.update(learner._draw(together * size), size)

    def frames(count):
        for _ in range(count // per_batch):
            learner.iterate(1000)

    return steps, frames


def theirs(name):
    """Return the same for stable-baselines3."""
    recipe = RECIPES[name]
    size, lr = recipe["replay"]["batch_size"], recipe["optimizer"]["lr"]
    shared = {
        "learning_rate": lr, "buffer_size": 20_000, "learning_starts": 1000, "batch_size": size,
        "train_freq": recipe["collector"]["frames_per_batch"],
        "gradient_steps": recipe["update"]["steps_per_batch"], "device": "cpu", "gamma": 0.99,
        "policy_kwargs": {"net_arch": [256, 256]},
    }  # fmt: skip
    if name == "sac":
        model = SAC("MlpPolicy", "Pendulum-v1", tau=0.005, **shared)
    else:
        model = DQN("MlpPolicy", "CartPole-v1", target_update_interval=20,
                    exploration_initial_eps=0.04, exploration_final_eps=0.04, **shared)  # fmt: skip
    model.learn(1000)

    def steps(count):
        model.train(gradient_steps=count, batch_size=size)
        if name == "dqn":  # counts frames, two for each step, and copies after every 20
            for _ in range(2 * count):
                model._on_step()

    def frames(count):
        model.learn(count, reset_num_timesteps=False)

    return steps, frames


def main():
    """Measure both and print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    print("| algorithm | per CPU second | ours | sb3 | ratio | one round |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for name in RECIPES:
        pair = zip(ours(name), theirs(name), COUNTS[name], ("steps", "frames"), strict=True)
        for mine, peer, count, unit in pair:
            seconds = [[], []]
            mine(count), peer(count)
            for _ in range(args.rounds):
                for side, spent in zip((mine, peer), seconds, strict=True):
                    began = time.process_time()
                    side(count)
                    spent.append(time.process_time() - began)
            ratios = sorted(b / a for a, b in zip(*seconds, strict=True))
            speed = [count * args.rounds / sum(spent) for spent in seconds]
            print(
                f"| {name} | {unit} | {speed[0]:.0f} | {speed[1]:.0f} | "
                f"{speed[0] / speed[1]:.2f} | {ratios[0]:.2f} to {ratios[-1]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
