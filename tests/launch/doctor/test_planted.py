"""The doctor on really trained runs with planted faults, and on healthy ones.

The thresholds were chosen on the archives `set`, `first` and `second`; `report` has other seeds,
and was trained and looked at afterwards. What is wrong in them is listed, so that nothing else goes
wrong unseen.
"""

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("score", Path(__file__).with_name("score.py"))
score = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(score)

SIZES = {"set": (203, 79, 1), "first": (122, 61, 3), "second": (129, 66, 3), "report": (72, 44, 1)}
"""Runs with a fault, healthy ones, and ones that collapsed by themselves."""
MISSED = {
    "set": {"polopt-pendulum-reward-flips-weak-11"},  # turned round, Pendulum's reward rises
    "first": {
        # The planted seconds were the smaller part of what a busy machine took.
        "sb3-cartpole-slowing-mild-21",
        "sb3-dqn-slowing-harsh-21",
        "sb3-pendulum-slowing-harsh-22",
    },
    "second": {"polopt-dapo-slowing-fresh-32"},  # batches of episodes: their number wavers
}
# Its return fell from 275 to 120 and stayed there: in `score.collapsed` just less than a collapse.
ALARMS = {"report": {"polopt-reinforce-healthy-42"}}


@pytest.mark.parametrize("half", SIZES)
def test_counts(half, tmp_path):
    score.unpack(half, tmp_path)
    rows = score.score(tmp_path)
    faults = [r for r in rows if r["fault"]]
    collapsed = [r for r in rows if r["collapsed"]]
    healthy = [r for r in rows if not r["fault"] and not r["collapsed"]]
    assert (len(faults), len(healthy), len(collapsed)) == SIZES[half]
    missed = {r["name"] for r in faults if not {*r["found"][:1]} & {*r["accept"]}}
    assert missed <= MISSED.get(half, set())
    assert {r["name"] for r in healthy if r["found"]} <= ALARMS.get(half, set())
    assert {f for r in collapsed for f in r["found"][:1]} <= {"reward-collapse"}
