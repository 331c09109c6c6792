"""The page: what the template shows, from runs that were put together."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from polopt import __version__
from polopt.launch.doctor.lines import number as plain
from polopt.launch.doctor.names import meaning
from polopt.launch.report.charts import COLOURS, line_chart, number
from polopt.launch.report.compare import Group, Section, curve, sections, spread
from polopt.launch.report.details import answers, findings, phases
from polopt.launch.report.gather import ReportRun
from polopt.launch.report.samples import clean

__all__ = ["MARK", "content", "render"]

MARK = "<!doctype html>\n<!-- polopt report -->"
"""How the page begins, so that no other file is taken for one."""

_MAIN = ("eval_reward", "eval_sampled", "reward")
_MORE = (
    "entropy", "kl_update", "kl_ref", "clip_fraction", "explained_variance", "value_clip_fraction",
    "grad_norm", "loss_policy", "loss_value", "loss", "policy_std", "temperature_alpha",
    "exploration_rate", "zero_std_groups", "reward_std", "length", "truncated_share", "repetition",
    "mismatch", "importance_weight", "weight_age", "regret", "best_arm_share", "learning_rate",
    "speed", "memory_host", "memory_device", "device_use",
)  # fmt: skip
_TITLES = {
    ("eval_reward", "control"): "Return in evaluation",
    ("reward", "control"): "Return in training",
    ("eval_reward", "llm"): "Evaluation, greedy answers",
    ("eval_sampled", "llm"): "Evaluation, sampled answers",
    ("reward", "llm"): "Reward in training",
}
_DECADES = 1000.0  # largest over smallest value from which on an axis is logarithmic
_POINTS = 12_000  # of all curves of a chart


def render(runs: Sequence[ReportRun], errors: Sequence[str]) -> str:
    """Return the page about runs.

    Args:
        runs: At least one.
        errors: What could not be read.
    """
    found = sections(runs, COLOURS)
    tasks = [s.title for s in found]
    many = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
    configurations = sum(len(s.groups) for s in found)
    title = ", ".join(tasks) if len(tasks) <= 3 else f"{len(tasks)} tasks"
    if len(found) == 1 and configurations == 1:
        title = found[0].groups[0].label
    subtitle = [many, f"{configurations} configurations" if configurations > 1 else ""]
    subtitle += [tasks[0] if len(tasks) == 1 and title != tasks[0] else ""]
    text = _template().render(
        title=clean(title, 120),
        subtitle=" · ".join(s for s in subtitle if s),
        errors=[clean(e, 400) for e in errors],
        sections=[_section(s) for s in found],
        version=__version__,
        written=time.strftime("%Y-%m-%d %H:%M:%S %z"),
    )
    return clean(text, len(text))  # names of files, and of what others logged, may hold anything


def content(runs: Sequence[ReportRun]) -> list[dict[str, Any]]:
    """Return the numbers of the comparison, as `--json` prints them."""
    return [
        {
            "task": section.title,
            "kind": section.kind,
            "configuration": group.label,
            "runs": [run.source for run in group.runs],
            "results": {
                name: {"mean": mean, "deviation": None if math.isnan(sd) else sd, "runs": n}
                for name, (mean, sd, n) in _results(group).items()
            },
            "findings": dict(Counter(f.id for run in group.runs for f in run.findings)),
        }
        for section in sections(runs, COLOURS)
        for group in section.groups
    ]


@cache
def _template() -> Template:
    text = files("polopt.launch.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["code"] = _code
    return environment.from_string(text)


def _code(text: str) -> Markup:
    """Return a text with what stands between backticks as code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(p) if i % 2 else escape(p) for i, p in enumerate(parts)
    )


def _section(section: Section) -> dict[str, Any]:
    runs = [run for group in section.groups for run in group.runs]
    names = list(dict.fromkeys(n for run in runs for n in run.facts if n != "solved"))
    bars, phase_names = phases(section)
    main = [figure for metric in _MAIN if (figure := _figure(section, metric, main=True))]
    if len(main) == 1:
        main = [f for m in _MAIN if (f := _figure(section, m, main=True, alone=True))]
    legend = [g for g in section.groups if g.style != "rest"]
    return {
        "title": clean(section.title, 120),
        "groups": section.groups,
        "cards": _cards(section, runs),
        "table": _table(section, names),
        "legend": legend,
        "others": len(section.groups) - len(legend),
        "main": main,
        "more": [f for metric in _MORE if (f := _figure(section, metric, main=False))],
        "caption": _caption(section),
        "phases": bars,
        "phase_names": phase_names,
        "findings": findings(runs),
        "examined": any(run.log.rows for run in runs),
        "samples": answers(section.groups),
        "differing": [(p, [clean(v, 200) for v in vs]) for p, vs in section.differing],
        "common": [(p, clean(v, 400)) for p, v in section.common],
        "runs": [_row(run, names) for run in runs],
        "run_columns": names,
        "machines": list(dict.fromkeys(run.machine for run in runs if run.machine)),
    }


def _figure(
    section: Section, metric: str, *, main: bool, alone: bool = False
) -> dict[str, Any] | None:
    runs = [run for group in section.groups for run in group.runs]
    points = min(max(_POINTS // len(runs), 40), 240 if main else 120)
    lines = [
        line
        for group in reversed(section.groups)  # the first lies on top
        if (line := curve(group, metric, points=points, hold=main)) is not None
    ]
    columns = [run.log.columns[metric] for run in runs if metric in run.log.columns]
    broken = [c for c in columns if c.nonfinite]
    if not lines or (not main and max(len(c) for c in columns) < 2):
        return None
    heights = [y for line in lines for part in (line.mean, *line.single) for _, y in part]
    logarithmic = not main and min(heights) > 0 and max(heights) / min(heights) > _DECADES
    names = dict.fromkeys(run.log.names[metric] for run in runs if metric in run.log.names)
    title = _TITLES.get((metric, section.kind)) or meaning(metric)
    title = title[:1].upper() + title[1:]
    steps = "frames" if _ours(section) and section.kind == "control" else "steps"
    bar = _bar(section) if metric == "eval_reward" else None
    name = " · ".join(names) + (", logarithmic" if logarithmic else "")
    name += ", GiB" * (metric.startswith("memory_") and _ours(section))
    name += ", after refilling" * (metric == "reward" and _refills(runs))
    name += f" · dotted: {bar[1]}" if bar else ""

    def draw(size: tuple[int, int], x: str = "") -> Markup:
        return line_chart(
            lines, label=f"{title} over {steps}, {len(lines)} curves", size=size, x=x,
            logarithmic=logarithmic, reference=bar[0] if bar else None,
            tooltips=main,
        )  # fmt: skip

    notes = []
    if broken:
        first = min(c.first_nonfinite for c in broken)
        count = sum(c.nonfinite for c in broken)
        notes = [f"{count} value{'s' * (count > 1)} NaN or infinite, the first at {number(first)}"]
    wide = draw((1060, 320) if alone else (520, 290), steps) if main else ""
    narrow = draw((370, 260), steps) if main else draw((330, 180))
    return {
        "title": title, "name": clean(name, 120), "wide": wide, "narrow": narrow, "notes": notes,
    }  # fmt: skip


def _ours(section: Section) -> bool:
    return section.groups[0].runs[0].log.framework == "polopt"


def _refills(runs: Sequence[ReportRun]) -> bool:
    """Whether what is trained on was filled up: its reward is not that of all answers."""
    return any(run.log.kind == "llm" and run.log.settings.get("refill") for run in runs)


def _bar(section: Section) -> tuple[float, str] | None:
    """Return the return that ends the runs, if all have the same."""
    found = {plain(run.log.settings.get("stop_at")) for g in section.groups for run in g.runs}
    value = found.pop() if len(found) == 1 else None
    return None if value is None or not math.isfinite(value) else (value, f"bar {number(value)}")


def _caption(section: Section) -> str:
    text = ""
    if several := [group for group in section.groups if len(group.runs) > 1]:
        unit = "seeds" if all(group.unit == "seeds" for group in several) else "runs"
        text += (
            f"Lines: mean over {unit}; areas: ± one standard deviation; thin: each {unit[:-1]}, "
            "with a dot where it ended. In these charts a completed run counts with its last value "
            "from there on; in the diagnostics the mean is over the runs that go on, while these "
            "are at least half. "
        )
    if any(len(c) > 240 for g in section.groups for r in g.runs for c in r.log.columns.values()):
        text += "Neighbouring points are averaged; for single runs areas show what they range over."
    return text.strip()


def _results(group: Group) -> dict[str, tuple[float, float, int]]:
    """Return mean, deviation and count by name of fact."""
    found: dict[str, tuple[float, float, int]] = {}
    for name in dict.fromkeys(n for run in group.runs for n in run.facts):
        values = [run.facts[name] for run in group.runs if name in run.facts]
        found[name] = (*spread(values), len(values))
    return found


def _cell(result: tuple[float, float, int] | None) -> dict[str, str]:
    if result is None:
        return {"value": "–", "spread": ""}
    mean, sd, _ = result
    return {
        "value": number(mean),
        "spread": number(sd, 2, beside=mean) if math.isfinite(sd) else "",
    }


def _solved(group: Group) -> str:
    known = [run.facts["solved"] for run in group.runs if "solved" in run.facts]
    return f"{int(sum(known))} of {len(known)}" if known else "–"


def _best(section: Section) -> tuple[str | None, Group]:
    """Return the result that configurations are told apart by, and the one that has most of it."""
    order = ("accuracy, sampled", "evaluation", "training reward")
    results = [_results(group) for group in section.groups]
    first = next((n for n in order if any(n in r for r in results)), None)
    heights = [r[first][0] if first in r else -math.inf for r in results]
    return first, section.groups[heights.index(max(heights))]


def _table(section: Section, names: Sequence[str]) -> dict[str, Any]:
    solved = any("solved" in run.facts for g in section.groups for run in g.runs)
    rows, (_, top) = [], _best(section)
    for group in section.groups:
        results = _results(group)
        cells = [{"value": _solved(group), "spread": ""}] if solved else []
        cells += [_cell(results.get(name)) for name in names]
        best = group is top
        rows.append({"group": group, "runs": len(group.runs), "cells": cells, "best": best})
    return {"columns": [*(["solved"] if solved else []), *names], "rows": rows}


def _cards(section: Section, runs: Sequence[ReportRun]) -> list[dict[str, str]]:
    """Return the cards: of the configuration alone, or of the best."""
    first, best = _best(section)
    results = {id(g): _results(g) for g in section.groups}
    mine, many = results[id(best)], len(section.groups) > 1
    cards = []

    def card(what: str, value: str, spread: str = "", note: str = "", tone: str = "") -> None:
        cards.append({"what": what, "value": value, "spread": spread, "note": note, "tone": tone})

    if many:
        card("runs", str(len(runs)), note=f"{len(section.groups)} configurations")
    if (solved := _solved(best)) != "–" and not many:
        all_solved = solved.split()[0] == solved.split()[-1]
        bar = _bar(section)
        card("solved", solved, note=bar[1] if bar else "", tone="good" if all_solved else "")
    if first is not None and first in mine:
        cell = _cell(mine[first])
        count = mine[first][2]
        note = best.label if many else f"mean over {count} {best.unit}" if count > 1 else ""
        if "before training" in mine and first == "accuracy, sampled" and not many:
            note = f"from {number(mine['before training'][0])}" + (f", {note}" if note else "")
        card(f"best: {first}" if many else first, **cell, note=clean(note, 120))
    if not many:
        seen = {first, "solved", "before training", "training reward"}
        for name in (n for n in mine if n not in seen):
            card(name, **_cell(mine[name]))
    worst = [run for run in runs if run.status not in ("completed", "")]
    if worst:
        count = Counter(run.status for run in worst).most_common(1)[0]
        card(
            "not completed", str(len(worst)), note=f"{count[1]} {count[0]}",
            tone="bad" if any(run.status == "failed" for run in worst) else "warn",
        )  # fmt: skip
    ids = {f.id for run in runs for f in run.findings}
    if any(run.log.rows for run in runs):
        card(
            "doctor", str(len(ids)), note="findings" if len(ids) != 1 else "finding",
            tone="warn" if ids else "good",
        )  # fmt: skip
    return cards[:8]


def _row(run: ReportRun, names: Sequence[str]) -> dict[str, Any]:
    return {
        "source": clean(run.source, 300),
        "seed": "–" if run.seed is None else run.seed,
        "status": run.status,
        "notes": [clean(n, 400) for n in (*run.log.notes, run.error) if n],
        "cells": [number(run.facts[n]) if n in run.facts else "–" for n in names],
    }
