"""Rewards inside PolicyTrainer: what fails leaves its group, what breaks the contract is told."""

import asyncio
import importlib.util
import os
from pathlib import Path

import pytest

pytest.importorskip("trl")
import torch

from polopt.envs.contract import RewardError
from polopt.envs.form_rewards import Length, Repetition
from polopt.envs.isolation import isolated
from polopt.losses import group_advantage

SETUP = Path(__file__).with_name("trl_setup.py")
spec = importlib.util.spec_from_file_location("trl_setup", SETUP)
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)


class Keeper(setup.PolicyTrainer):
    """Keeps the first generation."""

    first = None

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.first is None:
            self.first = {**output, "rewards": self._rewards}
        return output


def moody():
    """Make a closure, which reaches workers that cannot import this file."""

    def reward(completions, **_):
        (text,) = completions
        first = (text.split() or ["none"])[0]
        if first in ("w1", "w2"):
            os._exit(3)
        if first in ("w3", "w4"):
            return [1 / 0]
        return [None if first in ("w5", "w6") else len(set(text.split())) / (1 + len(text))]

    return reward


def test_samples_that_fail_leave_their_group(tmp_path):
    reward = isolated(moody(), timeout=30.0)
    trainer = setup.build(
        Keeper, tmp_path, reward=reward, algorithm=setup.algorithm("grpo"),
        config={"per_device_train_batch_size": 32},
    )  # fmt: skip
    try:
        trainer.train()
    finally:
        reward.close()
    batch, texts = trainer.first, []
    for ids, kept in zip(batch["completion_ids"], batch["completion_mask"].bool(), strict=True):
        texts.append(trainer._tokenizer.decode(ids[kept], skip_special_tokens=True))
    first = [(text.split() or ["none"])[0] for text in texts]
    gone = torch.tensor([word in {f"w{i}" for i in range(1, 7)} for word in first])
    assert 3 < gone.sum() < 29
    assert torch.equal(batch["rewards"][:, 0].isnan(), gone)
    assert torch.equal(batch["loss_mask"], batch["completion_mask"].bool() & ~gone[:, None])
    # The others are compared with each other and with nobody else.
    scores = torch.tensor([len(set(t.split())) / (1 + len(t)) for t in texts])
    scores = torch.where(gone, torch.nan, scores)
    expected = group_advantage(scores, torch.arange(32) // 4)
    assert torch.allclose(batch["advantages"][~gone], expected[~gone], atol=1e-5)
    assert reward.failures["crashed"] > 0
    assert reward.failures["raised"] > 0
    logged = trainer.state.log_history[0]
    assert logged["rewards/reward/failed"] == pytest.approx(
        sum(w in ("w1", "w2", "w3", "w4") for w in first) / 32
    )
    assert logged["reward"] == pytest.approx(scores.nanmean().item(), abs=1e-5)


@pytest.mark.parametrize("refill", [None, "reward"])
def test_other_rewards_do_not_stand_in_for_one_that_failed(tmp_path, refill):
    """Nor does a None that the reward itself returns: there the others count, as in TRL."""
    reward = isolated(moody(), timeout=30.0)
    rule = setup.losses.dapo(refill=refill, max_rounds=1)
    trainer = setup.build(
        Keeper, tmp_path, reward=[reward, Repetition(ngram=1)], algorithm=rule,
        config={"per_device_train_batch_size": 32, "max_steps": 1},
    )  # fmt: skip
    try:
        trainer.train()
    finally:
        reward.close()
    batch = trainer.first
    gone = batch["rewards"].isnan().all(1)
    alone = batch["rewards"][:, 0].isnan() & ~gone
    assert gone.any()
    assert alone.any()
    assert not batch["loss_mask"][gone].any()
    assert batch["loss_mask"][alone].any()


def test_kinds_of_rewards_together(tmp_path):
    async def slow(completions, **_):
        await asyncio.sleep(0.01)
        return [float(len(c)) for c in completions]

    class Tensors:
        def __call__(self, completions, **_):
            return torch.tensor([len(c) / 2 for c in completions])

    rewards = [
        isolated(lambda completions, **_: [len(completions[0]) / 4], workers=1),
        isolated(slow),
        slow,
        Tensors(),
        Length(limit=8, cache=4),
        Repetition(ngram=1),
    ]
    weights = [1.0, 0.5, 2.0, 0.0, 0.25, 1.0]
    trainer = setup.build(
        Keeper, tmp_path, reward=rewards, algorithm=setup.algorithm("grpo"),
        config={"reward_weights": weights, "max_steps": 1},
    )  # fmt: skip
    try:
        trainer.train()
    finally:
        rewards[0].close()
    found = trainer.first["rewards"]
    assert not found.isnan().any()
    for i, factor in ((1, 1.0), (2, 1.0), (3, 0.5)):
        assert torch.allclose(found[:, i] / factor, 4 * found[:, 0])
    names = ["<lambda>", "slow", "slow", "Tensors", "length", "repetition"]
    assert trainer.reward_func_names == names
    logged = trainer.state.log_history[0]
    assert logged["reward"] == pytest.approx(
        (found * torch.tensor(weights)).sum(1).mean().item(), abs=1e-5
    )


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda **_: [1.0], r"'<lambda>' returned 1 scores, expected a list of 8 numbers"),
        (lambda **_: 1.0, r"'<lambda>' returned 1.0 \(float\), expected a list of 8 numbers"),
        (lambda **_: None, r"'<lambda>' returned None, expected a list of 8 numbers"),
        (lambda **_: ["good"] * 8, r"'<lambda>' gave 'good' \(str\) to completion 0"),
        (lambda **_: [float("inf")] * 8, r"'<lambda>' gave inf \(float\) to completion 0"),
        (lambda **_: [1 / 0], r"'<lambda>' raised ZeroDivisionError: division by zero \(test_trl"),
        (lambda completions: [1.0] * 8, r"'<lambda>' raised TypeError.*take \*\*columns"),
    ],
)
def test_what_breaks_the_contract_is_one_sentence(tmp_path, reward, message):
    trainer = setup.build(
        setup.PolicyTrainer, tmp_path, reward=reward, algorithm=setup.algorithm("grpo")
    )
    with pytest.raises(RewardError, match=message) as caught:
        trainer.train()
    assert "\n" not in str(caught.value)


def test_async_rewards_break_it_with_the_same_words(tmp_path):
    async def judge(**_):
        return ["good"] * 8

    trainer = setup.build(
        setup.PolicyTrainer, tmp_path, reward=judge, algorithm=setup.algorithm("grpo")
    )
    with pytest.raises(RewardError, match=r"'judge' gave 'good' \(str\) to completion 0"):
        trainer.train()


def test_a_reward_that_never_works_stops_the_run(tmp_path):
    reward = isolated(lambda **_: [1 / 0], workers=1)
    trainer = setup.build(
        setup.PolicyTrainer, tmp_path, reward=reward, algorithm=setup.algorithm("grpo"),
        config={"max_steps": 9},
    )  # fmt: skip
    try:
        with pytest.raises(RewardError, match=r"scored none of the last 16 .*ZeroDivisionError"):
            trainer.train()
    finally:
        reward.close()
    assert trainer.state.global_step == 1  # eight samples may be bad luck


def test_a_tokenizer_that_cannot_pad(tmp_path):
    _, tokenizer = setup.tiny()
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="has no pad token, and no end-of-sequence token"):
        setup.build(
            setup.PolicyTrainer, tmp_path, tokenizer=tokenizer, algorithm=setup.algorithm("grpo")
        )
