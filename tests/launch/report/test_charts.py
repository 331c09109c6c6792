"""The charts of a report: every number and every curve can be drawn."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polopt.launch.report.charts import Line, line_chart, number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (9.5, "9.5"), (1234.0, "1234"), (-1600.0, "−1600"), (12345.0, "12.3k"),
        (999.96e3, "1M"), (1e-5, "1e−5"), (1e300, "1e300"), (math.nan, "NaN"), (-math.inf, "−∞"),
    ],
)  # fmt: skip
def test_numbers(value, text):
    assert number(value) == text


def test_a_deviation_has_the_unit_of_its_mean():
    assert number(640.0, 2, beside=13_100.0) == "0.64k"
    assert number(0.0, beside=13_100.0) == "0"


def test_ticks_are_told_apart():
    line = Line(style="c0", name="n", mean=[(0.0, 0.4922), (1.0, 0.4931)])
    drawn = line_chart([line], label="l", size=(300, 180))
    ticks = [part.split("<")[0] for part in drawn.split('text-anchor="end">')[1:]]
    assert len(ticks) == len(set(ticks)) > 1


@pytest.mark.parametrize(
    "steps",
    [(-1.7e308, 1.7e308), (0.0, 5e-324), (1e15, 1e15 + 0.125), (1e18, 1e18 + 256), (0.0, math.inf)],
)
def test_an_axis_of_any_length(steps):
    line = Line(
        style="c0", name="n", mean=[(x, y) for x, y in zip(steps, (5e-324, 0), strict=True)]
    )
    drawn = line_chart([line], label="l", size=(300, 200))
    assert "nan" not in drawn
    assert "inf" not in drawn


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.tuples(st.floats(0, 1e9), finite), min_size=1, max_size=20), st.booleans())
def test_every_finite_curve_can_be_drawn(points, logarithmic):
    points = sorted((x, abs(y) + 1e-300 if logarithmic else y) for x, y in points)
    line = Line(style="c0", name="n", mean=points, band=[(x, y, y) for x, y in points])
    drawn = line_chart([line], label="l", size=(300, 200), logarithmic=logarithmic, tooltips=True)
    assert "nan" not in drawn
    assert "inf" not in drawn
    assert drawn.count("<svg") == 1
