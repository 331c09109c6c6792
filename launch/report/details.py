"""What the page shows beside curves: times of phases, findings, answers."""

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup, escape

from polopt.launch.doctor.diagnose import Finding
from polopt.launch.doctor.phases import PHASES, bottleneck, phase_seconds, spoken
from polopt.launch.report.charts import number
from polopt.launch.report.compare import Group, Section
from polopt.launch.report.gather import ReportRun
from polopt.launch.report.samples import Sample, clean

__all__ = ["answers", "findings", "phases"]

_ORDER = ("fatal", "fault", "hint")


def phases(section: Section) -> tuple[list[dict[str, Any]], list[tuple[str, int]]]:
    """Return a bar per configuration, and the names and colours of the phases in them.

    Shares are of all runs of a configuration together; seconds are the mean of a run.
    """
    indices = {name: i for i, name in enumerate(PHASES)}
    bars: list[dict[str, Any]] = []
    binding: set[str] = set()  # a phase is told once
    used: dict[str, str] = {}
    for group in section.groups:
        measured = [s for run in group.runs if (s := phase_seconds(run.log))]
        if not measured:
            continue
        sums = {p: sum(s.get(p, 0.0) for s in measured) for p in PHASES}
        total = sum(sums.values())
        if not 0.0 < total < math.inf:
            continue
        parts = []
        mean = {p: s / len(measured) for p, s in sums.items() if s > 0.0}
        for phase in PHASES:
            if sums[phase] <= 0.0:
                continue
            word = used.setdefault(phase, spoken(phase, section.kind, mean))
            share = 100.0 * sums[phase] / total
            seconds = number(sums[phase] / len(measured))
            parts.append(
                {
                    "index": indices[phase],
                    "share": round(share, 2),
                    "title": f"{word}: {share:.1f} %, {seconds} s",
                }
            )
        advice = bottleneck(group.runs[0].log, mean)
        told = advice is not None and advice.phase in binding
        binding.add(advice.phase if advice else "")
        bars.append(
            {
                "label": group.label,
                "total": f"{number(total / len(measured))} s"
                + (" a run" if len(measured) > 1 else ""),
                "parts": parts,
                "spoken": ", ".join(p["title"] for p in parts),
                "says": advice.text if advice and not told else "",
            }
        )
    return bars, [(used[p], indices[p]) for p in PHASES if p in used]


def findings(runs: Sequence[ReportRun]) -> list[dict[str, Any]]:
    """Return what the doctor found, each rule once, the gravest first."""
    by_rule: dict[str, list[tuple[ReportRun, Finding]]] = {}
    for run in runs:
        for finding in run.findings:
            by_rule.setdefault(finding.id, []).append((run, finding))
    found = []
    for rule, seen in by_rule.items():
        run, finding = seen[0]
        where = ""
        if len(runs) > 1:
            names = [r.source.rpartition("/")[2] if r.task else r.name for r, _ in seen]
            where = f"in {len(seen)} of {len(runs)} runs: {', '.join(names[:3])}"
            where += ", …" if len(names) > 3 else ""
        evidence = [
            {"name": e.name, "text": clean(e.text, 300), "spark": _spark(e.values)}
            for e in finding.evidence
        ]
        found.append(
            {
                "id": rule,
                "title": finding.title,
                "level": finding.level,
                "tag": finding.level if finding.level != "fault" else finding.confidence,
                "where": clean(where, 300),
                "evidence": evidence,
                "cause": finding.cause,
                "remedy": finding.remedy,
                "source": finding.source,
                "symptoms": "; ".join(s.title for s in finding.symptoms),
            }
        )
    return sorted(found, key=lambda f: _ORDER.index(f["level"]))


def _spark(values: Sequence[float]) -> Markup:
    """Return a small picture of values, the width of a word or two."""
    size = math.ceil(len(values) / 60) or 1
    parts = [values[i : i + size] for i in range(0, len(values), size)]
    means = [sum(p) / len(p) for p in parts]
    if len(means) < 2 or not all(map(math.isfinite, means)):
        return Markup("")
    low, high = min(means), max(means)
    width, wide = 116.0 / (len(means) - 1), (high - low) or 1.0
    path = "L".join(f"{2 + i * width:.1f} {22 - 20 * (m - low) / wide:.1f}"
                    for i, m in enumerate(means))  # fmt: skip
    label = escape(f"from {number(values[0])} to {number(values[-1])}")
    return Markup(
        f'<svg class="spark c0" viewBox="0 0 120 24" role="img" aria-label="{label}">'
        f'<path class="line" style="stroke-width:1.5" d="M{path}"/></svg>'
    )


def answers(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return answers by run (the first of each configuration) and moment."""
    blocks = []
    for group in groups[:8]:
        run = next((r for r in group.runs if r.samples), None)
        if run is None:
            continue
        moments: dict[tuple[str, int], list[Sample]] = {}
        for sample in run.samples:
            moments.setdefault((sample.kind, sample.step), []).append(sample)
        last = max((m for m in moments if m[0] != "training"), key=lambda m: m[1], default=None)
        seed = "" if run.seed is None else f", seed {run.seed}"
        blocks.append(
            {
                "label": clean(f"{group.label}{seed}", 120),
                "moments": [
                    {
                        "title": f"step {step}",
                        "note": clean(_MOMENTS.get(kind, kind), 60),
                        "answers": mine,
                        "open": (kind, step) == last,
                    }
                    for (kind, step), mine in moments.items()
                ],
            }
        )
    return blocks


_MOMENTS = {
    "training": "trained on",
    "greedy": "held out, greedy",
    "sampled": "held out, sampled",
}
