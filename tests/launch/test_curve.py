import xml.etree.ElementTree as ET

import pytest

from polopt.launch.curve import ticks, write_curves


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 32768.0, [0, 10000, 20000, 30000]),
        (0.363, 0.977, [0.4, 0.6, 0.8]),
        (-1600.0, -150.0, [-1500, -1000, -500]),
        (9.27, 479.0, [100, 200, 300, 400]),
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
    ],
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize("points", [[], [(0.0, 1.0)], [(0.0, 2.0), (5.0, 2.0)]])
def test_any_curve_is_a_picture(tmp_path, points):
    path = tmp_path / "curve.svg"
    write_curves(path, {"a<b": points, "none": []}, title="t & u", x="x", y="y")
    lines = ET.parse(path).getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == bool(points)


def test_bands_lie_behind_their_curve_and_widen_the_axis(tmp_path):
    path = tmp_path / "curve.svg"
    curves = {"a": [(0.0, 0.5), (1.0, 0.5)]}
    write_curves(
        path, curves, title="t", x="x", y="y", bands={"a": [(0.0, 0.0, 1.0), (1.0, 0.5, 0.5)]}
    )
    svg = path.read_text()
    # Low edge forth, high edge back: the axis goes from 0 to 1, downwards.
    assert '<polygon points="60.0,340.0 620.0,190.0 620.0,190.0 60.0,40.0"' in svg
    assert svg.index("<polygon") < svg.index("<polyline")
    assert '<polyline points="60.0,190.0 620.0,190.0"' in svg
