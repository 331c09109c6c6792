"""Recipes of off-policy algorithms: what is refused, and that resuming is exact."""

import json
import math

import pytest
import torch

pytest.importorskip("torchrl")

from torchrl.envs import PendulumEnv as TorchRLPendulum

from polopt.envs.control import ClassicTask
from polopt.launch import off_policy_run
from polopt.launch.checkpoint import newest
from polopt.launch.job import prepare
from polopt.launch.off_policy import OffPolicyJob
from polopt.launch.off_policy_run import _OffPolicy
from polopt.launch.recipe import RecipeError, load, override
from polopt.launch.record import read_metrics
from polopt.launch.run import Run
from polopt.launch.train import find_recipe

SMALL = (
    "collector={num_envs: 4, frames_per_batch: 32, total_frames: 192}",
    "replay={capacity: 128, batch_size: 16, learning_starts: 32}",
    "update.steps_per_batch=3",
    "network.hidden=[8, 8]",
    "evaluation={every: 64, episodes: 3}",
)
PER = "replay.prioritised={alpha: 0.6, beta: {use: Linear, start: 0.4, end: 1.0, steps: 192}}"
CARTPOLE, PENDULUM = "cartpole-dqn", "pendulum-sac"
NOISE = "exploration={use: OrnsteinUhlenbeck}"


def tree(recipe, *overrides):
    return load(find_recipe(recipe), [*SMALL, *overrides])


def job(recipe, *overrides):
    return prepare(tree(recipe, *overrides), name="test")


def run(path, prepared, *, resume=False):
    path.mkdir(exist_ok=True)
    view = Run(path, None if resume else prepared.tree)
    return view.finish(prepared.train(view))


@pytest.mark.parametrize(
    ("recipe", "setting", "message"),
    [
        (CARTPOLE, "algorithm={use: sac}", "sac takes continuous actions, those of CartPole-v1 "
         "are discrete: use discrete_sac"),
        (CARTPOLE, "algorithm={use: td3}", "td3 takes continuous actions.* use dqn"),
        (PENDULUM, "algorithm={use: dqn}", "dqn takes discrete actions, those of Pendulum-v1 are "
         "continuous: use sac, td3 or ddpg"),
        (PENDULUM, "algorithm={use: discrete_sac}", "are continuous: use sac"),
        (CARTPOLE, "replay.capacity=8", "capacity 8 is less than batch_size 16"),
        (CARTPOLE, "replay.learning_starts=129", "learning_starts 129 is more than the buffer's "
         "capacity 128"),
        (CARTPOLE, "replay.learning_starts=15", "learning_starts 15 is less than batch_size 16"),
        (CARTPOLE, "collector.total_frames=32", "'replay.learning_starts' 32 is not below "
         "'collector.total_frames' 32"),
        (CARTPOLE, "replay.prioritised={alpha: 1.5}", "'?replay.prioritised'?: alpha must be in "
         r"\[0, 1\], got 1.5$"),
        (CARTPOLE, "replay.prioritised={beta: much}", "'replay.prioritised.beta': .*got 'much'"),
        (CARTPOLE, "replay.prioritised={beta: -0.1}", "beta must be in .0, 1., got -0.1"),
        (CARTPOLE, "replay.prioritised={beta: {use: Linear, start: 0.5, end: 2.0, steps: 9}}",
         "beta must be in .0, 1."),
        (CARTPOLE, "replay.prioritised={alfa: 0.5}", "replay.prioritised.*alfa"),
        (CARTPOLE, "replay.n_step=0", "n_step must be positive, got 0"),
        (CARTPOLE, "replay.n_step=46", "nothing would be learnt.* 16 whole transitions of "
         "'replay.n_step' 46 steps from 4 environments, the run has 6 batches of 32 frames"),
        (CARTPOLE, "collector={num_envs: 4, frames_per_batch: 132, total_frames: 192}",
         "frames_per_batch' 132 is more than 'replay.capacity' 128: part of each batch"),
        (PENDULUM, "algorithm={use: td3, policy_delay: 0}", "policy_delay must be at least 1"),
        (CARTPOLE, "algorithm.gamma=1.5", "gamma must be within .0, 1., got 1.5"),
        (CARTPOLE, "algorithm.target_every=0", "target_every must be at least 1, got 0"),
        (CARTPOLE, "algorithm.tau=0", r"tau must be within \(0, 1\], got 0"),
        (CARTPOLE, "algorithm.value_loss=l1", "algorithm.value_loss.*'l2' or 'smooth_l1'"),
        (CARTPOLE, "exploration=null", "'exploration' is missing, dqn has no randomness"),
        (CARTPOLE, "exploration={use: GaussianNoise}", "GaussianNoise is for continuous actions"),
        (CARTPOLE, "exploration={use: Linear, start: 1.0, end: 0.1, steps: 5}",
         "'exploration' must name a rule"),
        (CARTPOLE, "exploration.epsilon=1.5", "epsilon must be in .0, 1., got 1.5"),
        (PENDULUM, "algorithm={use: sac, alpha: 0.0}", "alpha must be positive and finite"),
        (PENDULUM, "algorithm={use: sac, target_entropy: -1.0, tune_alpha: false}",
         "target_entropy -1.0 needs a temperature that is tuned"),
        (PENDULUM, "algorithm={use: sac, target_entropy: 1.4}", "target_entropy' 1.4 is out of "
         "reach, the uniform policy on the actions of Pendulum-v1 has 1.39 nats"),
        (CARTPOLE, "algorithm={use: discrete_sac, target_entropy: 0.7}", "out of reach.* 0.693 "),
        (CARTPOLE, "collector.num_envs=2000000", "num_envs 2,000,000 is more than the 1,000,000"),
        (CARTPOLE, "collector.frames_per_batch=200000000", "frames_per_batch 200,000,000 is more"),
        (CARTPOLE, "evaluation.episodes=2000000", "episodes 2,000,000 is more than"),
        (PENDULUM, "algorithm={use: td3, smoothing_noise: -1.0}", "smoothing_noise must not be"),
        (PENDULUM, "algorithm={use: ddpg}", "'exploration' is missing, ddpg has no randomness"),
        # pydantic 2.10 leaves these to a check that has fewer words.
        (CARTPOLE, "replay.prioritised=none", "replay.prioritised'? must be a mapping of settings"
         "( or null)?, got 'none'(: write null for none)?$"),
        (CARTPOLE, "replay.prioritised=5", "must be a mapping of settings( or null)?, got 5$"),
        (CARTPOLE, "update.max_grad_norm=none", "must be a number or null, got 'none': write null"),
        (PENDULUM, "exploration.sigma=0.1", "{use: GaussianNoise, sigma: 0.1}, got {'sigma': 0.1"),
        (CARTPOLE, "update.epochs=3", "unknown key 'update.epochs'"),
        (CARTPOLE, "optimizer.lr=0", "lr must be positive, got 0"),
        (CARTPOLE, "launch={processes: 2}", "'launch.processes' must be 1"),
    ],
)  # fmt: skip
def test_wrong_recipes_are_one_sentence(recipe, setting, message):
    wrong = tree(recipe)
    override(wrong, setting)
    with pytest.raises(RecipeError, match=message):
        prepare(wrong, name="test")


def test_frames_beyond_the_last_whole_batch_do_not_count():
    settings = "collector={num_envs: 4, frames_per_batch: 80, total_frames: 150}"
    with pytest.raises(RecipeError, match=r"learning_starts' 100 frames.* has 1 batches of 80 fra"):
        job(CARTPOLE, settings, "replay.learning_starts=100")
    assert job(CARTPOLE, settings, "replay.learning_starts=80").arithmetic()["optimizer_steps"] == 3


def test_a_policy_that_would_never_learn_is_refused():
    with pytest.raises(RecipeError, match=r"policy_delay' 19 is more than the 18 optimizer steps"):
        job(PENDULUM, "algorithm={use: td3, policy_delay: 19}", NOISE)
    job(PENDULUM, "algorithm={use: td3, policy_delay: 18}", NOISE)


def test_an_environment_of_another_kind_is_refused(monkeypatch):
    monkeypatch.setattr(ClassicTask, "make", lambda *_, **__: TorchRLPendulum())
    with pytest.raises(ValueError, match=r"must make a polopt.envs.batched.VectorEnv, got a Pend"):
        job(PENDULUM)


def test_a_buffer_beyond_the_memory_is_refused_before_a_run():
    job(CARTPOLE).check_inputs()
    huge = job(CARTPOLE, "replay.capacity=10000000000000")
    with pytest.raises(RecipeError, match=r"'replay.capacity' 10,000,000,000,000 needs .* GiB"):
        huge.check_inputs()


def test_transitions_longer_than_a_batch_wait_for_later_ones(tmp_path):
    run(tmp_path, job(PENDULUM, "replay.n_step=20"))  # a batch has 8 steps
    sizes = [m["replay_size"] for m in read_metrics(tmp_path / "metrics.jsonl") if "updates" in m]
    assert sizes == [0, 0, 4 * (24 - 19), 4 * (32 - 19), 4 * (40 - 19), 4 * (48 - 19)]


def test_missing_sections_are_named():
    recipe = tree(CARTPOLE)
    del recipe["replay"]
    with pytest.raises(RecipeError, match="section 'replay' is missing"):
        prepare(recipe, name="test")


def test_resolved_recipe_resolves_to_itself():
    first = job(CARTPOLE, PER)
    assert isinstance(first, OffPolicyJob)
    again = prepare(json.loads(json.dumps(first.tree)), name="test")
    assert again.tree == first.tree
    assert (again.replay, again.exploration) == (first.replay, first.exploration)
    assert first.tree["replay"]["prioritised"]["eps"] == 1e-3
    assert first.tree["evaluation"]["stop_at"] == 475


@pytest.mark.parametrize(
    ("settings", "waiting"),
    [
        ((), 0),
        (("replay.n_step=20",), 2),  # after 24 steps of each environment 5 have 20 steps
        (("replay.n_step=45", PER), 5),  # and after the last of 48 just enough for a minibatch
        (("replay.learning_starts=33",), 1),
    ],
)
def test_arithmetic_is_what_happens(tmp_path, settings, waiting):
    prepared = job(CARTPOLE, *settings)
    numbers = prepared.arithmetic()
    assert (numbers["batches"], numbers["batches_before_learning"]) == (6, waiting)
    assert numbers["times_a_transition_is_drawn"] == 3 * 16 / 32
    run(tmp_path / "run", prepared)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert lines[-2]["updates"] == numbers["optimizer_steps"] == 3 * (6 - waiting)


def test_many_optimizer_steps_draw_a_part_at_a_time(monkeypatch):
    def weights(most):
        monkeypatch.setattr(off_policy_run, "_MOST_DRAWN", most)
        learner, draws = _OffPolicy(job(CARTPOLE, "update.steps_per_batch=7")), []
        draw = learner._draw
        monkeypatch.setattr(learner, "_draw", lambda n: draws.append(n) or draw(n))
        learner.iterate(0)
        return learner.update.loss.state_dict(), draws

    (whole, once), (parts, several), (_, single) = (weights(n) for n in (10_000, 40, 5))
    assert (once, several, single) == ([112], [32, 32, 48], [16] * 7)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


CASES = [
    (CARTPOLE, PER, "replay.n_step=3", "reward_scaling={clamp: 5.0}"),
    (CARTPOLE, "algorithm={use: double_dqn, target_every: 5}"),
    (CARTPOLE, "algorithm={use: discrete_sac}", "exploration=null"),
    (PENDULUM, PER, NOISE, "observation_scaling={}"),
    (PENDULUM, "algorithm={use: td3}", "replay.n_step=2", NOISE),
    (PENDULUM, "algorithm={use: ddpg}", NOISE),
]


@pytest.mark.parametrize("case", CASES)
def test_resume_is_exact(tmp_path, case):
    recipe, *settings = case
    settings = [*settings, "evaluation.stop_at=null"]
    run(tmp_path / "whole", job(recipe, *settings))
    run(tmp_path / "parts", job(recipe, *settings, "collector.total_frames=96"))
    run(tmp_path / "parts", job(recipe, *settings), resume=True)
    (_, whole, whole_state), (_, parts, parts_state) = (
        newest(tmp_path / name / "checkpoints") for name in ("whole", "parts")
    )
    assert whole.keys() == parts.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name
    for key in ("updates", "writer"):
        assert whole_state[key] == parts_state[key]
    assert whole["replay.observation"].shape[0] == 128  # full, and written over
    last = [read_metrics(tmp_path / n / "metrics.jsonl")[-2] for n in ("whole", "parts")]
    for name in ("loss_critic", "td_error", "replay_size", "updates"):
        assert last[0][name] == last[1][name]


def test_networks_see_scaled_observations_and_the_buffer_keeps_them_as_they_were():
    learner = _OffPolicy(job(PENDULUM, "observation_scaling={}"))
    learner.iterate(0)
    stored = learner.buffer[:]
    for key in ("observation", ("next", "observation")):
        drawn = learner._draw(4096)[key]
        # Cosine and sine are within ±1, the velocity is within ±8.
        mean, deviation = (f(stored["observation"], 0) for f in (torch.mean, torch.std))
        expected = ((stored[key] - mean) / deviation).std(0)
        torch.testing.assert_close(drawn.std(0), expected, rtol=0.1, atol=0.0)
        assert stored[key][:, 2].abs().max() <= 8.0
    scaled = (stored["observation"] - learner.observations.mean) / learner.observations.deviation
    torch.testing.assert_close(scaled.mean(0), torch.zeros(3), rtol=0.0, atol=1e-5)
    torch.testing.assert_close(
        learner.act(stored["observation"]), learner.update.act(scaled), rtol=0.0, atol=1e-5
    )


@pytest.mark.parametrize(("noise", "held"), [("{sigma: 0.5, theta: 0.05}", True), (None, False)])
def test_random_actions_before_learning_are_pushed_by_noise_that_remembers(noise, held):
    rule = "null" if noise is None else noise.replace("{", "{use: OrnsteinUhlenbeck, ")
    settings = ("collector={num_envs: 16, frames_per_batch: 1600, total_frames: 3200}",
                "replay={capacity: 1600, batch_size: 16, learning_starts: 1600}")  # fmt: skip
    learner = _OffPolicy(job(PENDULUM, f"exploration={rule}", *settings))
    learner.iterate(0)
    action = learner.buffer[:]["action"].view(16, 100)
    product = (action[:, 1:] * action[:, :-1]).mean() / action.square().mean()
    assert (product > 0.4) == held
    assert product > -0.1


def test_metrics(tmp_path):
    summary = run(tmp_path / "run", job(CARTPOLE, PER))
    assert set(summary["phase_seconds"]) == {
        "collect", "environment", "replay", "loss", "backward", "optimizer",
    }  # fmt: skip
    line = [m for m in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss_critic" in m][-1]
    expected = {
        "loss_critic", "td_error", "learning_rate", "replay_size", "updates", "epsilon",
        "episodes", "steps_per_second", "time_replay",
    }  # fmt: skip
    assert expected <= line.keys()
    assert line["replay_size"] == 128
    assert (tmp_path / "run" / "learning_curve.svg").exists()


@pytest.mark.parametrize(
    "settings",
    [
        (CARTPOLE, "exploration={use: Boltzmann, temperature: 0.1}"),
        (PENDULUM,),
    ],
)
def test_a_weight_that_is_too_large_is_told_before_it_acts(tmp_path, settings):
    prepared = job(*settings, "optimizer.lr=1e30", "update.steps_per_batch=1")
    (tmp_path / "run").mkdir()
    with pytest.raises(FloatingPointError, match=r"a weight became .* at frame 32: try a lower op"):
        prepared.train(Run(tmp_path / "run", prepared.tree))


@pytest.mark.parametrize(("prioritised", "what"), [("null", "loss_critic"), ("{}", "a TD error")])
def test_a_number_that_is_not_finite_is_told(tmp_path, prioritised, what):
    settings = ("optimizer.lr=1e30", "algorithm.value_loss=l2")
    prepared = job(CARTPOLE, *settings, f"replay.prioritised={prioritised}")
    (tmp_path / "run").mkdir()
    with pytest.raises(FloatingPointError, match=rf"{what} .* frame \d+: try a lower optimi"):
        prepared.train(Run(tmp_path / "run", prepared.tree))


def test_stable_baselines3_is_given_our_values():
    """What it is given, for every comparison of the table."""
    pytest.importorskip("stable_baselines3")
    from polopt.launch.bench.off_policy import scaling_of, values_of
    from polopt.launch.bench.table import GOALS

    for task, algorithm in GOALS:
        if algorithm != "ppo":
            ours = prepare(load(find_recipe(f"{task}-{algorithm}")), name="test")
            values_of(ours), scaling_of(ours)
    values = values_of(prepare(load(find_recipe(CARTPOLE)), name="test"))
    # 8 environments, 64 frames and 32 steps in a round: 100 optimizer steps are 200 frames.
    assert (values["train_freq"], values["gradient_steps"]) == (8, 32)
    assert values["target_update_interval"] == 200
    assert values["exploration_fraction"] == 0.1
    assert values["learning_rate"](1.0) == 1e-3
    values = values_of(job("pendulum-td3", "collector.num_envs=8", NOISE))
    assert values["policy_delay"] == 2
    assert len(values["action_noise"].noises) == 8
    assert values_of(job(PENDULUM))["target_entropy"] == "auto"
    # Entropies are measured in the range of actions here, ±2, and in ±1 there.
    values = values_of(job(PENDULUM, "algorithm.target_entropy=-1.0"))
    assert values["target_entropy"] == pytest.approx(-1.0 - math.log(2.0))
    with pytest.raises(ValueError, match="cannot be given the values of"):
        values_of(job(CARTPOLE, PER))
    with pytest.raises(ValueError, match="cannot be given the values of"):
        scaling_of(job(CARTPOLE, "reward_scaling={constant: 10.0}"))
    assert scaling_of(job(CARTPOLE)) == {}
    assert scaling_of(job(CARTPOLE, "observation_scaling={clamp: 5.0}")) == {
        "norm_obs": True, "norm_reward": False, "clip_obs": 5.0, "clip_reward": math.inf,
        "gamma": 0.99,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "seed", "frames"), [("pendulum-sac", 10, 20_000), ("pendulum-ddpg", 12, 20_000)]
)
def test_shipped_recipes_learn(tmp_path, recipe, seed, frames):
    prepared = prepare({**load(find_recipe(recipe)), "seed": seed}, name=recipe)
    summary = run(tmp_path / "run", prepared)
    assert summary["solved"]
    assert summary["final_return"] >= -200
    assert summary["frames"] <= frames
    first = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    assert first["greedy_return"] < -1000  # it was learnt, not given


@pytest.mark.slow
def test_a_far_goal_is_found(tmp_path):
    recipe = "mountaincar-continuous-ddpg"
    prepared = prepare({**load(find_recipe(recipe)), "seed": 31}, name=recipe)
    summary = run(tmp_path / "run", prepared)
    assert summary["solved"]
    assert summary["final_return"] >= 90
    first = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    assert first["greedy_return"] < 0
