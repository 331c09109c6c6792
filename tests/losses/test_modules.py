"""The TensorDict module says what it reads and writes, and computes what the functions do."""

from dataclasses import replace

import pytest
import torch
from axes import PRESETS, REGULARISERS, draw, objective_of
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from polopt.losses import (
    Clip,
    Linear,
    Objective,
    ValueTerm,
    dapo,
    grpo,
    policy_loss,
    ppo,
    resolve,
    value_loss,
)
from polopt.losses.modules import PolicyLoss

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]]).bool()


def entries(objective, batch):
    steps = dict(batch.steps)
    steps["action_log_prob"] = steps.pop("old_log_prob")
    return TensorDict(steps, batch_size=[len(MASK)])


@pytest.mark.parametrize("regulariser", ["none", "entropy", "kl k3", "two corrections"])
@pytest.mark.parametrize("preset", PRESETS)
def test_reads_and_writes_what_it_says(preset, regulariser):
    objective = replace(objective_of(preset), kl_in="loss", **REGULARISERS[regulariser])
    batch = draw(0, MASK, objective)
    td = entries(objective, batch)
    loss = PolicyLoss(objective)
    if not objective.uses_entropy:
        del td["entropy"]
    out = loss(td)
    assert len(loss.out_keys) == len(set(loss.out_keys))
    assert set(loss.out_keys) <= set(out.keys())
    assert {k for k in out.keys() if k.startswith("loss_")} <= set(loss.out_keys)  # noqa: SIM118
    steps = {k: v for k, v in batch.steps.items() if k in td or k == "old_log_prob"}
    expected = policy_loss(**steps, objective=objective)
    for key, value in expected.items():
        torch.testing.assert_close(out[key], value, msg=key)
    # Every entry it says it reads is needed.
    for key in loss.in_keys:
        with pytest.raises(ValueError, match=f"needs the entry '{key}'|required"):
            loss(td.exclude(key))


def test_values_and_trailing_dimensions():
    """TorchRL keeps a last dimension of one on values, advantages and rewards."""
    g = torch.Generator().manual_seed(0)
    x = {k: torch.randn(6, generator=g) for k in ("log_prob", "action_log_prob", "advantage",
         "value", "state_value", "value_target")}  # fmt: skip
    loss = PolicyLoss(ppo(value_clip=0.2, value_coef=0.7))
    flat = loss(TensorDict(x, batch_size=[6]))
    wide = {k: v if k == "log_prob" else v[:, None] for k, v in x.items()}
    out = loss(TensorDict(wide, batch_size=[6]))
    for key in loss.out_keys:
        assert torch.equal(out[key], flat[key]), key
    critic = value_loss(x["value"], x["state_value"], x["value_target"], clip=0.2)
    torch.testing.assert_close(out["loss_critic"], 0.7 * critic["loss_critic"])


def test_keys_can_be_renamed():
    objective = dapo().objective
    batch = draw(1, MASK, objective)
    td = entries(objective, batch)
    loss = PolicyLoss(objective)
    expected = loss(td)["loss_objective"]
    td.rename_key_("advantage", ("nested", "gain"))
    loss.set_keys(advantage=("nested", "gain"))
    assert ("nested", "gain") in loss.in_keys
    assert torch.equal(loss(td)["loss_objective"], expected)
    with pytest.raises(ValueError, match="unknown key 'advantages', expected one of"):
        loss.set_keys(advantages="x")


def test_denominator_is_one_number():
    objective = grpo(kl_coef=0.0).objective
    batch = draw(2, MASK, objective)
    td = entries(objective, batch)
    whole = PolicyLoss(objective)(td)["loss_objective"]
    td.batch_size = []
    td["denominator"] = torch.tensor(4.0)
    torch.testing.assert_close(PolicyLoss(objective)(td)["loss_objective"], whole * 2 / 4)
    td["denominator"] = torch.full((3,), 4.0)
    with pytest.raises(ValueError, match=r"denominator must be a scalar, got \(3,\)"):
        PolicyLoss(objective)(td)


def test_actor_and_critic_have_to_fit():
    actor = Squashed()
    critic = TensorDictModule(torch.nn.Linear(2, 1), in_keys=["x"], out_keys=["state_value"])
    with pytest.raises(ValueError, match="a critic was given, but the algorithm has no value term"):
        PolicyLoss(dapo(), actor, critic)
    with pytest.raises(ValueError, match="the algorithm trains a critic: give one"):
        PolicyLoss(ppo(), actor)
    assert PolicyLoss(dapo(), actor, critic, value=ValueTerm()).value_term == ValueTerm()
    with pytest.raises(ValueError, match=r"algorithm must be .* such as ppo\(\), .*got <function"):
        PolicyLoss(ppo)
    with pytest.raises(ValueError, match=r"actor must have .*get_dist.*got a TensorDictModule"):
        PolicyLoss(dapo(), critic)
    with pytest.raises(ValueError, match=r"critic must be a module for TensorDicts.*got a Linear"):
        PolicyLoss(ppo(), actor, torch.nn.Linear(2, 1))


class Squashed:
    """A policy whose entropy has no closed form."""

    in_keys = ("loc",)

    def get_dist(self, td):
        normal = torch.distributions.Normal(td["loc"], 1.0)
        tanh = torch.distributions.TanhTransform()
        return torch.distributions.TransformedDistribution(normal, [tanh])


def test_entropy_without_closed_form_is_sampled_with_its_gradient():
    torch.manual_seed(0)
    n = 200_000
    loc = torch.full((n,), 0.5, requires_grad=True)
    loss = PolicyLoss(replace(objective_of("a2c"), entropy_coef=1.0), Squashed())
    inputs = {"loc": loc, "action": torch.zeros(n), "advantage": torch.zeros(n)}
    out = loss(TensorDict(inputs, batch_size=[n]))
    (grad,) = torch.autograd.grad(out["loss_entropy"], loc)
    # H = H(normal) + E log(1 − tanh²), its slope −E 2·tanh, by quadrature.
    z = torch.linspace(-8, 8, 20001, dtype=torch.float64)
    weight = torch.exp(-0.5 * z**2)
    weight = weight / weight.sum()
    tanh = torch.tanh(0.5 + z)
    entropy = 1.4189385 + (weight * torch.log1p(-tanh.square())).sum()
    assert out["entropy"].item() == pytest.approx(entropy.item(), abs=0.02)
    assert grad.sum().item() == pytest.approx((weight * 2 * tanh).sum().item(), abs=0.02)


@pytest.mark.parametrize(
    "axes",
    [
        {"aggregation": "token_mean"},
        {"aggregation": "sequence_mean"},
        {"aggregation": "constant", "horizon": 7},
        {"aggregation": "group_token_mean"},
    ],
    ids=lambda axes: axes["aggregation"],
)
def test_value_term_shares_the_weights_of_its_denominator(axes):
    """Parts given the whole count add up to the whole, the critic's term too."""
    g = torch.Generator().manual_seed(0)
    mask = torch.arange(5) < torch.tensor([[5], [1], [3], [2]])
    names = ("log_prob", "action_log_prob", "advantage", "value", "state_value", "value_target")
    data = {n: torch.randn(4, 5, generator=g, dtype=torch.float64) for n in names}
    tokens = mask.sum(-1).double()
    group_tokens = torch.stack([tokens[:2].sum(), tokens[2:].sum()]).repeat_interleave(2)
    whole = TensorDict({**data, "mask": mask, "group_tokens": group_tokens}, [4])
    objective = Objective(surrogate=Clip(), **axes)
    loss = PolicyLoss(objective, value=ValueTerm(coef=1.0, clip=0.5))
    expected = loss(whole)
    count = objective.count(mask, group_tokens=group_tokens)
    parts = [TensorDict({**dict(whole[a:b]), "denominator": count}) for a, b in ((0, 1), (1, 4))]
    for name in ("loss_objective", "loss_critic"):
        total = sum(loss(part)[name] for part in parts)
        torch.testing.assert_close(total, expected[name])


def test_coefficients_of_the_critic_may_be_schedules():
    ramp = Linear(start=1.0, end=0.5, steps=10)
    algorithm = ppo(value_coef=ramp, value_clip=ramp, lam=ramp)
    later = resolve(algorithm, 10)
    assert later.value == ValueTerm(coef=0.5, clip=0.5)
    assert later.advantage.settings["lam"] == 0.5
    with pytest.raises(ValueError, match=r"lam must be in \[0, 1\], got 2.0"):
        ppo(lam=Linear(start=2.0, end=1.0, steps=10))


def test_divergence_of_whole_distributions_is_read():
    objective = Objective(surrogate=Clip(), kl_coef=0.5, kl="full")
    loss = PolicyLoss(objective)
    names = ("log_prob", "action_log_prob", "advantage")
    data = TensorDict({name: torch.zeros(2, 3) for name in names}, [2])
    with pytest.raises(ValueError, match="the loss needs the entry 'kl'"):
        loss(data)
    data["kl"] = torch.full((2, 3), 4.0)
    assert "kl" in loss.in_keys
    assert loss(data)["loss_kl"].item() == 2.0
    with pytest.raises(ValueError, match="kl 'full' is for the loss"):
        Objective(surrogate=Clip(), kl_coef=0.5, kl="full", kl_in="reward")
