"""The tests that rules are made of: of a metric, a setting, a line of text, or what is absent.

A test returns what it saw as `Evidence`, or None. A test of a metric or setting that the log does
not have is never passed, so a rule stays silent where it cannot see.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polopt.launch.doctor.log import Log, Series
from polopt.launch.doctor.predicates import PREDICATES, show

__all__ = ["SETTING_PREDICATES", "Evidence", "check_test", "examine"]

_POINTS = 60  # of a plot


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a test saw.

    Attributes:
        name: What the log calls the metric or setting.
        text: What was seen, with numbers.
        first: First step it was seen at, None for settings.
        last: Last step.
        steps: Steps of `values`.
        values: The metric, thinned, for a plot.
    """

    name: str
    text: str
    first: float | None = None
    last: float | None = None
    steps: tuple[float, ...] = ()
    values: tuple[float, ...] = ()


def _equals(value: Any, bound: Any) -> bool:  # noqa: ANN401
    return value == bound and isinstance(value, bool) == isinstance(bound, bool)


SETTING_PREDICATES: Mapping[str, Callable[[Any, Any], bool]] = {
    "over": lambda value, bound: _is_number(value) and value > bound,
    "under": lambda value, bound: _is_number(value) and value < bound,
    "equals": _equals,
    "differs": lambda value, bound: value != bound,
    "set": lambda value, bound: (value not in (None, False, "none", [], ())) == bound,
}  # fmt: skip
"""Tests of a setting; the bound may be a number times another setting (`of`)."""


def examine(log: Log, test: Mapping[str, Any]) -> Evidence | None:
    """Try one test of a rule.

    Args:
        log: One run.
        test: `{metric: …, is: name of a predicate, …}`, with `from`, `to` (shares of the run),
            `points` (how many it needs at least, 8 by default), or `of: other metric`, by whose
            median the values are divided; `{setting: …, is: over, value: …, of: other setting}`;
            `{mention: kind, phase: …}`; or `{absent: metric or setting}`, where a metric with less
            than `points` points (1 by default) is absent too.
    """
    if "metric" in test:
        return _metric(log, test)
    if "setting" in test:
        return _setting(log, test)
    if "absent" in test:
        few = len(log.columns.get(test["absent"], ())) < test.get("points", 1)
        missing = few and test["absent"] not in log.settings
        return Evidence(name=test["absent"], text="is not there") if missing else None
    for mention in log.mentions:
        if mention.kind == test["mention"] and test.get("phase") in (None, mention.phase):
            where = f"line {mention.line}: " if mention.line else ""
            return Evidence(name="the log says", text=f"{where}{mention.text}")
    return None


_WINDOW = ("metric", "is", "from", "to", "points", "of", "steps")


def check_test(test: Mapping[str, Any]) -> None:
    """Refuse a test that is not of a known form.

    Raises:
        ValueError: With what is wrong.
    """
    if "metric" in test:
        function = PREDICATES.get(test.get("is", ""))
        if function is None:
            raise ValueError(f"there is no test {test.get('is')!r} of a metric: {test}")
        names = list(inspect.signature(function).parameters)[1:]
        unknown = set(test) - {*names, *_WINDOW}
        if unknown:
            raise ValueError(f"{test['is']} takes {names}, not {sorted(unknown)}")
    elif "setting" in test:
        if test.get("is") not in SETTING_PREDICATES:
            raise ValueError(f"there is no test {test.get('is')!r} of a setting: {test}")
    elif not {"mention", "absent"} & test.keys():
        raise ValueError(f"a test has a metric, a setting, a mention or absent, got {test}")


def _metric(log: Log, test: Mapping[str, Any]) -> Evidence | None:
    series = log.columns.get(test["metric"])
    if series is None:
        return None
    name = str(log.names.get(test["metric"], test["metric"]))
    if "of" in test:
        other = log.columns.get(test["of"])
        scale = other.median() if other else math.nan
        if not scale > 0:
            return None
        points = [(s, m / scale, a / scale, b / scale, n) for s, m, a, b, n in series.points]
        series, name = Series(points), f"{name} / {log.names[test['of']]}"
    whole = series
    if "from" in test or "to" in test:
        series = series.window(test.get("from", 0.0), test.get("to", 1.0))
    if test["is"] != "nonfinite" and len(series) < test.get("points", 8):
        return None
    function = PREDICATES[test["is"]]
    given = {k: v for k, v in test.items() if k not in _WINDOW}
    seen = function(series, **given)
    if seen is None:
        return None
    text, first, last = seen
    steps, values = _thin(whole.steps, whole.values)
    return Evidence(name=name, text=text, first=first, last=last, steps=steps, values=values)


def _setting(log: Log, test: Mapping[str, Any]) -> Evidence | None:
    if test["setting"] not in log.settings:
        return None
    value, bound = log.settings[test["setting"]], test.get("value", 1)
    name, tail = str(log.paths.get(test["setting"], test["setting"])), ""
    if "of" in test:
        other = log.settings.get(test["of"])
        if not _is_number(other):
            return None
        tail = f", {log.paths[test['of']]} is {show(other)}"
        bound = bound * other
    if not SETTING_PREDICATES[test["is"]](value, bound):
        return None
    return Evidence(name=name, text=f"is {show(value)}{tail}")


def _is_number(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, int | float) and not isinstance(value, bool)


def _thin(
    steps: Sequence[float], values: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    stride = max(1, -(-len(steps) // _POINTS))
    return tuple(steps[::stride]), tuple(values[::stride])
