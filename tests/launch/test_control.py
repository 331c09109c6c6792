"""Recipes of control tasks: what is refused, what is resolved, and that resuming is exact."""

import json

import pytest
import torch

pytest.importorskip("torchrl")

from polopt.launch.checkpoint import newest
from polopt.launch.control import prepare
from polopt.launch.recipe import RecipeError, load, override
from polopt.launch.record import read_metrics
from polopt.launch.run import Run
from polopt.launch.train import find_recipe


def tree(*overrides):
    return load(
        find_recipe("cartpole-ppo"),
        [
            "collector.num_envs=4",
            "collector.frames_per_batch=64",
            "collector.total_frames=256",
            "update.minibatch_size=32",
            "update.epochs=2",
            "evaluation.every=128",
            "evaluation.episodes=5",
            *overrides,
        ],
    )


def job(*overrides):
    return prepare({"project": "polopt", **tree(*overrides)}, name="test")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("update.minibatch_size=48", "'update.minibatch_size' 48 must divide"),
        ("collector.frames_per_batch=66", "frames_per_batch 66 must be a multiple of num_envs 4"),
        ("collector.total_frames=10", "total_frames 10 is less than one batch of 64"),
        ("collector.num_env=4", "unknown key 'collector.num_env', did you mean 'num_envs'"),
        ("colector.num_envs=4", "unknown section 'colector', did you mean 'collector'"),
        ("update.epochs=many", "'update.epochs': .* got 'many'"),
        ("update.epochs=0", "epochs must be positive, got 0"),
        ("optimizer.lr=-1.0", "lr must be positive, got -1.0"),
        ("optimizer.lr.then.start=fast", "optimizer.lr.then.start"),
        ("reward_scaling.clamp=0", "clamp must be positive, got 0"),
        ("evaluation.episodes=0", "episodes must be positive, got 0"),
        ("algorithm={use: grpo}", "estimates its advantages with group_advantage: use ppo"),
        ("algorithm={use: a2c}", "set update.epochs=1 update.minibatch_size=64, or use ppo"),
        ("collector.use=Colector", "'collector.use': unknown name 'Colector', did you mean 'Coll"),
        ("collector.use=json:nothing", "'collector.use': cannot import 'json:nothing'"),
        (
            "collector.use=os:getcwd",
            "'collector.use' os:getcwd is no collector, it must take create",
        ),
        ("update.target_kl=0", "target_kl must be positive, got 0"),
        (
            "algorithm={use: kl_ppo, coef: {use: AdaptiveKl}}",
            "'algorithm': objective.surrogate.coef reacts to 'kl', which is not among",
        ),
        ("optimizer.lr={use: TargetKl}", "'optimizer.lr' must be a number or a schedule"),
        ("launch={processes: 2}", "'launch.processes' must be 1"),
        ("network.hidden=[64, 0]", "hidden must be positive widths"),
        ("task={use: cartpole, gravity: 3}", "unknown key 'task.gravity'"),
    ],
)
def test_wrong_recipes_are_one_sentence(setting, message):
    recipe = tree()
    override(recipe, setting)
    with pytest.raises(RecipeError, match=message):
        prepare(recipe, name="test")


def test_missing_sections_are_named():
    recipe = tree()
    del recipe["update"]
    with pytest.raises(RecipeError, match="section 'update' is missing"):
        prepare(recipe, name="test")


def test_resolved_recipe_resolves_to_itself():
    first = job()
    again = prepare(json.loads(json.dumps(first.tree)), name="test")
    assert again.tree == first.tree
    assert again.optimizer == first.optimizer
    assert first.tree["evaluation"]["stop_at"] == 475
    assert first.tree["network"] == {"hidden": [64, 64], "policy": "standard"}


def test_arithmetic():
    numbers = job().arithmetic()
    assert numbers["batches"] == 4
    assert numbers["optimizer_steps_per_batch"] == 4
    assert numbers["optimizer_steps"] == 16
    assert numbers["steps_per_environment_and_batch"] == 16


def run(folder, prepared, *, resume=False):
    folder.mkdir(exist_ok=True)
    view = Run(folder, None if resume else prepared.tree)
    summary = prepared.train(view)
    view.finish(summary)
    return summary


@pytest.mark.parametrize("collector", ["BatchedCollector", "Collector"])
def test_resuming_is_exact(tmp_path, collector):
    settings = f"collector.use={collector}", "evaluation.stop_at=null"
    whole = run(tmp_path / "whole", job(*settings))
    run(tmp_path / "parts", job(*settings, "collector.total_frames=128"))
    parts = run(tmp_path / "parts", job(*settings), resume=True)
    assert "solved" not in whole  # without a bar nothing is
    for key in ("final_return", "frames"):
        assert parts[key] == whole[key]
    assert whole["frames"] == 256
    kept = [newest(tmp_path / name / "checkpoints") for name in ("whole", "parts")]
    assert kept[0][0] == kept[1][0] == 256
    assert kept[0][1].keys() == kept[1][1].keys()
    for name, tensor in kept[0][1].items():
        assert torch.equal(tensor, kept[1][1][name]), name
    logs = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts")]
    values = [
        [(m["step"], m["loss_objective"]) for m in log if "loss_objective" in m] for log in logs
    ]
    assert values[0] == values[1]
    assert len(values[0]) == 4


def test_both_collectors_learn_the_same(tmp_path):
    summaries = [
        run(tmp_path / use, job(f"collector.use={use}"))
        for use in ("BatchedCollector", "Collector")
    ]
    assert summaries[0]["final_return"] == summaries[1]["final_return"]


def test_metrics_and_curve_are_written(tmp_path):
    summary = run(tmp_path / "run", job())
    assert set(summary["phase_seconds"]) == {
        "collect", "environment", "advantage", "loss", "backward", "optimizer"
    }  # fmt: skip
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    training = [m for m in lines if "loss_objective" in m]
    assert [m["step"] for m in training] == [64, 128, 192, 256]
    expected = {
        "loss_objective", "loss_critic", "clip_fraction", "value_clip_fraction", "kl_approx",
        "ratio_mean", "entropy", "explained_variance", "grad_norm", "learning_rate",
        "steps_per_second", "episodes", "time_collect", "time_advantage", "time_loss",
        "time_backward", "time_optimizer", "time_environment", "memory_host",
    }  # fmt: skip
    assert expected <= training[-1].keys()
    assert all(0.0 < m["time_environment"] < m["time_collect"] for m in training)
    assert [m["step"] for m in lines if "greedy_return" in m] == [0, 128, 256]
    picture = (tmp_path / "run" / "learning_curve.svg").read_text()
    assert "CartPole-v1, seed 0" in picture
    assert ">greedy</text>" in picture


def test_learning_rate_follows_its_schedule(tmp_path):
    run(tmp_path / "run", job("collector.total_frames=128"))
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    rates = [m["learning_rate"] for m in lines if "learning_rate" in m]
    assert rates == pytest.approx([4e-3 * 64 / 2048, 4e-3 * 128 / 2048])


def test_an_algorithm_without_a_ratio_has_no_target_kl():
    settings = "algorithm={use: a2c}", "update={epochs: 1, minibatch_size: 64, target_kl: 0.1}"
    with pytest.raises(RecipeError, match=r"'update.target_kl' needs an importance ratio"):
        job(*settings)


CONTROLLED = (
    # Out of reach: the coefficient doubles with every update.
    "algorithm={use: kl_ppo, coef: {use: TargetKl, value: 0.5, target: 1e-12}, "
    # Above any entropy of two actions: the bonus grows with every update.
    "entropy_coef: {use: TargetEntropy, target: 0.7, step: 0.125}}"
)


def test_controllers_adapt_and_resume(tmp_path):
    settings = CONTROLLED, "evaluation.stop_at=null"
    prepared = job(*settings)
    run(tmp_path / "whole", prepared)
    assert prepared.algorithm == job(*settings).algorithm  # the job can run again
    run(tmp_path / "parts", job(*settings, "collector.total_frames=128"))
    _, _, half = newest(tmp_path / "parts" / "checkpoints")
    assert half["controllers"]["objective.surrogate.coef"]["value"] == 0.5 * 2**2
    run(tmp_path / "parts", job(*settings), resume=True)
    kept = [newest(tmp_path / name / "checkpoints") for name in ("whole", "parts")]
    assert kept[0][2]["controllers"] == kept[1][2]["controllers"]
    assert kept[0][2]["controllers"]["objective.surrogate.coef"]["value"] == 0.5 * 2**4
    assert kept[0][2]["controllers"]["objective.entropy_coef"]["value"] == 0.5
    for name, tensor in kept[0][1].items():
        assert torch.equal(tensor, kept[1][1][name]), name
    bonus = [
        m["loss_entropy"] / m["entropy"]
        for m in read_metrics(tmp_path / "whole" / "metrics.jsonl")
        if "loss_entropy" in m
    ]
    assert bonus == pytest.approx([-0.125, -0.25, -0.375])  # none in the first update


def test_stops_at_the_bar(tmp_path):
    summary = run(tmp_path / "run", job("evaluation.stop_at=1"))
    assert summary["solved"]
    assert summary["frames"] == 128  # at the first evaluation after training began


def test_a_loss_that_is_not_finite_stops_before_the_poison_is_saved(tmp_path):
    prepared = job("optimizer={lr: 1e30}", "update.max_grad_norm=null")
    (tmp_path / "run").mkdir()
    view = Run(tmp_path / "run", prepared.tree)
    with pytest.raises(FloatingPointError, match="try a lower optimizer"):
        prepared.train(view)
    _, tensors, _ = newest(tmp_path / "run" / "checkpoints")
    assert all(t.isfinite().all() for t in tensors.values() if t.is_floating_point())


def test_a_reward_that_is_not_finite_names_its_environment(tmp_path, monkeypatch):
    prepared = job()
    step = type(prepared.task.physics).step

    def broken(self, state, action):
        state, reward, terminated = step(self, state, action)
        if len(state) == 4:  # the training environments only
            reward[2] = float("nan")
        return state, reward, terminated

    monkeypatch.setattr(type(prepared.task.physics), "step", broken)
    (tmp_path / "run").mkdir()
    with pytest.raises(FloatingPointError, match=r"reward of environment 2 is .*nan.* at step 0"):
        prepared.train(Run(tmp_path / "run", prepared.tree))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "seed", "bar"),
    [
        ("cartpole-ppo", 0, 475),
        ("cartpole-ppo", 1, 475),
        ("cartpole-a2c", 0, 475),
        ("cartpole-reinforce", 0, 475),
        ("pendulum-ppo", 0, -300),
        ("acrobot-ppo", 0, -100),
    ],
)
def test_shipped_recipes_learn(tmp_path, recipe, seed, bar):
    prepared = prepare({**load(find_recipe(recipe)), "seed": seed}, name=recipe)
    summary = run(tmp_path / "run", prepared)
    assert summary["solved"]
    assert summary["final_return"] >= bar
    assert summary["frames"] <= 100_000
    first = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    assert first["greedy_return"] < bar  # it was learnt, not given
