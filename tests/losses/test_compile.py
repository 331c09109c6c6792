"""The loss compiles whole, and a changed coefficient does not compile it again."""

from dataclasses import fields, replace
from typing import get_args

import pytest
import torch
from axes import PRESETS, combine, draw, objective_of
from torch._dynamo.utils import counters

from polopt.losses import Linear, Objective, policy_loss, resolve
from polopt.losses.schedules import Schedule

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]]).bool()


@pytest.fixture
def compiled():
    torch.compiler.reset()
    counters.clear()
    yield torch.compile(policy_loss, fullgraph=True, backend="aot_eager")
    torch.compiler.reset()


def run_with(loss, objective, batch):
    log_prob = batch.steps["log_prob"].clone().requires_grad_()
    out = loss(**{**batch.steps, "log_prob": log_prob}, objective=objective)
    terms = torch.stack([v for k, v in out.items() if k.startswith("loss_")])
    (grad,) = torch.autograd.grad(terms.sum(), log_prob)
    return out, grad


def graphs():
    return counters["stats"]["unique_graphs"]


def varied(objective: Objective, factor: float) -> Objective:
    """Return the objective with all its coefficients scaled, as a compiled loop resolves them."""
    objective = replace(objective, kl_in="loss", kl_coef=0.1, entropy_coef=0.01)
    scaled = replace(objective, surrogate=scale(objective.surrogate, factor))
    return resolve(scale(scaled, factor), 0, tensors=True)


def scale(node, factor):
    changes = {
        f.name: Linear(start=value * factor, end=value, steps=1)
        for f in fields(node)
        if isinstance(value := getattr(node, f.name), float) and Schedule in get_args(f.type)
    }
    return replace(node, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_compiles_whole_and_once(compiled, preset):
    """Coefficients as tensors, as a loop with schedules passes them to a compiled loss."""
    objective = objective_of(preset)
    batch = draw(0, MASK, objective)
    for factor in (1.0, 0.9, 0.7, 0.5):
        changed = varied(objective, factor)
        out, grad = run_with(compiled, changed, batch)
        expected, expected_grad = run_with(policy_loss, changed, batch)
        torch.testing.assert_close(grad, expected_grad)
        torch.testing.assert_close(out, expected)
        assert graphs() == 1, f"{preset}: {graphs()} graphs at factor {factor}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [
        ("ppo", "token_mean", "none"),
        ("dapo", "constant", "two corrections"),
        ("gspo", "group_token_mean", "kl reweighted"),
        ("cispo", "sequence_sum", "kl k3+"),
        ("rloo", "sequence_mean", "Reweight sequence"),
    ],
    ids=" ".join,
)
def test_other_points_compile_with_plain_numbers(compiled, point):
    objective = combine(*point)
    batch = draw(1, MASK, objective)
    extra = {"group_tokens": batch.group_tokens} if point[1] == "group_token_mean" else {}
    batch.steps.update(extra)
    out, grad = run_with(compiled, objective, batch)
    expected, expected_grad = run_with(policy_loss, objective, batch)
    torch.testing.assert_close(grad, expected_grad)
    torch.testing.assert_close(out, expected)
    assert graphs() == 1
