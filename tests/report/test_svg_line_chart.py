"""Line charts are SVG with the values as titles, within the frame, whatever the values are."""

import re
from xml.etree import ElementTree

import pytest

from moesaic.report.svg_line_chart import Line, LineChart, spaced

FRAME = (54, 366, 12, 182)
"""Left, right, top and bottom of the axes."""


def points(chart: LineChart) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', chart.svg)]


@pytest.mark.parametrize(
    "values",
    [(1.0, 2.0, 3.0), (5.0, 5.0, 5.0), (0.0, 0.0, 0.0), (-1e14, 0.0, 1e14), (1e-9, 2e-9, 3e-9), (None, 7.0, None)],
)
def test_every_value_is_a_point_within_the_frame_with_its_number(values):
    chart = LineChart("Loss", "", (1, 2, 3), (Line("a < b", values),))
    ElementTree.fromstring(chart.svg)  # is whole XML: labels are escaped
    known = [value for value in values if value is not None]
    assert len(points(chart)) == len(known)
    left, right, top, bottom = FRAME
    assert all(left <= x <= right and top <= y <= bottom for x, y in points(chart))
    assert "a &lt; b" in chart.svg


def test_numbers_and_names_of_axes_lie_within_the_picture():
    chart = LineChart("Loss", "", (1, 5, 9), (Line("loss", (1.0, 3.0, 2.0)),))
    svg = ElementTree.fromstring(chart.svg)
    _, _, width, height = map(float, svg.get("viewBox").split())
    texts = [text for text in svg.iter() if text.tag.endswith("text")]
    assert {"epoch", "1", "9", "3"} <= {text.text for text in texts}
    assert all(0 < float(text.get("x")) < width and 0 < float(text.get("y")) < height for text in texts)


def test_larger_values_are_higher_and_later_ones_further_right():
    chart = LineChart("Loss", "", (1, 5, 9), (Line("loss", (1.0, 3.0, 2.0)),))
    (x1, y1), (x2, y2), (x3, y3) = points(chart)
    assert x1 < x2 < x3
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y1 > y3 > y2


def test_long_runs_are_drawn_with_fewer_points_and_keep_the_last():
    count = 5000
    chart = LineChart("Loss", "", tuple(range(1, count + 1)), (Line("loss", tuple(map(float, range(count)))),))
    assert len(points(chart)) == 200
    assert f"epoch {count}, loss: 4,999" in chart.svg
    assert len(chart.svg) < 50_000


def test_a_logarithmic_axis_has_powers_of_ten():
    chart = LineChart("Rate", "", (1, 2, 3), (Line("rate", (1e-1, 1e-3, 1e-5)),), log=True)
    ys = [y for _, y in points(chart)]
    assert ys[1] - ys[0] == pytest.approx(ys[2] - ys[1], abs=0.2)
    assert "10⁻⁵" in chart.svg


def test_one_epoch_and_no_epoch_are_no_crash():
    assert len(points(LineChart("Loss", "", (1,), (Line("loss", (2.0,)),)))) == 1
    assert points(LineChart("Loss", "", (), (Line("loss", ()),))) == []


def test_a_description_has_the_first_the_last_and_the_extreme_values():
    chart = LineChart("Accuracy", "", (1, 2, 3), (Line("test", (None, 30.0, 20.0)), Line("none", (None,) * 3)))
    assert chart.description == "Accuracy by epoch. test: 30 in epoch 2, 20 in epoch 3, lowest 20, highest 30."


@pytest.mark.parametrize(("count", "most"), [(1, 2), (7, 3), (1001, 1000), (1000, 1000)])
def test_spaced_rows_begin_with_the_first_and_end_with_the_last(count, most):
    rows = spaced(count, most)
    assert len(rows) == min(count, most) == len(set(rows))
    assert (rows[0], rows[-1]) == (0, count - 1)


def test_the_ticks_of_an_axis_are_all_decimals_or_all_powers():
    decimals = LineChart("Rate", "", (1, 2), (Line("rate", (0.0009, 0.0001)),), low=0.0).svg
    assert all(f">{tick}</text>" in decimals for tick in ("0.001", "0.0008", "0.0002"))
    assert "⁻" not in decimals
    powers = LineChart("Rate", "", (1, 2), (Line("rate", (0.0004, 0.0001)),), low=0.0).svg
    assert "4·10⁻⁴" in powers
    assert "0.0004</text>" not in powers


def test_the_ticks_of_an_axis_are_at_the_values_that_they_name():
    svg = LineChart("Loss", "", (1, 2), (Line("loss", (1.24, 1.36)),)).svg
    ticks = re.findall(r'text-anchor="end">([^<]*)</text>', svg)
    assert ticks == ["1.225", "1.25", "1.275", "1.3", "1.325", "1.35", "1.375"]
