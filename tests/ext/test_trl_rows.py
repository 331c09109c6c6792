"""What the training rows are: on all ranks, and when a run goes on from a checkpoint."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("trl")
from datasets import Dataset, concatenate_datasets

from polopt.ext.trl import checkpoints
from polopt.ext.trl.rows import fingerprint
from polopt.ext.trl.trainer import PolicyTrainer

spec = importlib.util.spec_from_file_location("trl_setup", Path(__file__).with_name("trl_setup.py"))
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)

ROWS = [{"prompt": f"w{i % 13} w{i * 5 % 13}", "answer": None if i % 7 == 3 else {"a": [i, i % 3]}}
        for i in range(2500)]  # fmt: skip


def test_a_fingerprint_is_of_the_values_and_their_order():
    whole = fingerprint(Dataset.from_list(ROWS))
    assert whole.startswith("2500 rows (")
    parts = concatenate_datasets([Dataset.from_list(ROWS[:13]), Dataset.from_list(ROWS[13:])])
    assert fingerprint(parts) == whole
    longer = Dataset.from_list(ROWS + ROWS[:100])
    assert fingerprint(longer.select(range(2500))) == whole
    assert fingerprint(longer) != whole
    turned = list(range(2500))
    turned[1500], turned[1501] = 1501, 1500
    assert fingerprint(Dataset.from_list(ROWS).select(turned)) != whole
    assert fingerprint(Dataset.from_list(ROWS).to_iterable_dataset()) is None


def start(folder, rows, resume=None, **settings):
    trainer = setup.build(
        PolicyTrainer, folder, algorithm=setup.algorithm("dapo"), rows=rows,
        config={"save_strategy": "steps", "save_steps": 1, "max_steps": 1 + (resume is not None)},
        **settings,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_a_run_does_not_go_on_with_other_rows_unless_told_to(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(checkpoints.logger, "warning", lambda text, *a: said.append(text % a))
    rows = [{"prompt": row["prompt"]} for row in ROWS[:48]]
    start(tmp_path, rows)
    last = tmp_path / "checkpoint-1"
    other = [*rows[:30], {"prompt": "w1"}, *rows[31:]]
    with pytest.raises(ValueError, match=r"has changed since .*checkpoint-1: 48 rows \(.*; bring"):
        start(tmp_path, other, str(last))
    assert start(tmp_path, other, str(last), accept_changed_data=True).state.global_step == 2
    assert start(tmp_path, rows, str(last)).state.global_step == 2
    assert not said
    (last / "rng_state.pth").unlink()
    start(tmp_path, rows, str(last))
    (text,) = said
    assert f"{last} lacks rng_state.pth, as where hosts do not share the file system" in text
