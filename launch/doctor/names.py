"""The two tables of names: what each framework calls a metric, and what it calls a setting."""

import csv
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = [
    "FRAMEWORKS",
    "Alias",
    "aliases",
    "canonical",
    "framework_of",
    "meaning",
    "parameter",
    "settings_from",
    "table",
]

FRAMEWORKS = ("polopt", "trl", "sb3", "verl", "torchrl")
"""Whose logs are read, in the order in which ties are decided."""


@dataclass(frozen=True)
class Alias:
    """What a logged name means: a canonical name, and the factor that brings it to its unit."""

    name: str
    factor: float


@cache
def table(name: str) -> tuple[dict[str, str], ...]:
    """Return the rows of a table of this package, by column."""
    text = files("polopt.launch.doctor").joinpath(f"{name}.tsv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines(), delimiter="\t", restval="")
    return tuple({key: (value or "").strip() for key, value in row.items()} for row in rows)


@cache
def aliases(framework: str) -> Mapping[str, Alias]:
    """Return the names that a framework logs, and what they mean."""
    found: dict[str, Alias] = {}
    for row in table("aliases"):
        for word in row[framework].split():
            logged, _, factor = word.partition("*-")
            found[logged] = Alias(row["metric"], -float(factor) if factor else 1.0)
    return found


def canonical(logged: str, framework: str) -> Alias | None:
    """Return what a logged name means, None if the tables do not know it.

    TensorBoard files of transformers put `train/` before every name.
    """
    known = aliases(framework)
    if logged in known:
        return known[logged]
    if framework == "trl" and logged.startswith("train/"):
        return known.get(logged.removeprefix("train/"))
    for pattern, alias in known.items():
        head, star, tail = pattern.partition("*")
        if star and logged.startswith(head) and logged.endswith(tail):
            return alias
    return None


def framework_of(names: Collection[str]) -> str | None:
    """Return the framework that knows the most of these names, None if none knows any."""
    counts = {f: sum(canonical(n, f) is not None for n in names) for f in FRAMEWORKS}
    best = max(FRAMEWORKS, key=lambda f: (counts[f], -FRAMEWORKS.index(f)))
    return best if counts[best] else None


def meaning(metric: str) -> str:
    """Return what a canonical metric or setting is, in words."""
    for name, key in (("aliases", "metric"), ("settings", "setting")):
        for row in table(name):
            if row[key] == metric:
                return row["meaning"]
    return metric


def parameter(setting: str, framework: str, kind: str, *, replay: bool = False) -> str:
    """Return what a framework calls a setting; in words where it has none.

    Args:
        setting: One of the table.
        framework: Whose name is asked for.
        kind: Of the run, `control` or `llm`.
        replay: Whether it learns from replayed transitions: of several names that of the replay.
    """
    for row in table("settings"):
        if row["setting"] == setting:
            names = row.get(_column(framework, kind), "").split()
            names.sort(key=lambda name: name.startswith("replay.") is not replay)
            return names[0] if names else row["meaning"]
    raise KeyError(setting)


def settings_from(
    tree: Mapping[str, Any], framework: str, kind: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Read the settings that a configuration has.

    Args:
        tree: Nested or flat: `a.b` is looked for both ways.
        framework: Whose configuration it is.
        kind: `control` or `llm`.

    Returns:
        Values by canonical name (of a schedule the largest value), and the paths they stood at.
    """
    values: dict[str, Any] = {}
    paths: dict[str, str] = {}
    for row in table("settings"):
        for path in row.get(_column(framework, kind), "").split():
            found, value = _at(tree, path)
            if found:
                values[row["setting"]], paths[row["setting"]] = _value(value), path
                break
    return values, paths


def _column(framework: str, kind: str) -> str:
    return f"polopt_{kind}" if framework == "polopt" else framework


def _at(tree: Any, path: str) -> tuple[bool, Any]:  # noqa: ANN401
    if isinstance(tree, Mapping) and path in tree:
        return True, tree[path]
    for name in path.split("."):
        if not isinstance(tree, Mapping) or name not in tree:
            return False, None
        tree = tree[name]
    return True, tree


def _value(value: Any) -> Any:  # noqa: ANN401
    """Return a setting as one value: of a schedule, the largest that it takes."""
    if isinstance(value, int) and abs(value) > 1e300:  # a float holds hardly more
        return math.inf if value > 0 else -math.inf
    if not isinstance(value, Mapping):
        return value
    parts = [_value(value[k]) for k in ("start", "end", "value", "then") if k in value]
    numbers = [p for p in parts if isinstance(p, int | float)]
    return max(numbers) if numbers else dict(value)
