"""Prioritised sampling: its distribution, weights, stamps, state and refusals."""

import pytest
import torch
from torch import Tensor

from polopt.ext.replay import Priorities, SumTree
from polopt.losses import Linear

WALKS = [False]
try:
    import numba  # noqa: F401

    WALKS.append(True)
except ImportError:
    pass


@pytest.fixture(params=WALKS, ids=["torch", "numba"][: len(WALKS)])
def compiled(request: pytest.FixtureRequest) -> bool:
    return request.param


def filled(
    errors: Tensor, *, compiled: bool, capacity: int | None = None, **settings
) -> Priorities:
    priorities = Priorities(capacity or len(errors), **{"seed": 0, **settings})
    priorities.tree = SumTree(priorities.tree.capacity, compiled=compiled)
    slots = torch.arange(len(errors))
    priorities.add(slots)
    priorities.update(slots, errors)
    return priorities


def frequencies(priorities: Priorities, batches: int, n: int) -> Tensor:
    counts = torch.zeros(priorities.tree.capacity, dtype=torch.float64)
    for _ in range(batches):
        slots, _, _ = priorities.sample(n)
        counts += slots.bincount(minlength=len(counts))
    return counts / counts.sum()


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_items_are_drawn_in_proportion_to_their_priority(alpha: float, compiled: bool) -> None:
    errors = torch.linspace(-2.0, 3.0, 50)
    priorities = filled(errors, compiled=compiled, alpha=alpha, eps=0.01)
    wanted = (errors.double().abs() + 0.01) ** alpha
    wanted /= wanted.sum()
    batches, n = 2000, 10
    counts = frequencies(priorities, batches, n) * batches * n
    chi_square = ((counts - batches * n * wanted) ** 2 / (batches * n * wanted)).sum()
    # 49 degrees of freedom: 86 is the 99.9 % quantile of independent draws; parts of equal mass
    # vary less.
    assert chi_square < 86
    assert chi_square > 5  # and they do vary


def test_each_part_of_the_mass_gives_one_item(compiled: bool) -> None:
    priorities = filled(torch.full((100,), 0.5), compiled=compiled, alpha=1.0)
    for _ in range(20):
        slots, _, _ = priorities.sample(10)
        assert (slots // 10).tolist() == list(range(10))


def test_single_draws_are_proportional_too(compiled: bool) -> None:
    priorities = filled(torch.tensor([0.1, 0.2, 0.7]), compiled=compiled, alpha=1.0, eps=1e-9)
    found = frequencies(priorities, 3000, 1)
    torch.testing.assert_close(found, torch.tensor([0.1, 0.2, 0.7]).double(), atol=0.03, rtol=0)


def test_weights_follow_the_formula_over_the_whole_buffer(compiled: bool) -> None:
    errors = torch.tensor([0.5, -1.0, 4.0, 0.25])
    priorities = filled(errors, compiled=compiled, capacity=9, alpha=0.7, beta=0.3, eps=0.1)
    p = (errors.double().abs() + 0.1) ** 0.7
    all_weights = (4 * p / p.sum()) ** -0.3
    slots, weights, _ = priorities.sample(4)
    torch.testing.assert_close(weights, (all_weights / all_weights.max())[slots].float())
    assert weights.dtype == torch.float32


def test_at_full_correction_the_expected_update_is_the_uniform_one(compiled: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    errors = torch.rand(64, generator=generator)
    gradient = errors + torch.rand(64, generator=generator)
    priorities = filled(errors, compiled=compiled, beta=1.0, alpha=1.0, eps=0.05)
    total, scale, by_batch, batch_scale = 0.0, 0.0, 0.0, 0.0
    for _ in range(4000):
        slots, weights, _ = priorities.sample(8)
        total += float((weights * gradient[slots]).sum())
        scale += float(weights.sum())
        weights = weights / weights.max()
        by_batch += float((weights * gradient[slots]).sum())
        batch_scale += float(weights.sum())
    assert total / scale == pytest.approx(float(gradient.mean()), rel=0.01)
    # With the maximum of each batch it would lean towards large errors.
    assert by_batch / batch_scale > 1.04 * float(gradient.mean())
    # The length of the step is the same for all batches: N times the smallest probability.
    p = errors.double() + 0.05
    assert scale / (4000 * 8) == pytest.approx(float(64 * p.min() / p.sum()), rel=0.02)


def test_beta_is_annealed(compiled: bool) -> None:
    priorities = filled(
        torch.tensor([1.0, 2.0]),
        compiled=compiled,
        alpha=1.0,
        eps=1e-9,
        beta=Linear(start=0.0, end=1.0, steps=100),
    )
    for step, weight in ((0, 1.0), (50, 2**-0.5), (100, 0.5), (200, 0.5)):
        priorities.anneal(step)
        slots, weights, _ = priorities.sample(2)
        assert weights[slots == 1][0] == pytest.approx(weight)


def test_new_items_take_the_largest_priority_seen(compiled: bool) -> None:
    priorities = filled(torch.tensor([0.5, 0.5]), compiled=compiled, capacity=4, alpha=1.0, eps=0.1)
    assert priorities.tree.values.tolist() == pytest.approx([0.6, 0.6, 0, 0])
    priorities.add(torch.tensor([1]))
    assert float(priorities.tree.values[1]) == pytest.approx(0.6)  # not the 1 from before any
    priorities.update(torch.tensor([0]), torch.tensor([-7.0]))
    priorities.update(torch.tensor([0]), torch.tensor([0.0]))
    priorities.add(torch.tensor([2]))
    assert priorities.tree.values.tolist() == pytest.approx([0.1, 0.6, 7.1, 0])
    assert len(priorities) == 3


def test_updates_for_what_was_overwritten_are_ignored(compiled: bool) -> None:
    priorities = filled(torch.ones(8), compiled=compiled, alpha=1.0, eps=0.5)
    slots, _, stamps = priorities.sample(8)
    priorities.add(torch.tensor([2, 5]))
    priorities.update(slots, torch.full((8,), 9.0), stamps)
    values = priorities.tree.values
    kept = torch.isin(torch.arange(8), torch.tensor([2, 5]))
    assert (values[kept] == 1.5).all()
    assert (values[slots[~torch.isin(slots, torch.tensor([2, 5]))]] == 9.5).all()
    slots, _, stamps = priorities.sample(8)
    priorities.clear()
    priorities.add(torch.arange(8))
    before = priorities.tree.values
    priorities.update(slots, torch.full((8,), 9.0), stamps)
    assert torch.equal(priorities.tree.values, before)


def test_the_larger_of_two_errors_of_an_item_counts(compiled: bool) -> None:
    priorities = filled(torch.ones(3), compiled=compiled, alpha=1.0, eps=0.5)
    priorities.update(torch.tensor([1, 1, 1]), torch.tensor([2.0, -4.0, 0.0]))
    assert priorities.tree.values.tolist() == [1.5, 4.5, 1.5]


def test_an_empty_update_changes_nothing(compiled: bool) -> None:
    priorities = filled(torch.ones(3), compiled=compiled)
    before = priorities.tree.values
    priorities.update(torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    priorities.add(torch.zeros(0, dtype=torch.int64))
    assert torch.equal(priorities.tree.values, before)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_errors_that_are_not_finite_are_refused_whole(bad: float, compiled: bool) -> None:
    priorities = filled(torch.ones(4), compiled=compiled)
    before = priorities.state_dict()
    with pytest.raises(ValueError, match=rf"td_error must be finite, got {bad} for slot 2"):
        priorities.update(torch.tensor([0, 2]), torch.tensor([5.0, bad]))
    after = priorities.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_slots_outside_are_refused(compiled: bool) -> None:
    priorities = filled(torch.ones(4), compiled=compiled)
    for slots in (torch.tensor([0, 4]), torch.tensor([-1, 2])):
        with pytest.raises(ValueError, match=r"slots must be within \[0, 4\)"):
            priorities.add(slots)
        with pytest.raises(ValueError, match=r"slots must be within \[0, 4\)"):
            priorities.update(slots, torch.ones(2))


def test_shapes_must_fit(compiled: bool) -> None:
    priorities = filled(torch.ones(4), compiled=compiled)
    with pytest.raises(ValueError, match=r"must have the shape of slots \(2,\), got \(2, 1\)"):
        priorities.update(torch.tensor([0, 1]), torch.ones(2, 1))
    two = torch.zeros(2, 1, dtype=torch.int64)
    for call in (lambda: priorities.update(two, torch.ones(2, 1)), lambda: priorities.add(two)):
        with pytest.raises(ValueError, match=r"slots must have one dimension, .* \(2, 1\): flat"):
            call()


@pytest.mark.parametrize("n", [0, 5])
def test_no_more_can_be_sampled_than_is_stored(n: int, compiled: bool) -> None:
    priorities = filled(torch.ones(4), compiled=compiled, capacity=16)
    with pytest.raises(ValueError, match=rf"number of stored items 4, got {n}"):
        priorities.sample(n)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": 1.5}, r"alpha must be a number in \[0, 1\], got 1.5"),
        ({"alpha": -0.1}, r"alpha must be a number in \[0, 1\], got -0.1"),
        ({"alpha": torch.nan}, r"alpha must be a number in \[0, 1\], got nan"),
        ({"beta": 1.1}, r"beta must be in \[0, 1\], got 1.1"),
        ({"beta": Linear(start=0.4, end=2.0, steps=5)}, r"beta must be in \[0, 1\], got 2.0"),
        ({"eps": 0.0}, "eps must be positive and finite, got 0.0"),
        ({"capacity": 0}, "capacity must be at least 1, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Priorities(**{"capacity": 4, **arguments})


def test_a_restored_one_continues_exactly(compiled: bool) -> None:
    def go_on(priorities: Priorities) -> list[Tensor]:
        out = []
        for step in range(20):
            priorities.add(torch.tensor([step % 30, (7 * step) % 30]))
            slots, weights, stamps = priorities.sample(8)
            priorities.anneal(step)  # after the draw: the first one goes by what was restored
            priorities.update(slots, weights * (slots % 5), stamps)
            out += [slots, weights, stamps, priorities.tree.values]
        return out

    schedule = Linear(start=0.4, end=1.0, steps=50)
    first = filled(torch.rand(20), compiled=compiled, capacity=30, beta=schedule)
    go_on(first)
    state = {key: value.clone() for key, value in first.state_dict().items()}
    stored, wanted = len(first), go_on(first)
    second = filled(torch.rand(30), compiled=compiled, beta=schedule, seed=5)
    second.load_state_dict(state)
    assert len(second) == stored < 30
    assert all(torch.equal(a, b) for a, b in zip(go_on(second), wanted, strict=True))
    with pytest.raises(ValueError, match="state is of capacity 30, this one has 4"):
        Priorities(4).load_state_dict(state)


@pytest.mark.skipif(len(WALKS) < 2, reason="numba is not installed")
def test_both_walks_draw_the_same() -> None:
    one, two = (filled(torch.rand(500).fill_(1), compiled=c) for c in (False, True))
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    for step in range(50):
        drawn = [p.sample(64, g) for p, g in zip((one, two), generators, strict=True)]
        assert torch.equal(drawn[0][0], drawn[1][0])
        assert torch.equal(drawn[0][2], drawn[1][2])
        torch.testing.assert_close(drawn[0][1], drawn[1][1])
        errors = torch.rand(64, generator=torch.Generator().manual_seed(step))
        for p, (slots, _, stamps) in zip((one, two), drawn, strict=True):
            p.update(slots, errors, stamps)
    torch.testing.assert_close(one.tree.values, two.tree.values, rtol=1e-14, atol=0)
