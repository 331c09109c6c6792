"""Tests of a metric: a fixed set of functions of one series, by the names that rules use.

Values in rules are data: nothing in them is evaluated.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from polopt.launch.doctor.log import Series

__all__ = ["PREDICATES", "Seen", "show"]

Seen = tuple[str, float, float] | None
"""What a predicate returns: text, first and last step."""


def nonfinite(series: Series, share: float = 0.0) -> Seen:
    """Any value is NaN or infinite, or at least a share of them."""
    if not series.nonfinite or series.nonfinite < share * (series.nonfinite + len(series)):
        return None
    times = "once" if series.nonfinite == 1 else f"{series.nonfinite} times"
    first = series.first_nonfinite
    return f"NaN or infinite {times}, first at step {show(first)}", first, first


def above(series: Series, value: float, share: float = 0.8) -> Seen:
    """At least a share of the values are above a value."""
    return _side(series, value, share, "above", lambda v: v > value)


def below(series: Series, value: float, share: float = 0.8) -> Seen:
    """At least a share of the values are below a value."""
    return _side(series, value, share, "below", lambda v: v < value)


def _side(
    series: Series, value: float, share: float, word: str, test: Callable[[float], bool]
) -> Seen:
    hits = [p[0] for p in series.points if test(p[1])]
    if len(hits) < share * len(series) or not hits:
        return None
    text = f"median {show(series.median())}, {word} {show(value)} at {len(hits)} of {len(series)}"
    return text + " points", hits[0], hits[-1]


def spikes(series: Series, factor: float, times: int = 1, window: int = 25) -> Seen:
    """Some values are beyond a multiple of the median of the values before them."""
    hits = []
    for i in range(5, len(series.points)):
        before = [abs(p[1]) for p in series.points[max(0, i - window) : i]]
        usual = statistics.median(before)
        if usual > 0 and max(abs(series.points[i][2]), abs(series.points[i][3])) > factor * usual:
            hits.append((series.points[i], usual))
    if len(hits) < times:
        return None
    worst, usual = max(hits, key=lambda h: abs(h[0][3]) / h[1])
    top = worst[3] if abs(worst[3]) > abs(worst[2]) else worst[2]
    text = f"{len(hits)} spikes, the largest {show(top)} where {show(usual)} was usual"
    return text, hits[0][0][0], hits[-1][0][0]


def grown(series: Series, factor: float, part: float = 0.2, least: float = 0.0) -> Seen:
    """The late values are at least a multiple of the early ones (medians, in size)."""
    early, late = _ends(series, part)
    if not (abs(late) >= factor * abs(early) and abs(late) > least):
        return None
    return f"from {show(early)} to {show(late)}", *_span(series)


def shrunk(series: Series, factor: float, part: float = 0.2) -> Seen:
    """The late values are at most a fraction of the early ones (medians, in size)."""
    early, late = _ends(series, part)
    if not (abs(late) <= factor * abs(early) and early != 0):
        return None
    return f"from {show(early)} to {show(late)}", *_span(series)


def risen(series: Series, noise: float = 2.0, part: float = 0.25) -> Seen:
    """The late mean is above the early one by more than the noise."""
    early, late, unit = _noise(series, part)
    if not late - early > noise * unit:
        return None
    return f"rose from {show(early)} to {show(late)}", *_span(series)


def not_risen(series: Series, noise: float = 2.0, part: float = 0.25) -> Seen:
    """The late mean is not above the early one by more than the noise."""
    early, late, unit = _noise(series, part)
    if late - early > noise * unit:
        return None
    return (
        f"does not rise: {show(early)} at first, {show(late)} at last, noise {show(unit)}",
        *_span(series),
    )


def fallen(series: Series, noise: float = 2.0, part: float = 0.25) -> Seen:
    """The late mean is below the early one by more than the noise."""
    early, late, unit = _noise(series, part)
    if not early - late > noise * unit:
        return None
    return f"fell from {show(early)} to {show(late)}", *_span(series)


def not_fallen(series: Series, shrink: float = 0.9, part: float = 0.2) -> Seen:
    """The late values are still at a share of the early ones or above (medians)."""
    early, late = _ends(series, part)
    if not late >= shrink * early:
        return None
    return f"stays: {show(early)} at first, {show(late)} at last", *_span(series)


def not_grown(series: Series, factor: float, part: float = 0.2) -> Seen:
    """The late values are less than a multiple of the early ones (medians, in size)."""
    early, late = _ends(series, part)
    if abs(late) >= factor * abs(early):
        return None
    return f"{show(early)} at first, {show(late)} at last", *_span(series)


def rising(series: Series, share: float = 0.9) -> Seen:
    """A share of ten neighbouring parts have a mean above that of the part before."""
    parts = _tenths(series)
    if sum(b > a for a, b in pairwise(parts)) < share * 9:
        return None
    return f"rises steadily from {show(parts[0])} to {show(parts[-1])}", *_span(series)


def falling(series: Series, share: float = 0.8) -> Seen:
    """In a share of all pairs of values the later is lower.

    A fall at one point, as when another program takes up the machine, has no more than three
    quarters of them; a steady one all.
    """
    values = _parts(series, 100)
    pairs = len(values) * (len(values) - 1) // 2
    lower = sum(b < a for i, a in enumerate(values) for b in values[i + 1 :])
    if not pairs or lower < share * pairs:
        return None
    early, late = _ends(series, 0.2)
    return f"falls steadily from {show(early)} to {show(late)}", *_span(series)


def not_at_best(series: Series, part: float = 0.2, near: float = 0.05) -> Seen:
    """The last values are below the best that was reached, by a share of the whole range."""
    _, late = _ends(series, part)
    low, high = min(series.values), max(series.values)
    if high - late <= near * (high - low):
        return None
    return f"ends at {show(late)}, and {show(high)} was reached", *_span(series)


def constant(series: Series, within: float = 1e-9) -> Seen:
    """All values are the same, but for a share of their size."""
    low, high = min(p[2] for p in series.points), max(p[3] for p in series.points)
    if high - low > within * max(abs(low), abs(high)):
        return None
    return (
        f"{show(low)} at all {len(series)} points",
        *_span(series),
    )


def collapsed(series: Series, share: float = 0.6, size: float = 0.6, noise: float = 3.0) -> Seen:
    """Falls from its best by a share of the way it had come, and ends there.

    The best is the highest of a fifth of the run, so that one lucky batch is no best; the end is
    that of the last fifth or of the last tenth (3 points at least), whichever is lower. By means
    and by medians alike: neither one large value nor a few small ones make a collapse. The fall
    must also be a share of the size of best or end, whichever is larger: where little was learnt,
    little way was come, and wandering is no collapse.
    """
    width, last = max(3, len(series) // 5), max(3, len(series) // 10)
    if len(series) < 3 * width:
        return None
    values = series.values
    steps = [abs(b - a) for a, b in pairwise(values)]
    text, peak = "", 0.0
    for middle in (statistics.fmean, statistics.median):
        usual = [middle(values[i : i + width]) for i in range(len(values) - width + 1)]
        at = max(range(len(usual)), key=usual.__getitem__)
        best, end = usual[at], min(usual[-1], middle(values[-last:]))
        way, fall = best - min(usual[: at + 1]), best - end
        if usual[0] >= best or fall < noise * statistics.median(steps):
            return None
        if fall < share * way or fall < size * max(abs(best), abs(end)):
            return None
        peak = series.points[min(at + width // 2, len(series) - 1)][0]
        text = f"rose to {show(best)} at step {show(peak)} and fell back to {show(end)}"
    return text, peak, series.points[-1][0]


def mostly_same(series: Series, share: float = 0.5) -> Seen:
    """At least a share of the values are one and the same."""
    value, count = Counter(series.values).most_common(1)[0]
    if count < share * len(series):
        return None
    return f"{show(value)} at {count} of {len(series)} points", *_span(series)


def beyond_size(series: Series, value: float, share: float = 0.8) -> Seen:
    """At least a share of the values are, in size, above a value."""
    return _side(series, value, share, "in size above", lambda v: abs(v) > value)


def within_size(series: Series, value: float, share: float = 0.8) -> Seen:
    """At least a share of the values are, in size, at most a value."""
    return _side(series, value, share, "in size at most", lambda v: abs(v) <= value)


PREDICATES: Mapping[str, Callable[..., Seen]] = {
    f.__name__: f
    for f in (
        nonfinite, above, below, spikes, grown, not_grown, shrunk, risen, not_risen, fallen,
        not_fallen, rising, falling, not_at_best, constant, collapsed, mostly_same, beyond_size,
        within_size,
    )
}  # fmt: skip
"""Tests of a metric, by the name that rules use."""


def show(value: Any) -> str:  # noqa: ANN401
    """Return a number with as many digits as a reader needs."""
    if value is None:
        return "none"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.0f}" if abs(value) >= 1e3 and value == int(value) else f"{value:.3g}"
    return str(value)


def _span(series: Series) -> tuple[float, float]:
    return series.points[0][0], series.points[-1][0]


def _tenths(series: Series) -> list[float]:
    """Means of ten parts; too short a series is as good as constant."""
    return _parts(series, 10) if len(series) >= 10 else [0.0] * 10


def _parts(series: Series, most: int) -> list[float]:
    """Means of at most so many parts."""
    values, count = series.values, len(series)
    most = min(most, count)
    return [
        statistics.fmean(values[i * count // most : (i + 1) * count // most]) for i in range(most)
    ]


def _ends(series: Series, part: float) -> tuple[float, float]:
    size = max(2, round(part * len(series)))
    values = series.values
    return statistics.median(values[:size]), statistics.median(values[-size:])


def _noise(series: Series, part: float) -> tuple[float, float, float]:
    """Return the early mean, the late mean, and the standard error of their difference."""
    size = max(3, round(part * len(series)))
    values = series.values
    early, late = values[:size], values[-size:]
    steps = [b - a for a, b in pairwise(values)]
    # Differences of neighbours: a trend does not count as noise.
    spread = statistics.fmean(s * s for s in steps) ** 0.5 / 2**0.5 if steps else 0.0
    return statistics.fmean(early), statistics.fmean(late), spread * (2 / size) ** 0.5
