"""Charts show their numbers, look the same every time, and can be told apart without colours."""

import io
import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from report.example_run import CHARTS

from moesaic.ledger import Blocks, Chart, Panel, Series
from moesaic.report import draw, to_svg, write_figures

FIGURE_4, FIGURE_5, FIGURE_8 = CHARTS


def chart(*panels: Panel) -> Chart:
    return Chart("figure-1", "paper", "Figure 1", "A title", "A caption.", panels)


def lines(*series: Series, **options) -> Panel:
    return Panel("panel", "x", "y", series, **options)


def drawn_lines(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    """The data of each line with error bars, by its colour."""
    return {
        container.lines[0].get_color(): list(zip(*container.lines[0].get_data(), strict=True))
        for container in axes.containers
    }


def rendered(figure: Figure) -> np.ndarray:
    file = io.BytesIO()
    figure.savefig(file, dpi=100, format="png")
    file.seek(0)
    return matplotlib.image.imread(file)[..., :3]


def test_every_panel_has_its_lines_at_their_numbers():
    figure = draw(FIGURE_4)
    for axes, panel in zip(figure.axes, FIGURE_4.panels, strict=True):
        expected = [list(zip(line.x, line.y, strict=True)) for line in panel.series]
        assert list(drawn_lines(axes).values()) == expected
        assert axes.get_title("left") == panel.title
        assert axes.get_xlabel() == panel.x_label


def test_error_bars_reach_one_spread_up_and_down():
    axes = draw(chart(lines(Series("a", "cnn", (1.0,), (50.0,), (3.0,))))).axes[0]
    _, _, (bar,) = axes.containers[0].lines
    assert bar.get_segments()[0][:, 1].tolist() == [47.0, 53.0]


def test_no_axis_promises_more_than_all_or_less_than_none():
    panel = Panel("panel", "x", "Routed (%)", (Series("a", "cnn", (1.0, 2.0), (50.0, 98.0), (80.0, 20.0)),))
    low, high = draw(chart(panel)).axes[0].get_ylim()
    assert -10 < low < 0
    assert 100 < high < 110


def test_panels_share_their_limits_and_a_panel_alone_keeps_them():
    low, high = lines(Series("a", "cnn", (1.0, 2.0), (10.0, 20.0))), lines(Series("a", "cnn", (5.0, 9.0), (80.0, 90.0)))
    together = draw(chart(low, high))
    alone = draw(chart(low, high), panel=0)
    limits = {(axes.get_xlim(), axes.get_ylim()) for axes in [*together.axes, *alone.axes]}
    assert len(limits) == 1
    ((across, up),) = limits
    assert across[0] < 1 < 9 < across[1]
    assert up[0] < 10 < 90 < up[1]
    assert len(alone.axes) == 1


def test_panels_with_other_axes_keep_their_own_limits_and_labels():
    other = Panel("other", "x", "seconds", (Series("b", "joint", (1.0, 2.0), (0.1, 0.2)),))
    first, second = draw(chart(lines(Series("a", "cnn", (1.0, 2.0), (10.0, 20.0))), other)).axes
    assert second.get_ylim()[1] < 1 < first.get_ylim()[0]
    assert second.get_ylabel() == "seconds"


def test_a_role_keeps_its_colour_and_marker_in_every_chart():
    def look(*roles: str) -> dict[str, tuple[str, str]]:
        panel = lines(*(Series(role, role, (1.0,), (1.0,)) for role in roles))
        containers = draw(chart(panel)).axes[0].containers
        return {
            role: (container.lines[0].get_color(), container.lines[0].get_marker())
            for role, container in zip(roles, containers, strict=True)
        }

    everyone, few = look("cnn", "separate", "joint", "best", "other"), look("something", "joint", "cnn")
    assert everyone["cnn"] == few["cnn"]
    assert everyone["joint"] == few["joint"]
    for one_for_each in zip(*everyone.values(), strict=True):
        assert len(set(one_for_each)) == len(everyone)


def test_two_lines_of_one_role_differ_by_dash():
    panel = lines(Series("300 samples", "joint", (1.0,), (1.0,)), Series("500 samples", "joint", (1.0,), (2.0,)))
    first, second = (container.lines[0] for container in draw(chart(panel)).axes[0].containers)
    assert first.get_color() == second.get_color()
    assert first.get_linestyle() != second.get_linestyle()


def test_the_legend_names_each_line_once():
    (legend,) = draw(FIGURE_4).legends
    labels = [line.label for line in FIGURE_4.panels[0].series]
    assert sorted(text.get_text() for text in legend.get_texts()) == sorted(labels)


def test_a_level_is_a_dotted_line_with_its_number():
    axes = draw(chart(lines(Series("a", "cnn", (1.0, 2.0), (10.0, 20.0)), level=95.0))).axes[0]
    assert axes.get_ylim()[1] > 95
    assert [text.get_text() for text in axes.texts] == ["95"]


def test_a_logarithmic_axis_takes_values_that_are_not_positive():
    axes = draw(chart(lines(Series("a", "cnn", (1.0, 2.0), (0.0, 1e-6), (1.0, 0.0)), log_y=True))).axes[0]
    assert axes.get_yscale() == "log"
    assert axes.get_ylim()[0] > 0


def test_a_value_that_is_missing_leaves_a_gap():
    figure = draw(chart(lines(Series("a", "cnn", (1.0, 2.0, 3.0), (10.0, math.nan, 20.0)))))
    assert np.isfinite(figure.axes[0].get_ylim()).all()
    rendered(figure)


def test_lines_without_any_number_still_make_a_chart():
    rendered(draw(chart(lines(Series("a", "cnn", (), ())), lines())))


def test_blocks_are_grey_from_black_for_0_to_white_for_1_with_ticks_at_their_values():
    blocks = Blocks((2.0, 4.0), (100.0, 300.0), ((0.0, 0.5), (1.0, math.nan)))
    figure = draw(chart(Panel("panel", "l", "samples", blocks=blocks)))
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["2", "4"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["100", "300"]
    picture = rendered(figure)
    height, width, _ = picture.shape
    box = axes.get_position()

    def colour(column: int, row: int) -> np.ndarray:
        x, y = box.x0 + (column + 0.5) / 2 * box.width, box.y0 + (row + 0.5) / 2 * box.height
        return picture[round((1 - y) * height), round(x * width)]

    assert colour(0, 0).tolist() == [0, 0, 0]
    assert colour(0, 1).tolist() == [1, 1, 1]
    assert np.ptp(colour(1, 0)) == 0
    assert colour(1, 0)[0] == pytest.approx(0.5, abs=0.02)
    assert np.ptp(colour(1, 1)) > 0.05  # not run: no grey that could be taken for a value
    assert "not run" in figure.axes[-1].get_ylabel()


def test_the_same_chart_gives_the_same_bytes(tmp_path: Path):
    for folder in ("a", "b"):
        write_figures(tmp_path / folder, CHARTS[1:])
    names = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert names == sorted(f"{each.id}.{kind}" for each in CHARTS[1:] for kind in ("png", "svg"))
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_an_svg_carries_no_date_and_no_program():
    text = to_svg(FIGURE_8)
    assert "<metadata" not in text
    assert "atplotlib.org" not in text


def test_drawings_on_one_page_share_no_id_and_refer_to_their_own():
    drawings = [to_svg(each, panel) for each in CHARTS for panel in range(len(each.panels))]
    ids = [set(re.findall(r'\bid="([^"]+)"', drawing)) for drawing in drawings]
    assert sum(map(len, ids)) == len(set.union(*ids))
    for drawing, own in zip(drawings, ids, strict=True):
        referred = set(re.findall(r'(?:url\(|href=")#([^")]+)', drawing))
        assert referred
        assert referred <= own


def test_colours_can_be_left_to_the_page():
    text = to_svg(FIGURE_4, 0, variables=True)
    assert "stroke: var(--chart-vermilion, #D55E00)" in text
    assert not re.search(r"(fill|stroke): #(?!ffffff)", text)
    assert "var(--" not in to_svg(FIGURE_4, 0)


@pytest.mark.parametrize("label", ["<script>alert(1)</script>", "a & b", "costs $5 or $6", "_hidden", "]]>", '" id="x'])
def test_labels_are_text_whatever_they_contain(label: str):
    panel = Panel(label, label, label, (Series("a", "cnn", (1.0, 2.0), (1.0, 2.0)),))
    root = ElementTree.fromstring(to_svg(chart(panel), 0, variables=True))
    assert sum(element.text == label for element in root.iter("{http://www.w3.org/2000/svg}text")) == 3
    assert not [element for element in root.iter() if element.tag.endswith("script")]


def test_a_legend_label_is_text_too():
    panel = lines(Series("$1 <b> $2", "cnn", (1.0, 2.0), (1.0, 2.0)))
    root = ElementTree.fromstring(to_svg(chart(panel)))
    assert "$1 <b> $2" in [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_many_panels_go_into_rows():
    figure = draw(chart(*[lines(Series("a", "cnn", (1.0, 2.0), (1.0, 2.0)))] * 5))
    assert len(figure.axes) == 5
    assert len({round(axes.get_position().y0, 3) for axes in figure.axes}) == 2


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        (replace(FIGURE_4, id="../figure"), "names a file"),
        (replace(FIGURE_4, panels=()), "no panels"),
        (chart(lines(Series("a", "cnn", (1.0,), (1.0, 2.0)))), "1 x and 2 y"),
        (chart(Panel("", "", "", blocks=Blocks((1.0,), (1.0, 2.0), ((0.5,),)))), "need 2 rows of 1"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_the_reason(fault: Chart, complaint: str, tmp_path: Path):
    with pytest.raises(ValueError, match=complaint):
        write_figures(tmp_path, [fault])
    assert list(tmp_path.iterdir()) == []
