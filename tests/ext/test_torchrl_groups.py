"""Groups of rollouts: one start state, what is dropped and refilled, advantages, gradients."""

import math

import pytest
import torch

pytest.importorskip("torchrl")

from tensordict import TensorDict

from polopt.envs.control import cartpole, gymnasium, mountain_car, pendulum
from polopt.ext.metrics import Stopwatch
from polopt.ext.torchrl.group_update import GroupUpdate
from polopt.ext.torchrl.groups import DynamicSampling, GroupAdvantage, GroupCollector
from polopt.ext.torchrl.networks import distribution_of, make_actor
from polopt.losses import (
    Advantage,
    Sampling,
    dapo,
    dr_grpo,
    grpo,
    informative,
    opo,
    reinforce_pp,
    remax,
    rloo,
    whiten,
)
from polopt.losses.modules import PolicyLoss


def collector(task=None, envs=8, size=4, **settings):
    torch.manual_seed(0)
    env = (task or cartpole()).make(envs, seed=0)
    return GroupCollector(env, make_actor(env), group_size=size, **settings)


def positions(source):
    snapshot = source.env.snapshot()
    return snapshot["state"].view(-1, source.group_size, snapshot["state"].shape[-1]), snapshot


@pytest.mark.parametrize("segment", [None, 7])
def test_members_share_their_start_bit_for_bit(segment):
    source = collector(segment=segment)
    for _ in range(3):
        state, snapshot = positions(source)
        assert (state == state[:, :1]).all()
        assert (snapshot["steps"].view(-1, 4) == snapshot["steps"].view(-1, 4)[:, :1]).all()
        assert (state[0, 0] != state[1, 0]).any()  # groups do not
        batch = source.collect()
        first = batch["observation"][:, 0].view(2, 4, -1)
        assert torch.equal(first, state.float())
        assert batch["group"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
        assert len(batch["action"].unique(dim=0)) > 1  # their actions differ


def test_a_group_goes_on_where_its_first_member_stands():
    source = collector(segment=5)
    _, before = positions(source)
    batch = source.collect()
    other = cartpole().make(8)
    other.restore(before)
    for step in range(5):
        other.advance(batch["action"][:, step])
    reached = other.snapshot()["state"].view(2, 4, -1)
    state, snapshot = positions(source)
    assert torch.equal(state, reached[:, :1].expand_as(state))
    assert snapshot["steps"].tolist() == [5] * 8


def test_episodes_end_and_begin_anew():
    source = collector()
    for _ in range(2):
        batch = source.collect()
        mask, reward = batch["mask"], batch["next", "reward"].squeeze(-1)
        length = mask.sum(1)
        assert length.max() == mask.shape[1] > length.min()
        done = batch["next", "done"].squeeze(-1)
        assert (done.sum(1) == 1).all()
        assert done[torch.arange(8), length - 1].all()
        assert torch.equal(batch["outcome"], length.float())  # CartPole pays one a step
        assert torch.equal(batch["episode_return"], length.float())
        for name in ("observation", "action", "action_log_prob"):
            assert not batch[name][~mask].any()
        assert not reward[~mask].any()
        assert positions(source)[1]["steps"].tolist() == [0] * 8


def test_the_outcome_is_discounted_and_the_return_spans_the_segments():
    source = collector(pendulum(), segment=20, gamma=0.9)
    earned = torch.zeros(2)
    for number in range(10):  # 200 steps, one episode
        batch = source.collect()
        reward = batch["next", "reward"].squeeze(-1)
        by_hand = [sum(0.9**t * r for t, r in enumerate(row.tolist())) for row in reward]
        torch.testing.assert_close(batch["outcome"], torch.tensor(by_hand), rtol=1e-5, atol=1e-4)
        whole = earned.repeat_interleave(4) + reward.sum(1)
        earned = whole.view(2, 4)[:, 0]
        if number < 9:
            assert batch["episode_return"].isnan().all()
    torch.testing.assert_close(batch["episode_return"], whole)


def test_other_groups_stay_where_they_are():
    source = collector(segment=5)
    source.collect()
    state, before = positions(source)
    batch = source.collect(torch.tensor([False, True]))
    assert batch["group"].tolist() == [1, 1, 1, 1]
    now, snapshot = positions(source)
    assert torch.equal(now[0], state[0])
    assert not torch.equal(now[1], state[1])
    assert snapshot["steps"].view(2, 4)[:, 0].tolist() == [5, 10]
    assert before["steps"].view(2, 4)[:, 0].tolist() == [5, 5]
    with pytest.raises(ValueError, match="at least one group"):
        source.collect(torch.tensor([False, False]))


def test_a_collector_continues_where_it_was_saved():
    source = collector(segment=6)
    source.collect()
    saved, seed = source.state_dict(), torch.get_rng_state()
    expected = [source.collect() for _ in range(2)]
    other = collector(segment=6)
    other.load_state_dict(saved)
    torch.set_rng_state(seed)
    for batch in expected:
        again = other.collect()
        assert set(again.keys(True, True)) == set(batch.keys(True, True))
        for name in batch.keys(True, True):
            # The return of an episode that goes on is NaN.
            torch.testing.assert_close(again[name], batch[name], rtol=0, atol=0, equal_nan=True)


def test_groups_without_spread_are_replaced_by_new_starts():
    # Twelve steps: some groups of a random policy lose no pole.
    source = collector(envs=32, segment=12)
    sampled = DynamicSampling(source, Sampling(refill="reward")).collect()
    batch = sampled.batch
    assert sampled.rounds > 0
    assert sampled.dropped == sampled.flat == sampled.played - 8 > 0
    assert sorted(batch["group"].tolist()) == [g for g in range(8) for _ in range(4)]
    assert informative(batch["outcome"], batch["group"]).all()
    assert sampled.frames > batch["mask"].sum()
    advantage = GroupAdvantage(grpo().advantage)(batch)["advantage"].squeeze(-1)
    assert (advantage != 0).view(len(batch), -1)[batch["mask"]].float().mean() > 0.5


def test_without_a_refill_every_group_stays_and_teaches_nothing_if_it_is_flat():
    source = collector(envs=32, segment=12)
    sampled = DynamicSampling(source, Sampling()).collect()
    assert sampled.flat > 0
    assert sampled.dropped == sampled.rounds == 0
    assert len(sampled.batch) == 32
    advantage = GroupAdvantage(grpo().advantage)(sampled.batch)["advantage"].squeeze(-1)
    flat = ~informative(sampled.batch["outcome"], sampled.batch["group"])
    rows = flat[sampled.batch["group"]]
    assert not advantage[rows].any()
    assert advantage[~rows][sampled.batch["mask"][~rows]].any()


def test_refills_are_bounded():
    source = collector(mountain_car(), segment=3)  # −1 for every step: never any spread
    sampled = DynamicSampling(source, Sampling(refill="reward", max_rounds=2)).collect()
    assert len(sampled.batch) == 0
    assert sampled.rounds == 2
    assert sampled.played == sampled.flat == sampled.dropped == 6
    assert sampled.frames == 3 * 8 * 3


def rollouts():
    """Three steps at most; group 0 scores 1 and 3, group 1 scores 2 and 2."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 0]]).bool()
    reward = torch.tensor([[0.0, 0.0, 1.0], [3.0, 0.0, 0.0], [1.0, 1.0, 0.0], [2.0, 0.0, 0.0]])
    return TensorDict(
        {
            "mask": mask,
            "group": torch.tensor([0, 0, 1, 1]),
            "outcome": reward.sum(1),
            "next": {"reward": reward.unsqueeze(-1)},
        },
        [4],
    )


@pytest.mark.parametrize(
    ("algorithm", "rows"),
    [
        (grpo(), [-1 / math.sqrt(2), 1 / math.sqrt(2), 0, 0]),  # (R − 2) / √2, n − 1
        (dr_grpo(horizon=3), [-1, 1, 0, 0]),
        (rloo(), [-2, 2, 0, 0]),  # R − the other
        (opo(), [1 - 6 / 4, 3 - 6 / 4, 0, 0]),  # lengths 3 and 1: (3·1 + 1·3) / 4
    ],
    ids=["grpo", "dr_grpo", "rloo", "opo"],
)
def test_advantages_by_hand(algorithm, rows):
    batch = GroupAdvantage(algorithm.advantage)(rollouts())
    expected = torch.tensor(rows, dtype=torch.float32).unsqueeze(-1) * batch["mask"]
    torch.testing.assert_close(batch["advantage"].squeeze(-1), expected, rtol=1e-5, atol=1e-6)
    assert batch["group_tokens"].tolist() == [4, 4, 4, 4]


def test_advantages_per_step_and_whitening():
    batch = GroupAdvantage(reinforce_pp(kl_coef=0.0).advantage)(rollouts())
    ahead = torch.tensor([[1.0, 1, 1], [3, 0, 0], [2, 1, 0], [2, 0, 0]])  # what is still to come
    expected = whiten(ahead, batch["mask"])
    torch.testing.assert_close(batch["advantage"].squeeze(-1), expected)
    kept = batch["advantage"].squeeze(-1)[batch["mask"]]
    assert kept.mean().abs() < 1e-6
    assert kept.std() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("task", [cartpole(), pendulum()], ids=lambda task: task.name)
@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
def test_update_has_the_gradient_of_the_formula(task, aggregation):
    source = collector(task, segment=30)
    algorithm = grpo(kl_coef=0.0) if aggregation == "sequence_mean" else dapo(high=0.2)
    batch = GroupAdvantage(algorithm.advantage)(source.collect())
    actor = source.policy
    with torch.no_grad():
        for parameter in actor.parameters():  # so that the clip has work
            parameter += 0.2 * torch.randn_like(parameter)
    per_row = []
    for row in range(8):
        steps = int(batch["mask"][row].sum())
        part = {k: batch[k][row, :steps] for k in ("observation", "action", "action_log_prob")}
        dist = actor.get_dist(TensorDict({"observation": part["observation"]}, [steps]))
        ratio = (dist.log_prob(part["action"]) - part["action_log_prob"]).exp()
        advantage = batch["advantage"][row, 0, 0]
        per_row.append(-torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    mean = torch.stack([r.mean() for r in per_row]).mean()
    loss = mean if aggregation == "sequence_mean" else torch.cat(per_row).mean()
    expected = torch.autograd.grad(loss, list(actor.parameters()))
    batch["observation"][~batch["mask"]] = math.nan  # padding is never looked at
    update = GroupUpdate(
        PolicyLoss(algorithm),
        distribution_of(actor),
        torch.optim.SGD(actor.parameters(), lr=0.0),
        epochs=1,
        minibatch_size=8,
        max_grad_norm=None,
        stopwatch=Stopwatch(),
    )
    metrics = update(batch)
    assert metrics["clip_fraction"] > 0
    torch.testing.assert_close(metrics["loss_objective"], loss.detach())
    for parameter, gradient in zip(actor.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_a_short_batch_is_dealt_evenly():
    source = collector(segment=10)
    batch = GroupAdvantage(grpo().advantage)(source.collect())[:5]
    sizes = []
    loss = PolicyLoss(grpo(kl_coef=0.0))
    loss.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    update = GroupUpdate(
        loss, distribution_of(source.policy), torch.optim.SGD(source.policy.parameters(), lr=0.0),
        epochs=2, minibatch_size=4, max_grad_norm=0.5, stopwatch=Stopwatch(),
    )  # fmt: skip
    update(batch)
    assert sizes == [3, 2, 3, 2]


def test_target_kl_ends_the_passes():
    source = collector()
    batch = GroupAdvantage(grpo().advantage)(source.collect())
    steps = []
    optimizer = torch.optim.SGD(source.policy.parameters(), lr=100.0)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    update = GroupUpdate(
        PolicyLoss(grpo(kl_coef=0.0)), distribution_of(source.policy), optimizer,
        epochs=10, minibatch_size=8, max_grad_norm=0.5, target_kl=1e-6, stopwatch=Stopwatch(),
    )  # fmt: skip
    update(batch)
    assert len(steps) == 2  # the first pass starts from the policy that collected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 1}, "group_size must be at least 2, got 1"),
        ({"size": 3}, "group_size 3 must divide the 8 copies"),
        ({"segment": 0}, "segment must be at least 1 or none, got 0"),
        ({"gamma": 1.5}, r"gamma must be in \[0, 1\], got 1.5"),
    ],
)
def test_wrong_groups_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        collector(**settings)


def test_an_environment_that_cannot_go_back_is_refused():
    with pytest.raises(ValueError, match="cannot go back to a state, as those of gym"):
        collector(gymnasium(name="CartPole-v1"))


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(refill="correct"), "use refill='reward'"),
        (Sampling(at_bound="stop"), "use at_bound='train'"),
        (Sampling(drop_truncated=True), "drop_truncated=True is for answers"),
        (Sampling(overlong_cache=5), "overlong_cache=5 is for answers"),
    ],
)
def test_sampling_for_answers_is_refused(sampling, message):
    with pytest.raises(ValueError, match=message):
        DynamicSampling(collector(), sampling)


def test_an_advantage_that_needs_more_is_refused():
    with pytest.raises(ValueError, match="remax_advantage asks for greedy_reward; of rollouts"):
        GroupAdvantage(remax().advantage)

    def by_value(reward, value):
        return reward - value

    with pytest.raises(ValueError, match="by_value asks for value"):
        GroupAdvantage(Advantage(estimate=by_value))
