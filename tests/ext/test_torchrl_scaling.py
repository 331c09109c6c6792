"""Scaling of observations inside the networks."""

import pytest
import torch

pytest.importorskip("torchrl")

from tensordict import TensorDict

from polopt.envs.control import pendulum
from polopt.ext.torchrl.networks import distribution_of, flatten, make_actor, make_critic, value_of
from polopt.ext.torchrl.transforms import ObservationScaling


def observations(*shape):
    torch.manual_seed(0)
    return torch.randn(*shape, 3) * torch.tensor([5.0, 0.1, 1.0]) + torch.tensor([100.0, 0.0, -2.0])


@pytest.mark.parametrize("cuts", [[60], [1, 59], [20, 20, 20], [7, 0, 3, 50]])
def test_statistics_are_those_of_all_data_however_they_are_cut(cuts):
    data = observations(60)
    scaling = ObservationScaling(3, clamp=None)
    for part in data.split(cuts):
        if len(part):
            scaling.measure(part.reshape(-1, 1, 3))
    torch.testing.assert_close(scaling.mean, data.double().mean(0).float())
    expected = (data.double().var(0, unbiased=False) + 1e-8).sqrt().float()
    torch.testing.assert_close(scaling.deviation, expected)
    scaled = scaling(data)
    torch.testing.assert_close(scaled.mean(0), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(scaled.std(0, unbiased=False), torch.ones(3), atol=1e-3, rtol=0)


def test_before_the_first_measurement_observations_pass_and_the_clamp_holds():
    data = observations(5)
    assert torch.equal(ObservationScaling(3, clamp=None)(data), data)
    assert ObservationScaling(3, clamp=2.0)(data).abs().max() == 2.0
    with pytest.raises(ValueError, match="clamp must be positive or none, got -1"):
        ObservationScaling(3, clamp=-1.0)


def test_only_measuring_changes_the_statistics_and_they_are_saved():
    data = observations(4, 10)
    scaling = ObservationScaling(3)
    scaling.measure(data)
    before = {k: v.clone() for k, v in scaling.state_dict().items()}
    scaling(data + 1.0)
    assert all(torch.equal(v, before[k]) for k, v in scaling.state_dict().items())
    copy = ObservationScaling(3)
    copy.load_state_dict(before)
    for other in (scaling, copy):
        other.measure(data * 2.0)
    assert torch.equal(copy(data), scaling(data))
    assert not torch.equal(copy.mean, before["mean"])


def test_the_networks_scale_on_every_path():
    env = pendulum().make(4, seed=0)
    scaling = ObservationScaling(3)
    scaling.measure(observations(50))
    torch.manual_seed(1)
    actor, critic = make_actor(env, scaling=scaling), make_critic(env, scaling=scaling)
    torch.manual_seed(1)
    plain, plain_critic = make_actor(env), make_critic(env)
    flatten([*actor.parameters(), *critic.parameters()])
    raw = observations(7)
    expected = distribution_of(plain)(scaling(raw)).mean
    torch.testing.assert_close(distribution_of(actor)(raw).mean, expected)
    whole = actor.get_dist(TensorDict({"observation": raw}, [7])).mean
    torch.testing.assert_close(whole, expected)
    torch.testing.assert_close(value_of(critic)(raw), value_of(plain_critic)(scaling(raw)))
    scaling.measure(raw + 30.0)
    assert not torch.allclose(distribution_of(actor)(raw).mean, expected)
