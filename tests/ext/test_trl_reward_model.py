"""Reward models: the score is the model's, smoothed where asked for, and faults are told."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("trl")
import torch
from transformers import AutoModelForSequenceClassification

from polopt.envs.contract import RewardError
from polopt.ext.trl.rewards import RewardModel

SETUP = Path(__file__).with_name("trl_setup.py")
spec = importlib.util.spec_from_file_location("trl_setup", SETUP)
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)


@pytest.fixture
def folder(tmp_path):
    """Make the folder of a reward model."""

    def make(labels=1, template=True, head=True, **settings):
        model, tokenizer = setup.tiny()
        config = model.config
        config.num_labels = labels
        for key, value in settings.items():
            setattr(config, key, value)
        torch.manual_seed(1)
        model = AutoModelForSequenceClassification.from_config(config)
        if template:
            tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
        weights = {k: v for k, v in model.state_dict().items() if head or not k.startswith("score")}
        model.save_pretrained(tmp_path, state_dict=weights)
        tokenizer.save_pretrained(tmp_path)
        return str(tmp_path)

    return make


def test_scores_are_those_of_the_model_alone(folder):
    path = folder()
    prompts, texts = ["w1 w2 "] * 5, ["w3", "w4 w5 w6", "", "w7 w8", "w9"]
    scores = RewardModel(path=path, batch_size=2)(prompts=prompts, completions=texts)
    _, tokenizer = setup.tiny()
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    for prompt, text, score in zip(prompts, texts, scores, strict=True):
        ids = tokenizer(prompt + text, return_tensors="pt")
        assert score == pytest.approx(model(**ids).logits.item(), abs=1e-6)
    assert len(set(scores)) == 5
    talks = [[{"role": "user", "content": "w1 w2"}]] * 5
    answers = [[{"role": "assistant", "content": text}] for text in texts]
    reward = RewardModel(path=path)
    assert reward(prompts=talks, completions=answers) == pytest.approx(scores, abs=1e-6)
    assert reward(prompts=talks, completions=texts) == pytest.approx(scores, abs=1e-6)


def test_smoothing_is_a_mean_over_dropout_that_disturbs_nothing(folder):
    path = folder(attention_dropout=0.2)
    prompts, texts = ["w1 w2 w3 w4 "] * 4, ["w3", "w4 w5 w6", "w5", "w7 w8"]
    plain = torch.tensor(RewardModel(path=path)(prompts=prompts, completions=texts))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    errors = {}
    for samples in (2, 64):
        reward = RewardModel(path=path, samples=samples)
        found = reward(prompts=prompts, completions=texts)
        assert found == reward(prompts=prompts, completions=texts)
        errors[samples] = (torch.tensor(found) - plain).abs().mean()
    assert torch.equal(torch.get_rng_state(), before)
    assert 0 < errors[64] < errors[2]
    assert RewardModel(path=path)(prompts=prompts, completions=texts) == plain.tolist()


@pytest.mark.parametrize(
    ("made", "settings", "message"),
    [
        ({}, {"samples": 3}, "has no dropout, so 3 passes are one: set samples to 1"),
        ({"labels": 2}, {}, "has 2 labels, expected one score"),
        ({"head": False}, {}, r"lacks the weights 'score.weight', which would be drawn at random"),
        (None, {"path": "/none"}, "cannot load the reward model '/none'"),
    ],
)
def test_models_that_are_none(folder, made, settings, message):
    path = {} if made is None else {"path": folder(**made)}
    with pytest.raises(RewardError, match=message):
        RewardModel(**{**path, **settings})(prompts=["w1"], completions=["w2"])


def test_numbers_out_of_range():
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        RewardModel(path="x", samples=0)
