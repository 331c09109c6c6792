"""A named algorithm with other choices on its axes."""

import pytest

from polopt.losses import Clip, Reweight, Sampling, adjusted, dapo, grpo


def test_what_is_not_named_stays():
    base = dapo(high=0.3, max_rounds=3)
    assert adjusted(base=base) == base
    found = adjusted(
        base=base,
        surrogate=Clip(low=0.1, high=0.1),
        objective={"kl": "full", "kl_coef": 0.1},
        corrections=[Reweight()],
        advantage={"scale": "none"},
        whiten=True,
        sampling={"top_entropy": 0.2},
    )
    assert (found.objective.kl, found.objective.aggregation) == ("full", "token_mean")
    assert found.objective.corrections == (Reweight(),)
    assert found.objective.surrogate == Clip(low=0.1, high=0.1)
    assert found.advantage.settings == {**base.advantage.settings, "scale": "none"}
    assert found.advantage.whiten
    assert found.sampling == Sampling(refill="correct", max_rounds=3, top_entropy=0.2)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"objective": {"agregation": "token_mean"}}, "objective has no field 'agregation'"),
        ({"sampling": {"top": 0.2}}, "sampling has no field 'top', expected one of .*top_entropy"),
        ({"sampling": {"top_entropy": 0.0}}, r"top_entropy must be in \(0, 1\], got 0.0"),
        ({"sampling": {"top_entropy": "0.2"}}, "top_entropy must be int or float or none, got '0"),
        ({"sampling": {"max_rounds": True}}, "max_rounds must be int, got True"),
        ({"sampling": {"drop_truncated": "no"}}, "drop_truncated must be bool, got 'no'"),
        ({"advantage": {"scales": 1}}, "has no setting 'scales'"),
    ],
)
def test_unknown_choices_are_refused(choices, message):
    with pytest.raises(ValueError, match=message):
        adjusted(base=grpo(), **choices)
