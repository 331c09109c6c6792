"""Optimizer steps per CPU second, ours against stable-baselines3's, with the same values.

    pip install stable-baselines3
    python tests/bench/off_policy.py

Both learn from a full buffer in one process on one thread, in turns, so that both meet the same
machine. Values are rl-zoo3's: SAC on Pendulum with two layers of 256 and batches of 256; DQN on
CartPole with two layers of 256, batches of 64, 128 steps in a round and a target that is copied
after every 10. A step is everything from the draw to the target update. The ratio is of the sums
over all rounds; beside it stand the lowest and the highest ratio of one round.
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
        "update": {"steps_per_batch": 8},
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


def ours(name):
    """Return a function that takes so many optimizer steps."""
    recipe = RECIPES[name]
    learner = _OffPolicy(prepare(json.loads(json.dumps(recipe)), name=name))
    filling = learner.collector.collect(learner._anything, 1000)
    learner.buffer.extend(filling.reshape(-1))
    learner.update.set_lr(recipe["optimizer"]["lr"])
    size = recipe["replay"]["batch_size"]
    return lambda count: learner.update(learner._draw(count * size), size)


def theirs(name):
    """Return the same for stable-baselines3."""
    recipe = RECIPES[name]
    size, lr = recipe["replay"]["batch_size"], recipe["optimizer"]["lr"]
    shared = {"learning_rate": lr, "buffer_size": 20_000, "learning_starts": 10**6,
              "batch_size": size, "device": "cpu",
              "policy_kwargs": {"net_arch": [256, 256]}}  # fmt: skip
    if name == "sac":
        model = SAC("MlpPolicy", "Pendulum-v1", gamma=0.99, tau=0.005, **shared)
    else:
        model = DQN("MlpPolicy", "CartPole-v1", gamma=0.99, target_update_interval=10, **shared)
    model.learn(1000)

    def learn(count):
        model.train(gradient_steps=count, batch_size=size)
        if name == "dqn":  # counts frames, and copies after every 10
            for _ in range(count):
                model._on_step()

    return learn


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
    print("| algorithm | ours, steps/CPU-s | sb3, steps/CPU-s | ratio | one round |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, recipe in RECIPES.items():
        count = recipe["update"]["steps_per_batch"]
        sides = ours(name), theirs(name)
        seconds = [[], []]
        for side in sides:
            side(count)
        for _ in range(args.rounds):
            for side, spent in zip(sides, seconds, strict=True):
                began = time.process_time()
                side(count)
                spent.append(time.process_time() - began)
        ratios = sorted(b / a for a, b in zip(*seconds, strict=True))
        mine, peer = (count * args.rounds / sum(spent) for spent in seconds)
        print(
            f"| {name} | {mine:.0f} | {peer:.0f} | {mine / peer:.2f} | "
            f"{ratios[0]:.2f} to {ratios[-1]:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
