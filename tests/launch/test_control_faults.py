"""Control runs in which something breaks: NaN of an environment, checkpoints that do not fit."""

import json
import time

import pytest
import torch

pytest.importorskip("torchrl")

from polopt.envs.control import cartpole
from polopt.ext.metrics import Stopwatch
from polopt.ext.torchrl.collector import BatchedCollector
from polopt.launch.checkpoint import newest, write
from polopt.launch.cli import main
from polopt.launch.control import prepare
from polopt.launch.recipe import RecipeError, load, override
from polopt.launch.record import read_metrics
from polopt.launch.run import Run
from polopt.launch.train import find_recipe, recipe_names

SMALL = (
    "collector.use=BatchedCollector",
    "collector.num_envs=4",
    "collector.frames_per_batch=64",
    "collector.total_frames=256",
    "update={minibatch_size: 32, epochs: 2}",
    "evaluation={every: 128, episodes: 5, stop_at: null}",
)


def job(*overrides, recipe="cartpole-ppo"):
    return prepare(
        {"project": "polopt", **load(find_recipe(recipe), [*SMALL, *overrides])}, name="t"
    )


def run(folder, prepared, *, resume=False):
    folder.mkdir(exist_ok=True)
    view = Run(folder, None if resume else prepared.tree)
    try:
        summary = prepared.train(view)
    finally:
        view.finish({})
    return summary


@pytest.fixture
def spoil(monkeypatch):
    """Let training environments give NaN: `spoil("reward", row=2, step=7)`; counted from 0."""

    def begin(what, *, row, step, rows=4):
        physics, count = type(cartpole().physics), []
        sound = physics.step

        def broken(self, state, action):
            state, reward, terminated = sound(self, state, action)
            if len(state) == rows:  # the evaluation has more copies
                if len(count) == step:
                    (reward if what == "reward" else state)[row] = float("nan")
                count.append(0)
            return state, reward, terminated

        monkeypatch.setattr(physics, "step", broken)

    return begin


@pytest.mark.parametrize("collector", ["BatchedCollector", "Collector"])
@pytest.mark.parametrize(("what", "where"), [("reward", "nan"), ("observation", r"\[nan")])
def test_nan_stops_with_the_environment_and_the_step(tmp_path, spoil, what, where, collector):
    spoil(what, row=2, step=16 * 3 + 5)
    prepared = job(f"collector.use={collector}", "checkpoints.every=64")
    place = "at step 5 of the batch that begins at frame 192"
    with pytest.raises(
        FloatingPointError, match=rf"the {what} of environment 2 is {where}.*{place}"
    ):
        run(tmp_path / "run", prepared)
    step, tensors, _ = newest(tmp_path / "run" / "checkpoints")
    assert step == 192
    assert all(t.isfinite().all() for t in tensors.values() if t.is_floating_point())


@pytest.mark.parametrize("collector", ["BatchedCollector", "Collector"])
@pytest.mark.parametrize("what", ["reward", "observation"])
def test_nan_drops_the_environment_where_asked(tmp_path, spoil, what, collector):
    spoil(what, row=2, step=21)
    settings = f"collector.use={collector}", "collector.not_finite=drop", "algorithm.whiten=false"
    summary = run(tmp_path / "run", job(*settings))
    assert summary["environments_dropped"] == 1
    assert summary["frames"] == 256
    lines = [m for m in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss_critic" in m]
    assert [m.get("environments_dropped", 0) for m in lines] == [0, 1, 0, 0]
    _, tensors, _ = newest(tmp_path / "run" / "checkpoints")
    assert all(t.isfinite().all() for t in tensors.values() if t.is_floating_point())
    assert tensors["scaling.moments"][0] == 256 - 16  # the dropped row was not counted


def test_dropping_nothing_changes_nothing(tmp_path):
    kept = []
    for choice in ("stop", "drop"):
        run(tmp_path / choice, job(f"collector.not_finite={choice}"))
        kept.append(newest(tmp_path / choice / "checkpoints")[1])
    for name, tensor in kept[0].items():
        assert torch.equal(tensor, kept[1][name]), name


def test_a_batch_of_which_nothing_is_left_ends_the_run(tmp_path, spoil):
    spoil("reward", row=slice(None), step=3)
    with pytest.raises(FloatingPointError, match="every environment gave numbers that are not fin"):
        run(tmp_path / "run", job("collector.not_finite=drop"))


def test_nan_in_an_evaluation_stops_or_leaves_the_episode_out(tmp_path, spoil):
    spoil("reward", row=3, step=2, rows=5)
    with pytest.raises(
        FloatingPointError, match="environment 3 is nan at step 2 of the evaluation"
    ):
        run(tmp_path / "stop", job())
    spoil("reward", row=3, step=2, rows=5)
    assert run(tmp_path / "drop", job("collector.not_finite=drop"))["final_return"] > 0


def test_nan_ends_a_command_in_one_sentence(tmp_path, spoil, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spoil("reward", row=1, step=0)
    assert main(["train", "cartpole-ppo", *SMALL, "--json"]) == 1
    out, err = capfd.readouterr()
    assert "Traceback" not in err
    assert "polopt: the reward of environment 1 is nan at step 0" in err
    assert json.loads(out)["error"].startswith("the reward of environment 1 is nan")


def test_a_reward_of_another_shape_is_one_sentence(tmp_path, monkeypatch):
    physics = type(cartpole().physics)
    sound = physics.step

    def column(self, state, action):
        state, reward, terminated = sound(self, state, action)
        return state, reward.unsqueeze(-1), terminated

    monkeypatch.setattr(physics, "step", column)
    with pytest.raises(RecipeError, match=r"'task': reward.* must have shape \[5\], got \[5, 1\]"):
        run(tmp_path / "run", job())


@pytest.mark.parametrize(("batches", "found"), [([], "None"), ([5], "5")])
def test_a_collector_without_batches_is_one_sentence(tmp_path, monkeypatch, batches, found):
    monkeypatch.setattr(BatchedCollector, "__iter__", lambda self: iter(batches))
    message = rf"'collector.use' BatchedCollector gave {found} at frame 0, expected .* of 64 steps"
    with pytest.raises(RecipeError, match=message):
        run(tmp_path / "run", job())


def test_a_weight_that_grows_without_end_stops(tmp_path):
    settings = (
        "algorithm={use: a2c}",
        "update={epochs: 1, minibatch_size: 64, max_grad_norm: null}",
        "optimizer={lr: 1e20}",
    )
    with pytest.raises(FloatingPointError, match=r"a weight became .* try a lower optimizer.lr"):
        run(tmp_path / "run", job(*settings))
    _, tensors, _ = newest(tmp_path / "run" / "checkpoints")
    assert all(t.abs().max() < 100 for n, t in tensors.items() if n.startswith("actor"))


def test_a_checkpoint_that_does_not_fit_is_one_sentence(tmp_path):
    run(tmp_path / "run", job("collector.total_frames=64"))
    folder = tmp_path / "run" / "checkpoints"
    step, tensors, state = newest(folder)
    for change, message in (
        (lambda t, s: t.pop("earned"), "it has no 'earned'"),
        (lambda t, s: s.pop("solved"), "it has no 'solved'"),
        (lambda t, s: t.pop("actor.module.0.module.0.weight"), "Missing key"),
    ):
        other, counters = dict(tensors), dict(state)
        change(other, counters)
        write(folder, step, other, counters, 1)
        with pytest.raises(
            RecipeError, match=rf"step-64 of .* does not fit this recipe.*{message}"
        ):
            run(tmp_path / "run", job(), resume=True)


def test_scaled_observations_are_resumed_exactly_and_frozen_in_evaluation(tmp_path):
    settings = "observation_scaling={clamp: 5.0}", "collector.use=Collector"
    run(tmp_path / "whole", job(*settings))
    run(tmp_path / "parts", job(*settings, "collector.total_frames=128"))
    run(tmp_path / "parts", job(*settings), resume=True)
    kept = [newest(tmp_path / name / "checkpoints") for name in ("whole", "parts")]
    for name, tensor in kept[0][1].items():
        assert torch.equal(tensor, kept[1][1][name]), name
    counts = [t for n, t in kept[0][1].items() if n.endswith("0.moments")]
    assert len(counts) == 2  # of actor and critic, which share one
    assert all((c[0] == 256).all() for c in counts)  # evaluations are not counted


def test_timers_cost_less_than_a_hundredth(tmp_path):
    """Laps of one iteration, counted, times the cost of a lap, against the iteration's time."""
    watch, laps = Stopwatch(), 20_000
    began = time.process_time()
    for _ in range(laps):
        watch.lap("loss")
    lap = (time.process_time() - began) / laps
    prepared = prepare({**load(find_recipe("cartpole-ppo")), "seed": 0}, name="t")
    override(prepared.tree, "collector.total_frames=8192")
    prepared = prepare(prepared.tree, name="t")
    summary = run(tmp_path / "run", prepared)
    iterations = summary["frames"] // prepared.collector.frames_per_batch
    steps = prepared.arithmetic()["optimizer_steps_per_batch"]
    cost = iterations * (2 + 3 * steps) * lap  # collect, advantage; loss, backward, optimizer
    assert cost < 0.01 * summary["train_cpu_seconds"]
    assert all(seconds > 0 for n, seconds in summary["phase_seconds"].items() if n != "replay")
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    booked = sum(v for m in lines for k, v in m.items() if k in ("time_loss", "time_backward"))
    assert booked == pytest.approx(
        sum(summary["phase_seconds"][p] for p in ("loss", "backward")), abs=0.01
    )


VARIANTS = [n for n in recipe_names() if n.startswith("cartpole-ppo-")]


@pytest.mark.parametrize("recipe", VARIANTS)
def test_variants_state_only_what_differs(recipe):
    path = find_recipe(recipe)
    assert "base: cartpole-ppo\n" in path.read_text()
    base, tree = load(find_recipe("cartpole-ppo")), load(path)
    assert "base" not in tree
    assert {k for k in tree if tree[k] != base[k]} <= {"algorithm", "update"}
    assert tree != base
    prepare(tree, name=recipe)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("task={use: gymnasium, name: CartPol-v1}", "has no environment 'CartPol-v1', did you me"),
        ("task={use: gymnasium, name: Blackjack-v1}", "Blackjack-v1 observes Tuple"),
        ("task={use: gymnasium, name: FrozenLake-v1}", "FrozenLake-v1 observes Discrete"),
        ("task={use: cart_pole}", "unknown name 'cart_pole', did you mean 'cartpole'"),
        ("collector.not_finite=skip", "'collector.not_finite': .* got 'skip'"),
        ("optimizer.lr=.inf", "lr must be finite, got inf"),
        ("optimizer.lr=.nan", "lr must be positive, got nan"),
        ("optimizer.lr={use: Linear, start: 1.0, end: -1.0, steps: 9}", "at least 0, got -1.0"),
        ("optimizer.eps=.inf", "eps must be finite, got inf"),
        ("evaluation.stop_at=.nan", "stop_at must be a number, or null .* got nan"),
        ("evaluation.stop_at=.inf", "stop_at must be a number, or null .* got inf"),
        ("network.hidden=[100000, 100000]", "makes layers of 10,000,200,000 weights, more than"),
        ("network.hidden=[1000000000]", "makes layers of 2,000,000,000 weights"),
        ("observation_scaling={clamp: 0}", "clamp must be positive, got 0"),
        ("observation_scaling={clip: 1}", "unknown key 'observation_scaling.clip'"),
    ],
)
def test_wrong_settings_are_one_sentence(setting, message):
    recipe = load(find_recipe("cartpole-ppo"), SMALL)
    override(recipe, setting)
    with pytest.raises(RecipeError, match=message) as found:
        prepare({**recipe, "project": "polopt"}, name="t")
    assert "\n" not in str(found.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "frames"),
    [
        ("mountaincar-ppo", 150_000),
        ("mountaincar-continuous-ppo", 40_000),
        *((name, 100_000) for name in VARIANTS),
    ],
)
def test_recipes_learn(tmp_path, recipe, frames):
    prepared = prepare({**load(find_recipe(recipe)), "seed": 0}, name=recipe)
    summary = run(tmp_path / "run", prepared)
    assert summary["solved"]
    assert summary["final_return"] >= prepared.task.bar
    assert summary["frames"] <= frames
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[0]["greedy_return"] < prepared.task.bar


@pytest.mark.slow
def test_lunar_lander_trains_through_gymnasium(tmp_path):
    pytest.importorskip("Box2D")
    recipe = load(
        find_recipe("lunarlander-ppo"),
        ["collector.total_frames=16384", "evaluation={episodes: 10, every: 16384}"],
    )
    run(tmp_path / "run", prepare({**recipe, "seed": 0}, name="t"))
    returns = [
        m["greedy_return"]
        for m in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if "greedy_return" in m
    ]
    assert len(returns) == 2
    assert returns[1] > returns[0] + 50
