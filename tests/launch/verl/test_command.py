"""The command: files, JSON, exit status, and errors in one sentence."""

import json
from pathlib import Path

import pytest
import yaml

from polopt.launch.cli import main
from polopt.launch.verl import check

SCRIPT = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=16 "
    "data.train_files=$DATA/gsm8k/train.parquet data.val_files=/v.parquet "
    "actor_rollout_ref.model.path=/m actor_rollout_ref.rollout.n=4 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=16 "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 "
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1 "
    "trainer.n_gpus_per_node=2 trainer.experiment_name=a_$(date +%F)\n"
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the script; the installed libraries are not looked at."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "_job", lambda recipe: [])
    Path("run.sh").write_text(SCRIPT)
    return tmp_path


def test_json(here, capsys):
    assert main(["import-verl", "run.sh", "--json", "--set", "DATA=/d"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["arithmetic"]["gradient_accumulation_steps"] == 8
    assert {k["verdict"] for k in answer["keys"]} <= {"exact", "converted", "ours"}
    assert answer["written"] == [
        f"run/{n}" for n in ("recipe.yaml", "accelerate.yaml", "vllm.txt", "report.md")
    ]
    assert yaml.safe_load(Path("run/recipe.yaml").read_text()) == answer["recipe"]
    assert yaml.safe_load(Path("run/accelerate.yaml").read_text()) == answer["accelerate"]
    assert answer["recipe"]["name"] == "a_-date-+-F"


def test_markdown_and_open_names(here, capsys):
    assert main(["import-verl", "run.sh", "--out", "a/b"]) == 1
    report = capsys.readouterr().out
    assert "- data.train_files: `--set DATA=…`" in report
    assert Path("a/b/report.md").read_text() in report
    task = yaml.safe_load(Path("a/b/recipe.yaml").read_text())["task"]
    assert task["train_files"] == ["${DATA}/gsm8k/train.parquet"]
    assert "accelerate launch --config_file a/b/accelerate.yaml -m polopt train" in report


def test_server_command(here, capsys):
    main(["import-verl", "run.sh", "--set", "DATA=/d"])
    text = Path("run/vllm.txt").read_text()
    assert "vllm serve /m \\\n  --tensor-parallel-size 1 \\\n  --data-parallel-size 2" in text
    assert """--weight-transfer-config '{"backend": "nccl"}'""" in text


def test_refusals_write_nothing(here, capsys):
    Path("run.sh").write_text(SCRIPT.strip() + " model_engine=megatron\n")
    assert main(["import-verl", "run.sh", "--set", "DATA=/d"]) == 3
    assert "## Refused: nothing is written without --allow" in capsys.readouterr().out
    assert not Path("run").exists()
    assert main(["import-verl", "run.sh", "--set", "DATA=/d", "--allow"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no.sh"], "cannot read the script no.sh: No such file or directory"),
        (["."], "cannot read the script .: Is a directory"),
        (["bytes.sh"], "cannot read the script bytes.sh: it is not a text file"),
        (["run.sh", "--set", "DATA"], "--set 'DATA' is not of the form NAME=VALUE"),
        (["run.sh", "--set", "data.rows=many"], "--set data.rows=many must be a whole number"),
        (["run.sh", "--set", "trainer.nnodes=x"], "trainer.nnodes must be a whole number, got 'x'"),
        (["odd.sh"], "odd.sh: line 2: unbalanced single quote"),
    ],
)
def test_errors(here, capsys, words, message):
    Path("bytes.sh").write_bytes(b"\xff\xfe\x00")
    Path("odd.sh").write_text("true\necho 'a\n")
    assert main(["import-verl", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_substitutions_are_split_behind_the_name(here, capsys):
    Path("run.sh").write_text(SCRIPT.replace("$DATA", "$(f a=b)"))
    assert main(["import-verl", "run.sh", "--set", "$(f a=b)=/d=e"]) == 0
    task = yaml.safe_load(Path("run/recipe.yaml").read_text())["task"]
    assert task["train_files"] == ["/d=e/gsm8k/train.parquet"]


def test_unknown_keys_of_accelerate_are_found():
    pytest.importorskip("accelerate")
    tree = {"num_processes": 2, "fsdp_config": {"fsdp_version": 2, "fsdp_nope": 1}, "colour": 1}
    assert check._accelerate(tree) == [
        "accelerate.yaml: unknown key 'colour'",
        "accelerate.yaml: unknown key 'fsdp_config.fsdp_nope'",
    ]
