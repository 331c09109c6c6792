"""The gradient of a batch does not depend on how it is cut, padded, ordered or stored."""

from itertools import pairwise

import pytest
import torch
from axes import AGGREGATIONS, PRESETS, REGULARISERS, Batch, combine, count, draw, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor


def close(name, got, expected, *, rtol=1e-6, atol=1e-9):
    torch.testing.assert_close(
        got, expected, rtol=rtol, atol=atol, msg=lambda m: f"{name}: {m}", check_dtype=False
    )


def check_cuts(name, batch, objective, cuts):
    """Micro-batches with the count of the whole: gradients join, outputs add up."""
    out, grad = run(batch, objective)
    edges = [0, *sorted(cuts), len(grad)]
    parts = [batch.rows(slice(a, b)) for a, b in pairwise(edges)]
    total = sum(count(p, objective) for p in parts)
    close(f"{name}, count", total, count(batch, objective))
    results = [run(p, objective, total) for p in parts]
    close(f"{name}, gradient in {len(parts)} parts", torch.cat([g for _, g in results]), grad)
    for key, value in out.items():
        close(f"{name}, {key} in {len(parts)} parts", sum(o[key] for o, _ in results), value)


def check_padding(name, batch, objective, left, right, rows):
    out, grad = run(batch, objective)
    wide, wide_grad = run(batch.padded(left, right, rows), objective)
    expected = torch.nn.functional.pad(grad, (left, right, 0, rows))
    close(f"{name}, gradient padded", wide_grad, expected)
    for key, value in out.items():
        close(f"{name}, {key} padded", wide[key], value)


def check_order(name, batch, objective, order):
    out, grad = run(batch, objective)
    shuffled, shuffled_grad = run(batch.rows(order), objective)
    close(f"{name}, gradient reordered", shuffled_grad, grad[order])
    for key, value in out.items():
        close(f"{name}, {key} reordered", shuffled[key], value)


def check_types(name, batch, objective):
    """Against float64 on the same numbers; tolerance relative to the largest entry."""
    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        stored = batch.to(dtype)
        out, grad = run(stored, objective)
        exact, exact_grad = run(stored.to(torch.float64), objective)
        assert grad.dtype == dtype
        assert {v.dtype for v in out.values()} == {torch.float32}
        assert {v.dtype for v in exact.values()} == {exact_grad.dtype} == {torch.float64}
        scale = exact_grad.abs().max().item()
        close(f"{name}, gradient {dtype}", grad.double(), exact_grad, rtol=rtol, atol=rtol * scale)
        for key, value in exact.items():
            close(f"{name}, {key} {dtype}", out[key].double(), value, rtol=1e-5, atol=1e-5)


MASK = torch.tensor([
    [1, 1, 1, 1, 1, 1],
    [1, 1, 0, 0, 1, 1],
    [0, 0, 0, 0, 0, 0],
    [0, 1, 0, 0, 0, 0],
    [1, 1, 1, 1, 0, 0],
    [1, 1, 1, 0, 0, 0],
    [0, 0, 1, 1, 1, 1],
    [1, 0, 0, 0, 0, 0],
]).bool()  # fmt: skip


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_combination(preset, aggregation):
    """All regularisers, on rows of every kind: whole, holes, empty, one step."""
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    for i, regulariser in enumerate(REGULARISERS):
        name = f"{preset} {aggregation} {regulariser}"
        objective = combine(preset, aggregation, regulariser)
        batch = draw(i, MASK, objective)
        for cuts in ([3], [2, 4, 6]):
            check_cuts(name, batch, objective, cuts)
        check_padding(name, batch, objective, left=1, right=2, rows=2)
        check_order(name, batch, objective, order)
        check_types(name, batch, objective)


@st.composite
def problems(draw_):
    rows, steps = draw_(st.integers(1, 6)), draw_(st.integers(1, 6))
    bits = draw_(st.lists(st.booleans(), min_size=rows * steps, max_size=rows * steps))
    point = [draw_(st.sampled_from(list(axis))) for axis in (PRESETS, AGGREGATIONS, REGULARISERS)]
    objective = combine(*point)
    spread = draw_(st.sampled_from([1e-4, 0.3, 3.0]))
    batch = draw(
        draw_(st.integers(0, 2**31)),
        torch.tensor(bits).view(rows, steps),
        objective,
        spread=spread,
        far=draw_(st.booleans()),
    )
    return " ".join(point), objective, batch


@given(problem=problems(), data=st.data())
@settings(max_examples=150)
def test_any_batch(problem, data):
    """One row, one step, empty rows and empty batches among them; some steps 30 nats away."""
    name, objective, batch = problem
    rows = len(batch.steps["mask"])
    small = st.integers(0, 3)
    check_cuts(name, batch, objective, data.draw(st.lists(st.integers(0, rows), max_size=3)))
    check_padding(name, batch, objective, data.draw(small), data.draw(small), data.draw(small))
    check_order(name, batch, objective, data.draw(st.permutations(range(rows))))
    out, grad = run(batch, objective)
    assert grad.isfinite().all(), name
    assert all(v.isfinite() for v in out.values()), (name, out)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (1, 1), (2, 3)], ids=str)
def test_batches_without_steps_give_zero(preset, shape):
    for aggregation in AGGREGATIONS:
        for regulariser in REGULARISERS:
            objective = combine(preset, aggregation, regulariser)
            batch = draw(0, torch.zeros(shape, dtype=torch.bool), objective)
            if batch.steps["mask"].numel():
                batch = batch.padded(1, 1, 1)
            out, grad = run(batch, objective)
            name = f"{preset} {aggregation} {regulariser}"
            assert not any(v.item() for v in out.values()), (name, out)
            assert not grad.any(), name


@pytest.mark.parametrize("preset", PRESETS)
def test_no_mask_is_a_mask_of_ones(preset):
    for aggregation in AGGREGATIONS:
        if aggregation == "group_token_mean":
            continue
        for regulariser in REGULARISERS:
            objective = combine(preset, aggregation, regulariser)
            batch = draw(3, torch.ones(4, 5, dtype=torch.bool), objective)
            bare = Batch({k: v for k, v in batch.steps.items() if k != "mask"}, batch.group_tokens)
            for denominator in (None, torch.tensor(7.0)):
                out, grad = run(batch, objective, denominator)
                light, light_grad = run(bare, objective, denominator)
                name = f"{preset} {aggregation} {regulariser} {denominator}"
                close(f"{name}, gradient", light_grad, grad)
                assert light.keys() == out.keys()
                for key, value in out.items():
                    close(f"{name}, {key}", light[key], value)


def is_per_step(preset):
    objective = combine(preset, "token_mean", "none")
    return objective.ratio in ("token", "none") and preset != "gmpo"


@pytest.mark.parametrize("preset", [p for p in PRESETS if is_per_step(p)])
def test_single_steps_are_sequences_of_one(preset):
    """Control batches [B] give what [B, 1] gives."""
    objective = combine(preset, "token_mean", "entropy")
    batch = draw(4, torch.tensor([[True], [False], [True], [True]]), objective)
    flat = Batch({k: v.squeeze(-1) for k, v in batch.steps.items()}, batch.group_tokens)
    out, grad = run(batch, objective)
    flat_out, flat_grad = run(flat, objective)
    close(f"{preset}, gradient", flat_grad, grad.squeeze(-1))
    for key, value in out.items():
        close(f"{preset}, {key}", flat_out[key], value)


def weights(objective, mask: Tensor) -> Tensor:
    """Return the share of each step in the mean, from the definition of the aggregation."""
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    group = torch.arange(len(mask)) // 2
    tokens = torch.stack([mask[group == g].sum() for g in group]).clamp(min=1)[:, None]
    rows = mask.any(-1).sum()
    groups = len({int(g) for g, m in zip(group, mask, strict=True) if m.any()})
    return (
        mask
        * {
            "token_mean": 1.0 / mask.sum(),
            "sequence_mean": 1.0 / (rows * length),
            "sequence_sum": 1.0 / rows,
            "constant": torch.tensor(1.0) / (rows * 16),
            "group_token_mean": 1.0 / (groups * tokens),
        }[objective.aggregation].double()
    )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("preset", PRESETS)
def test_on_policy_gradient_is_the_policy_gradient(preset, aggregation):
    """At ratio one: −A·∇log π under the weights of the aggregation, whatever the surrogate."""
    objective = combine(preset, aggregation, "none")
    batch = draw(5, MASK, objective)
    batch.steps["old_log_prob"] = batch.steps["log_prob"].clone()
    if objective.selects:
        batch.steps["selection"] = torch.zeros_like(MASK)
    # One advantage per sequence: rules for whole sequences spread it over their steps.
    batch.steps["advantage"] = torch.randn(
        len(MASK), 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    share = weights(objective, MASK)
    if objective.ratio == "sequence_sum":  # the ratio of the whole answer moves with every step
        share = share.sum(-1, keepdim=True) * MASK
    if preset == "gmpo":  # the geometric mean is over steps already
        share = share.sum(-1, keepdim=True) * MASK / MASK.sum(-1, keepdim=True).clamp(min=1)
    _, grad = run(batch, objective)
    close(f"{preset} {aggregation}", grad, -batch.steps["advantage"] * share)


def test_sequence_ratio_gives_each_token_its_own_advantage():
    """GSPO-token, by hand: s·A_t / n per sequence."""
    objective = combine("gspo", "sequence_mean", "none")
    objective = type(objective)(**{**vars(objective), "surrogate": type(objective.surrogate)()})
    batch = draw(6, MASK, objective, spread=0.1)
    new, old, advantage = (batch.steps[k] for k in ("log_prob", "old_log_prob", "advantage"))
    length = MASK.sum(-1, keepdim=True).clamp(min=1)
    ratio = (torch.where(MASK, new - old, 0.0).sum(-1, keepdim=True) / length).exp()
    assert ((ratio > 0.8) & (ratio < 1.2)).all()
    _, grad = run(batch, objective)
    close("gspo", grad, torch.where(MASK, -ratio * advantage / length / 7, 0.0))
