"""A resumed run goes on as if it had not been interrupted; the reference model; schedules."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

from polopt import losses
from polopt.ext.trl.trainer import PolicyTrainer

spec = importlib.util.spec_from_file_location("trl_setup", Path(__file__).with_name("trl_setup.py"))
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)


def weights(trainer):
    return torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


def logs(trainer, key):
    return [h[key] for h in trainer.state.log_history if key in h]


def refilled(folder, resume=None, **config):
    rows = [{"prompt": f"w{i % 13} w{i * 5 % 13}", "easy": i % 2 == 0} for i in range(24)]
    knobs = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6, "optim": "adamw_torch",
             "learning_rate": 1e-2, **config}  # fmt: skip
    trainer = setup.build(PolicyTrainer, folder, reward=setup.known, rows=rows, config=knobs,
                          algorithm=losses.dapo())  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize(
    ("at", "config"),
    [(3, {}), (4, {"steps_per_generation": 2}), (4, {"num_iterations": 2})],
)
def test_resume_at_a_generation_boundary_is_exact(tmp_path, at, config):
    whole = refilled(tmp_path / "a", **config)
    assert whole.refilled["rounds"] > 0
    resumed = refilled(tmp_path / "b", str(tmp_path / "a" / f"checkpoint-{at}"), **config)
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)
    assert resumed.refilled == whole.refilled
    assert resumed.generated == whole.generated
    assert resumed._stream.position == whole._stream.position > 0


def test_checkpoints_between_generations_say_so(tmp_path, monkeypatch):
    from polopt.ext.trl import trainer as module

    said = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *a, **_: said.append(text % a))
    refilled(tmp_path / "a", num_iterations=2)
    exact = [
        json.loads((tmp_path / "a" / f"checkpoint-{i}" / "polopt.json").read_text())["exact"]
        for i in range(1, 7)
    ]
    assert exact == [False, True] * 3
    refilled(tmp_path / "b", str(tmp_path / "a" / "checkpoint-3"), num_iterations=2)
    assert any("between two generations" in text for text in said)


@pytest.fixture
def saved(tmp_path):
    """TRL loads the reference model from where the policy came from."""
    model, _ = setup.tiny()
    model.save_pretrained(tmp_path / "model")
    return type(model).from_pretrained(tmp_path / "model")


def test_divergence_in_the_loss(tmp_path, saved):
    algorithm = losses.grpo(kl_coef=0.5)
    trainer = setup.build(
        PolicyTrainer, tmp_path, algorithm=algorithm, model=saved, config={"max_steps": 3}
    )
    trainer.train()
    kl = logs(trainer, "kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[-1] > 1e-5
    assert logs(trainer, "loss_kl")[-1] == pytest.approx(0.5 * kl[-1], rel=0.5)


@pytest.mark.parametrize("iterations", [1, 2])
def test_divergence_in_the_reward(tmp_path, saved, iterations):
    seen = []

    class Seen(PolicyTrainer):
        def _generate_and_score_completions(self, inputs):
            out = super()._generate_and_score_completions(inputs)
            seen.append((out, self._rewards[:, 0]))
            return out

    trainer = setup.build(
        Seen,
        tmp_path,
        algorithm=losses.rloo(kl_coef=0.5),
        model=saved,
        config={"max_steps": 5, "num_iterations": iterations},
    )
    trainer.train()
    assert not logs(trainer, "loss_kl")
    kl = logs(trainer, "kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-5)
    assert abs(kl[-1]) > 1e-4
    out, reward = seen[-1]
    group = torch.arange(8) // 4
    settings = {"baseline": "leave_one_out", "scale": "none"}
    free = losses.group_advantage(reward, group, **settings)
    assert not torch.allclose(out["advantages"], free, atol=1e-4)
    if iterations > 1:  # TRL keeps the old log-probabilities then
        gap = out["old_per_token_logps"] - out["ref_per_token_logps"]
        penalty = 0.5 * torch.where(out["completion_mask"].bool(), gap, 0.0).sum(-1)
        expected = losses.group_advantage(reward - penalty, group, **settings)
        torch.testing.assert_close(out["advantages"], expected)


def test_schedules_are_resolved(tmp_path):
    algorithm = setup.algorithm("dapo")
    objective = replace(
        algorithm.objective, entropy_coef=losses.Linear(start=0.0, end=0.1, steps=4)
    )
    trainer = setup.build(
        PolicyTrainer,
        tmp_path,
        algorithm=replace(algorithm, objective=objective),
        config={"max_steps": 3},
    )
    trainer.train()
    terms = logs(trainer, "loss_entropy")
    entropy = logs(trainer, "entropy")
    assert terms[-1] == pytest.approx(-0.05 * entropy[-1], rel=1e-4)


def test_missing_rewards_are_left_out(tmp_path):
    """A sample without a reward changes neither its group's statistics nor the count."""

    def reward(completions, **_):
        return [None, 1.0, 0.0, 0.5, 0.0, float("nan"), None, None]

    trainer = setup.build(
        PolicyTrainer, tmp_path, reward=reward, algorithm=setup.algorithm("dr_grpo"),
        config={"max_steps": 1},
    )  # fmt: skip
    trainer.model.train()
    rows = trainer.train_dataset.select([0] * 4 + [1] * 4).to_list()
    seen = trainer._generate_and_score_completions(rows)
    expected = torch.tensor([0.0, 0.5, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(seen["advantages"], expected)
    trained = seen["loss_mask"].any(-1)
    assert trained.tolist() == [False, True, True, True, True, False, False, False]
