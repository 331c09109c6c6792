"""`polopt serve`, and what a recipe may say about vLLM; no vLLM is started here."""

import json

import pytest

pytest.importorskip("trl")

from polopt.launch import serve as module
from polopt.launch.cli import main

VLLM = ["trainer.use_vllm=true", "trainer.vllm_mode=server"]


def refused(capsys, *words):
    assert main(list(words)) == 2
    return capsys.readouterr().err


def test_a_recipe_is_needed(capsys):
    assert "name a recipe first" in refused(capsys, "serve")


def test_the_recipe_must_generate_with_vllm(capsys):
    assert "add trainer.use_vllm=true" in refused(capsys, "serve", "arithmetic-dapo")
    assert "add trainer.use_vllm=true" in refused(capsys, "serve", "cartpole-ppo")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("vllm.host=0.0.0.0", "is every interface"),
        (
            "vllm.flags={host: 0.0.0.0}",
            "flags has 'host', which polopt sets: leave it out, and set vllm.host",
        ),
        ("vllm.flags={middleware: mine}", "flags has 'middleware', which polopt sets"),
        ("trainer.vllm_mode=sever", "'trainer.vllm_mode' must be colocate or server, got 'sever'"),
        ("vllm.port=99999", "port must be from 0 to 65535, got 99999"),
        ("vllm.backend=mpi", "backend must be nccl, gloo or safetensors, got 'mpi'"),
        ("vllm.hots=a", "unknown key 'vllm.hots', did you mean 'host'?"),
        ("vllm.max_model_length=0", "max_model_length must be at least 1, got 0"),
    ],
)
def test_wrong_settings_are_told_before_anything_starts(capsys, setting, message):
    words = ["train", "arithmetic-dapo", *VLLM, setting, "--dry-run"]
    assert message in refused(capsys, *words)


def test_a_section_without_effect_is_refused(capsys):
    text = refused(capsys, "train", "arithmetic-dapo", "vllm.port=0", "--dry-run")
    assert "'vllm' has no effect without trainer.use_vllm=true" in text


def test_the_resolved_recipe_has_the_section(capsys):
    assert main(["train", "arithmetic-dapo", *VLLM, "--dry-run", "--json"]) == 0
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    assert recipe["vllm"]["host"] == "127.0.0.1"


class Short:
    """A server that starts, and ends when it is looked at for the second time."""

    latest = None

    def __init__(self, model, settings, log, *, key):
        self.model, self.log, self.key, self.url = model, log, key or "made", "http://host:1"
        self.looks = 0
        Short.latest = self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.looks = -1

    def alive(self):
        self.looks += 1
        folder = self.log.parent
        assert (folder / "key").read_text() == self.key
        assert (folder / "key").stat().st_mode & 0o777 == 0o600
        return self.looks < 2


def test_it_says_where_and_ends_with_the_server(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("polopt.ext.vllm.server.Server", Short)
    monkeypatch.setattr("polopt.launch.llm.LlmJob.check_here", lambda job: None)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    words = ["serve", "arithmetic-dapo", *VLLM, "--model", "mine", "--runs", str(tmp_path)]
    assert main(words) == 1  # it was not asked to end
    said = capsys.readouterr().err
    assert "mine is served at http://host:1" in said
    assert "polopt train arithmetic-dapo" in said
    assert "trainer.vllm_server_base_url=http://host:1" in said
    assert "ended by itself" in said
    [folder] = tmp_path.iterdir()
    assert not (folder / "key").exists()
    assert Short.latest.looks == -1
