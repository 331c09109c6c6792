"""Dynamic sampling: groups without signal do not reach the loss."""

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

from polopt import losses
from polopt.ext.trl.sampling import PromptStream
from polopt.ext.trl.trainer import PolicyTrainer

spec = importlib.util.spec_from_file_location("trl_setup", Path(__file__).with_name("trl_setup.py"))
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)


class Seen(PolicyTrainer):
    """Keeps what reaches the loss."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches = []

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        trained = output["loss_mask"].any(-1)
        self.batches.append((self._rewards[:, 0].view(-1, 4), trained.view(-1, 4)))
        return output


def logs(trainer, key):
    return [h[key] for h in trainer.state.log_history if key in h]


def test_no_group_without_signal_reaches_the_loss(tmp_path):
    trainer = setup.refill(tmp_path, kind=Seen, max_steps=4)
    for rewards, trained in trainer.batches:
        assert ((rewards.amax(1) - rewards.amin(1)) > 0).all()
        assert trained.all()
    assert logs(trainer, "frac_reward_zero_std") == [0.0] * 4
    assert logs(trainer, "sampling/groups_short") == [0.0] * 4
    dropped = trainer.refilled["all_correct"] + trainer.refilled["all_wrong"]
    assert dropped > 0
    assert trainer.refilled["groups"] * 4 == trainer.generated
    assert trainer.refilled["groups"] - dropped >= 8
    assert sum(logs(trainer, "sampling/dropped_all_correct")) == trainer.refilled["all_correct"]


def test_rewards_are_computed_once(tmp_path):
    trainer = setup.refill(tmp_path, max_steps=3)
    assert trainer.refilled["rounds"] > 0
    assert sum(trainer.scored) == trainer.generated


def test_more_than_needed_is_drawn_if_told_to(tmp_path):
    """Fewer rounds, more answers in vain, and never more than a batch at once."""

    def rounds(factor):
        knobs = {"share": 0.6, "max_steps": 3, "per_device_train_batch_size": 32}
        trainer = setup.refill(tmp_path, sampling={"oversample": factor}, kind=Seen, **knobs)
        assert max(trainer.scored) == 32
        return trainer.refilled["rounds"], trainer.generated

    few, many = rounds(3.0), rounds(1.0)
    assert few[0] < many[0]
    assert few[1] > many[1]


def test_at_the_bound_the_informative_groups_are_trained_on(tmp_path):
    trainer = setup.refill(tmp_path, kind=Seen, share=0.85, max_rounds=1, max_steps=6)
    short = logs(trainer, "sampling/groups_short")
    assert 0 < sum(short) < 12
    for (rewards, trained), missing in zip(trainer.batches, short, strict=True):
        useful = (rewards.amax(1) - rewards.amin(1)) > 0
        assert (~useful).sum() == missing
        torch.testing.assert_close(trained, useful[:, None].expand(-1, 4))
    # Their smaller count is what the gradient is divided by.
    exact = setup.refill(tmp_path, share=0.85, max_rounds=1, max_steps=6)
    assert sum(logs(exact, "sampling/groups_short")) > 0
    assert max(exact.errors) < 1e-4


def test_only_degenerate_groups_end_the_training_with_a_word(tmp_path, caplog, monkeypatch):
    from polopt.ext.trl import sampling as module

    said = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *a, **_: said.append(text % a))
    trainer = setup.refill(tmp_path, kind=Seen, share=1.0, max_rounds=2, max_steps=5)
    assert trainer.state.global_step == 1
    assert trainer.ended.startswith("No group carried a signal after 2 further rounds")
    assert trainer.ended in said
    assert logs(trainer, "sampling/groups_short") == [2.0]
    assert logs(trainer, "grad_norm") == [0.0]


def test_at_the_bound_the_run_ends_if_told_to(tmp_path, monkeypatch):
    from polopt.ext.trl import sampling as module

    said = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *a, **_: said.append(text % a))
    stops = {"share": 0.85, "max_rounds": 1, "max_steps": 6, "sampling": {"at_bound": "stop"}}
    trainer = setup.refill(tmp_path, kind=Seen, **stops)
    short = logs(trainer, "sampling/groups_short")
    # The first batch that is short of some groups is the last one, and its groups are trained on.
    assert short[-1] > 0
    assert not any(short[:-1])
    assert trainer.state.global_step == len(short) < 6
    assert trainer.batches[-1][1].any() or short[-1] == 2
    assert any("Training stops here" in text for text in said)


def test_evaluation_is_not_refilled(tmp_path):
    trainer = setup.refill(tmp_path, share=1.0, max_rounds=1, max_steps=1)
    before = trainer.generated
    metrics = trainer.evaluate(trainer.train_dataset.select(range(2)))
    assert trainer.generated == before
    assert metrics["eval_reward"] == pytest.approx(1.0)


def test_rule_on_rewards(tmp_path):
    """Answers that are all wrong but differ in reward carry a signal for `reward` only."""

    def partial(completions, **_):
        return [0.1 * len(set(c.split())) for c in completions]

    knobs = {"reward": partial, "config": {"max_steps": 1}}
    rule = setup.build(PolicyTrainer, tmp_path, algorithm=losses.dapo(refill="reward"), **knobs)
    rule.train()
    assert rule.refilled["all_wrong"] == 0
    rule = setup.build(PolicyTrainer, tmp_path, algorithm=losses.dapo(max_rounds=1), **knobs)
    rule.train()
    assert rule.refilled["all_wrong"] == rule.refilled["groups"] > 0


def test_columns_logged_by_rewards_stay_beside_their_samples(tmp_path):
    def reward(completions, easy, log_extra, **_):
        log_extra("text", list(completions))
        return setup.known(completions, easy)

    rows = [{"prompt": f"w{i % 13}", "easy": i % 4 != 0} for i in range(24)]
    trainer = setup.build(
        PolicyTrainer,
        tmp_path,
        reward=reward,
        rows=rows,
        algorithm=losses.dapo(),
        config={"max_steps": 1, "per_device_train_batch_size": 16},
    )
    trainer.train()
    assert trainer.refilled["rounds"] > 0
    assert len(trainer._logs["completion"]) == 16
    assert list(trainer._logs["extra"]["text"]) == list(trainer._logs["completion"])


def test_stream_is_restored_by_its_position():
    stream, again = PromptStream(7, 3), PromptStream(7, 3)
    drawn = stream.take(25)
    assert sorted(drawn[:7]) == sorted(drawn[7:14]) == list(range(7))
    assert drawn[:7] != drawn[7:14]
    again.position = 11
    assert again.take(14) == drawn[11:]
    assert PromptStream(7, 4).take(25) != drawn
