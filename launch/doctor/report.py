"""Findings as text and as JSON."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from polopt.launch.doctor.diagnose import Finding
from polopt.launch.doctor.examine import Evidence
from polopt.launch.doctor.log import Log
from polopt.launch.doctor.phases import bottleneck, phase_seconds, questions, spoken
from polopt.launch.doctor.predicates import show

__all__ = ["as_json", "as_text", "brief", "sparkline"]

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Draw values as a line of block characters, thinned to a width."""
    if not values:
        return ""
    size = max(1, math.ceil(len(values) / width))
    means = [statistics.fmean(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    if high == low:
        return _BARS[0] * len(means)
    top = len(_BARS) - 1
    return "".join(_BARS[round((m - low) / (high - low) * top)] for m in means)


def brief(finding: Finding) -> str:
    """Return one line: what is wrong, what was seen, what helps."""
    seen = "; ".join(f"{e.name} {e.text}" for e in finding.evidence[:2])
    return f"{finding.title} ({seen}). {finding.remedy}"


def as_json(log: Log, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return a run and its findings as JSON can hold them."""
    first, last = log.steps()
    return {
        "source": log.source,
        "framework": log.framework,
        "kind": log.kind,
        "rows": log.rows,
        "steps": [first, last],
        "metrics": sorted(log.names.values()),
        "notes": log.notes,
        "findings": [asdict(f) for f in findings],
        "questions": questions(log, _rules(findings)),
        "phase_seconds": phase_seconds(log),
        "bottleneck": asdict(binds) if (binds := bottleneck(log)) else None,
    }


def as_text(log: Log, findings: Sequence[Finding]) -> str:
    """Return a run and its findings to be read in a terminal."""
    first, last = log.steps()
    head = f"{log.source}: {log.framework}"
    if log.rows:
        head += f", {log.rows} rows, steps {show(first)} to {show(last)}"
    lines = [head, *(f"  note: {note}" for note in log.notes)]
    if not findings:
        lines.append("  nothing found")
    for number, finding in enumerate(findings, 1):
        lines += _finding(finding, number)
    asked = questions(log, _rules(findings)) if log.rows else {}
    lines += [f"  {question}? {answer}" for question, answer in asked.items()]
    if (binds := bottleneck(log)) is not None:
        seconds = phase_seconds(log)
        total = sum(seconds.values())
        parts = sorted(seconds.items(), key=lambda part: -part[1])
        shares = [
            f"{spoken(p, log.kind, seconds)} {s / total:.0%}"
            for p, s in parts
            if s >= 0.005 * total
        ]
        lines += [f"  time: {', '.join(shares)}", f"  {binds.text}"]
    return "\n".join(lines)


def _rules(findings: Sequence[Finding]) -> list[str]:
    return [f.id for finding in findings for f in (finding, *finding.symptoms)]


def _finding(finding: Finding, number: int) -> list[str]:
    level = "" if finding.level == "fault" else f"{finding.level}, "
    lines = [f"  {number}. {finding.title} [{finding.id}; {level}confidence {finding.confidence}]"]
    for evidence in finding.evidence:
        lines += _evidence(evidence)
    lines.append(f"     cause:  {finding.cause}")
    lines.append(f"     remedy: {finding.remedy}")
    lines.append(f"     source: {finding.source}")
    if finding.symptoms:
        lines.append("     explains: " + "; ".join(s.title for s in finding.symptoms))
    return lines


def _evidence(evidence: Evidence) -> list[str]:
    where = ""
    if evidence.first is not None and evidence.last is not None:
        where = f" (steps {show(evidence.first)} to {show(evidence.last)})"
        if evidence.first == evidence.last:
            where = ""
    lines = [f"     {evidence.name} {evidence.text}{where}"]
    if evidence.values:
        low, high = min(evidence.values), max(evidence.values)
        lines.append(f"       {sparkline(evidence.values)}  {show(low)} … {show(high)}")
    return lines
