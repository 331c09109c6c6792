"""Learning curves as SVG files, drawn without a plotting library."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from polopt.launch.files import write_text

__all__ = ["write_curves"]

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_LEFT, _TOP, _WIDTH, _HEIGHT = 60, 40, 560, 300


def ticks(low: float, high: float) -> list[float]:
    """Return four to ten round numbers (steps of 1, 2 or 5) within [low, high]; high > low."""
    rough = (high - low) / 5.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def write_curves(
    path: Path,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x: str,
    y: str,
    bands: Mapping[str, Sequence[tuple[float, float, float]]] | None = None,
) -> None:
    """Draw curves into one picture.

    Args:
        path: The SVG file.
        curves: Points (x, y) by name, in the order of x; curves without points are left out.
        title: Stands above.
        x: Names the horizontal axis.
        y: Names the vertical axis.
        bands: Areas (x, low, high) behind the curves of the same name.
    """
    bands = bands or {}
    curves = {name: points for name, points in curves.items() if points}
    xs = [px for points in curves.values() for px, _ in points] or [0.0]
    ys = [py for points in curves.values() for _, py in points] or [0.0]
    ys += [edge for points in bands.values() for _, *edges in points for edge in edges]
    left, right = min(xs), max(max(xs), min(xs) + 1e-9)
    low, high = min(ys), max(max(ys), min(ys) + 1e-9)

    def place(px: float, py: float) -> tuple[float, float]:
        return (
            _LEFT + _WIDTH * (px - left) / (right - left),
            _TOP + _HEIGHT * (1.0 - (py - low) / (high - low)),
        )

    def text(px: float, py: float, content: str, anchor: str = "middle", fill: str = "#222") -> str:
        return (
            f'<text x="{px:.1f}" y="{py:.1f}" text-anchor="{anchor}" fill="{fill}">'
            f"{escape(content)}</text>"
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" '
        f'height="{_TOP + _HEIGHT + 60}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        text(_LEFT + _WIDTH / 2, 22, title),
        text(_LEFT + _WIDTH / 2, _TOP + _HEIGHT + 40, x),
        f'<g transform="rotate(-90 14 {_TOP + _HEIGHT / 2})">'
        + text(14, _TOP + _HEIGHT / 2, y)
        + "</g>",
    ]
    for tick in ticks(low, high):
        _, py = place(left, tick)
        parts.append(f'<path d="M{_LEFT} {py:.1f}h{_WIDTH}" stroke="#ddd"/>')
        parts.append(text(_LEFT - 6, py + 4, f"{tick:,.6g}", "end"))
    for tick in ticks(left, right):
        px, _ = place(tick, low)
        parts.append(text(px, _TOP + _HEIGHT + 18, f"{tick:,.6g}"))
    for i, (name, points) in enumerate(curves.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        edges = bands.get(name, ())
        around = [(px, low) for px, low, _ in edges] + [(px, up) for px, _, up in reversed(edges)]
        if around:
            area = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in around)
            parts.append(f'<polygon points="{area}" fill="{colour}" fill-opacity="0.15"/>')
        line = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(text(_LEFT + _WIDTH - 8, _TOP + _HEIGHT - 12 - 16 * i, name, "end", colour))
    write_text(path, "\n".join([*parts, "</svg>"]) + "\n")
