"""Models made in place, their cache, and how they are evaluated."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("reasoning_gym")
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, AutoTokenizer

from polopt.envs.text import arithmetic
from polopt.ext.trl import models
from polopt.ext.trl.evaluate import answer
from polopt.ext.trl.models import Pretrained, TinyQwen3, cache_folder

TINY = TinyQwen3(hidden_size=16, layers=1, heads=2, warmup_steps=3, warmup_batch_size=8)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("POLOPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def task():
    return arithmetic(train_size=200, evaluation_size=40)


def test_made_once_for_each_configuration(task, cache):
    folder = TINY.make(task)
    assert folder.parent == cache
    stamp = folder.stat().st_mtime_ns
    assert TINY.make(task) == folder
    assert folder.stat().st_mtime_ns == stamp
    others = {
        TINY.make(replace(task, train=task.train[1:])),
        replace(TINY, seed=1).make(task),
        replace(TINY, label_accuracy=1.0).make(task),
    }
    assert len(others | {folder}) == 4
    assert sorted(cache.iterdir()) == sorted(others | {folder})  # and nothing half-made


def test_held_out_problems_are_not_looked_at(task):
    blind = replace(task, evaluation=[{"prompt": "?"}])
    assert TINY.make(blind) == TINY.make(task)


def test_same_weights_again(task, cache):
    weights = (TINY.make(task) / "model.safetensors").read_bytes()
    cache.rename(cache.with_name("other"))
    torch.manual_seed(99)
    assert (TINY.make(task) / "model.safetensors").read_bytes() == weights


def test_nothing_is_left_when_saving_fails(task, cache, monkeypatch):
    from transformers import PreTrainedTokenizerFast

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        TINY.make(task)
    assert not list(cache.iterdir())


def test_it_is_whole_on_whichever_rank_it_is_made(task, cache):
    # transformers saves on the first rank alone, and another host may have its own cache.
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        folder = TinyQwen3(warmup_steps=2).make(task)
    finally:
        torch.distributed.destroy_process_group()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    again = TinyQwen3(warmup_steps=2, seed=0)._model(model.config.vocab_size)
    trained = [
        not torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    ]
    assert all(trained)  # the weights are those of the file, not random ones


def test_another_process_may_be_first(task, cache, monkeypatch):
    real, made = models._supervise, []

    def slow(*args):
        real(*args)
        if not made:
            made.append(None)
            made.append(TINY.make(task))

    monkeypatch.setattr(models, "_supervise", slow)
    assert TINY.make(task) == made[1]
    assert list(cache.iterdir()) == [made[1]]


def test_model_and_tokenizer(task):
    folder = TINY.make(task)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    for row in [*task.train, *task.evaluation]:
        assert tokenizer.unk_token_id not in tokenizer(row["prompt"])["input_ids"]
        ids = tokenizer(row["answer"])["input_ids"]
        assert tokenizer.decode(ids) == row["answer"]
        assert len(ids) == len(row["answer"])


def test_answers_leave_no_trace_and_repeat(task):
    folder = TINY.make(task)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    knobs = {"max_new_tokens": 4, "batch_size": 16}
    state = torch.get_rng_state()
    first = answer(model, tokenizer, task, task.evaluation, sample=True, **knobs)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    again = answer(model, tokenizer, task, task.evaluation, sample=True, **knobs)
    other = answer(model, tokenizer, task, task.evaluation, sample=True, seed=1, **knobs)
    assert first == again
    assert first.completions != other.completions
    assert first.accuracy == sum(task.correct(task.evaluation, first.completions)) / 40
    whole = answer(
        model, tokenizer, task, task.evaluation, sample=False, max_new_tokens=4, batch_size=40
    )
    parts = answer(model, tokenizer, task, task.evaluation, sample=False, **knobs)
    assert whole == parts


def test_pretrained_is_a_path(task):
    assert Pretrained(path="some/model").make(task) == "some/model"


def test_cache_of_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("POLOPT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "polopt"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"heads": 3}, "heads must be even and divide hidden_size=64, got 3"),
        ({"label_accuracy": 0.0}, r"label_accuracy must be in \(0, 1\], got 0.0"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        TinyQwen3(**arguments)
