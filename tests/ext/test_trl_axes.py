"""Every preset and every point on the axes is trained, or refused with the reason."""

import importlib.util
import itertools
from pathlib import Path
from typing import get_args

import pytest
import torch

pytest.importorskip("trl")

from polopt import losses
from polopt.ext.trl.config import ADVANTAGE_INPUTS, check_algorithm
from polopt.ext.trl.trainer import PolicyTrainer
from polopt.launch.job import algorithm_names
from polopt.losses import advantages, corrections, covariance, groups, outcomes, surrogates
from polopt.losses.objective import RatioLevel

spec = importlib.util.spec_from_file_location("trl_setup", Path(__file__).with_name("trl_setup.py"))
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)

CRITIC = "trains a critic .* PolicyTrainer does not: use a group-based one"
REPLAY = "learns values of actions from a replay buffer, for control tasks"
CONTROL = {
    **dict.fromkeys(["ppo", "kl_ppo", "a2c", "reinforce"], CRITIC),
    **dict.fromkeys(["dqn", "double_dqn", "ddpg", "td3", "sac", "discrete_sac"], REPLAY),
}
NEEDED = {"dr_grpo": {"horizon": 8}, "grpo": {"kl_coef": 0.1}, "rloo": {"kl_coef": 0.1},
          "remax": {"kl_coef": 0.1}, "dapo": {"refill": "reward"}}  # fmt: skip


def instances(*modules):
    """Return an object of each class that the modules offer, with the settings it needs."""
    more = {"RejectDivergent": {"limit": 1.0}, "OffPolicyMask": {"threshold": 1.0},
            "ClipCov": {"share": 0.3, "cov_low": 0.0}, "KlCov": {"share": 0.3}}  # fmt: skip
    names = [(m, n) for m in modules for n in m.__all__ if n[0].isupper()]
    kinds = [getattr(m, n) for m, n in names]
    made = [k for k in kinds if isinstance(k, type) and not getattr(k, "_is_protocol", False)]
    return [kind(**more.get(kind.__name__, {})) for kind in made]


SURROGATES = instances(surrogates, covariance)
CORRECTIONS = instances(corrections)
AGGREGATIONS = get_args(losses.Aggregation)
KL = [kind for kind in get_args(losses.Kl) if kind != "full"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    setup.saved(folder)
    return lambda: setup.saved(folder)


@pytest.mark.parametrize("name", sorted(algorithm_names()))
def test_every_preset_is_trained_or_refused_with_the_reason(tmp_path, model, name):
    rule = algorithm_names()[name](**NEEDED.get(name, {}))
    if name in CONTROL:
        with pytest.raises(ValueError, match=CONTROL[name]):
            check_algorithm(rule)
        return
    rewards = [setup.variety, setup.unequal]
    trainer = setup.build(
        PolicyTrainer, tmp_path, algorithm=rule, model=model(), reward=rewards,
        config={"per_device_train_batch_size": 16, "max_steps": 2, "num_iterations": 2},
    )  # fmt: skip
    trainer.train()
    logged = [h for h in trainer.state.log_history if "grad_norm" in h]
    assert len(logged) == 2
    assert all(0 < h["grad_norm"] < float("inf") for h in logged), logged


def test_every_estimator_of_advantages_is_used_by_a_preset_or_needs_a_critic():
    """So that the test above has trained it."""
    offered = {n for m in (advantages, groups, outcomes) for n in m.__all__ if "advantage" in n}
    offered |= {"gae", "discounted_return"}
    used = {name for name, preset in algorithm_names().items() if name not in CONTROL}
    rules = [algorithm_names()[n](**NEEDED.get(n, {})).advantage for n in used]
    unused = offered - {rule.estimate.__name__ for rule in rules}
    assert unused == {"gae", "discounted_return"}
    needs = losses.ppo().advantage.needs
    assert "value" in needs
    assert "value" not in ADVANTAGE_INPUTS


def point(trainer, number, surrogate, ratio, aggregation):
    """Return an objective with these choices; the axes beside them go round."""
    kl_in = "reward" if number % 5 == 4 else "loss"
    return losses.Objective(
        surrogate=surrogate,
        ratio=ratio,
        aggregation=aggregation,
        horizon=8 if aggregation == "constant" else None,
        entropy_coef=0.1 * (number % 2),
        kl_coef=0.2 * (number % 3),
        kl=KL[number % len(KL)],
        kl_in=kl_in,
        kl_reweighted=kl_in == "loss" and number % 4 == 0,
        corrections=tuple(CORRECTIONS[: number % (len(CORRECTIONS) + 1)]),
    )


def test_every_surrogate_ratio_and_aggregation_is_the_loss_of_one_batch(tmp_path, model):
    """With all divergences, corrections and bonuses in turn; in three micro-batches of a step."""
    rule = losses.adjusted(base=losses.grpo(), objective={"aggregation": "group_token_mean"})
    trainer = setup.build(
        PolicyTrainer, tmp_path, algorithm=rule, model=model(), trim_padding=False,
        config={"per_device_train_batch_size": 12},
    )  # fmt: skip
    trainer.model.train()
    rows = [dict(trainer.train_dataset[i // 4]) for i in range(12)]
    whole = trainer._generate_and_score_completions(rows)
    log_prob, entropy, _ = trainer._score(trainer.model, whole, compute_entropy=True)
    noise = torch.Generator().manual_seed(0)

    def near(x):
        return x.detach() + 0.2 * torch.randn(x.shape, generator=noise)

    whole["old_per_token_logps"] = near(log_prob)
    whole["sampling_per_token_logps"] = near(log_prob)
    whole["ref_per_token_logps"] = near(log_prob)
    whole = {k: v for k, v in whole.items() if isinstance(v, torch.Tensor) and v.ndim}
    parts = [{k: v[i : i + 4] for k, v in whole.items()} for i in (0, 4, 8)]
    trained = list(trainer.model.parameters())

    def gradient(loss):
        found = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
        return torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten()
                          for g, p in zip(found, trained, strict=True)])  # fmt: skip

    axes = list(itertools.product(SURROGATES, get_args(RatioLevel), AGGREGATIONS))
    assert len(axes) == len(SURROGATES) * 4 * 5
    assert len(SURROGATES) >= 8
    for number, choices in enumerate(axes):
        objective = point(trainer, number, *choices)
        trainer.algorithm = losses.Algorithm(objective=objective, advantage=rule.advantage)
        check_algorithm(trainer.algorithm)
        trainer.policy_loss.objective = objective
        trainer._window = type(trainer._window)()
        trainer._open(parts)
        ours = 0.0
        for part in parts:
            ours = ours + trainer._compute_loss(trainer.model, part)
            trainer._window.done += 1
        selection = None
        if objective.selects:
            selection = torch.cat(trainer._window.selections)
        out = losses.policy_loss(
            log_prob, whole["old_per_token_logps"], whole["advantages"][:, None],
            whole["loss_mask"], objective=objective, entropy=entropy, selection=selection,
            behavior_log_prob=whole["sampling_per_token_logps"],
            ref_log_prob=whole["ref_per_token_logps"], group_tokens=whole["group_tokens"],
        )  # fmt: skip
        expected = sum(value for name, value in out.items() if name.startswith("loss_"))
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5, msg=str(choices))
        a, b = gradient(ours), gradient(expected)
        assert b.abs().max() > 1e-6, choices
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5 * float(b.abs().max()) + 1e-7)
