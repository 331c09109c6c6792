"""Runs that differ in their seeds put together, and those of one task side by side."""

import bisect
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from polopt.launch.doctor.log import Series
from polopt.launch.report.charts import Line
from polopt.launch.report.gather import ReportRun, aside

__all__ = ["Group", "Section", "curve", "sections", "spread"]

Points = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs of one configuration.

    Attributes:
        label: How it differs from the others.
        style: CSS classes of its curves.
        runs: One per seed, unless a seed was run twice.
    """

    label: str
    style: str
    runs: list[ReportRun]

    @property
    def unit(self) -> str:
        """What its runs are: `seeds`, or `runs` if a seed is not known or is there twice."""
        seeds = [run.seed for run in self.runs]
        return "runs" if None in seeds or len({*seeds}) < len(seeds) else "seeds"


@dataclass(frozen=True, kw_only=True)
class Section:
    """Runs that can be compared: of one task, logged by one framework.

    Attributes:
        title: The task.
        kind: `control` or `llm`.
        groups: In the order in which they were named.
        differing: Settings that differ between the groups: path, and a value per group.
        common: Settings that all have.
    """

    title: str
    kind: str
    groups: list[Group]
    differing: list[tuple[str, list[str]]]
    common: list[tuple[str, str]]


def sections(runs: Sequence[ReportRun], colours: int) -> list[Section]:
    """Return runs by task, and within a task by configuration.

    Args:
        runs: All of them.
        colours: How many groups have a colour of their own.
    """
    by_task: dict[tuple[str, str, str], list[ReportRun]] = {}
    for run in runs:
        by_task.setdefault((run.log.framework, run.log.kind, run.task), []).append(run)
    return [_section(key, mine, colours) for key, mine in by_task.items()]


def _section(key: tuple[str, str, str], runs: list[ReportRun], colours: int) -> Section:
    by_key: dict[tuple, list[ReportRun]] = {}
    for run in runs:
        by_key.setdefault(run.key, []).append(run)
    members = list(by_key.values())
    configs = [m[0].config for m in members]
    paths = list(dict.fromkeys(p for c in configs for p in c if not aside(p)))
    values = {p: [c.get(p, "—") for c in configs] for p in paths}
    differing = [(p, v) for p, v in values.items() if len(set(v)) > 1]
    common = [(p, v[0]) for p, v in values.items() if len(set(v)) == 1]
    labels = _labels([m[0].name for m in members], configs, differing)
    groups = [
        Group(label=label, style=_style(i, colours), runs=mine)
        for i, (label, mine) in enumerate(zip(labels, members, strict=True))
    ]
    framework, kind, task = key
    named = next((run.title for run in runs if run.title), "")
    title = (
        named
        or task
        or {"trl": "TRL", "sb3": "stable-baselines3", "torchrl": "TorchRL"}.get(
            framework, framework
        )
    )
    return Section(title=title, kind=kind, groups=groups, differing=differing, common=common)


def _labels(
    names: list[str], configs: list[dict[str, str]], differing: list[tuple[str, list[str]]]
) -> list[str]:
    """Return names that tell groups apart: the recipe, then what differs."""
    paths = {path for config in configs for path in config}
    labels = [*names]
    for name in dict.fromkeys(names):
        # Only settings that tell this group from others of its name.
        own = [i for i, other in enumerate(names) if other == name]
        mine = [configs[i] for i in own]
        told = [p for p, values in differing if len({values[i] for i in own}) > 1]
        wheres = list(dict.fromkeys(w for p in told for w in _wheres(p, mine)))
        parts = [[_told(where, config, paths) for where in wheres] for config in mine]
        # As few as tell them apart, but not fewer than three.
        most = next(
            (n for n in range(3, len(wheres)) if len({tuple(p[:n]) for p in parts}) == len(own)),
            len(wheres),
        )
        for i, words in zip(own, parts, strict=True):
            shown = [word for word in words[:most] if word]
            rest = sum(map(bool, words[most:]))
            if shown:
                labels[i] = f"{name} · {', '.join(shown)}" + (f" +{rest}" if rest else "")
    return [f"{n} ({i})" if labels.count(n) > 1 else n for i, n in enumerate(labels, 1)]


def _wheres(path: str, configs: list[dict[str, str]]) -> list[str]:
    """Return the outermost section around a setting that not all have, and the setting.

    Without the setting where all that have the section have it alike, or the section tells it.
    """
    words = path.split(".")
    sections = [".".join(words[:n]) for n in range(1, len(words))]
    where = next((s for s in sections if not all(_inside(s, c) for c in configs)), path)
    alike = len({c.get(path) for c in configs if _inside(where, c)}) < 2
    return [where] if alike or path == f"{where}.use" else [where, path]


def _inside(section: str, config: dict[str, str]) -> bool:
    return any(path.startswith(section + ".") for path in config)


def _told(path: str, config: dict[str, str], paths: set[str]) -> str:
    """Return what is said of a setting or section; nothing of a setting that is not there."""
    if _inside(path, config):
        used = config.get(f"{path}.use")
        return f"{path} {used}" if used else path
    value = config.get(path, "null")
    value = value if len(value) <= 40 else f"{value[:38]}…"
    if value == "null" and any(p.startswith(path + ".") for p in paths):
        return f"no {path}"
    return f"{_short(path, paths)} {value}" if path in config else ""


def _short(path: str, paths: set[str]) -> str:
    """Return the end of a path that no other setting has; of a deep one all but its first word."""
    words = path.split(".")
    count = max(1, len(words) - 1)
    while count < len(words):
        end = "." + ".".join(words[-count:])
        if sum(f".{p}".endswith(end) for p in paths) == 1:
            break
        count += 1
    return ".".join(words[-count:])


def _style(index: int, colours: int) -> str:
    turn, colour = divmod(index, colours)
    return f"c{colour} d{turn}" if turn < 3 else "rest"


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and sample deviation; NaN for that of one value, or where it overflows."""
    if not all(abs(value) < 1e150 for value in values):
        return sum(values) / len(values), math.nan
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan


def curve(group: Group, metric: str, *, points: int, hold: bool) -> Line | None:
    """Return the curve of a metric over the runs of a group, None if none has it.

    Args:
        group: The runs.
        metric: Its canonical name.
        points: How many a curve has at most.
        hold: Whether a run that completed counts with its last value from there on, as one
            that stopped at its bar does. Else the mean is over those that go on, while these are
            at least half of the runs, and two.
    """
    columns = [(r, r.log.columns[metric]) for r in group.runs if metric in r.log.columns]
    columns = [(r, c) for r, c in columns if c.points]
    if not columns:
        return None
    if len(columns) == 1:
        mean, band = _thinned(columns[0][1], points)
        return Line(style=group.style, name=group.label, mean=mean, band=band)
    singles = [_thinned(c, points)[0] for _, c in columns]
    begin = max(s[0][0] for s in singles)
    ends = [
        math.inf if hold and run.status == "completed" else s[-1][0]
        for s, (run, _) in zip(singles, columns, strict=True)
    ]
    least = len(singles) if hold else max(2, math.ceil(len(singles) / 2))
    end = sorted(ends, reverse=True)[least - 1]
    steps = sorted({x for s in singles for x, _ in s if begin <= x <= end})
    steps = steps[:: math.ceil(len(steps) / points) or 1]
    rows = [
        (x, [_at(s, x) for s, last in zip(singles, ends, strict=True) if x <= last]) for x in steps
    ]
    stats = [(x, *spread(values)) for x, values in rows]
    return Line(
        style=group.style,
        name=f"{group.label}, {len(singles)} {group.unit}",
        mean=[(x, mean) for x, mean, _ in stats],
        band=[(x, mean - sd, mean + sd) for x, mean, sd in stats if math.isfinite(sd)],
        single=singles,
        ends=[s[-1] for s in singles if s[-1][0] < steps[-1]] if hold and steps else [],
    )


def _thinned(series: Series, points: int) -> tuple[Points, list[tuple[float, float, float]]]:
    """Return means over neighbours, and where that hides something their extremes."""
    size = math.ceil(len(series.points) / points) or 1
    parts = [series.points[i : i + size] for i in range(0, len(series.points), size)]
    mean = [
        (p[-1][0], sum(v * n for _, v, _, _, n in p) / sum(n for *_, n in p)) for p in parts
    ]  # fmt: skip
    band = [(p[-1][0], min(q[2] for q in p), max(q[3] for q in p)) for p in parts]
    return mean, band if any(low < high for _, low, high in band) else []


def _at(points: Points, x: float) -> float:
    """Return the height of a curve at x, by straight lines; the last one beyond its end."""
    i = bisect.bisect_left(points, (x, -math.inf))
    if i == len(points):
        return points[-1][1]
    x1, y1 = points[i]
    if i == 0 or x1 == x:
        return y1
    x0, y0 = points[i - 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
