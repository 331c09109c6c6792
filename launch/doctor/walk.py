"""The guide's checklists, item by item: what a recipe has, what it lacks, what is odd."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polopt.launch.doctor.diagnose import Finding
from polopt.launch.doctor.log import Log
from polopt.launch.doctor.names import parameter, table
from polopt.launch.doctor.predicates import show

__all__ = ["Item", "as_lines", "walk"]

_MARKS = {"fine": "ok ", "odd": "odd", "outside": " ? ", "given": " = ", "missing": " - "}
_INSIDE = ("warmup", "lr_end")  # of a schedule, so not there where the rate is a number


@dataclass(frozen=True, kw_only=True)
class Item:
    """One line of a checklist.

    Attributes:
        section: Of the guide.
        name: The setting, as the recipe calls it.
        value: What it is set to; None where it is missing or none.
        state: `fine`, `odd` (a finding says why), `outside` what is usual, `given` where that
            cannot be told from settings, or `missing`.
        advice: What is usual.
    """

    section: str
    name: str
    value: Any
    state: str
    advice: str


def walk(log: Log, findings: Sequence[Finding]) -> list[Item]:
    """Go through the checklist of a kind of recipe.

    Args:
        log: The settings.
        findings: What `preflight` finds in them.
    """
    found = {f.id for top in findings for f in (top, *top.symptoms)}
    way = "replay" if log.replays else "policy"
    kinds = ("control", way) if log.kind == "control" else ("llm",)
    items = []
    for row in table("walk"):
        setting = row["setting"]
        if row["kind"] not in kinds or (log.lacks(setting) and setting not in _INSIDE):
            continue
        value = log.settings.get(setting)
        state = "odd" if found & {*row["rules"].split()} else _state(row, value, log.settings)
        name = log.paths.get(setting) or parameter(setting, log.framework, log.kind)
        items.append(
            Item(section=row["section"], name=name, value=value, state=state, advice=row["advice"])
        )
    return items


def _state(row: Mapping[str, str], value: Any, settings: Mapping[str, Any]) -> str:  # noqa: ANN401
    """Return `fine` only where the advice was computed, and holds."""
    words, number = row["words"].split(), isinstance(value, int | float)
    if value is None:
        return "missing"
    if str(value).lower() in words or "set" in words:
        return "fine"
    low, high = (_bounds(row[end], settings) for end in ("low", "high"))
    if number and not isinstance(value, bool) and row["high"]:
        if low is None or high is None:
            return "given"
        return "fine" if max(low) <= value <= min(high) else "outside"
    return "outside" if words or row["high"] else "given"


def _bounds(cell: str, settings: Mapping[str, Any]) -> list[float] | None:
    """Return the bounds in a cell: numbers, or `0.2*total`; None if such a setting is not known."""
    bounds = []
    for word in cell.split():
        factor, _, name = word.partition("*")
        of = settings.get(name) if name else 1.0
        if not isinstance(of, int | float) or of <= 0:
            return None
        bounds.append(float(factor) * of)
    return bounds


def as_lines(items: Sequence[Item]) -> list[str]:
    """Return the checklist to be read in a terminal."""
    rows = [(_MARKS[i.state], i.name, _word(i.value), f"{i.advice} ({i.section})") for i in items]
    names, values = (max((len(row[n]) for row in rows), default=0) for n in (1, 2))
    marks = "ok; odd, see above; ? not as usual; = set, not judged; - not set"
    return [f"  the guide's checklist ({marks})"] + [
        f"    {mark} {name:<{names}}  {value:<{values}}  {advice}"
        for mark, name, value, advice in rows
    ]


def _word(value: Any) -> str:  # noqa: ANN401
    if value is None:
        return "not set"
    return "on" if isinstance(value, dict) or value is True else show(value)
