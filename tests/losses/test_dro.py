"""DRO, the docs' example of a loss of one's own, agrees with verl's."""

import importlib.util
from pathlib import Path

import pytest
import torch
from golden import load
from parity.policy import batch, far_from_old

from polopt.losses import policy_loss

FILE = Path(__file__).parents[2] / "examples" / "dro.py"


@pytest.fixture(scope="module")
def objective():
    spec = importlib.util.spec_from_file_location("dro", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.dro(beta=0.1).objective


def test_loss_and_gradient_are_verl_s(objective):
    agreed = 0
    for record in load("policy_losses")["results"]:
        wanted = record["loss_name"], record.get("loss_agg_mode"), record["dtype"]
        if wanted != ("dro_0.1", "token-mean", "float64"):
            continue
        inputs = batch(record["case"], record["adv"], "float64", "rollout_log_prob")
        # Ours bounds the log-ratio; without a step theirs is NaN.
        if far_from_old(inputs) or not inputs["mask"].any():
            continue
        log_prob = inputs["log_prob"].clone().requires_grad_()
        out = policy_loss(
            log_prob,
            inputs["old_log_prob"],
            inputs["advantage"],
            inputs["mask"],
            objective=objective,
        )
        (grad,) = torch.autograd.grad(out["loss_objective"], log_prob)
        assert out["loss_objective"].item() == pytest.approx(float(record["loss"]), rel=1e-6)
        torch.testing.assert_close(grad, record["grad_log_prob"].double(), rtol=1e-6, atol=1e-8)
        agreed += 1
    assert agreed >= 7
