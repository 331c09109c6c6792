"""The terms of an update and a forward pass, within 5 % of torch's own memory tracker."""

import re
from pathlib import Path

import pytest

pytest.importorskip("trl")
validate = pytest.importorskip("polopt.launch.plan.validate")

from polopt.launch.plan.gpus import GIB
from polopt.launch.plan.validate import CASES, FURTHER, MODELS, NAMES, compare

TOLERANCE = 0.05
DOCS = (Path(__file__).parents[3] / "docs/planner.md").read_text(encoding="utf-8")


def check(model, variant, *, checkpointing, layers=3):
    found = compare(model, variant, checkpointing=checkpointing, layers=layers)
    assert found.error("parameters") == 0.0
    for name in NAMES:
        experts = model == "qwen3-30b-a3b" and name == "work"
        assert abs(found.error(name)) < (0.07 if experts else TOLERANCE), name
    if layers == 3:
        check_documented(model, variant, checkpointing, found)
    return found


def check_documented(model, variant, checkpointing, found):
    """Compare with the table in docs/planner.md, where it has the case."""
    case = f"{model} | {variant} | {'on' if checkpointing else 'off'}"
    row = re.search(rf"^\| {re.escape(case)} \| (.*) \|$", DOCS, re.MULTILINE)
    if row is None:
        assert (model, variant, checkpointing) not in CASES
        return
    cells = row[1].split(" | ")
    for name, size, error in zip(NAMES, cells[::2], cells[1::2], strict=True):
        assert float(size) == pytest.approx(getattr(found, name)[1] / GIB, abs=0.01)
        assert float(error[:-1]) == pytest.approx(100 * found.error(name), abs=0.1)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_one_architecture(checkpointing):
    check("smollm2-135m", "FSDP on 8, mixed", checkpointing=checkpointing)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_every_architecture_under_fsdp(model, checkpointing):
    check(model, "FSDP on 8, mixed", checkpointing=checkpointing)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "qwen3-30b-a3b", "gemma-2-2b", "phi-4"])
def test_one_card(model, checkpointing):
    check(model, "one card, bf16", checkpointing=checkpointing)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("variant", FURTHER)
def test_other_precisions_attentions_and_lengths(variant, checkpointing):
    check("llama-3.2-1b", variant, checkpointing=checkpointing)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [True, False])
def test_linear_in_layers(checkpointing):
    """Five layers are as far off as two: cutting models to three changes nothing."""
    variant = "FSDP on 8, mixed"
    few, many = (
        check("qwen3-0.6b", variant, checkpointing=checkpointing, layers=n) for n in (2, 6)
    )
    planned = many.update[0] - few.update[0]
    tracked = many.update[1] - few.update[1]
    assert tracked > 0.1 * GIB
    assert planned == pytest.approx(tracked, rel=TOLERANCE)


def test_the_cases_cover_eight_architectures_and_both_settings():
    kinds = {(model, checkpointing) for model, _, checkpointing in CASES}
    assert len(kinds) >= 2 * 8
