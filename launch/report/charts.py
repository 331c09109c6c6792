"""Curves as SVG inside a page, which gives them their colours."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from polopt.launch.curve import ticks

__all__ = ["COLOURS", "Line", "line_chart", "number"]

COLOURS = 7
"""How many curves have a colour of their own; further ones are dashed, then grey."""

_LARGEST = 1e150  # beyond it differences overflow
_SMALLEST = 1e-300  # a length of an axis below which its ticks underflow
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve, with what belongs to it.

    Attributes:
        style: CSS classes: its colour and dashes.
        name: For the tooltip.
        mean: Points (x, y), by x.
        band: Area (x, low, high), by x.
        single: Curves of the seeds, drawn thin.
        ends: Points at which runs ended.
    """

    style: str
    name: str
    mean: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    single: Sequence[Sequence[tuple[float, float]]] = ()
    ends: Sequence[tuple[float, float]] = ()


def number(value: float, digits: int = 3, beside: float | None = None) -> str:
    """Return a number for people: `18.4k`, `0.0123`, `3e−5`.

    Args:
        value: The number.
        digits: How many of them count.
        beside: A number with whose unit it is written: `18.4k ± 0.7k`.
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    size, whole = abs(value), abs(value if beside is None else beside)
    unit, name = next(((u, n) for u, n in _UNITS if whole >= u * 0.9995), (1.0, ""))
    if size >= 1e15 or (whole < 9999.5 and 0 < size < 1e-3):
        head, _, power = f"{value:.{digits - 1}e}".partition("e")
        if "." in head:
            head = head.rstrip("0").rstrip(".")
        text = f"{head}e{int(power)}"
    elif whole >= 9999.5 and size:
        text = _plain(value / unit, digits) + name
    else:
        text = _plain(value, digits)
    return text.replace("-", "−")


def _plain(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{float(f'{value:.{digits}g}'):.12g}"


def line_chart(
    lines: Sequence[Line],
    *,
    label: str,
    size: tuple[int, int],
    x: str = "",
    logarithmic: bool = False,
    reference: float | None = None,
    tooltips: bool = False,
) -> Markup:
    """Draw curves over one axis.

    Args:
        lines: Drawn in this order; at least one has a point.
        label: For those who cannot see the picture.
        size: Width and height in CSS pixels before scaling.
        x: Names the horizontal axis.
        logarithmic: Whether the vertical axis is; all values are positive then.
        reference: A height to mark with a dotted line; a name in the chart would lie on curves.
        tooltips: Whether the points of the means tell their numbers.
    """
    width, height = size
    points = [p for line in lines for part in (line.mean, *line.single) for p in part]
    heights = [_held(y) for _, y in points]
    heights += [_held(edge) for line in lines for _, *edges in line.band for edge in edges]
    if logarithmic:
        heights = [v for v in heights if v > 0]
    if reference is not None:
        heights.append(reference)
    scale = math.log10 if logarithmic else float
    low, high = _room([scale(v) for v in heights])
    left, right = min(_held(p[0]) for p in points), max(_held(p[0]) for p in points)
    if right - left <= max(1e-12 * max(abs(left), abs(right)), _SMALLEST):
        air = max(0.5, 1e-9 * abs(left))
        left, right = left - air, right + air
    marks = _marks(low, high, logarithmic, most=6 if height > 200 else 4)
    largest = max(map(abs, marks), default=0.0)
    texts = [number(10**m) for m in marks] if logarithmic else _apart(marks, largest)
    margin = 14 + 6.4 * max((len(t) for t in texts), default=1)
    top, bottom, edge = 10, 36 if x else 22, 12
    inner, tall = width - margin - edge, height - top - bottom

    def across(value: float) -> float:
        return margin + inner * (_held(value) - left) / (right - left)

    def up(value: float) -> float:
        value = _held(value)
        place = (scale(value) - low) / (high - low) if not logarithmic or value > 0 else 0.0
        return top + tall * (1.0 - min(max(place, 0.0), 1.0))

    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}" '
        'xmlns="http://www.w3.org/2000/svg">'
    ]
    for mark, text in zip(marks, texts, strict=True):
        place = top + tall * (1.0 - (mark - low) / (high - low))
        parts.append(f'<path class="grid" d="M{margin:.1f} {place:.1f}h{inner:.1f}"/>')
        parts.append(_text(margin - 7, place + 4, text, "end"))
    for mark in _marks(left, right, False, most=7 if width > 600 else 4):
        text = number(mark, beside=max(abs(left), abs(right)))
        parts.append(_text(across(mark), height - bottom + 17, text, "middle"))
    if x:
        parts.append(_text(margin + inner / 2, height - 4, x, "middle", "name"))
    if reference is not None:
        place = up(reference)
        parts.append(f'<path class="bar" d="M{margin:.1f} {place:.1f}h{inner:.1f}"/>')
    for line in lines:
        parts += _draw(line, across, up, tooltips)
    return Markup("".join([*parts, "</svg>"]))


def _draw(
    line: Line, across: Callable[[float], float], up: Callable[[float], float], tooltips: bool
) -> list[str]:
    def path(points: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{across(px):.1f} {up(py):.1f}" for px, py in points)

    parts = []
    if len(line.band) > 1:
        lower = [(px, low) for px, low, _ in line.band]
        upper = [(px, high) for px, _, high in reversed(line.band)]
        parts.append(f'<path class="band" d="{path([*lower, *upper])}Z"/>')
    parts += [f'<path class="thin" d="{path(s)}"/>' for s in line.single if len(s) > 1]
    if len(line.mean) > 1:
        parts.append(f'<path class="line" d="{path(line.mean)}"/>')
    alone = [p for p in (line.mean, *line.single) if len(p) == 1]
    for px, py in [*line.ends, *(p[0] for p in alone)]:
        parts.append(f'<circle class="end" cx="{across(px):.1f}" cy="{up(py):.1f}" r="3"/>')
    if tooltips:
        widths = {px: high - low for px, low, high in line.band}
        for px, py in line.mean[:: math.ceil(len(line.mean) / 60) or 1]:
            spread = f" ± {number(widths[px] / 2)}" if widths.get(px) else ""
            title = escape(f"{line.name}\n{number(px)}: {number(py)}{spread}")
            parts.append(
                f'<circle class="hover" cx="{across(px):.1f}" cy="{up(py):.1f}" r="7">'
                f"<title>{title}</title></circle>"
            )
    return [f'<g class="{line.style}">', *parts, "</g>"] if parts else []


def _held(value: float) -> float:
    return min(max(value, -_LARGEST), _LARGEST)


def _room(heights: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis with some air at both."""
    low, high = min(heights, default=0.0), max(heights, default=1.0)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), _SMALLEST):
        air = abs(low) * 0.5 if abs(low) > _SMALLEST else 0.5
        return low - air, high + air
    air = 0.05 * (high - low)
    return low - air, high + air


def _marks(low: float, high: float, logarithmic: bool, most: int) -> list[float]:
    """Return round numbers within [low, high], at most so many."""
    if logarithmic:  # whole powers of ten, if the axis has two
        powers = list(range(math.ceil(low), math.floor(high) + 1))
        if len(powers) > 1:
            return [float(p) for p in powers[:: math.ceil(len(powers) / most)]]
    found = ticks(low, high)
    if len(found) > most:
        every = math.ceil(len(found) / most)
        step = found[1] - found[0]
        # Of every second mark those that are even multiples of the step.
        found = [m for m in found if round(m / step) % every == 0]
    return found


def _apart(marks: Sequence[float], beside: float) -> list[str]:
    """Return numbers with as many digits as tell them apart."""
    texts: list[str] = []
    for digits in range(3, 9):
        texts = [number(mark, digits, beside=beside) for mark in marks]
        if len(set(texts)) == len(texts):
            break
    return texts


def _text(px: float, py: float, content: str, anchor: str, kind: str = "tick") -> str:
    return (
        f'<text class="{kind}" x="{px:.1f}" y="{py:.1f}" text-anchor="{anchor}">'
        f"{escape(content)}</text>"
    )
