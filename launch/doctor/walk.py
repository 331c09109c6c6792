"""The guide's checklists, item by item: what a recipe has, what it lacks, what is odd."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polopt.launch.doctor.diagnose import Finding
from polopt.launch.doctor.log import Log
from polopt.launch.doctor.names import parameter, table
from polopt.launch.doctor.predicates import show

__all__ = ["Item", "as_lines", "walk"]

_MARKS = {"fine": "ok ", "odd": "odd", "outside": " ? ", "missing": " - "}


@dataclass(frozen=True, kw_only=True)
class Item:
    """One line of a checklist.

    Attributes:
        section: Of the guide.
        name: The setting, as the recipe calls it.
        value: What it is set to; None where it is missing or none.
        state: `fine`, `odd` (a finding says why), `outside` what is usual, or `missing`.
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
    way = "replay" if "buffer_size" in log.settings else "policy"
    kinds = ("control", way) if log.kind == "control" else ("llm",)
    items = []
    for row in table("walk"):
        if row["kind"] not in kinds:
            continue
        setting = row["setting"]
        value = log.settings.get(setting)
        known = setting in log.settings
        state = "fine" if known and value is not None else "missing"
        if isinstance(value, int | float) and row["low"]:
            state = "fine" if float(row["low"]) <= value <= float(row["high"]) else "outside"
        if found & {*row["rules"].split()}:
            state = "odd"
        name = log.paths.get(setting) or parameter(setting, log.framework, log.kind)
        items.append(
            Item(section=row["section"], name=name, value=value, state=state, advice=row["advice"])
        )
    return items


def as_lines(items: Sequence[Item]) -> list[str]:
    """Return the checklist to be read in a terminal."""
    rows = [(_MARKS[i.state], i.name, _word(i.value), f"{i.advice} ({i.section})") for i in items]
    names, values = (max((len(row[n]) for row in rows), default=0) for n in (1, 2))
    return ["  the guide's checklist (ok; odd, see above; ? not as usual; - not set)"] + [
        f"    {mark} {name:<{names}}  {value:<{values}}  {advice}"
        for mark, name, value, advice in rows
    ]


def _word(value: Any) -> str:  # noqa: ANN401
    if value is None:
        return "not set"
    return "on" if isinstance(value, dict) or value is True else show(value)
