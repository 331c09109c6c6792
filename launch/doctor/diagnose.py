"""From a run to findings: rules are tried, symptoms go under their cause, the rest is ranked."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from polopt.launch.doctor.examine import Evidence, examine
from polopt.launch.doctor.log import Log, Series
from polopt.launch.doctor.rules import CONFIDENCE, Rule, rules

__all__ = ["Finding", "diagnose", "preflight"]

_LEVELS = ("fatal", "fault", "hint")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        id: The rule that found it.
        title: What is wrong.
        level: `fatal`, `fault` or `hint`.
        confidence: `high`, `medium` or `low`.
        evidence: What was seen.
        cause: The likely cause.
        remedy: What to do, in the parameter names of the framework that wrote the log.
        source: Where the rule is known from.
        symptoms: Findings that this one explains.
    """

    id: str
    title: str
    level: str
    confidence: str
    evidence: tuple[Evidence, ...]
    cause: str
    remedy: str
    source: str
    symptoms: tuple["Finding", ...] = ()


def diagnose(log: Log) -> list[Finding]:
    """Return what is wrong with a run, the likeliest cause first; empty if nothing is seen.

    Hints about settings are left out: they are for before a run, see `preflight`.
    """
    _derive(log)
    tried = [r for r in rules() if not (r.settings and r.level == "hint")]
    return _fold(_try(log, tried), tried)


def preflight(log: Log) -> list[Finding]:
    """Return what is odd about settings alone; `level` tells the serious ones."""
    tried = [r for r in rules() if r.settings]
    return _fold(_try(log, tried), tried)


def _try(log: Log, tried: Iterable[Rule]) -> list[Finding]:
    findings = []
    for rule in tried:
        if rule.kind not in ("any", log.kind):
            continue
        for case in rule.cases:
            if case.kind not in ("any", log.kind):
                continue
            seen = [examine(log, test) for test in case.when]
            if all(seen):
                findings.append(
                    Finding(
                        id=rule.id,
                        title=rule.title,
                        level=rule.level,
                        confidence=case.confidence,
                        evidence=tuple(
                            e
                            for e, test in zip(seen, case.when, strict=True)
                            if e is not None and "absent" not in test
                        ),
                        cause=" ".join(rule.cause.split()),
                        remedy=_named(rule.remedy, log),
                        source=rule.source,
                    )
                )
                break
    return findings


def _named(text: str, log: Log) -> str:
    """Put the framework's names for the settings into a remedy."""
    text = " ".join(text.split())
    return re.sub(r"\{(\w+)\}", lambda m: log.parameter(m[1]), text)


def _fold(findings: list[Finding], tried: Iterable[Rule]) -> list[Finding]:
    """Put every finding under the strongest that explains it, directly or through others."""
    explains = {rule.id: set(rule.explains) for rule in tried}
    order = sorted(findings, key=lambda f: (_LEVELS.index(f.level), CONFIDENCE.index(f.confidence)))
    roots: list[Finding] = []
    under: dict[str, list[Finding]] = {}
    for finding in order:
        causes = [f for f in findings if finding.id in _reach(f.id, explains) and f is not finding]
        # Of two that explain each other, the stronger is the cause.
        causes = [
            c for c in causes
            if c.id not in _reach(finding.id, explains) or order.index(c) < order.index(finding)
        ]  # fmt: skip
        if causes:
            best = min(causes, key=order.index)
            under.setdefault(best.id, []).append(finding)
        else:
            roots.append(finding)

    def gather(finding: Finding) -> tuple[Finding, ...]:
        return tuple(s for f in under.get(finding.id, ()) for s in (f, *gather(f)))

    folded = [replace(f, symptoms=gather(f)) for f in roots]
    # A fault that only a symptom's level makes fatal is as urgent as its symptom.
    return sorted(
        folded,
        key=lambda f: (
            min(_LEVELS.index(s.level) for s in (f, *f.symptoms)),
            CONFIDENCE.index(f.confidence),
            -len(f.symptoms),
        ),
    )


def _reach(start: str, explains: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        for name in explains.get(todo.pop(), ()):
            if name not in seen:
                seen.add(name)
                todo.append(name)
    return seen


def _derive(log: Log) -> None:
    """Compute metrics from others: the share of collecting, and speed by interval."""
    parts = [
        log.columns[n]
        for n in ("update_time", "loss_time", "backward_time", "optimizer_time", "advantage_time",
                  "reward_time", "sync_time")
        if n in log.columns
    ]  # fmt: skip
    collect = log.columns.get("collect_time")
    if collect and parts and "collect_share" not in log.columns:
        rest = dict.fromkeys(collect.steps, 0.0)
        for part in parts:
            for step, value in zip(part.steps, part.values, strict=True):
                if step in rest:
                    rest[step] += value
        share, odds, environment = Series(), Series(), Series()
        begin = _learning_begins(log)
        inner = log.columns.get("environment_time") or Series()
        simulated = dict(zip(inner.steps, inner.values, strict=True))
        for step, value in zip(collect.steps, collect.values, strict=True):
            if step > begin and value + rest[step] > 0:
                share.add(step, value / (value + rest[step]))
                if step in simulated:
                    environment.add(step, simulated[step] / (value + rest[step]))
            if step > begin and rest[step] > 0:
                odds.add(step, value / rest[step])
        log.columns |= {"collect_share": share, "collect_odds": odds}
        for name, other in (("collect_share", "all phases"), ("collect_odds", "other phases")):
            log.names[name] = f"{log.names['collect_time']} / {other}"
        if len(environment):
            log.columns["environment_share"] = environment
            log.names["environment_share"] = f"{log.names['environment_time']} / all phases"
    _derive_speed(log)
    gamma, length = log.settings.get("gamma"), log.columns.get("length")
    if isinstance(gamma, int | float) and 0 <= gamma < 1 and length:
        share = Series()
        for step, value in zip(length.steps, length.values, strict=True):
            if value > 0:
                share.add(step, 1 / (1 - gamma) / value)
        log.columns["horizon_share"] = share
        log.names["horizon_share"] = f"1 / (1 - {log.paths['gamma']}) / {log.names['length']}"


def _learning_begins(log: Log) -> float:
    """Return the step from which learning goes on; its first interval is partly without it."""
    begins = [c.points[0][0] for n in _LEARNING if (c := log.columns.get(n)) and c.points]
    return max(begins, default=-math.inf)


_LEARNING = ("loss", "loss_policy", "loss_value", "grad_norm")


def _derive_speed(log: Log) -> None:
    """Compute speed by interval, and in each tenth of the steps, from when learning goes on.

    Before, a run is only faster.
    """
    if "interval_speed" in log.columns:
        return
    begin = _learning_begins(log)
    mean, speed = log.columns.get("mean_speed"), log.columns.get("speed")
    speeds, elapsed = Series(), []
    if mean and len(mean) > 2:
        # Speed since the start, as SB3 logs it: elapsed time is steps over speed.
        elapsed = [(s, s / v) for s, v in zip(mean.steps, mean.values, strict=True) if v > 0]
        for (step, time), (later, now) in pairwise(elapsed):
            if step and time and now > time:
                speeds.add(later, (later - step) / (now - time))
        name = log.names["mean_speed"]
    elif speed:
        before, time = 0.0, 0.0
        for step, value in zip(speed.steps, speed.values, strict=True):
            if value > 0:
                time += (step - before) / value
                elapsed.append((step, time))
            before = step
        speeds, name = speed, log.names["speed"]
    else:
        return
    by = {"interval_speed": "interval", "tenth_speed": "tenth"}
    found = Series([p for p in speeds.points if p[0] > begin]), _tenths(elapsed, begin)
    for (metric, word), series in zip(by.items(), found, strict=True):
        log.columns[metric], log.names[metric] = series, f"{name}, by {word}"


def _tenths(elapsed: list[tuple[float, float]], begin: float) -> Series:
    """Return the speed in each tenth of the steps after one, from steps and elapsed seconds."""
    import numpy as np

    after = [e for e in elapsed if e[0] >= begin]
    speeds = Series()
    if len(after) < 11:
        return speeds
    steps, seconds = zip(*after, strict=True)
    width = (steps[-1] - steps[0]) / 10
    marks = [steps[0] + width * i for i in range(11)]
    taken = np.diff(np.interp(marks, steps, seconds)).tolist()
    for mark, time in zip(marks[1:], taken, strict=True):
        if time > 0:
            speeds.add(mark, width / time)
    return speeds
