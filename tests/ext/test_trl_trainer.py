"""PolicyTrainer: the loss and the advantages are ours, and exactly normalised."""

import importlib.util
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")
from trl import GRPOTrainer

from polopt import losses
from polopt.ext.trl.trainer import PolicyTrainer

SETUP = Path(__file__).with_name("trl_setup.py")
spec = importlib.util.spec_from_file_location("trl_setup", SETUP)
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)


def weights(trainer):
    return torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


def logs(trainer, key):
    return [h[key] for h in trainer.state.log_history if key in h]


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo"])
def test_equals_trl_where_trl_is_exact(tmp_path, name):
    """One micro-batch a step: TRL's own loss has the right denominator there."""
    epsilon_high = 0.28 if name == "dapo" else 0.2
    scale = "none" if name == "dr_grpo" else "group"
    knobs = {"loss_type": name, "epsilon_high": epsilon_high, "scale_rewards": scale,
             "num_iterations": 2}  # fmt: skip
    theirs = setup.build(GRPOTrainer, tmp_path / "a", config={**knobs, "max_steps": 4})
    theirs.train()
    ours_algorithm = setup.algorithm(name)
    rule = ours_algorithm.advantage
    # TRL adds 1e-4 to the standard deviation.
    rule = replace(rule, settings={**rule.settings, "eps": 1e-4})
    ours = setup.build(
        PolicyTrainer, tmp_path / "b", config={"num_iterations": 2, "max_steps": 4},
        algorithm=replace(ours_algorithm, advantage=rule),
    )  # fmt: skip
    start = weights(ours).clone()
    ours.train()
    assert (weights(ours) - start).abs().max() > 1e-3
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-5, atol=1e-6)
    for key in ("loss", "entropy", "clip_ratio/region_mean", "clip_ratio/high_max", "reward"):
        assert logs(ours, key) == pytest.approx(logs(theirs, key), abs=1e-5)


@pytest.mark.parametrize(
    ("accumulate", "generate", "iterations"),
    [(1, 1, 1), (2, 2, 1), (2, 4, 1), (2, 2, 2), (1, 3, 2), (4, 2, 1), (2, 3, 1), (4, 3, 2)],
)
def test_gradient_is_that_of_one_batch(tmp_path, accumulate, generate, iterations):
    done = setup.compare(
        tmp_path, "dapo", per_device_train_batch_size=4, max_steps=4,
        gradient_accumulation_steps=accumulate, steps_per_generation=generate,
        num_iterations=iterations,
    )  # fmt: skip
    assert len(done.lengths) > 2
    assert len(done.errors) == 8
    assert max(done.errors) < 1e-4
    # The loss that Trainer logs is that of the whole step, too.
    assert logs(done, "loss")[:4] == pytest.approx(logs(done, "loss_objective"), abs=1e-5)


@pytest.mark.parametrize(("accumulate", "generate", "iterations"), [(4, 2, 1), (2, 3, 2)])
def test_mean_over_the_tokens_of_a_group(tmp_path, accumulate, generate, iterations):
    """DAPO's eq. 8: a group is a group wherever the micro-batches cut it."""
    rule = setup.algorithm("dapo")
    rule = replace(rule, objective=replace(rule.objective, aggregation="group_token_mean"))
    seen = []

    class Seen(setup.Recorder):
        def _generate_and_score_completions(self, inputs):
            out = super()._generate_and_score_completions(inputs)
            seen.append((out["group_tokens"], out["loss_mask"].sum(1).view(-1, 4).sum(1)))
            return out

    done = setup.build(
        Seen, tmp_path, reward=setup.unequal, algorithm=rule,
        config={"per_device_train_batch_size": 4, "max_steps": 3, "num_iterations": iterations,
                "gradient_accumulation_steps": accumulate, "steps_per_generation": generate},
    )  # fmt: skip
    done.train()
    assert max(done.errors) < 1e-4
    for given, summed in seen:
        assert torch.equal(given, summed.repeat_interleave(4))
    assert len(torch.cat([summed for _, summed in seen]).unique()) > 1


def test_partial_last_window(tmp_path):
    """Nine micro-batches, two a step: the last step has one."""
    done = setup.compare(
        tmp_path, "dapo", per_device_train_batch_size=4, gradient_accumulation_steps=2,
        steps_per_generation=3, max_steps=-1, num_train_epochs=1, num_generations=4,
    )  # fmt: skip
    assert done.state.global_step == 24
    short = setup.build(
        setup.Recorder, tmp_path, algorithm=setup.algorithm("dapo"),
        rows=[{"prompt": f"w{i} w{i + 1}"} for i in range(9)],
        config={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
                "steps_per_generation": 3, "max_steps": -1, "num_train_epochs": 1},
    )  # fmt: skip
    short.train()
    assert short.state.global_step == 5
    assert max(done.errors + short.errors) < 1e-4


@pytest.mark.slow
def test_gradient_on_two_ranks():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(SETUP), "2"]
    # Two threads each on two cores wait for each other in turns: five times as long.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("compared on 2 ranks") == 2


def test_loss_of_trl_is_not_used(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("TRL's loss was called")

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", refuse)
    trainer = setup.build(PolicyTrainer, tmp_path, algorithm=setup.algorithm("dapo"))
    start = weights(trainer).clone()
    trainer.train()
    assert (weights(trainer) - start).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["gspo", "cispo", "sapo", "rloo"])
def test_other_algorithms_train(tmp_path, name):
    trainer = setup.build(PolicyTrainer, tmp_path, algorithm=setup.algorithm(name))
    start = weights(trainer).clone()
    trainer.train()
    assert all(torch.isfinite(torch.tensor(logs(trainer, "grad_norm"))))
    assert (weights(trainer) - start).abs().max() > 1e-5


@torch.no_grad()
def sampled_elsewhere(prompts, trainer, gap=0.1):
    """Answers of random words, with log-probs that are `gap` below the model's; one is not told."""
    tokenizer, model = trainer._tokenizer, trainer.accelerator.unwrap_model(trainer.model)
    out = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    for i, prompt in enumerate(prompts):
        ids = tokenizer(prompt)["input_ids"]
        words = torch.randint(3, 16, (3 + i % 4,)).tolist()
        scores = model(input_ids=torch.tensor([[*ids, *words]])).logits[0].log_softmax(-1)
        taken = [float(scores[len(ids) + t - 1, word]) - gap for t, word in enumerate(words)]
        out["prompt_ids"].append(ids)
        out["completion_ids"].append(words)
        out["logprobs"].append([float("nan"), *taken[1:]] if i == 0 else taken)
    return out


def test_a_sampler_that_differs_is_measured_and_corrected(tmp_path):
    rule = setup.algorithm("dapo")
    fixed = replace(rule.objective, corrections=(losses.Reweight(high=2.0),))
    done = {
        name: setup.build(
            PolicyTrainer, tmp_path / name, algorithm=replace(rule, objective=objective),
            rollout_func=sampled_elsewhere, config={"max_steps": 1},
        )
        for name, objective in {"plain": rule.objective, "fixed": fixed}.items()
    }  # fmt: skip
    for trainer in done.values():
        trainer.train()
        (gap,), (kl,) = logs(trainer, "mismatch/log_prob_gap"), logs(trainer, "mismatch/kl")
        tokens = trainer.state.log_history[0]["completions/mean_length"] * 8
        told = 1 - 1 / tokens
        assert gap == pytest.approx(0.1 * told, rel=1e-3)
        assert kl == pytest.approx((math.exp(0.1) - 1.1) * told, rel=1e-2)
    assert logs(done["fixed"], "correction_mean") == [pytest.approx(math.exp(0.1), rel=0.02)]
    plain = setup.build(PolicyTrainer, tmp_path / "own", algorithm=rule, config={"max_steps": 1})
    plain.train()
    assert not logs(plain, "mismatch/kl")  # the policy sampled for itself


def test_empty_answers_are_ends_of_the_text(tmp_path):
    """TRL fails on them; here they are an end of sequence that the sampler did not return."""
    seen = []

    def rollout(prompts, trainer):
        out = sampled_elsewhere(prompts, trainer)
        out["completion_ids"][1], out["logprobs"][1] = [], []
        out["env_mask"] = [[1] * len(ids) for ids in out["completion_ids"]]
        return out

    class Seen(PolicyTrainer):
        def _compute_loss(self, model, inputs):
            seen.append(inputs)
            return super()._compute_loss(model, inputs)

    trainer = setup.build(
        Seen, tmp_path, algorithm=setup.algorithm("dapo"), rollout_func=rollout,
        config={"max_steps": 1, "eval_strategy": "no"},
    )  # fmt: skip
    start = weights(trainer).clone()
    trainer.train()
    assert logs(trainer, "sampling/empty_answers") == [1.0]
    (batch,) = seen
    lengths = batch["loss_mask"].sum(1)
    (alone,) = batch["completion_ids"][lengths == 1]
    assert alone[0] == 1  # the end of the text, which is trained on
    assert (weights(trainer) - start).abs().max() > 1e-4
    assert torch.isfinite(weights(trainer)).all()
