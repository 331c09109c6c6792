"""Advantages that need more than the rewards of whole answers, and answers that are too long."""

import copy
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")
import transformers

from polopt import losses
from polopt.ext.trl.trainer import PolicyTrainer

spec = importlib.util.spec_from_file_location("trl_setup", Path(__file__).with_name("trl_setup.py"))
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)


class Kept(PolicyTrainer):
    """Keeps the first generation batch."""

    first = None

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.first is None:
            shown = list(self._logs["advantages"])
            self.first = {**output, "rewards": self._rewards.clone(), "shown": shown}
        return output


WORDS = setup.WORDS


def some(completions, **_):
    """Like `variety`, and every fifth answer has no reward."""
    return [None if i % 5 == 3 else r for i, r in enumerate(setup.variety(completions))]


def start(folder, algorithm, **settings):
    trainer = setup.build(
        Kept, folder, algorithm=algorithm, reward=some,
        config={"per_device_train_batch_size": 16}, **settings,
    )  # fmt: skip
    trainer.train()
    return trainer.first, trainer


def test_token_rewards_with_divergence_and_whitening(tmp_path):
    """REINFORCE++: the answer's reward at its last token, k1 at every token, whitened returns."""
    model, _ = setup.tiny()
    model.save_pretrained(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():  # after TRL knows where the reference is: the policy has moved
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    moved = copy.deepcopy(model)
    rule = losses.reinforce_pp(kl_coef=0.5, gamma=0.9)
    batch, trainer = start(tmp_path, rule, model=model)
    mask = batch["loss_mask"]
    present = ~batch["rewards"][:, 0].isnan()
    assert 0 < present.sum() < len(present)
    assert torch.equal(mask, batch["completion_mask"].bool() & present[:, None])
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = mask.shape[1]
    start_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")

    def log_prob(model):
        scores = model(input_ids=ids, attention_mask=attention).logits[:, -width - 1 : -1]
        taken = scores.log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]
        return taken.detach()

    torch.testing.assert_close(log_prob(start_model)[mask], batch["ref_per_token_logps"][mask],
                               rtol=1e-4, atol=1e-4)  # fmt: skip
    kl = log_prob(moved) - log_prob(start_model)
    assert kl[mask].abs().max() > 0.01
    expected = torch.zeros_like(kl)
    for i, length in enumerate(mask.sum(1).tolist()):
        ahead = 0.0
        for t in reversed(range(length)):
            last = batch["rewards"][i, 0] if t == length - 1 else 0.0
            ahead = last - 0.5 * kl[i, t] + 0.9 * ahead
            expected[i, t] = ahead
    steps = expected[mask]
    white = (expected - steps.mean()) / steps.std()
    torch.testing.assert_close(batch["advantages"][mask], white[mask], rtol=1e-3, atol=1e-3)
    assert (batch["advantages"][~mask] == 0).all()
    means = (white * mask).sum(1) / mask.sum(1).clamp(min=1)
    assert batch["shown"] == pytest.approx(means.tolist(), abs=1e-3)
    assert all("kl" in h for h in trainer.state.log_history if "loss" in h)


def test_length_weighs_the_baseline(tmp_path):
    batch, _ = start(tmp_path, losses.opo())
    length = batch["completion_mask"].sum(1).double()
    reward = batch["rewards"][:, 0].double()
    for group in torch.arange(len(reward)).split(4):
        group = group[~reward[group].isnan()]
        baseline = (length[group] * reward[group]).sum() / length[group].sum()
        expected = (reward[group] - baseline).float()
        torch.testing.assert_close(batch["advantages"][group], expected, rtol=1e-4, atol=1e-5)


def test_advantages_of_answers_are_whitened_over_tokens(tmp_path):
    batch, _ = start(tmp_path, losses.reinforce_pp_baseline(kl_coef=0.0))
    plain, _ = start(tmp_path, replace(
        losses.reinforce_pp_baseline(kl_coef=0.0),
        advantage=replace(losses.reinforce_pp_baseline().advantage, whiten=False),
    ))  # fmt: skip
    mask = batch["loss_mask"]
    before = plain["advantages"][:, None].expand(mask.shape)
    steps = before[mask]
    assert len(set(mask.sum(1).tolist())) > 2
    expected = (steps - steps.mean()) / steps.std()
    torch.testing.assert_close(batch["advantages"][mask], expected, rtol=1e-4, atol=1e-5)


def test_gradient_of_token_advantages_is_that_of_one_batch(tmp_path):
    done = setup.compare(
        tmp_path, "reinforce_pp", per_device_train_batch_size=4, max_steps=3,
        gradient_accumulation_steps=2, steps_per_generation=4, max_completion_length=16,
    )  # fmt: skip
    assert max(done.errors) < 1e-4
    assert len(done.widths) > 1


def test_soft_punishment_is_added_to_the_reward(tmp_path):
    rule = losses.dapo(refill=None, overlong_cache=4)
    batch, trainer = start(tmp_path, rule)
    length = batch["completion_mask"].sum(1)
    assert length.max() == 8
    assert length.min() < 5
    punishment = ((8 - 4 - length.float()) / 4).clamp(-1, 0)
    torch.testing.assert_close(batch["rewards"][:, 1], punishment)
    total = batch["rewards"][:, 0] + punishment
    group = torch.arange(len(total)) // 4
    torch.testing.assert_close(batch["advantages"], losses.group_advantage(total, group))
    assert (batch["rewards"][:, 0].isnan() == ~batch["loss_mask"].any(1)).all()
    assert "rewards/soft_overlong/mean" in trainer.state.log_history[0]


def test_refilling_by_reward_sees_the_punishment(tmp_path):
    """All answers are right, and some of them too long: such a group carries signal."""
    rule = losses.dapo(refill="reward", overlong_cache=8)
    trainer = setup.build(
        Kept, tmp_path, algorithm=rule, reward=lambda completions, **_: [1.0] * len(completions)
    )
    trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.first["advantages"].abs().max() > 0


def test_answers_that_were_cut_leave_the_loss_and_stay_in_their_group(tmp_path):
    batch, trainer = start(tmp_path, losses.dapo(refill=None, drop_truncated=True))
    plain, _ = start(tmp_path, losses.dapo(refill=None))
    completion, kept = batch["completion_ids"], batch["completion_mask"].bool()
    cut = kept.all(1) & (completion[:, -1] > 1)
    assert 0 < cut.sum() < len(cut)
    missing = batch["rewards"][:, 0].isnan()
    assert torch.equal(batch["loss_mask"], kept & ~cut[:, None] & ~missing[:, None])
    torch.testing.assert_close(batch["advantages"], plain["advantages"])
    log = trainer.state.log_history[0]
    assert log["sampling/dropped_truncated"] == pytest.approx(cut.float().mean().item())


def test_slope_has_to_fit_the_longest_answer(tmp_path):
    with pytest.raises(ValueError, match=r"overlong_cache=9 must be at most .*_length=8"):
        setup.build(PolicyTrainer, tmp_path, algorithm=losses.dapo(refill=None, overlong_cache=9))
    with pytest.raises(ValueError, match="overlong_cache must be at least 1, got 0"):
        losses.dapo(overlong_cache=0)


def test_the_greedy_answer_is_the_baseline(tmp_path):
    """ReMax: reward minus that of the greedy answer to the same prompt, which leaves no trace."""
    calls = []

    def reward(prompts, completions, log_extra, log_metric, **_):
        calls.append(list(zip(prompts, completions, strict=True)))
        log_extra("text", list(completions))
        log_metric("answers", len(completions))
        return [0.1 * len(c.split()) + WORDS.index((c.split() or ["w0"])[0]) for c in completions]

    trainer = setup.build(
        Kept, tmp_path, algorithm=losses.remax(), reward=reward,
        config={"per_device_train_batch_size": 8, "max_steps": 1},
    )  # fmt: skip
    model = copy.deepcopy(trainer.model)
    trainer.train()
    sampled, greedy = calls
    assert (len(sampled), len(greedy)) == (8, 2)
    assert [p for p, _ in greedy] == [p for p, _ in sampled[::4]]
    for prompt, text in greedy:
        ids = trainer._tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = model.generate(ids, do_sample=False, max_new_tokens=8, eos_token_id=1, pad_token_id=0)
        assert trainer._tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == text
    ignore = {"log_extra": lambda *_: None, "log_metric": lambda *_: None}
    baseline = torch.tensor(reward(*zip(*greedy, strict=True), **ignore)).repeat_interleave(4)
    batch = trainer.first
    expected = batch["rewards"][:, 0] - baseline
    torch.testing.assert_close(batch["advantages"], expected)
    assert expected.abs().max() > 0.5
    (logged,) = [h for h in trainer.state.log_history if "reward" in h]
    assert logged["reward_greedy"] == pytest.approx(baseline.mean().item())
    assert logged["answers"] == 8.0
    lengths = batch["completion_mask"].sum(1).float()
    assert logged["completions/mean_length"] == pytest.approx(lengths.mean().item())
    assert list(trainer._logs["extra"]["text"]) == [text for _, text in sampled]
    assert trainer.generated == 10
