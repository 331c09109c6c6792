"""The doctor on really trained runs with planted faults, and on healthy ones.

All archives but `report` and `after` chose the thresholds; these two have other seeds, and were
trained and looked at afterwards. What is wrong in them is listed, so that nothing else goes wrong
unseen.
"""

import importlib.util
import random
from pathlib import Path

import pytest

from polopt.launch.doctor.log import Series
from polopt.launch.doctor.predicates import collapsed

_spec = importlib.util.spec_from_file_location("score", Path(__file__).with_name("score.py"))
score = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(score)

SIZES = {
    "set": (203, 79, 1),
    "first": (122, 61, 3),
    "second": (129, 66, 3),
    "third": (72, 44, 1),
    "probe": (0, 114, 5),
    "report": (168, 170, 2),
    "after": (8, 32, 0),
}
"""Runs with a fault, healthy ones, and ones that collapsed by themselves."""
MISSED = {
    "set": {
        "polopt-pendulum-reward-flips-weak-11",  # turned round, Pendulum's reward rises
        "sb3-pendulum-slowing-weak-2",  # to half of its speed, which the machine's other work does
    },
    "first": {
        "sb3-cartpole-reward-flips-mild-21",  # half turned round: it ends at half of its best
        # The planted seconds were the smaller part of what a busy machine took.
        "sb3-cartpole-slowing-mild-21",
        "sb3-dqn-slowing-harsh-21",
        "sb3-pendulum-slowing-harsh-22",
    },
    # Just below two thresholds: 2.4 times as slow, and a fall by 57 % of the best.
    "report": {"sb3-cartpole-slowing-slight-61", "sb3-cartpole-reward-flips-slight-61"},
}


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
    assert not {r["name"] for r in healthy if r["found"]}
    assert {f for r in collapsed for f in r["found"][:1]} <= {"reward-collapse"}


def test_the_rule_asks_for_more_than_a_collapse():
    draw = random.Random(0)
    seen = {(False, False): 0, (False, True): 0, (True, True): 0, (True, False): 0}
    for _ in range(2000):
        rise, fall = draw.randint(4, 40), draw.randint(4, 40)
        top, end, noise = draw.uniform(1, 9), draw.uniform(0, 9), draw.uniform(0, 2)
        values = [top * i / rise for i in range(rise)]
        values += [top + (end - top) * i / fall for i in range(fall)]
        values = [v + draw.gauss(0, noise) for v in values]
        series = Series([(float(i), v, v, v, 1) for i, v in enumerate(values)])
        seen[collapsed(series) is not None, score.collapsed(values)] += 1
    assert seen[True, False] == 0
    assert min(n for pair, n in seen.items() if pair != (True, False)) > 50
