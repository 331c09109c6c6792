"""Names of the Hugging Face hub, from a server on this machine that speaks the hub's language."""

import importlib.util
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("math_verify")

import pyarrow as pa
from pyarrow import parquet

from polopt.ext.trl.models import TinyQwen3
from polopt.launch.job import prepare
from polopt.launch.record import read_metrics

spec = importlib.util.spec_from_file_location("hub", Path(__file__).with_name("hub.py"))
hub = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hub)

RECIPE = """\
task:
  use: dataset
  name: me/sums
  eval_split: test
  prompt_key: question
  rewards: [{use: MathVerify, boxed: false}]
  tokenizer: me/tiny
  max_prompt_length: 20
model: {use: pretrained, path: me/tiny}
algorithm: {use: grpo, kl_coef: 0.1}
trainer:
  per_device_train_batch_size: 16
  num_generations: 8
  max_completion_length: 4
  max_steps: 2
  logging_steps: 1
"""

SCRIPT = """\
import contextlib, io, json, sys
from polopt.launch.cli import main
found = []
for words in json.loads(sys.argv[1]):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        code = main(words)
    found.append([code, err.getvalue()])
print(json.dumps(found))
"""


def run(folder, url, *commands):
    """Train with settings, or run other words, in a process that takes `url` for the hub."""
    train = ["train", "sums.yaml", "--json"]
    commands = [words if words[0] == "eval" else [*train, *words] for words in commands]
    (folder / "sums.yaml").write_text(RECIPE)
    env = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(folder / "cache"),
           "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}  # fmt: skip
    env = {k: v for k, v in env.items() if k not in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(commands)], cwd=folder, env=env,
        capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Make the repositories: a dataset in parquet with two splits, one of lines, and a model."""
    random.seed(0)
    pairs = random.sample([(a, b) for a in range(20) for b in range(20)], 200)
    rows = [{"question": f"{a} + {b} =", "answer": str(a + b)} for a, b in pairs]
    data = tmp_path / "hub" / "datasets" / "me" / "sums" / "data"
    data.mkdir(parents=True)
    for split, part in (("train", rows[:160]), ("test", rows[160:])):
        parquet.write_table(pa.Table.from_pylist(part), data / f"{split}-00000-of-00001.parquet")
    lines = tmp_path / "hub" / "datasets" / "me" / "lines" / "train.jsonl"
    lines.parent.mkdir()
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("POLOPT_CACHE", str(tmp_path / "made"))
    maker = TinyQwen3(hidden_size=16, warmup_steps=0)
    tree = {"task": {"use": "dataset", "train_files": [str(lines)], "prompt_key": "question"},
            "model": {"use": "tiny_qwen3"}, "algorithm": {"use": "dapo"},
            "trainer": {}}  # fmt: skip
    made = maker.make(prepare(tree, name="x").task)
    shutil.copytree(made, tmp_path / "hub" / "models" / "me" / "tiny")
    return tmp_path / "hub"


@pytest.mark.slow
@pytest.mark.timeout(600)  # seven commands, each with its imports and downloads
def test_datasets_and_models_by_their_names(root, tmp_path):
    lines = ["task.name=me/lines", "task.eval_split=null"]
    with hub.Hub(root) as served:
        parquet_run, lines_run, evaluation, no_data, no_split, no_model, no_tokenizer = run(
            tmp_path, served.url, ["name=one"], [*lines, "name=two"],
            ["eval", "me/tiny", "--recipe", "sums.yaml", "--samples", "2"], ["task.name=me/none"],
            ["task.eval_split=dev"], ["model.path=me/none"], ["task.tokenizer=me/none"],
        )  # fmt: skip
        asked = "\n".join(served.asked)
    assert [parquet_run[0], lines_run[0], evaluation[0]] == [0, 0, 0], (parquet_run, evaluation)
    assert "data: 160 of 160 rows to train on, 40 held out" in parquet_run[1]
    assert "data: 198 of 200 rows to train on, 2 held out" in lines_run[1]
    runs = [f for name in ("one", "two") for f in (tmp_path / "runs").glob(f"{name}-*")]
    assert len(runs) == 2
    for folder in runs:
        assert json.loads((folder / "summary.json").read_text())["steps"] == 2
        # The reference model came from the hub as well.
        logged = [m for m in read_metrics(folder / "metrics.jsonl") if "kl" in m]
        assert [m["step"] for m in logged] == [1, 2]
    for name in ("train.jsonl", "train-00000-of-00001.parquet", "model.safetensors"):
        assert sum(line.startswith("GET") and name in line for line in asked.splitlines()) == 1
    for (code, err), message in (
        (no_data, "task: cannot load the dataset 'me/none' (config None, split 'train'): Dataset"),
        (no_split, "task: cannot load the dataset 'me/sums' (config None, split 'dev'): Unknown"),
        (no_model, "cannot load the model 'me/none': me/none is not a local folder and"),
        (no_tokenizer, "cannot load the tokenizer 'me/none': me/none is not a local folder and"),
    ):
        assert code == 2
        assert message in err
        assert "Traceback" not in err


@pytest.mark.slow
def test_without_a_network(root, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    lines = root / "datasets" / "me" / "lines" / "train.jsonl"
    data = ["task.name=null", f"task.train_files=[{lines}]", "task.eval_split=null"]
    here = ["task.tokenizer=null", "task.max_prompt_length=null"]
    found = run(tmp_path, url, here, [*data, *here])
    wanted = ("cannot load the dataset 'me/sums' (config None, split 'train'): Couldn't reach",
              "cannot load the model 'me/tiny': We couldn't connect to")  # fmt: skip
    for (code, err), message in zip(found, wanted, strict=True):
        assert code == 2
        assert message in err
        assert "Traceback" not in err
