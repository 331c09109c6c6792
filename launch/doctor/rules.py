"""Rules: `rules.yaml` for what a run logged, `checklist.yaml` for its settings. Both are data."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from polopt.launch import yaml12
from polopt.launch.doctor.examine import check_test
from polopt.launch.doctor.names import table

__all__ = ["CONFIDENCE", "Case", "Rule", "rules"]

CONFIDENCE = ("high", "medium", "low")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to recognise a fault: all of its tests pass.

    Attributes:
        when: The tests, see `polopt.launch.doctor.examine.examine`.
        confidence: `high`, `medium` or `low`.
        kind: `control`, `llm`, or `any`, where a rule is of both.
    """

    when: tuple[Mapping[str, Any], ...]
    confidence: str
    kind: str


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A fault, how it shows, and what helps.

    Attributes:
        id: Its name.
        title: What is wrong, in one line.
        kind: `control`, `llm`, or `any`.
        cases: Tried in order; the first that holds is reported.
        cause: Why, in one or two sentences.
        remedy: What to do; `{lr}` stands for what the framework calls that setting.
        source: Where it is known from.
        explains: Rules whose findings are symptoms of this one.
        level: `fatal` (the run cannot recover), `fault` or `hint`.
        settings: Whether all tests are of settings: it can be asked before a run.
    """

    id: str
    title: str
    kind: str
    cases: tuple[Case, ...]
    cause: str
    remedy: str
    source: str
    explains: tuple[str, ...]
    level: str
    settings: bool


@cache
def rules() -> tuple[Rule, ...]:
    """Return all rules, those of the metrics first.

    Raises:
        ValueError: If an entry is not well-formed.
    """
    found: list[Rule] = []
    for name in ("rules", "checklist"):
        text = files("polopt.launch.doctor").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
        found += [_rule(entry) for entry in yaml12.parse(text)]
    ids = [rule.id for rule in found]
    if twice := {i for i in ids if ids.count(i) > 1}:
        raise ValueError(f"rules are there twice: {sorted(twice)}")
    for rule in found:
        if missing := set(rule.explains) - set(ids):
            raise ValueError(f"{rule.id} explains {sorted(missing)}, which are no rules")
    return tuple(found)


_FIELDS = {"id", "title", "kind", "cases", "cause", "remedy", "source", "explains", "level"}


def _rule(entry: dict[str, Any]) -> Rule:
    where = f"rule {entry.get('id')!r}"
    if unknown := set(entry) - _FIELDS:
        raise ValueError(f"{where} has unknown fields {sorted(unknown)}")
    if missing := _FIELDS - {"explains", "level", "kind"} - set(entry):
        raise ValueError(f"{where} lacks {sorted(missing)}")
    metrics = {row["metric"] for row in table("aliases")} | {*_DERIVED}
    settings = {row["setting"] for row in table("settings")}
    cases = []
    for case in entry["cases"]:
        for test in case["when"]:
            try:
                check_test(test)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            for key, known in (("metric", metrics), ("setting", settings)):
                if test.get(key, next(iter(known))) not in known:
                    raise ValueError(f"{where}: there is no {key} {test[key]!r}")
        if case["confidence"] not in CONFIDENCE:
            raise ValueError(f"{where}: confidence is one of {CONFIDENCE}")
        of = case.get("kind", "any")
        cases.append(Case(when=tuple(case["when"]), confidence=case["confidence"], kind=of))
    level, kind = entry.get("level", "fault"), entry.get("kind", "any")
    kinds = {kind, *(case.kind for case in cases)}
    if level not in ("fatal", "fault", "hint") or kinds - {"any", "control", "llm"}:
        raise ValueError(f"{where}: level {level!r} or kind {kind!r} is unknown")
    return Rule(
        id=entry["id"],
        title=entry["title"],
        kind=kind,
        cases=tuple(cases),
        cause=entry["cause"],
        remedy=entry["remedy"],
        source=entry["source"],
        explains=tuple(entry.get("explains", ())),
        level=level,
        settings=all(_of_settings(t) for c in cases for t in c.when),
    )


def _of_settings(test: Mapping[str, Any]) -> bool:
    return "setting" in test or "absent" in test or test.get("mention") == "override"


_DERIVED = (
    "collect_share",
    "collect_odds",
    "environment_share",
    "tenth_speed",
    "interval_speed",
    "horizon_share",
)
"""Metrics that `diagnose` computes from others."""
