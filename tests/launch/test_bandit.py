"""Bandits as a job: regret, its growth, exact resuming, refusals."""

import pytest
import torch

from polopt.launch.checkpoint import newest
from polopt.launch.job import prepare
from polopt.launch.recipe import RecipeError, load
from polopt.launch.record import read_metrics
from polopt.launch.run import Run
from polopt.launch.train import find_recipe


def job(*overrides):
    return prepare(load(find_recipe("bandit-ucb"), overrides), name="test")


def run(folder, prepared, *, resume=False):
    folder.mkdir(exist_ok=True)
    view = Run(folder, None if resume else prepared.tree)
    summary = prepared.train(view)
    view.finish(summary)
    return summary


def regrets(folder):
    return {m["step"]: m["regret"] for m in read_metrics(folder / "metrics.jsonl")}


TWO_ARMS = ("task.means=[0.9, 0.6]", "play.runs=100")


def test_the_regret_of_ucb1_grows_like_the_logarithm_within_its_bound(tmp_path):
    summary = run(tmp_path / "run", job(*TWO_ARMS, "play.plays=10000"))
    curve = regrets(tmp_path / "run")
    bound = job(*TWO_ARMS).task.ucb1_bound
    assert all(regret <= bound(plays) for plays, regret in curve.items())
    # Once every arm is well known, each tenfold of plays costs the same again.
    first, second = curve[1000] - curve[100], curve[10_000] - curve[1000]
    assert 0.5 < second / first < 2.0
    assert summary["best_arm_share"] > 0.95
    assert summary["regret"] == curve[10_000]
    assert (tmp_path / "run" / "regret.svg").exists()


def test_the_regret_of_a_constant_epsilon_grows_with_the_plays(tmp_path):
    rule = "exploration={use: EpsilonGreedy, epsilon: 0.2}"
    run(tmp_path / "run", job(*TWO_ARMS, rule, "play.plays=5000"))
    curve = regrets(tmp_path / "run")
    late, plays = curve[5000] - curve[1000], 4000
    assert late / plays == pytest.approx(0.3 * 0.2 / 2, rel=0.1)  # gap, and the share of its arm


@pytest.mark.parametrize(
    "rule",
    [
        "{use: Ucb}",
        "{use: EpsilonGreedy, epsilon: {use: Exponential, start: 1.0, end: 0.01, steps: 40}}",
        "{use: Boltzmann, temperature: {use: Linear, start: 1.0, end: 0.1, steps: 40}}",
    ],
)
def test_resuming_is_exact(tmp_path, rule):
    settings = f"exploration={rule}", "play.runs=7"
    whole = run(tmp_path / "whole", job(*settings, "play.plays=60"))
    run(tmp_path / "parts", job(*settings, "play.plays=25"))
    parts = run(tmp_path / "parts", job(*settings, "play.plays=60"), resume=True)
    assert parts == whole
    kept = [newest(tmp_path / name / "checkpoints")[1] for name in ("whole", "parts")]
    assert kept[0].keys() == kept[1].keys()
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("exploration={use: GaussianNoise}", "'exploration' must be a rule for discrete actions"),
        ("exploration={use: Ucp}", "unknown name 'Ucp', did you mean 'Ucb'"),
        ("exploration={use: Ucb, c: -1}", "c must be a finite number of at least 0, got -1"),
        ("play.plays=1", "plays must be at least 2, got 1"),
        ("play.runs=9000000", "runs 9,000,000 is more than the 1,000,000 that are held"),
        ("play.games=3", "unknown key 'play.games'"),
        ("task.means=[0.5, 1.5]", r"must be in \[0, 1\]"),
        ("algorithm={use: ppo}", "unknown section 'algorithm'"),
        ("launch.processes=2", "'launch.processes' must be 1 for a bandit, got 2"),
    ],
)
def test_wrong_recipes_are_one_sentence(setting, message):
    with pytest.raises(RecipeError, match=message):
        job(setting)


def test_the_rule_must_be_named():
    tree = load(find_recipe("bandit-ucb"), [])
    del tree["exploration"]
    with pytest.raises(RecipeError, match="the section 'exploration' is missing, for example"):
        prepare(tree, name="test")
