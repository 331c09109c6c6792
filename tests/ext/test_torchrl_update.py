"""The update step, networks and evaluation; and our loss in a loop of the user's own."""

import time

import pytest
import torch

pytest.importorskip("torchrl")

from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from polopt.envs.control import cartpole, pendulum
from polopt.ext.metrics import Stopwatch
from polopt.ext.torchrl.collector import BatchedCollector
from polopt.ext.torchrl.distributions import Categorical as OurCategorical
from polopt.ext.torchrl.evaluate import greedy_returns
from polopt.ext.torchrl.networks import (
    distribution_of,
    flatten,
    make_actor,
    make_critic,
    value_of,
)
from polopt.ext.torchrl.transforms import GAEAdvantage
from polopt.ext.torchrl.update import Update
from polopt.losses import ppo
from polopt.losses.modules import PolicyLoss

ALGORITHM = ppo(value_clip=0.2, entropy_coef=0.01, whiten=False)


def setting(task, frames=240):
    torch.manual_seed(0)
    env = task.make(4, seed=0)
    actor, critic = make_actor(env), make_critic(env)
    batch = BatchedCollector(env, actor, frames_per_batch=frames, total_frames=frames).collect()
    return actor, critic, GAEAdvantage(critic)(batch)


def updater(
    actor, critic, *, epochs=1, minibatch_size=240, lr=0.0, max_grad_norm=None, flat=False, **more
):
    parameters = [*actor.parameters(), *critic.parameters()]
    if flat:
        parameters = [flatten(parameters)]
    optimizer = torch.optim.Adam(parameters, lr=lr)
    return Update(
        PolicyLoss(ALGORITHM),
        distribution_of(actor),
        value_of(critic),
        optimizer,
        epochs=epochs,
        minibatch_size=minibatch_size,
        max_grad_norm=max_grad_norm,
        stopwatch=Stopwatch(),
        **more,
    )


def nudged(actor, critic):
    """Move the policy away from the one that collected, so that clipping has work."""
    with torch.no_grad():
        for parameter in (*actor.parameters(), *critic.parameters()):
            parameter += 0.2 * torch.randn_like(parameter)


@pytest.mark.parametrize("task", [cartpole(), pendulum()], ids=lambda task: task.name)
def test_update_has_the_gradient_of_torchrl_s_loss(task):
    actor, critic, batch = setting(task)
    nudged(actor, critic)
    update = updater(actor, critic)
    metrics = update(batch)
    ours = [p.grad.clone() for p in (*actor.parameters(), *critic.parameters())]
    loss = ClipPPOLoss(
        actor, critic, clip_epsilon=0.2, entropy_coeff=0.01, critic_coeff=0.25, clip_value=0.2,
        loss_critic_type="l2", normalize_advantage=False,
    )  # fmt: skip
    out = loss(batch.reshape(-1))
    total = out["loss_objective"] + out["loss_critic"] + out["loss_entropy"]
    parameters = [*actor.parameters(), *critic.parameters()]
    expected = torch.autograd.grad(total, parameters)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-4)
    for name in ("loss_objective", "loss_critic", "loss_entropy"):
        torch.testing.assert_close(metrics[name], out[name].detach(), atol=1e-6, rtol=1e-5)
    assert metrics["clip_fraction"] > 0


def test_minibatches_cover_the_batch_once_an_epoch():
    actor, critic, batch = setting(cartpole())
    whole = updater(actor, critic)(batch)
    cut = updater(actor, critic, epochs=2, minibatch_size=60)(batch)  # lr 0: same policy
    for name in ("loss_objective", "loss_critic", "entropy"):
        torch.testing.assert_close(cut[name], whole[name])


def test_gradient_norm_is_reported_and_bounded():
    actor, critic, batch = setting(cartpole())
    free = updater(actor, critic)
    norm = free(batch)["grad_norm"]
    bound = float(norm) / 10
    update = updater(actor, critic, max_grad_norm=bound)
    assert update(batch)["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    grads = [p.grad.flatten() for p in (*actor.parameters(), *critic.parameters())]
    assert float(torch.cat(grads).norm()) == pytest.approx(bound, rel=1e-3)


def test_phases_are_timed_at_no_noticeable_cost():
    actor, critic, batch = setting(cartpole())
    update = updater(actor, critic, epochs=20)
    watch = update.stopwatch
    watch.start()
    update(batch)
    seconds = watch.take()
    assert set(seconds) == {"time_loss", "time_backward", "time_optimizer"}
    assert min(seconds.values()) > 0
    assert watch.take() == {}
    start = time.process_time()
    for _ in range(60 * 20):  # twenty times as many laps as the update made
        watch.lap("loss")
    assert time.process_time() - start < 20 * 0.01 * sum(seconds.values())


def test_minibatch_size_must_divide():
    actor, critic, batch = setting(cartpole())
    with pytest.raises(ValueError, match="must divide the 240 steps of the batch, got 100"):
        updater(actor, critic, minibatch_size=100)(batch)


def test_shortcuts_equal_the_modules():
    for task in (cartpole(), pendulum()):
        actor, critic, batch = setting(task)
        nudged(actor, critic)
        observation, action = batch["observation"], batch["action"]
        expected = actor.get_dist(batch).log_prob(action)
        torch.testing.assert_close(distribution_of(actor)(observation).log_prob(action), expected)
        value = critic(batch.select("observation"))["state_value"].squeeze(-1)
        torch.testing.assert_close(value_of(critic)(observation), value)


def test_flat_parameters_train_like_separate_ones():
    results = []
    for flat in (False, True):
        actor, critic, batch = setting(cartpole())
        parameters = [*actor.parameters(), *critic.parameters()]
        updater(actor, critic, epochs=3, lr=1e-2, max_grad_norm=0.1, flat=flat)(batch)
        results.append(torch.cat([p.detach().flatten() for p in parameters]))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-4)
    before = setting(cartpole())[0]
    assert not torch.equal(next(before.parameters()), next(actor.parameters()))


def test_categorical_equals_torch_s():
    logits = (3 * torch.randn(5, 7, 4)).requires_grad_()
    ours, torchs = OurCategorical(logits), Categorical(logits=logits)
    action = torchs.sample()
    for mine, theirs in (
        (ours.log_prob(action), torchs.log_prob(action)),
        (ours.entropy(), torchs.entropy()),
        (ours.probs, torchs.probs),
        (ours.mode, torchs.mode),
    ):
        torch.testing.assert_close(mine, theirs)
        if mine.requires_grad:
            grads = [
                torch.autograd.grad(x.sin().sum(), logits, retain_graph=True)[0]
                for x in (mine, theirs)
            ]
            torch.testing.assert_close(*grads)
    draws = ours.sample(torch.Size([20_000]))
    assert draws.shape == (20_000, 5, 7)
    frequency = nn.functional.one_hot(draws, 4).double().mean(0)
    torch.testing.assert_close(frequency, ours.probs.detach().double(), atol=0.02, rtol=0.0)
    single = OurCategorical(logits[0, 0])  # an environment without a batch
    assert single.sample().shape == ()
    assert single.sample(torch.Size([3])).shape == (3,)


def test_unusual_modules_run_as_they_are():
    hidden = TensorDictModule(nn.Linear(4, 8), in_keys=["observation"], out_keys=["hidden"])
    head = TensorDictModule(nn.Linear(8, 2), in_keys=["hidden"], out_keys=["logits"])
    actor = ProbabilisticActor(
        TensorDictSequential(hidden, head), in_keys=["logits"], distribution_class=Categorical
    )
    observation = torch.randn(5, 4)
    expected = head.module(hidden.module(observation))
    got = distribution_of(actor)(observation)
    torch.testing.assert_close(got.logits, expected - expected.logsumexp(-1, keepdim=True))
    critic = TensorDictSequential(
        hidden, ValueOperator(nn.Linear(8, 1), in_keys=["hidden"], out_keys=["state_value"])
    )
    assert value_of(critic)(observation).shape == (5,)


def test_greedy_returns_count_the_first_episode_only():
    env = cartpole().make(3, seed=0)

    def left(observation):
        return Categorical(logits=torch.tensor([[9.0, 0.0]]).expand(len(observation), 2))

    returns = greedy_returns(env, left)
    expected = []
    for i in range(3):
        reference = cartpole().make(3, seed=0)
        reference.restart()
        steps, ended = 0, False
        while not ended:
            _, _, terminated, _ = reference.advance(torch.zeros(3, dtype=torch.int64))
            steps, ended = steps + 1, bool(terminated[i])
        expected.append(float(steps))
    assert returns.tolist() == expected


def test_a_user_s_own_loop_with_only_our_loss():
    """TorchRL's collector, TorchRL's GAE, the user's loop: the return rises."""
    torch.manual_seed(0)
    env = cartpole().make(8, seed=0)
    actor, critic = make_actor(env), make_critic(env)
    loss = PolicyLoss(ppo(value_clip=1.0), actor, critic)
    advantage = GAE(gamma=0.98, lmbda=0.8, value_network=critic, average_gae=True)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=3e-3)
    lengths = []
    for batch in Collector(env, actor, frames_per_batch=512, total_frames=512 * 12):
        flat = advantage(batch).reshape(-1)
        for _ in range(6):
            for index in torch.randperm(len(flat)).split(256):
                out = loss(flat[index])
                total = sum(v for k, v in out.items() if k.startswith("loss_"))
                optimizer.zero_grad()
                total.backward()
                optimizer.step()
        lengths.append(batch.numel() / max(int(batch["next", "done"].sum()), 1))
    assert lengths[-1] > 2 * lengths[0]


def test_loss_reads_a_plain_tensordict_of_the_user():
    _, _, batch = setting(cartpole())
    entries = {k: batch[k].reshape(240, -1).squeeze(-1) for k in ("action", "action_log_prob")}
    renamed = TensorDict(
        {
            **entries,
            "obs": batch["observation"].reshape(240, 4),
            "adv": batch["advantage"].reshape(240),
            "log_prob": batch["action_log_prob"].reshape(240),
        },
        [240],
    )
    loss = PolicyLoss(ppo(value_clip=None).objective)
    loss.set_keys(advantage="adv")
    out = loss(renamed)
    assert float(out["loss_objective"]) == pytest.approx(
        -float(batch["advantage"].mean()), abs=1e-5
    )


def test_target_kl_ends_the_epochs(monkeypatch):
    actor, critic, batch = setting(cartpole())

    def steps(target_kl):
        update = updater(actor, critic, epochs=6, minibatch_size=120, target_kl=target_kl)
        measured = []

        def step(minibatch):
            measured.append(0.1 * len(measured))  # means of the epochs: 0.05, 0.25, 0.45, …
            return {"kl_approx": torch.tensor(measured[-1])}

        monkeypatch.setattr(update, "_step", step)
        update(batch)
        return len(measured)

    assert steps(None) == steps(2.0) == 12
    assert steps(0.04) == 2
    assert steps(0.3) == 6
