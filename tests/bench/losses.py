"""Ratios of the losses and of GAE against the same work elsewhere, in one process.

    OMP_NUM_THREADS=1 taskset -c 0 python tests/bench/losses.py [--compile]

Prints a Markdown table: time and peak memory (of the tensors made in the call) of ours divided
by those of the other, forward and backward. Below one is faster (smaller) than the other. Times
are the least of several alternating rounds of CPU time, so that a busy machine does not decide.
"""

import argparse
import functools
import time
import weakref
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from polopt.losses import dapo, gae, policy_loss, ppo
from polopt.losses.modules import PolicyLoss


def control_batch(size=256):
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(size, generator=g)
    new = (old + 0.1 * torch.randn(size, generator=g)).requires_grad_()
    return new, old, torch.randn(size, generator=g)


def llm_batch(rows=64, steps=1024):
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(rows, steps, generator=g)
    new = (old + 0.1 * torch.randn(rows, steps, generator=g)).requires_grad_()
    length = torch.randint(1, steps + 1, (rows, 1), generator=g)
    mask = torch.arange(steps) < length
    entropy = torch.rand(rows, steps, generator=g)
    return new, old, torch.randn(rows, 1, generator=g), mask, entropy


def by_hand(log_prob, old, advantage):
    """PPO's clip and its three metrics, as one writes them down."""
    log_ratio = log_prob - old
    ratio = log_ratio.exp()
    free, bound = -advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)
    loss = torch.max(free, bound).mean()
    with torch.no_grad():
        metrics = (
            (bound > free).float().mean(),
            (ratio - 1.0 - log_ratio).mean(),
            ratio.mean(),
        )
    return loss, metrics


def trl_loss():
    """TRL's own `_compute_loss`, on log-probabilities that are handed in."""
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(use_cpu=True, bf16=False, report_to=[])
    trainer = object.__new__(GRPOTrainer)
    same = SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        reduce=lambda x, reduction: x,
        gather=lambda x: x,
    )
    vars(trainer).update(
        args=args,
        accelerator=same,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        loss_type="dapo",
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.28,
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        current_gradient_accumulation_steps=1,
    )
    args.steps_per_generation = 1

    def loss(new, old, advantage, mask, entropy):
        rows = len(new)
        none = torch.zeros(rows, 0, dtype=torch.long)
        trainer._get_per_token_logps_and_entropies = lambda *a, **k: (new, entropy, None)
        inputs = {
            "prompt_ids": none,
            "prompt_mask": none,
            "completion_ids": torch.zeros(new.shape, dtype=torch.long),
            "completion_mask": mask.long(),
            "advantages": advantage.squeeze(1),
            "old_per_token_logps": old,
            "num_items_in_batch": mask.sum(),
        }
        return trainer._compute_loss(None, inputs)

    return loss


def torchrl_llm_loss(new, old, advantage, mask, entropy):
    """TorchRL's `GRPOLoss` with DAPO's bounds, on log-probabilities that are handed in."""
    from tensordict.nn import TensorDictModuleBase
    from torchrl.objectives.llm import GRPOLoss

    class Given(TensorDictModuleBase):
        in_keys = ("tokens",)
        out_keys = ("log_probs",)

        def get_dist(self, tensordict, **_):
            return SimpleNamespace(log_prob=lambda action: new, mask=mask)

    loss = GRPOLoss(actor_network=Given(), clip_epsilon=(0.2, 0.28), entropy_bonus=False)
    keys, data = loss.tensor_keys, TensorDict({}, [len(new)])
    data.set(keys.action, torch.zeros(new.shape, dtype=torch.long))
    data.set(keys.sample_log_prob, old)
    data.set(keys.advantage, advantage[..., None].expand(*new.shape, 1))
    return lambda: {"loss_objective": loss(data).loss_objective}


def torchrl_pair(size=256):
    """Ours and TorchRL's whole PPO loss: actor, critic, value term, entropy."""
    from tensordict.nn import (
        ProbabilisticTensorDictModule,
        ProbabilisticTensorDictSequential,
        TensorDictModule,
    )
    from torchrl.objectives import ClipPPOLoss

    torch.manual_seed(0)

    def net(out):
        layers = [torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)]
        return torch.nn.Sequential(*layers, torch.nn.Tanh(), torch.nn.Linear(64, out))

    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(net(2), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )
    critic = TensorDictModule(net(1), in_keys=["observation"], out_keys=["state_value"])
    data = TensorDict({"observation": torch.randn(size, 4)}, [size])
    with torch.no_grad():
        data = critic(actor(data))
    data["advantage"], data["value_target"] = torch.randn(2, size, 1)
    data["advantage"] = data["advantage"].squeeze(-1)[:, None]
    theirs = ClipPPOLoss(
        actor, critic, clip_value=0.2, entropy_coeff=0.01, loss_critic_type="l2", critic_coeff=0.5
    )
    ours = PolicyLoss(ppo(entropy_coef=0.01, value_clip=0.2), actor, critic)

    def total(module):
        return sum(v for k, v in module(data).items() if k.startswith("loss_"))

    return lambda: total(ours), lambda: total(theirs)


def gae_by_numpy(reward, value, ahead, terminated, done, gamma, lam):
    delta = reward + gamma * ahead * ~terminated - value
    decay = (gamma * lam * ~done).astype(np.float32)
    advantage = np.empty_like(delta)
    running = np.zeros_like(delta[-1])
    for t in range(len(delta) - 1, -1, -1):
        running = delta[t] + decay[t] * running
        advantage[t] = running
    return advantage, advantage + value


def gae_runs(rows, steps):
    from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

    g = torch.Generator().manual_seed(0)
    reward, value, ahead = torch.randn(3, rows, steps, generator=g)
    done = torch.rand(rows, steps, generator=g) < 0.01
    flat = [x.T.contiguous().numpy() for x in (reward, value, ahead, done, done)]
    last = [x[..., None] for x in (value, ahead, reward, done, done)]
    return {
        "ours": lambda: gae(reward, value, ahead, done, done, gamma=0.99, lam=0.95),
        "numpy loop": lambda: gae_by_numpy(*flat, 0.99, 0.95),
        "TorchRL vectorised": lambda: vec_generalized_advantage_estimate(0.99, 0.95, *last),
    }


def backward(function):
    def run():
        out = function()
        out = out[0] if isinstance(out, tuple) else out
        if isinstance(out, dict):
            out = out["loss_objective"]
        out.backward()

    return run


def least_times(runs, rounds=7, seconds=0.25):
    """CPU microseconds per call of each function, the least of alternating rounds."""
    best = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            calls, start = 0, time.process_time()
            while (passed := time.process_time() - start) < seconds:
                run()
                calls += 1
            best[name] = min(best[name], 1e6 * passed / calls)
    return best


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make and that are still alive."""

    def __init__(self):
        super().__init__()
        self.bytes = self.peak = 0
        self._seen = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage not in self._seen:
                    self._seen.add(storage)
                    self.bytes += storage.nbytes()
                    self.peak = max(self.peak, self.bytes)
                    weakref.finalize(storage, self._free, storage.nbytes())
        return out

    def _free(self, size):
        self.bytes -= size


def peak_bytes(run):
    """Largest sum of live tensors that one call makes."""
    run()
    live = Live()
    with live:
        run()
    return live.peak


def cases(compiled):
    """Work by name; the first of each entry is ours."""
    control, llm = control_batch(), llm_batch()
    ppo_objective, dapo_objective = ppo().objective, dapo().objective
    wrap = functools.partial(torch.compile, dynamic=False) if compiled else lambda f: f
    loss, hand = wrap(policy_loss), wrap(by_hand)
    trl = trl_loss()  # never compiled: it reads numbers back, and would compile at each call
    ours, theirs = torchrl_pair()
    table = {
        "control loss, 256": {
            "ours": backward(lambda: loss(*control, objective=ppo_objective)),
            "by hand": backward(lambda: hand(*control)),
        },
        "PPO loss with actor and critic, 256": {
            "ours": backward(wrap(ours)),
            "TorchRL ClipPPOLoss": backward(wrap(theirs)),
        },
        "LLM loss, 64×1024": {
            "ours": backward(lambda: loss(*llm[:4], objective=dapo_objective, entropy=llm[4])),
            "TRL, eager" if compiled else "TRL": backward(lambda: trl(*llm)),
            "TorchRL GRPOLoss": backward(wrap(torchrl_llm_loss(*llm))),
        },
    }
    if not compiled:
        table |= {"GAE, 128×8": gae_runs(8, 128), "GAE, 2048×64": gae_runs(64, 2048)}
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compile", action="store_true", help="all of it compiled by inductor")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| work | ours µs | other | other µs | time, ours / other | memory, ours / other |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, runs in cases(args.compile).items():
        times = least_times(runs)
        peaks = {} if args.compile else {key: peak_bytes(run) for key, run in runs.items()}
        for other in list(runs)[1:]:
            ratio = times["ours"] / times[other]
            memory = f"{peaks['ours'] / peaks[other]:.2f}" if peaks.get(other) else ""
            cells = (name, f"{times['ours']:.0f}", other, f"{times[other]:.0f}", f"{ratio:.2f}")
            print(f"| {' | '.join(cells)} | {memory} |")


if __name__ == "__main__":
    main()
