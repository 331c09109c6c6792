"""docs/data.md: its example runs, and it names every setting and every reward."""

import inspect
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("trl")

from polopt.envs.dataset import dataset
from polopt.launch.cli import main
from polopt.launch.job import task_names

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def block(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_every_setting_is_named():
    assert [name for name in inspect.signature(dataset).parameters if f"`{name}`" not in TEXT] == []


def test_every_reward_is_named():
    rewards = {name for name, target in task_names().items() if "__call__" in vars(target)}
    assert {"MathVerify", "RewardModel", "TextFormat"} <= rewards
    assert [name for name in rewards if f"`{name}`" not in TEXT] == ["ReasoningGym"]


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("math_verify")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLOPT_CACHE", str(tmp_path / "cache"))
    exec(block("python")[0], {})
    Path("sums.yaml").write_text(block("yaml")[0])
    fast = ["model.warmup_steps=60", "trainer.max_steps=2"]
    assert main(["train", "sums.yaml", "--dry-run", *fast]) == 0
    capsys.readouterr()
    assert main(["train", "sums.yaml", "--json", *fast]) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert summary["steps"] == 2
    assert "data: 270 of 300 rows to train on, 30 held out" in err
    assert summary["rewards"]["math_verify"] == {"scored": 2 * 32 + 4 * 30}
