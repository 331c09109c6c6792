"""Controllers in PolicyTrainer: they react to what the run measures, and resume."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("trl")

from polopt import losses
from polopt.ext.trl.trainer import PolicyTrainer

spec = importlib.util.spec_from_file_location("trl_setup", Path(__file__).with_name("trl_setup.py"))
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)


def with_entropy(**settings):
    algorithm = setup.algorithm("dapo")
    bonus = losses.TargetEntropy(**settings)
    return replace(algorithm, objective=replace(algorithm.objective, entropy_coef=bonus))


def train(folder, algorithm, steps, resume=None, **knobs):
    config = {"max_steps": steps, "save_strategy": "steps", "save_steps": 1, **knobs}
    trainer = setup.build(PolicyTrainer, folder, algorithm=algorithm, config=config)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def coefficient(trainer):
    return trainer.algorithm.objective.entropy_coef


def test_entropy_below_its_target_raises_the_bonus(tmp_path):
    # Two micro-batches make a step: one observation each, not two.
    trainer = train(
        tmp_path, with_entropy(target=100.0, step=0.01), 3, gradient_accumulation_steps=2
    )
    assert coefficient(trainer).value == pytest.approx(0.03)
    assert coefficient(trainer).active
    assert trainer.policy_loss.objective.entropy_coef == pytest.approx(0.02)  # of the last step


def test_what_the_user_passed_stays_as_it_was(tmp_path):
    algorithm = with_entropy(target=100.0, step=0.01)
    train(tmp_path, algorithm, 2)
    assert algorithm.objective.entropy_coef.value == 0.0


def test_resumes(tmp_path):
    whole = train(tmp_path / "a", with_entropy(target=100.0, step=0.01), 4)
    resumed = train(
        tmp_path / "b", with_entropy(target=100.0, step=0.01), 4, str(tmp_path / "a/checkpoint-2")
    )
    assert coefficient(resumed) == coefficient(whole)
    assert coefficient(whole).value == pytest.approx(0.04)


def test_a_metric_that_is_not_measured_is_refused(tmp_path):
    with pytest.raises(ValueError, match="entropy_coef reacts to 'reward', which is not among"):
        train(tmp_path, with_entropy(target=1.0, metric="reward"), 1)


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_divergence_below_its_target_lowers_its_weight(tmp_path, place):
    model, tokenizer = setup.tiny()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    algorithm = setup.algorithm("grpo")
    weight = losses.AdaptiveKl(value=0.1, target=50.0, horizon=80)
    algorithm = replace(
        algorithm,
        objective=replace(algorithm.objective, kl_coef=weight, kl="k3", kl_in=place),
    )
    trainer = setup.build(
        PolicyTrainer,
        tmp_path / "run",
        model=str(tmp_path / "model"),
        algorithm=algorithm,
        config={"max_steps": 2},
    )
    trainer.train()
    # 8 answers a step of a horizon of 80, an error of −0.2.
    expected = 0.1 * (1 - 0.2 * 8 / 80) ** 2
    assert trainer.algorithm.objective.kl_coef.value == pytest.approx(expected)
