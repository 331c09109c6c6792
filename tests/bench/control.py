"""The two costs of on-policy control, against the same work elsewhere, in one process.

    OMP_NUM_THREADS=1 taskset -c 0 python tests/bench/control.py [minibatch] [collect]

minibatch: one optimizer step of PPO on CartPole (forward, backward, norm, clip, Adam; actor and
critic of 64×64) through `Update`, through TorchRL's `ClipPPOLoss`, and the least that autograd
can do: both networks forward and backward on a loss of one operation, and Adam.

collect: frames a second of `BatchedCollector`, of TorchRL's `Collector`, and of a bare loop over
tensors that does the same work (policy, physics, resets, storing).

Times are the least of several alternating rounds of CPU time, so that a busy machine does not
decide. Ratios are time, ours / other.
"""

import argparse
import importlib.util
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import nn
from torchrl.collectors import Collector
from torchrl.objectives import ClipPPOLoss

from polopt.envs.classic import CartPole
from polopt.envs.control import cartpole
from polopt.ext.metrics import Stopwatch
from polopt.ext.torchrl.collector import BatchedCollector
from polopt.ext.torchrl.networks import (
    distribution_of,
    flatten,
    make_actor,
    make_critic,
    value_of,
)
from polopt.ext.torchrl.update import Update
from polopt.losses import ppo
from polopt.losses.modules import PolicyLoss

_spec = importlib.util.spec_from_file_location("losses", Path(__file__).with_name("losses.py"))
_losses = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_losses)
least_times = _losses.least_times

CLIP, VALUE_CLIP, ENTROPY, NORM, LR = 0.2, 0.2, 0.01, 0.5, 1e-4


def networks():
    torch.manual_seed(0)
    env = cartpole().make(1, seed=0)
    return make_actor(env), make_critic(env)


def minibatch(size):
    """Return one minibatch as it comes out of `GAEAdvantage`."""
    actor, critic = networks()
    g = torch.Generator().manual_seed(0)
    data = TensorDict({"observation": torch.randn(size, 4, generator=g)}, [size])
    with torch.no_grad():
        data = critic(actor(data)).exclude("logits")
    data["advantage"], data["value_target"] = torch.randn(2, size, 1, generator=g)
    return data


def ours(size):
    actor, critic = networks()
    parameters = flatten([*actor.parameters(), *critic.parameters()])
    update = Update(
        PolicyLoss(ppo(clip=CLIP, value_clip=VALUE_CLIP, entropy_coef=ENTROPY)),
        distribution_of(actor),
        value_of(critic),
        torch.optim.Adam([parameters], lr=LR, fused=True),
        epochs=10,
        minibatch_size=size,
        max_grad_norm=NORM,
        stopwatch=Stopwatch(),
    )
    data = minibatch(size).unsqueeze(0)
    return lambda: update(data)


def torchrl(size, *, fused):
    actor, critic = networks()
    loss = ClipPPOLoss(
        actor, critic, clip_epsilon=CLIP, entropy_coeff=ENTROPY, critic_coeff=0.25,
        clip_value=VALUE_CLIP, loss_critic_type="l2", normalize_advantage=False,
    )  # fmt: skip
    parameters = [p for p in loss.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=LR, fused=fused)
    data = minibatch(size)

    def step():
        out = loss(data)
        total = out["loss_objective"] + out["loss_critic"] + out["loss_entropy"]
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(parameters, NORM)
        optimizer.step()

    return lambda: [step() for _ in range(10)]


def floor(size):
    actor, critic = networks()
    parameters = flatten([*actor.parameters(), *critic.parameters()])
    optimizer = torch.optim.Adam([parameters], lr=LR, fused=True)
    policy, value = actor[0].module, critic.module
    observation = minibatch(size)["observation"]
    weights = [torch.randn(size, 2) / size, torch.randn(size, 1) / size]

    def step():
        outputs = [policy(observation), value(observation)]
        parameters.grad.zero_()
        torch.autograd.backward(outputs, weights)
        optimizer.step()

    return lambda: [step() for _ in range(10)]


def bare_loop(envs, steps):
    """A loop over tensors, with what `BatchedCollector` stores."""
    actor, _ = networks()
    policy, physics = actor[0].module, CartPole()
    kept = {"state": physics.start(torch.rand(envs, 4, dtype=torch.float64)),
            "age": torch.zeros(envs, dtype=torch.int64)}  # fmt: skip

    @torch.no_grad()
    def run():
        state, age, rows = kept["state"], kept["age"], []
        for _ in range(steps):
            observation = physics.observe(state)
            log_probs = policy(observation).log_softmax(-1)
            action = torch.multinomial(log_probs.exp(), 1)
            log_prob = log_probs.gather(-1, action).squeeze(-1)
            action = action.squeeze(-1)
            state, reward, terminated = physics.step(state, action)
            age = age + 1
            truncated = age >= 500
            rows.append((observation, action, log_prob, physics.observe(state), reward.float(),
                         terminated, truncated))  # fmt: skip
            done = terminated | truncated
            if done.any():
                fresh = physics.start(torch.rand(envs, 4, dtype=torch.float64))
                state = torch.where(done.unsqueeze(-1), fresh, state)
                age = age.masked_fill(done, 0)
        kept.update(state=state, age=age)
        return [torch.stack(column, 1) for column in zip(*rows, strict=True)]

    return run


def collectors(envs, steps):
    actor, _ = networks()
    frames = envs * steps
    mine = BatchedCollector(
        cartpole().make(envs, seed=0), actor, frames_per_batch=frames, total_frames=frames
    )
    stock = iter(
        Collector(cartpole().make(envs, seed=0), actor, frames_per_batch=frames, total_frames=-1)
    )
    return {
        "ours": mine.collect,
        "a bare loop": bare_loop(envs, steps),
        "TorchRL Collector": lambda: next(stock),
    }


def show(work, times, unit, value):
    for other in list(times)[1:]:
        cells = (work, value(times["ours"]), other, value(times[other]))
        print(f"| {' | '.join(cells)} | {times['ours'] / times[other]:.2f} |", flush=True)


def main():
    """Measure what the command line names, and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", default=["minibatch", "collect"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "minibatch" in args.what:
        print("| minibatch | ours µs | other | other µs | ours / other |")
        print("| --- | --- | --- | --- | --- |")
        for size in (64, 256, 1024):
            runs = {
                "ours": ours(size),
                "TorchRL ClipPPOLoss, Adam": torchrl(size, fused=False),
                "TorchRL ClipPPOLoss, fused Adam": torchrl(size, fused=True),
                "both networks and Adam alone": floor(size),
            }
            show(str(size), least_times(runs, rounds=5), "µs", lambda t: f"{t / 10:.0f}")
    if "collect" in args.what:
        print("| collect | ours frames/s | other | other frames/s | ours / other, time |")
        print("| --- | --- | --- | --- | --- |")
        for envs in (8, 64, 1024):
            times = least_times(collectors(envs, 64), rounds=5)
            show(f"N = {envs}", times, "frames/s", lambda t, n=envs: f"{64e6 * n / t:,.0f}")


if __name__ == "__main__":
    main()
