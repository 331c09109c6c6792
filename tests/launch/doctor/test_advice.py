"""What is advised can be done, and what the checklist calls fine is."""

import re

import pytest

from polopt.launch.cli import main
from polopt.launch.doctor import phases
from polopt.launch.doctor.command import _settings
from polopt.launch.doctor.diagnose import _named, preflight
from polopt.launch.doctor.log import Log, Series
from polopt.launch.doctor.names import table
from polopt.launch.doctor.rules import rules
from polopt.launch.doctor.walk import _INSIDE, walk
from polopt.launch.job import prepare
from polopt.launch.recipe import RecipeError, load
from polopt.launch.train import find_recipe, recipe_names

SECTIONS = (
    "algorithm|checkpoints|collector|evaluation|exploration|groups|launch|network|optimizer|"
    "replay|task|trainer|update|vllm"
)
KINDS = ("cartpole-ppo", "cartpole-grpo", "pendulum-ddpg", "cartpole-dqn", "arithmetic-grpo",
         "arithmetic-gspo")  # fmt: skip
ODD = {
    "smollm2-arithmetic": {"range-llm-lr"},  # all weights at 3e-5, for a run of only 40 steps
}


def settings_of(name, *overrides):
    job = prepare(load(find_recipe(name), overrides), name=name)
    return _settings(job.tree, name, overrides)


def refusal(name, override):
    """Return what is said against a setting; the value may well be wrong."""
    try:
        settings_of(name, override)
    except RecipeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", KINDS)
def test_every_key_that_is_advised_is_one_of_the_recipe(name):
    pytest.importorskip("trl" if name.startswith("arithmetic") else "torchrl")
    log = settings_of(name)
    texts = [phases._knob(phase, log) for phase in phases.PHASES]
    texts += [_named(rule.remedy, log) for rule in rules() if rule.kind in ("any", log.kind)]
    shown = {row["setting"] for row in table("walk")} & {*_INSIDE}
    shown = {log.parameter(setting) for setting in shown}
    texts += [item.name for item in walk(log, []) if item.name not in shown]
    keys = {k for text in texts for k in re.findall(rf"\b(?:{SECTIONS})(?:\.\w+)+", text)}
    keys -= {"trainer.balance_batch"}  # which the remedy says is verl's
    assert len(keys) > 3
    refused = {key: refusal(name, f"{key}=1") for key in keys}
    assert {key: error for key, error in refused.items() if "unknown" in error} == {}


def test_the_knob_of_replay_names_its_own_batch(monkeypatch):
    pytest.importorskip("torchrl")
    monkeypatch.setattr(phases, "find_spec", lambda name: None)
    uniform = phases._knob("replay_time", settings_of("pendulum-ddpg"))
    assert "a larger replay.batch_size with a smaller update.steps_per_batch" in uniform
    assert "numba" not in uniform
    drawn = settings_of("pendulum-ddpg", "replay.prioritised={alpha: 0.6}")
    assert "pip install 'polopt[replay]'" in phases._knob("replay_time", drawn)
    monkeypatch.setattr(phases, "find_spec", lambda name: object())
    assert phases._knob("replay_time", drawn) == uniform
    # A log without its configuration.
    bare = Log(source="", framework="polopt", kind="control", columns={"replay_time": Series()})
    assert "replay.batch_size" in phases._knob("replay_time", bare)


@pytest.mark.parametrize(
    ("recipe", "name", "state"),
    [
        (["pendulum-ddpg", "checkpoints.every=39999"], "checkpoints.every", "outside"),
        (["pendulum-ddpg", "checkpoints.every=8000"], "checkpoints.every", "fine"),
        (["pendulum-ddpg"], "algorithm.use", "outside"),
        (["cartpole-double-dqn"], "algorithm.use", "fine"),
        (["pendulum-ddpg", "replay.learning_starts=30000"], "replay.learning_starts", "outside"),
        (["pendulum-ddpg", "replay.capacity=60000"], "replay.capacity", "outside"),
        (["pendulum-ddpg"], "update.max_grad_norm", "missing"),
        (["cartpole-ppo"], "update.minibatch_size", "outside"),  # half of the batch
        (["cartpole-ppo", "update.minibatch_size=256"], "update.minibatch_size", "fine"),
        (["cartpole-ppo", "algorithm.whiten=false"], "algorithm.whiten", "outside"),
        (["cartpole-ppo"], "optimizer.lr.then.end", "fine"),
    ],
)
def test_the_checklist_computes_what_it_says(recipe, name, state):
    pytest.importorskip("torchrl")
    items = {i.name: i.state for i in walk(settings_of(*recipe), [])}
    assert items[name] == state


def test_what_cannot_be_told_from_settings_is_not_called_fine():
    tree = {"trainer": {"max_completion_length": 512, "save_steps": 10, "max_steps": -1}}
    items = {i.name: i.state for i in walk(_settings(tree, "recipe", ()), [])}
    assert items["trainer.max_completion_length"] == "given"
    assert items["trainer.save_steps"] == "given"  # the run's length is not known


def test_shipped_recipes_pass():
    for needed in ("torchrl", "trl", "Box2D"):
        pytest.importorskip(needed)
    found = {n: {f.id for f in preflight(settings_of(n))} for n in recipe_names()}
    assert {n: ids for n, ids in found.items() if ids} == ODD


def test_a_name_that_is_nearly_a_recipe_and_a_setting_of_a_run(here, capfd):
    assert main(["doctor", "pendulum-sacc"]) == 2
    message = "there is no run, log or recipe 'pendulum-sacc', did you mean 'pendulum-sac'?"
    assert message in capfd.readouterr().err
    assert main(["doctor", str(here), "optimizer.lr=1"]) == 2
    assert "is no recipe: settings go with one" in capfd.readouterr().err
