"""`polopt doctor` on the command line, before a run and after one."""

import json
import re
from pathlib import Path

import pytest

from polopt.launch.cli import main


def lines(path, **columns):
    names = list(columns)
    rows = zip(*columns.values(), strict=True)
    text = "".join(
        json.dumps({"step": i, **dict(zip(names, row, strict=True))}) + "\n"
        for i, row in enumerate(rows)
    )
    path.write_text(text)
    return str(path)


def test_findings_nothing_found_and_not_understood(tmp_path, capfd):
    bad = lines(tmp_path / "a.jsonl", return_mean=[1.0] * 20, kl_approx=[0.01] * 20)
    assert main(["doctor", bad]) == 1
    out = capfd.readouterr().out
    assert "the reward is the same all the time [reward-constant; confidence high]" in out
    assert "▁▁▁" in out
    assert "remedy: Run the reward" in out
    good = lines(tmp_path / "b.jsonl", return_mean=[float(i) for i in range(20)])
    assert main(["doctor", good]) == 0
    assert "nothing found" in capfd.readouterr().out
    (tmp_path / "c.jsonl").write_text("")
    assert main(["doctor", bad, str(tmp_path / "c.jsonl")]) == 2
    streams = capfd.readouterr()
    assert streams.err.strip().endswith("c.jsonl is empty")
    assert "reward-constant" in streams.out


def test_json(tmp_path, capfd):
    bad = lines(tmp_path / "a.jsonl", return_mean=[1.0] * 20, kl_approx=[0.01] * 20)
    assert main(["doctor", bad, "--json"]) == 1
    (run,) = json.loads(capfd.readouterr().out)["runs"]
    (finding,) = run["findings"]
    assert finding["id"] == "reward-constant"
    assert finding["evidence"][0]["values"] == [1.0] * 20
    assert (run["framework"], run["kind"], run["rows"]) == ("polopt", "control", 20)


def test_wrong_words(here, capfd):
    assert main(["doctor"]) == 2
    assert main(["doctor", "optimizer.lr=3"]) == 2
    assert main(["doctor", "nothing.jsonl"]) == 2
    assert main(["doctor", "nothing.yaml"]) == 2
    for line in capfd.readouterr().err.strip().splitlines():
        assert line.startswith("polopt: ")
    assert main(["doctor", "fake.yaml", "more.yaml"]) == 2


def test_a_recipe_and_the_warning_of_train(here, capfd):
    assert main(["doctor", "fake.yaml"]) == 0
    assert "nothing found" in capfd.readouterr().out
    odd = ["fake.yaml", "algorithm={use: ppo, clip: 0.9}"]
    assert main(["doctor", *odd, "--json"]) == 1
    (finding,) = json.loads(capfd.readouterr().out)["findings"]
    assert finding["id"] == "range-clip"
    assert main(["train", *odd, "--dry-run", "--json"]) == 0
    streams = capfd.readouterr()
    assert json.loads(streams.out)["checks"] == [
        "the clip range is outside the usual range (algorithm.clip is 0.9). "
        "Set algorithm.clip to 0.1 to 0.3."
    ]
    assert streams.err.count("\n") == 1
    assert main(["train", "fake.yaml", "doctor={on_fatal: never}", "--dry-run"]) == 2
    assert "'doctor.on_fatal'" in capfd.readouterr().err


def test_a_fatal_finding_saves_and_stops_a_run(here, only_run, capfd):
    recipe = ["fake.yaml", "collector.total_frames=50", "task.fault=grad"]
    assert main(["train", *recipe, "doctor.on_fatal=stop", "--json"]) == 1
    streams = capfd.readouterr()
    summary = json.loads(streams.out)
    assert summary["status"] == "stopped"
    assert summary["steps"] == 5
    assert list(summary["doctor"]) == ["nonfinite"]
    assert "doctor: nonfinite: the loss or its gradient is NaN" in streams.err
    assert [p.name for p in sorted((only_run() / "checkpoints").iterdir())][-1] == "step-5"
    assert main(["doctor", str(only_run())]) == 1


def test_a_fatal_finding_is_only_told_by_default(here, capfd):
    recipe = ["fake.yaml", "collector.total_frames=9", "task.fault=grad"]
    assert main(["train", *recipe, "--json"]) == 0
    streams = capfd.readouterr()
    assert json.loads(streams.out)["steps"] == 9
    assert streams.err.count("doctor: nonfinite") == 1


def test_a_log_does_nothing_to_a_terminal(here, capfd):
    Path("a.log").write_text("step:1 - actor/entropy:1\n\x1b]0;x\x07 CUDA out of memory \x1b[2J\n")
    Path("b\x1b[2J.jsonl").write_text(json.dumps({"step": 1, "\x1b[2Jfoo\x07": 1}))
    assert main(["doctor", "a.log", "b\x1b[2J.jsonl"]) == 2
    out, err = capfd.readouterr()
    assert not {"\x1b", "\x07"} & {*out, *err}
    assert "CUDA out of memory \\x1b[2J" in out
    assert "it has \\x1b[2Jfoo\\x07, step" in err


def test_what_may_not_be_looked_at(here, capfd, monkeypatch):
    stat = Path.stat

    def refuse(path, **kwargs):
        if path.parts[:1] == ("locked",):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **kwargs)

    monkeypatch.setattr(Path, "stat", refuse)
    for command in ("doctor", "report"):
        assert main([command, "locked/x.log"]) == 2
        message = "polopt: cannot read locked/x.log: Permission denied\n"
        assert capfd.readouterr().err == message
    assert main(["doctor", "locked/x.yaml"]) == 2
    assert "locked/x.yaml" in capfd.readouterr().err


def test_no_word_is_not_this_folder(here, capfd):
    assert main(["doctor", ""]) == 2
    assert "name a run" in capfd.readouterr().err


def test_the_checklist_of_the_guide_is_gone_through(here, capfd):
    pytest.importorskip("torchrl")
    assert main(["doctor", "cartpole-ppo", "algorithm.clip=0.9", "--json"]) == 1
    found = json.loads(capfd.readouterr().out)
    items = {i["name"]: i for i in found["checklist"]}
    assert items["algorithm.clip"]["state"] == "odd"
    assert items["algorithm.lam"] | {"advice": ""} == {
        "section": "8, priority 2", "name": "algorithm.lam", "value": 0.95, "state": "fine",
        "advice": "",
    }  # fmt: skip
    assert items["update.target_kl"]["state"] == "missing"
    assert items["optimizer.lr"]["state"] == "outside"  # 0.004
    assert "replay.capacity" not in items
    assert main(["doctor", "pendulum-sac"]) == 0
    out = capfd.readouterr().out
    assert " -  update.max_grad_norm" in out
    assert "ok  replay.capacity" in out
    assert "algorithm.clip" not in out
    assert " -  optimizer.lr.use" in out
    assert main(["doctor", "cartpole-double-dqn", "algorithm.gamma=1.0"]) == 0
    out = capfd.readouterr().out
    assert "ok  algorithm.use" in out
    assert " ?  algorithm.gamma" in out
    # A rate that falls over 60000 steps is no warm-up.
    assert " ?  optimizer.lr.use" in out
    main(["doctor", "cartpole-ppo"])
    assert "ok  optimizer.lr.use" in capfd.readouterr().out


def test_the_checklist_of_language_models_knows_both_names_of_checkpointing():
    from polopt.launch.doctor.command import _settings
    from polopt.launch.doctor.walk import walk

    tree = {"trainer": {"activation_checkpointing": False, "num_iterations": 2}}
    items = {i.name: i for i in walk(_settings(tree, "recipe", ()), [])}
    assert items["trainer.activation_checkpointing"].value is False
    assert items["trainer.num_iterations"].state == "outside"
    assert items["trainer.num_generations"].state == "missing"
    assert items["vllm.flags.max_num_batched_tokens"].state == "missing"


def test_every_item_of_the_checklist_is_a_setting_and_its_rules_are_rules():
    from polopt.launch.doctor.names import parameter, table
    from polopt.launch.doctor.rules import rules

    known = {rule.id for rule in rules()}
    for row in table("walk"):
        kind = "llm" if row["kind"] == "llm" else "control"
        assert parameter(row["setting"], "polopt", kind)
        assert {*row["rules"].split()} <= known
        assert row["kind"] in ("control", "policy", "replay", "llm")
        assert bool(row["low"]) == bool(row["high"])
        for name in re.findall(r"\*(\w+)", row["low"] + row["high"]):
            assert parameter(name, "polopt", kind)
    walked = {r for row in table("walk") for r in row["rules"].split()}
    settings = {r.id for r in rules() if r.settings}
    assert settings - walked == {"override-lost"}
