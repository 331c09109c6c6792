"""Checkpoints are whole or not there, and the model card says what was trained."""

import importlib.util
import json
import os
import resource
import signal
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")
from transformers.trainer_utils import get_last_checkpoint

from polopt import losses
from polopt.ext.trl.checkpoints import recover_folder, replace_folder
from polopt.ext.trl.trainer import PolicyTrainer

spec = importlib.util.spec_from_file_location("trl_setup", Path(__file__).with_name("trl_setup.py"))
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)


def weights(trainer):
    return torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


def start(folder, kind=PolicyTrainer, resume=None, **config):
    knobs = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, **config}
    trainer = setup.build(kind, folder, algorithm=setup.algorithm("dapo"), config=knobs)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


class Killed(PolicyTrainer):
    """Dies by SIGKILL in the middle of its second checkpoint, when the weights are written."""

    def _save_optimizer_and_scheduler(self, folder):
        if self.state.global_step == 2:
            assert (Path(folder) / "model.safetensors").exists()
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_optimizer_and_scheduler(folder)


def test_a_kill_while_saving_leaves_the_last_one_whole(tmp_path):
    folder = tmp_path / "run"
    torch.set_num_threads(1)  # before the fork: a child has none of its parent's threads
    child = os.fork()
    if child == 0:
        start(folder, Killed, save_total_limit=1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    last = get_last_checkpoint(str(folder))
    assert last == str(folder / "checkpoint-1")
    resumed = start(folder, resume=last, save_total_limit=1)
    torch.testing.assert_close(weights(resumed), weights(start(tmp_path / "whole")), rtol=0, atol=0)
    # What the killed one left is gone, and older ones go when newer ones are there.
    assert {p.name for p in folder.iterdir()} == {"checkpoint-3", "README.md"}


class Full(PolicyTrainer):
    """Meets a limit on the size of files, as on a full disk, at its second checkpoint."""

    limit = 2000

    def _save_checkpoint(self, *args, **kwargs):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.state.global_step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, before[1]))
        try:
            super()._save_checkpoint(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [2000, 30_000])
def test_a_full_disk_leaves_the_last_one_whole(tmp_path, limit, monkeypatch):
    monkeypatch.setattr(Full, "limit", limit)  # too small for the weights; for the optimizer
    with pytest.raises(OSError, match=r"cannot write the checkpoint .*-2: .* as they were"):
        start(tmp_path, Full, save_total_limit=1, optim="adamw_torch")
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint-1", "README.md"}
    assert json.loads((tmp_path / "checkpoint-1" / "polopt.json").read_text())["exact"]
    start(tmp_path, resume=str(tmp_path / "checkpoint-1"), optim="adamw_torch")


def test_ranks_that_do_not_write_know_the_best_one_by_its_name(tmp_path, monkeypatch):
    trainer = start(tmp_path, max_steps=1)
    trainer.state.best_global_step = 1
    trainer.state.best_model_checkpoint = str(tmp_path / "_saving" / "checkpoint-1")
    monkeypatch.setattr(type(trainer.args), "should_save", False)
    trainer._save_checkpoint(trainer.model, trial=None)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")


def test_a_folder_takes_the_place_of_another(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a").write_text("1")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "b").write_text("2")
    replace_folder(tmp_path / "new", tmp_path / "old")
    assert [p.name for p in tmp_path.rglob("*")] == ["old", "b"]


def test_a_replacement_that_was_cut_off_is_undone(tmp_path, monkeypatch):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("")
    rename, target = Path.rename, tmp_path / "old"

    def killed(self, to):
        if self.name == "new":
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        replace_folder(tmp_path / "new", target)
    assert not target.exists()
    recover_folder(target)
    assert [p.name for p in target.iterdir()] == ["old"]
    recover_folder(target)  # nothing to do
    monkeypatch.undo()
    replace_folder(tmp_path / "new", target)
    assert [p.name for p in target.iterdir()] == ["new"]


def test_the_best_checkpoint_of_transformers_is_found_and_kept(tmp_path):
    """`metric_for_best_model` and `load_best_model_at_end` work as in TRL."""
    values = iter([0.1, 0.9, 0.2, 0.3])

    class Scored(PolicyTrainer):
        def evaluate(self, *args, **kwargs):
            metrics = {"eval_reward": next(values)}
            self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    trainer = setup.build(
        Scored, tmp_path, algorithm=setup.algorithm("dapo"), eval_dataset=[],
        config={"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "save_total_limit": 2,
                "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "reward",
                "load_best_model_at_end": True},
    )  # fmt: skip
    trainer.train()
    best = str(tmp_path / "checkpoint-2")
    assert trainer.state.best_model_checkpoint == best
    kept = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert kept["best_model_checkpoint"] == best
    assert {p.name for p in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    again = setup.tiny()[0].from_pretrained(best)
    vector = torch.nn.utils.parameters_to_vector(again.parameters())
    torch.testing.assert_close(weights(trainer), vector.detach(), rtol=0, atol=0)


def test_what_is_pushed_is_a_whole_checkpoint(tmp_path, monkeypatch):
    from transformers import Trainer

    pushed = []

    def push(self, folder):
        pushed.append((Path(folder).name, (Path(folder) / "polopt.json").exists()))

    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    trainer = setup.build(
        PolicyTrainer, tmp_path, algorithm=setup.algorithm("dapo"),
        config={"save_strategy": "steps", "save_steps": 1, "max_steps": 2},
    )  # fmt: skip
    trainer.args.push_to_hub = True
    trainer.train()
    assert pushed == [("checkpoint-1", True), ("checkpoint-2", True)]


def test_a_hub_that_cannot_be_reached_is_one_sentence(tmp_path, monkeypatch):
    """At the start; later it costs a warning, and training goes on."""
    from transformers import Trainer
    from transformers.utils import PushInProgress

    from polopt.ext.trl import checkpoints

    said = []
    monkeypatch.setattr(checkpoints.logger, "warning", lambda text, *a: said.append(text % a))
    state = {"reached": False, "pushes": 0}

    def init(self, *_, **__):
        if not state["reached"]:
            raise ConnectionError("[Errno 111] Connection refused\nand more")
        self.hub_model_id, self.push_in_progress = "me/tiny", None

    def push(self, folder):
        state["pushes"] += 1
        if state["pushes"] == 1:
            raise ConnectionError("[Errno 101] Network is unreachable")
        job = Future()
        job.set_exception(ConnectionError("[Errno 110] Timed out"))
        self.push_in_progress = PushInProgress([job])

    monkeypatch.setattr(Trainer, "init_hf_repo", init)
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    knobs = {"push_to_hub": True, "hub_model_id": "me/tiny", "save_strategy": "steps",
             "save_steps": 1, "max_steps": 2}  # fmt: skip
    match = r"repository 'me/tiny' on the hub: .*refused; log in"
    with pytest.raises(ValueError, match=match) as caught:
        setup.build(PolicyTrainer, tmp_path, algorithm=setup.algorithm("dapo"), config=knobs)
    assert "\n" not in str(caught.value)
    state["reached"] = True
    trainer = setup.build(
        PolicyTrainer, tmp_path, algorithm=setup.algorithm("dapo"), config=knobs
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 2
    assert said[0].endswith("checkpoint-1: [Errno 101] Network is unreachable")
    assert said[1] == "a push to the hub has failed: [Errno 110] Timed out"


def test_the_model_card_says_what_was_trained(tmp_path):
    trainer = setup.build(PolicyTrainer, tmp_path, algorithm=losses.cispo())
    trainer.create_model_card("a-name", "someone/data", ["more"])
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: transformers\ntags: [polopt, trl, more]\n")
    assert "# a-name" in text
    assert "surrogate=Cispo(" in text
    assert "group_advantage" in text
    assert "rewards: variety" in text
    assert "arxiv.org" not in text
    assert "GRPO" not in text
