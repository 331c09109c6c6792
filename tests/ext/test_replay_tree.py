"""The tree of sums: what it holds, what it finds, and that both walks agree to the bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polopt.ext.replay import SumTree

WALKS = [False]
try:
    import numba  # noqa: F401

    WALKS.append(True)
except ImportError:
    pass


def writes(capacity: int) -> st.SearchStrategy[list[list[tuple[int, float]]]]:
    value = st.one_of(st.just(0.0), st.floats(1e-12, 1e12))
    batch = st.lists(st.tuples(st.integers(0, capacity - 1), value), min_size=1, max_size=20)
    return st.lists(batch, min_size=1, max_size=6)


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[list[tuple[int, float]]], list[float]]:
    capacity = draw(st.sampled_from([1, 2, 15, 16, 17, 255, 256, 257, 4097]))
    fractions = draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20))
    return capacity, draw(writes(capacity)), fractions


def apply(tree: SumTree, batch: list[tuple[int, float]]) -> None:
    slots, values = zip(*batch, strict=True)
    tree.write(torch.tensor(slots), torch.tensor(values, dtype=torch.float64))


@pytest.mark.parametrize("compiled", WALKS)
@settings(max_examples=60, deadline=None)
@given(history=histories())
def test_sum_minimum_and_find_agree_with_a_list(
    compiled: bool, history: tuple[int, list[list[tuple[int, float]]], list[float]]
) -> None:
    capacity, batches, fractions = history
    tree, leaves = SumTree(capacity, compiled=compiled), [0.0] * capacity
    for batch in batches:
        apply(tree, batch)
        largest: dict[int, float] = {}
        for slot, value in batch:
            largest[slot] = max(value, largest.get(slot, 0.0))
        for slot, value in largest.items():
            leaves[slot] = value
    assert tree.values.tolist() == leaves
    assert float(tree.total) == pytest.approx(sum(leaves), rel=1e-12)
    assert float(tree.minimum) == min((x for x in leaves if x > 0), default=torch.inf)
    if not any(leaves):
        return
    mass = torch.tensor(fractions, dtype=torch.float64) * tree.total
    found = tree.find(mass)
    values = torch.tensor(leaves, dtype=torch.float64)
    assert (values[found] > 0).all()
    ends = values.cumsum(0)
    slack = 1e-12 * ends[-1]
    assert (mass <= ends[found] + slack).all()
    assert (mass >= ends[found] - values[found] - slack).all()


@pytest.mark.skipif(True not in WALKS, reason="numba is not installed")
@settings(max_examples=60, deadline=None)
@given(history=histories())
def test_both_walks_agree_to_the_bit(
    history: tuple[int, list[list[tuple[int, float]]], list[float]],
) -> None:
    capacity, batches, fractions = history
    trees = [SumTree(capacity, compiled=compiled) for compiled in (False, True)]
    for tree in trees:
        for batch in batches:
            apply(tree, batch)
    assert torch.equal(trees[0].values, trees[1].values)
    assert trees[0].total == trees[1].total
    assert trees[0].minimum == trees[1].minimum
    if trees[0].total > 0:
        mass = torch.tensor([*fractions, 1.0], dtype=torch.float64) * trees[0].total
        assert torch.equal(trees[0].find(mass), trees[1].find(mass))


@pytest.mark.parametrize("compiled", WALKS)
def test_rounding_errors_do_not_pile_up(compiled: bool) -> None:
    tree = SumTree(300, compiled=compiled)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        slots = torch.randint(300, (32,), generator=generator)
        values = 10.0 ** (24 * torch.rand(32, generator=generator, dtype=torch.float64) - 12)
        tree.write(slots, values)
    leaves = tree.values
    fresh = SumTree(300, compiled=compiled)
    fresh.write(torch.arange(300), leaves)
    assert tree.total == fresh.total
    tree.write(torch.arange(300), torch.full((300,), 1e-12, dtype=torch.float64))
    assert float(tree.total) == pytest.approx(300e-12, rel=1e-12)


@pytest.mark.parametrize("compiled", WALKS)
def test_a_mass_beyond_the_total_falls_on_the_last_leaf_that_has_any(compiled: bool) -> None:
    tree = SumTree(40, compiled=compiled)
    tree.write(torch.tensor([3, 20]), torch.tensor([0.1, 0.2]))
    assert tree.find(torch.tensor([0.0, 5.0], dtype=torch.float64)).tolist() == [3, 20]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "capacity must be at least 1, got 0"),
        ({"capacity": 4, "device": "meta", "compiled": True}, "compiled needs device 'cpu'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SumTree(**arguments)
