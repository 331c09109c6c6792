"""Live peers on the same inputs: an upstream change shows here."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)

from polopt.losses import cispo, dapo, dr_grpo, gae, grpo, gspo, policy_loss, ppo, sapo
from polopt.losses.modules import PolicyLoss

N = 32


def actor_of():
    torch.manual_seed(0)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(torch.nn.Linear(4, 3), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )


def rollout(actor):
    g = torch.Generator().manual_seed(1)
    td = TensorDict(
        {
            "observation": torch.randn(N, 4, generator=g),
            "action": torch.randint(3, (N,), generator=g),
            "advantage": torch.randn(N, 1, generator=g),
            "value_target": torch.randn(N, 1, generator=g),
            "state_value": torch.randn(N, 1, generator=g),
        },
        batch_size=[N],
    )
    log_prob = actor.get_dist(td).log_prob(td["action"]).detach()
    td["action_log_prob"] = log_prob + 0.3 * torch.randn(N, generator=g)
    return td


@pytest.mark.parametrize("clip", [0.2, (0.2, 0.28)], ids=str)
def test_torchrl_clip_ppo(clip):
    """Value and gradient through an actor and a critic, with the entropy bonus."""
    objectives = pytest.importorskip("torchrl.objectives")
    if isinstance(clip, tuple):
        pytest.importorskip("torchrl", minversion="0.14", reason="two bounds came with 0.14")
    actor = actor_of()
    critic = TensorDictModule(
        torch.nn.Linear(4, 1), in_keys=["observation"], out_keys=["state_value"]
    )
    td = rollout(actor)
    theirs = objectives.ClipPPOLoss(
        actor, critic, clip_epsilon=clip, clip_value=0.3, loss_critic_type="l2", functional=False
    )
    theirs.set_keys(sample_log_prob="action_log_prob")
    expected = theirs(td.clone())
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    # Its squared error has no half.
    algorithm = ppo(clip=low, clip_high=high, entropy_coef=0.01, value_coef=2.0, value_clip=0.3)
    loss = PolicyLoss(algorithm, actor, critic)
    out = loss(td.clone())
    terms = ("loss_objective", "loss_entropy", "loss_critic")
    for name in terms:
        torch.testing.assert_close(out[name], expected[name].reshape(()), msg=name)
    parameters = [*actor.parameters(), *critic.parameters()]
    grads = torch.autograd.grad(sum(out[k] for k in terms), parameters)
    expected_grads = torch.autograd.grad(sum(expected[k] for k in terms), parameters)
    torch.testing.assert_close(grads, expected_grads)
    assert set(loss.out_keys) <= set(out.keys())


@pytest.mark.parametrize("lam", [0.5, 0.95, 1.0])
def test_torchrl_gae(lam):
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    g = torch.Generator().manual_seed(2)
    value, following, reward = torch.randn(3, 6, 50, 1, generator=g, dtype=torch.float64)
    done = torch.rand(6, 50, 1, generator=g) < 0.1
    terminated = done & (torch.rand(6, 50, 1, generator=g) < 0.5)
    expected = functional.generalized_advantage_estimate(
        0.99, lam, value, following, reward, done=done, terminated=terminated
    )
    flat = [x.squeeze(-1) for x in (reward, value, following, terminated, done)]
    got = gae(*flat, gamma=0.99, lam=lam)
    for a, b in zip(got, expected, strict=True):
        # Theirs keeps gamma in float32.
        torch.testing.assert_close(a[..., None], b, rtol=1e-5, atol=1e-6)


class Trainer:
    """What TRL's `_compute_loss` reads of its trainer; anything else is off."""

    def __init__(self, log_prob, entropy, **settings):
        self.given = log_prob, entropy, None
        self.beta, self.importance_sampling_level = 0.0, "token"
        self.epsilon_low = self.epsilon_high = 0.2
        self.top_entropy_quantile = 1.0
        self.max_completion_length = 16
        self.current_gradient_accumulation_steps = 1
        self.model = SimpleNamespace(training=True)
        self.args = SimpleNamespace(
            delta=None, use_bias_correction_kl=False, steps_per_generation=1,
            sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
        )  # fmt: skip
        same = lambda x, **_: x  # noqa: E731
        self.accelerator = SimpleNamespace(num_processes=1, reduce=same, gather=same)
        self._metrics = {"train": defaultdict(list)}
        vars(self).update(settings)

    def __getattr__(self, name):
        return None

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        return self.given


TRL = {
    "grpo": ({"loss_type": "grpo", "beta": 0.04}, grpo().objective),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, dapo().objective),
    "dr_grpo": ({"loss_type": "dr_grpo"}, dr_grpo(horizon=16).objective),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 5.0}, cispo().objective),
    "sapo": ({"loss_type": "sapo"}, sapo().objective),
    "gspo": (
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 3e-4,
            "epsilon_high": 4e-4,
        },
        gspo().objective,
    ),
}


@pytest.mark.parametrize("name", TRL)
def test_trl(name):
    """Its `_compute_loss` on given log-probabilities: value and gradient."""
    trl = pytest.importorskip("trl")
    settings, objective = TRL[name]
    g = torch.Generator().manual_seed(3)
    mask = torch.arange(6) < torch.tensor([6, 3, 1, 4])[:, None]
    old = -torch.rand(4, 6, generator=g, dtype=torch.float64)
    log_prob = (old + 0.4 * torch.randn(4, 6, generator=g, dtype=torch.float64)).requires_grad_()
    ref = old - 0.2
    advantage = torch.randn(4, generator=g, dtype=torch.float64)
    ids = torch.zeros(4, 6, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
        "completion_mask": mask.long(), "advantages": advantage, "old_per_token_logps": old,
        "ref_per_token_logps": ref, "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    trainer = Trainer(log_prob, torch.zeros_like(old), **settings)
    theirs = trl.GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    (expected,) = torch.autograd.grad(theirs, log_prob)
    out = policy_loss(
        log_prob, old, advantage[:, None], mask, objective=objective, ref_log_prob=ref
    )
    loss = sum(v for k, v in out.items() if k.startswith("loss_"))
    (grad,) = torch.autograd.grad(loss, log_prob)
    # A temperature of theirs is in float32.
    torch.testing.assert_close(loss, theirs, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-7)
