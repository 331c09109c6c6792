"""Group algorithms as jobs: what is refused, exact resuming, what a run leaves behind."""

import json

import pytest
import torch

pytest.importorskip("torchrl")

from polopt.launch.checkpoint import newest
from polopt.launch.job import prepare
from polopt.launch.recipe import RecipeError, load, override
from polopt.launch.record import read_metrics
from polopt.launch.run import Run
from polopt.launch.train import find_recipe


def tree(*overrides):
    return load(
        find_recipe("cartpole-dapo"),
        [
            "groups={size: 4, segment: 12}",
            "collector={num_envs: 8, total_frames: 400}",
            "update={epochs: 2, minibatch_size: 4}",
            "evaluation={every: 200, episodes: 5, stop_at: null}",
            *overrides,
        ],
    )


def job(*overrides):
    return prepare(tree(*overrides), name="test")


def run(folder, prepared, *, resume=False):
    folder.mkdir(exist_ok=True)
    view = Run(folder, None if resume else prepared.tree)
    return view.finish(prepared.train(view))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("groups={size: 3}", "group_size 3 must divide the 8 copies of the environment"),
        ("groups={size: 1}", "group_size must be at least 2, got 1"),
        ("groups={segment: 5}", "'groups.size' is missing"),
        ("groups={size: 4, segments: 5}", "unknown key 'groups.segments', did you mean 'segment'"),
        ("groups={size: 4, gamma: 2.0}", r"gamma must be in \[0, 1\], got 2.0"),
        ("update={epochs: 2, minibatch_size: 3}", "'update.minibatch_size' 3 must divide 'coll"),
        ("collector.frames_per_batch=64", "unknown key 'collector.frames_per_batch'"),
        ("collector.total_frames=0", "total_frames must be positive, got 0"),
        ("collector.num_envs=8000000", "num_envs 8,000,000 is more than the 1,000,000 that"),
        ("reward_scaling={clamp: 10.0}", "unknown section 'reward_scaling'"),
        ("task={use: gymnasium, name: CartPole-v1}", "cannot go back to a state"),
        ("algorithm={use: dapo}", "use refill='reward'"),
        ("algorithm={use: grpo}", "kl_coef is set, .* set algorithm.kl_coef=0"),
        ("algorithm={use: gdpo}", "gdpo_advantage asks for rewards; of rollouts there are"),
        ("algorithm={use: gpg}", "set update.epochs=1 update.minibatch_size=8, or use dapo"),
        ("optimizer.lr={use: TargetKl}", "'optimizer.lr' must be a number or a schedule"),
        ("launch={processes: 2}", "'launch.processes' must be 1"),
    ],
)
def test_wrong_recipes_are_one_sentence(setting, message):
    recipe = tree()
    override(recipe, setting)
    with pytest.raises(RecipeError, match=message):
        prepare(recipe, name="test")


def test_a_missing_section_is_named():
    recipe = tree()
    del recipe["groups"]
    with pytest.raises(RecipeError, match=r"section 'groups' is missing, for example groups: {si"):
        prepare(recipe, name="test")


def test_preparing_leaves_random_numbers_alone():
    before = torch.get_rng_state()
    job()
    assert torch.equal(torch.get_rng_state(), before)


def test_resolved_recipe_resolves_to_itself():
    first = job()
    again = prepare(json.loads(json.dumps(first.tree)), name="test")
    assert again.tree == first.tree
    assert first.tree["groups"] == {"size": 4, "segment": 12, "gamma": 1.0}


def test_arithmetic():
    numbers = job().arithmetic()
    assert numbers["groups_per_batch"] == 2
    assert numbers["steps_per_rollout_at_most"] == 12
    assert numbers["frames_per_batch_at_most"] == 8 * 12 * 9
    assert numbers["optimizer_steps_per_batch"] == 4


@pytest.mark.parametrize("algorithm", ["dapo", "grpo"])
def test_resuming_is_exact(tmp_path, algorithm):
    settings = () if algorithm == "dapo" else ("algorithm={use: grpo, kl_coef: 0}",)
    whole = run(tmp_path / "whole", job(*settings))
    run(tmp_path / "parts", job(*settings, "collector.total_frames=150"))
    parts = run(tmp_path / "parts", job(*settings), resume=True)
    for key in ("final_return", "frames", "groups_played", "groups_flat", "refill_rounds"):
        assert parts[key] == whole[key], key
    kept = [newest(tmp_path / name / "checkpoints") for name in ("whole", "parts")]
    assert kept[0][1].keys() == kept[1][1].keys()
    for name, tensor in kept[0][1].items():
        assert torch.equal(tensor, kept[1][1][name]), name
    logs = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts")]
    values = [
        [(m["step"], m["loss_objective"]) for m in log if "loss_objective" in m] for log in logs
    ]
    assert values[0] == values[1]
    assert len(values[0]) > 1


def test_metrics_summary_and_curve(tmp_path):
    summary = run(tmp_path / "run", job())
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    training = [m for m in lines if "groups_played" in m]
    for name in ("groups_played", "groups_flat", "groups_dropped", "refill_rounds"):
        assert summary[name] == sum(m[name] for m in training)
    assert summary["groups_dropped"] == summary["groups_flat"] > 0
    assert summary["groups_played"] > 2 * len(training)  # two places a batch, some refilled
    expected = {
        "loss_objective", "clip_fraction", "kl_approx", "ratio_mean", "entropy", "grad_norm",
        "learning_rate", "steps_per_second", "episodes", "time_collect", "time_advantage",
        "time_loss", "time_backward", "time_optimizer",
    }  # fmt: skip
    assert expected <= training[-1].keys()
    assert summary["frames"] == training[-1]["step"] >= 400
    assert any("return_mean" in m for m in training)
    assert ">greedy</text>" in (tmp_path / "run" / "learning_curve.svg").read_text()


@pytest.mark.parametrize(
    "algorithm",
    [
        "{use: dr_grpo, horizon: 12}", "{use: rloo}", "{use: gspo}", "{use: cispo}", "{use: sapo}",
        "{use: gmpo}", "{use: opo}", "{use: gpg}", "{use: clip_cov}", "{use: pass_at_k}",
        "{use: reinforce_pp, kl_coef: 0}", "{use: reinforce_pp_baseline, kl_coef: 0}",
    ],
)  # fmt: skip
def test_every_algorithm_without_a_critic_trains(tmp_path, algorithm):
    settings = f"algorithm={algorithm}", "update={epochs: 1, minibatch_size: 8}"
    prepared = job(*settings, "groups={size: 4}", "collector.total_frames=100")
    run(tmp_path / "run", prepared)
    training = [m for m in read_metrics(tmp_path / "run" / "metrics.jsonl") if "grad_norm" in m]
    assert training[0]["grad_norm"] > 0


@pytest.mark.parametrize(
    ("settings", "rounds"),
    [
        (["groups={size: 4}"], 9),  # the first and eight refills
        (["groups={size: 4}", "algorithm={use: grpo, kl_coef: 0}"], 9),  # of nine batches
        (["groups={size: 4, segment: 50}", "algorithm={use: grpo, kl_coef: 0}"], 12),
    ],
    ids=["dapo", "grpo", "segments"],
)
def test_a_run_without_any_spread_ends_with_the_reason(tmp_path, settings, rounds):
    # −1 for every step, and 200 steps to an episode.
    more = "task={use: mountain_car}", "collector.total_frames=20000"
    message = f"MountainCar-v0: in the first {rounds} rounds no group had spread"
    with pytest.raises(RecipeError, match=message):
        run(tmp_path / "run", job(*settings, *more, "evaluation.every=20000"))


def test_a_batch_without_spread_later_is_no_end(tmp_path):
    # Four steps lose no pole, until the groups stand where one may fall.
    settings = "groups={size: 4, segment: 4}", "algorithm={use: grpo, kl_coef: 0}"
    run(tmp_path / "run", job(*settings, "update={epochs: 1, minibatch_size: 8}"))
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    flat = [m["groups_flat"] == m["groups_played"] for m in lines if "groups_played" in m]
    assert any(flat[flat.index(False) :])


def test_a_loss_that_is_not_finite_stops_before_the_poison_is_saved(tmp_path):
    prepared = job("optimizer={lr: 1e30}", "update.max_grad_norm=null", "groups={size: 4}")
    (tmp_path / "run").mkdir()
    with pytest.raises(FloatingPointError, match="try a lower optimizer"):
        prepared.train(Run(tmp_path / "run", prepared.tree))
    _, tensors, _ = newest(tmp_path / "run" / "checkpoints")
    assert all(t.isfinite().all() for t in tensors.values() if t.is_floating_point())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "bar"), [("cartpole-dapo", 475), ("acrobot-grpo", -100), ("pendulum-dapo", -300)]
)
def test_shipped_recipes_learn(tmp_path, recipe, bar):
    summary = run(tmp_path / "run", prepare(load(find_recipe(recipe)), name=recipe))
    assert summary["solved"]
    assert summary["final_return"] >= bar
    first = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    assert first["greedy_return"] < bar  # it was learnt, not given
