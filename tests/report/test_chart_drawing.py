"""Charts show their numbers, are reproducible, and distinguish lines without colours."""

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
from matplotlib.text import Text
from papers.engine.example_findings import CHARTS, SECOND_CHARTS

from moesaic.report import draw, to_svg, write_figures
from moesaic.report.chart import Blocks, Chart, Counts, Group, Panel, Points, Regions, Series
from moesaic.report.chart_drawing import panel_width
from moesaic.report.chart_style import COLOURS, DARK_CARD, MANY_POINTS, MAX_ROLES, ON_DARK, line_styles, role_colours

FIGURE_4, FIGURE_5, FIGURE_8 = CHARTS
REGIONS, MULTIPLES, TABLE, _ = SECOND_CHARTS


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
    def style(*roles: str) -> dict[str, tuple[str, str]]:
        panel = lines(*(Series(role, role, (1.0,), (1.0,)) for role in roles))
        containers = draw(chart(panel)).axes[0].containers
        return {
            role: (container.lines[0].get_color(), container.lines[0].get_marker())
            for role, container in zip(roles, containers, strict=True)
        }

    everyone, few = style("cnn", "separate", "joint", "best", "other"), style("something", "joint", "cnn")
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
    axes = draw(chart(lines(Series("a", "cnn", (1.0, 2.0), (1.0, 2.0)), level=math.log(4)))).axes[0]
    assert [text.get_text() for text in axes.texts] == ["1.39"]


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
    image = rendered(figure)
    height, width, _ = image.shape
    box = axes.get_position()

    def colour(column: int, row: int) -> np.ndarray:
        x, y = box.x0 + (column + 0.5) / 2 * box.width, box.y0 + (row + 0.5) / 2 * box.height
        return image[round((1 - y) * height), round(x * width)]

    assert colour(0, 0).tolist() == [0, 0, 0]
    assert colour(0, 1).tolist() == [1, 1, 1]
    assert np.ptp(colour(1, 0)) == 0
    assert colour(1, 0)[0] == pytest.approx(0.5, abs=0.02)
    assert np.ptp(colour(1, 1)) > 0.05  # not run: no grey that could be taken for a value
    assert "not run" in figure.axes[-1].get_ylabel()


def test_the_same_chart_gives_the_same_bytes_in_its_papers_folder(tmp_path: Path):
    drawn = (FIGURE_8, replace(REGIONS, panels=REGIONS.panels[:1], row_titles=()), TABLE)
    for folder in ("a", "b"):
        write_figures(tmp_path / folder, drawn)
    names = sorted(str(file.relative_to(tmp_path / "a")) for file in (tmp_path / "a").rglob("*.*"))
    assert names == sorted(f"{each.paper}/{each.id}.{kind}" for each in drawn for kind in ("png", "svg"))
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_an_svg_carries_no_date_and_no_program():
    text = to_svg(FIGURE_8)
    assert "<metadata" not in text
    assert "atplotlib.org" not in text


def test_drawings_on_one_page_share_no_id_and_refer_to_their_own():
    charts = (*CHARTS, replace(FIGURE_8, paper="chen2022"), REGIONS)
    drawings = [to_svg(each, panel) for each in charts for panel in range(len(each.panels))]
    drawings.append(to_svg(REGIONS, "legend"))
    ids = [set(re.findall(r'\bid="([^"]+)"', drawing)) for drawing in drawings]
    assert sum(map(len, ids)) == len(set.union(*ids))
    for drawing, own in zip(drawings, ids, strict=True):
        referred = set(re.findall(r'(?:url\(|href=")#([^")]+)', drawing))
        assert referred
        assert referred <= own


def test_colours_can_be_left_to_the_page():
    text = to_svg(FIGURE_4, 0, variables=True)
    assert "fill: var(--chart-ink, #333333)" in text
    assert "var(--" not in to_svg(FIGURE_4, 0)


def test_colours_that_stand_for_a_line_stay_where_ink_is_left_to_the_page():
    for each in (*CHARTS, REGIONS):
        drawings = [to_svg(each, variables=left) for left in (False, True)]
        used = [set(re.findall(r"#[0-9a-f]{6}", drawing, re.IGNORECASE)) for drawing in drawings]
        drawn = {style.colour.lower() for style in line_styles(each.panels).values()} | {
            colour.lower() for colour in role_colours(each.panels).values()
        }
        assert all(drawn <= {colour.lower() for colour in own} for own in used)
        left = re.findall(r"var\(--chart-(\w+)", drawings[1])
        assert set(left) <= {"ink", "line"}


def test_colours_of_lines_are_legible_on_light_and_dark_pages():
    """WCAG asks for 3:1 where a mark has no text; orange and sky of Okabe and Ito are lighter on white."""
    for name, colour in COLOURS.items():
        if name not in ON_DARK:
            assert contrast(colour, DARK_CARD) >= 3, name
            assert contrast(colour, "#ffffff") >= (2.2 if name in ("orange", "sky") else 2.9), name


def contrast(first: str, second: str) -> float:
    low, high = sorted(luminance(each) for each in (first, second))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_cells_keep_the_colour_of_their_value_where_colours_are_left_to_the_page():
    """Some greys of values are also colours of ink and lines: 0.2 is #333333."""
    greys = [int(colour[1:3], 16) / 255 for colour in COLOURS.values() if colour[1:3] == colour[3:5] == colour[5:]]
    assert len(greys) == 3
    cells = Panel("", "x", "y", blocks=Blocks((1.0, 2.0, 3.0), (1.0,), (tuple(greys),)))
    table = Panel("", "", "", counts=Counts(("a",), ("b", "c"), ((1.0, 0.0),)))
    for panel, count in ((cells, 3), (table, 2)):
        text = to_svg(chart(panel), variables=True)
        shown, plain = (ElementTree.fromstring(each) for each in (text, to_svg(chart(panel))))
        cell_colours = [fills(root, "data-0") for root in (shown, plain)]
        assert len(cell_colours[0]) >= count
        assert cell_colours[0] == cell_colours[1]
        assert "fill: var(--chart-ink, #333333)" in text, "labels are not data"
    assert {f"#{round(255 * grey):02x}" + f"{round(255 * grey):02x}" * 2 for grey in greys} <= set(
        fills(ElementTree.fromstring(to_svg(chart(cells), variables=True)), "data-0")
    )


def fills(root: ElementTree.Element, name: str) -> list[str]:
    """The colours in which elements of data are filled."""
    groups = [each for each in root.iter() if f"-{name}" in each.get("id", "")]
    assert groups
    styles = [each.get("style", "") for group in groups for each in group.iter()]
    return [found[1] for style in styles if (found := re.search("fill: ([^;]+)", style))]


@pytest.mark.parametrize("label", ["<script>alert(1)</script>", "a & b", "costs $5 or $6", "_hidden", "]]>", '" id="x'])
def test_labels_are_text_whatever_they_contain(label: str):
    panel = Panel(label, label, label, (Series("a", "cnn", (1.0, 2.0), (1.0, 2.0)),))
    root = ElementTree.fromstring(to_svg(chart(panel), 0, variables=True))
    assert sum(element.text == label for element in root.iter("{http://www.w3.org/2000/svg}text")) == 3
    assert not [element for element in root.iter() if element.tag.endswith("script")]
    table = Panel("", "", "", counts=Counts((label,), (label,), ((1.0,),)))
    titled = replace(chart(table), columns=1, row_titles=(label,))
    root = ElementTree.fromstring(to_svg(titled))
    assert sum(element.text == label for element in root.iter("{http://www.w3.org/2000/svg}text")) == 3


def test_a_legend_label_is_text_too():
    panel = lines(Series("$1 <b> $2", "cnn", (1.0, 2.0), (1.0, 2.0)))
    root = ElementTree.fromstring(to_svg(chart(panel)))
    assert "$1 <b> $2" in [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]


def many(label: str, role: str, height: float = 1.0, spread: float | None = None) -> Series:
    x = tuple(float(i) for i in range(31))
    return Series(label, role, x, (height,) * 31, None if spread is None else (spread,) * 31)


def test_a_line_of_many_points_has_a_band_instead_of_bars_and_no_markers():
    axes = draw(chart(lines(many("a", "cnn", 50.0, 3.0)))).axes[0]
    assert not axes.containers
    (line,) = axes.lines
    assert line.get_marker() == "None"
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (47.0, 53.0)
    assert axes.get_ylim()[0] < 47 < 53 < axes.get_ylim()[1]


def test_lines_without_markers_differ_by_dash_whatever_their_role():
    axes = draw(chart(lines(*(many(f"signal {i}", f"signal-{i}", i) for i in range(4))))).axes[0]
    styles = [line._dash_pattern for line in axes.lines]  # type: ignore[attr-defined]
    assert len({str(style) for style in styles}) == 4


def test_a_logarithmic_axis_across_has_its_ticks_at_the_measured_places():
    line = Series("a", "cnn", (0.0, 1.0, 10.0, 100.0, 101.0), (1.0,) * 5)
    axes = draw(chart(lines(line, log_x=True))).axes[0]
    assert axes.get_xscale() == "log"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "10", "100"]
    assert 0 < axes.get_xlim()[0] < 1


def test_experts_have_eight_colours_that_stay():
    def style(count: int) -> list[str]:
        panel = lines(*(Series(f"e{i}", f"expert-{i}", (1.0,), (1.0,)) for i in range(1, count + 1)))
        return [container.lines[0].get_color() for container in draw(chart(panel)).axes[0].containers]

    assert len(set(style(8))) == 8
    assert style(3) == style(8)[:3]


def test_strangers_beside_all_experts_still_have_a_colour():
    panel = lines(*(Series(role, role, (1.0,), (1.0,)) for role in [*(f"expert-{i}" for i in range(1, 9)), "a", "b"]))
    colours = [container.lines[0].get_color() for container in draw(chart(panel)).axes[0].containers]
    assert len(set(colours)) == 10


def colour_at(figure: Figure, axes: Axes, x: float, y: float) -> list[float]:
    """The colour that is drawn at a place of the axes' data."""
    image = rendered(figure)
    across, up = figure.transFigure.inverted().transform(axes.transData.transform((x, y)))
    return image[round((1 - up) * image.shape[0]), round(across * image.shape[1])].tolist()


GROUPS = (
    Group("expert 1", "expert-1", (0.0, 1.0), (0.0, 2.0), "+", "class +1"),
    Group("expert 2", "expert-2", (2.0,), (1.0,), "+", "class +1"),
    Group("expert 1", "expert-1", (3.0,), (3.0,), "-", "class −1"),
)


def plane(points: Points, x_label: str = "", y_label: str = "") -> Panel:
    return Panel("panel", x_label, y_label, points=points)


def test_points_lie_where_they_belong_with_colours_for_labels_and_markers_for_classes():
    figure = draw(chart(plane(Points(GROUPS))))
    drawn = [(line.get_xdata().tolist(), line.get_ydata().tolist(), line.get_marker()) for line in figure.axes[0].lines]
    assert drawn == [([0, 1], [0, 2], "+"), ([2], [1], "+"), ([3], [3], "_")]
    first, second, third = (line.get_color() for line in figure.axes[0].lines)
    assert first == third != second
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["expert 1", "expert 2", "class +1", "class −1"]


def test_axes_that_mean_nothing_have_no_ticks():
    bare, named = (draw(chart(plane(Points(GROUPS), *labels))).axes[0] for labels in (("", ""), ("width", "height")))
    assert not bare.get_xticks().size
    assert not bare.get_yticks().size
    assert named.get_xticks().size
    assert named.get_yticks().size


def test_regions_have_the_colours_of_their_experts_and_turn_where_the_score_does():
    regions = Regions(
        (0.0, 1.0, 2.0), (0.0, 1.0), ("expert-1", "expert-2"), ((0, 1, -1), (1, 1, 0)), ((-1.0, 1.0, 2.0),) * 2
    )
    figure = draw(chart(plane(Points((Group("expert 1", "expert-1", (), ()),), regions))))
    axes = figure.axes[0]
    assert axes.get_xlim() == (-0.5, 2.5)
    blue, vermilion = colour_at(figure, axes, -0.3, 0.2), colour_at(figure, axes, 1.0, 0.2)
    assert blue[2] > blue[0]
    assert vermilion[0] > vermilion[2]
    assert colour_at(figure, axes, 2.2, 0.2) == [1, 1, 1]
    assert colour_at(figure, axes, -0.3, 1.2) == vermilion
    (border,) = axes.collections
    assert border.get_paths()[0].vertices[:, 0] == pytest.approx(0.5)
    assert "decision boundary" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_scores_that_never_turn_draw_no_line():
    regions = Regions((0.0, 1.0), (0.0, 1.0), scores=((1.0, 2.0), (3.0, 4.0)))
    assert not draw(chart(plane(Points(GROUPS, regions)))).axes[0].collections


def test_thousands_of_points_do_not_make_a_drawing_large():
    x = tuple(math.sin(i) for i in range(4000))
    few, crowd = (to_svg(chart(plane(Points((Group("a", "a", x[:n], x[:n]),)))), 0) for n in (100, 4000))
    assert "<image" not in few
    assert "<image" in crowd
    assert len(crowd) < 200_000


def test_counts_are_written_into_cells_that_are_darker_the_more_of_their_row_they_have():
    counts = Counts(("cluster 1", "cluster 2"), ("1", "2", "3"), ((0.0, 1000.0, 3000.0), (2.0, 2.0, math.nan)))
    figure = draw(chart(Panel("panel", "expert", "", counts=counts)))
    axes = figure.axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["0", "1,000", "3,000", "2", "2", "–"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["cluster 1", "cluster 2"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first row is on top
    none, quarter, most, half = (
        sum(colour_at(figure, axes, x + 0.1, y + 0.1)) for x, y in ((0, 0), (1, 0), (2, 0), (0, 1))
    )
    assert none == 3
    assert none > quarter > half > most


def test_a_count_can_be_read_on_its_cell():
    shares = tuple(float(i) for i in range(0, 101, 5))
    rows = tuple((share, 100 - share) for share in shares)
    counts = Counts(tuple(str(share) for share in shares), ("a", "b"), rows)
    figure = draw(chart(Panel("panel", "", "", counts=counts)))

    def brightness(colour) -> float:
        return float(np.dot(matplotlib.colors.to_rgb(colour), (0.2126, 0.7152, 0.0722)))

    mesh = figure.axes[0].collections[0]
    for share, cell, text in zip(
        np.ravel(rows), mesh.cmap(mesh.norm(np.ravel(rows) / 100)), figure.axes[0].texts, strict=True
    ):
        assert abs(brightness(cell[:3]) - brightness(text.get_color())) > 0.4, share


def test_small_multiples_share_limits_and_one_legend_and_say_each_label_once_a_row_or_column():
    figure = draw(MULTIPLES)
    assert len({round(axes.get_position().y0, 3) for axes in figure.axes}) == 2
    assert len({(axes.get_xlim(), axes.get_ylim()) for axes in figure.axes}) == 1
    assert [bool(axes.get_ylabel()) for axes in figure.axes] == [True, False, False, False] * 2
    assert [bool(axes.get_xlabel()) for axes in figure.axes] == [False] * 4 + [True] * 4
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 4


def test_with_columns_a_panel_alone_has_no_legend_and_the_legend_alone_no_panel():
    panel, legend = draw(MULTIPLES, 5), draw(MULTIPLES, "legend")
    assert not panel.legends
    assert panel.axes[0].get_ylabel() == "inner product"
    assert not legend.axes
    assert [text.get_text() for text in legend.legends[0].get_texts()] == [f"feature signal {i}" for i in range(1, 5)]


def test_rows_have_their_titles_over_them_from_above():
    figure = draw(REGIONS)
    figure.draw_without_rendering()
    titles = {text.get_text(): text for text in figure.findobj(Text)}
    heights = [
        titles[text].get_window_extent().y0 for text in ("nonlinear experts", "linear experts", "decision boundary")
    ]
    assert heights == sorted(heights, reverse=True)
    panels = [axes for axes in figure.axes if axes.lines]
    assert panels[0].get_window_extent().y1 < heights[0]
    assert panels[2].get_window_extent().y1 < heights[1] < panels[0].get_window_extent().y0


def test_panels_of_different_kinds_may_stand_in_one_chart():
    kinds = (FIGURE_4.panels[0], FIGURE_5.panels[0], TABLE.panels[1], REGIONS.panels[1])
    figure = draw(replace(chart(*kinds), columns=2))
    rendered(figure)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[0] == FIGURE_4.panels[0].series[0].label
    assert {"expert 1", "class +1", "decision boundary"} <= set(labels)


def test_two_charts_may_not_share_a_file(tmp_path: Path):
    write_figures(tmp_path, [FIGURE_8, replace(FIGURE_8, paper="chen2022")])
    with pytest.raises(ValueError, match=r"two charts would both be chowdhury2023/figure-8\.png"):
        write_figures(tmp_path, [FIGURE_8, FIGURE_8])


def test_many_panels_go_into_rows():
    figure = draw(chart(*[lines(Series("a", "cnn", (1.0, 2.0), (1.0, 2.0)))] * 5))
    assert len(figure.axes) == 5
    assert len({round(axes.get_position().y0, 3) for axes in figure.axes}) == 2


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        (replace(FIGURE_4, id="../figure"), "names a file"),
        (replace(FIGURE_4, paper="../paper"), "names a file"),
        (replace(FIGURE_4, columns=0), "columns=0"),
        (replace(FIGURE_4, row_titles=("a",)), "needs columns"),
        (replace(FIGURE_4, columns=1, row_titles=("a",)), "1 row titles for 2 panels"),
        (chart(Panel("", "", "", counts=Counts(("a",), ("b", "c"), ((1.0,),)))), "need 1 rows of 2"),
        (chart(Panel("", "", "", counts=Counts(("a",), ("b",), ((-1.0,),)))), "negative"),
        (chart(plane(Points((Group("a", "a", (1.0,), ()),)))), "1 x and 0 y"),
        (chart(plane(Points((), Regions((0.0,), (0.0,), ("a",), ((1,),))))), "from -1 to 0"),
        (chart(plane(Points((), Regions((0.0,), (0.0,), scores=((1.0, 2.0),))))), "scores of regions"),
        (chart(plane(Points(tuple(Group(str(i), str(i), (), ()) for i in range(11))))), "more roles"),
        (chart(replace(FIGURE_4.panels[0], points=Points(()))), "use a panel for each"),
        (replace(FIGURE_4, panels=()), "no panels"),
        (chart(lines(Series("a", "cnn", (1.0,), (1.0, 2.0)))), "1 x and 2 y"),
        (chart(Panel("", "", "", blocks=Blocks((1.0,), (1.0, 2.0), ((0.5,),)))), "need 2 rows of 1"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_the_reason(fault: Chart, complaint: str, tmp_path: Path):
    with pytest.raises(ValueError, match=complaint):
        write_figures(tmp_path, [fault])
    assert list(tmp_path.iterdir()) == []


def test_limits_leave_a_twentieth_of_the_range_on_each_side():
    axes = draw(chart(lines(Series("a", "cnn", (0.0, 100.0), (10.0, 20.0))))).axes[0]
    assert axes.get_xlim() == pytest.approx((-5.0, 105.0))
    assert axes.get_ylim() == pytest.approx((9.5, 20.5))
    logarithmic = draw(chart(lines(Series("a", "cnn", (1.0, 100.0), (1.0, 10.0)), log_x=True, log_y=True))).axes[0]
    assert logarithmic.get_xlim() == pytest.approx((100**-0.05, 100**1.05))
    assert logarithmic.get_ylim() == pytest.approx((10**-0.05, 10**1.05))


def test_a_single_value_has_room_around_it():
    axes = draw(chart(lines(Series("a", "cnn", (0.0,), (20.0,))))).axes[0]
    assert axes.get_xlim() == (-1.0, 1.0)
    assert axes.get_ylim() == (18.0, 22.0)
    logarithmic = draw(chart(lines(Series("a", "cnn", (3.0,), (1.0,)), log_x=True))).axes[0]
    assert logarithmic.get_xlim() == pytest.approx((2.0, 4.5))


def test_a_level_beyond_the_lines_is_within_the_limits():
    axes = draw(chart(lines(Series("a", "cnn", (1.0, 2.0), (1.0, 2.0)), level=12.0))).axes[0]
    assert axes.get_ylim() == pytest.approx((0.45, 12.55))
    (label,) = axes.texts
    assert label.get_text() == "12"
    assert label.xy == (1, 12.0)


def test_ticks_are_at_least_seven_percent_of_the_axis_apart():
    axes = draw(chart(lines(Series("a", "cnn", (0.0, 7.0, 8.0, 100.0), (1.0,) * 4)))).axes[0]
    assert axes.get_xticks().tolist() == [0, 8, 100]  # 7.7 of the axis' 110


def test_thirty_points_have_markers_and_more_have_none():
    def drawn(points: int) -> Axes:
        x = tuple(float(i) for i in range(points))
        return draw(chart(lines(Series("a", "cnn", x, x)))).axes[0]

    assert [bool(drawn(points).containers) for points in (MANY_POINTS, MANY_POINTS + 1)] == [True, False]


def test_points_are_smaller_where_there_are_many():
    def size(points: int) -> float:
        x = tuple(float(i) for i in range(points))
        (line,) = draw(chart(plane(Points((Group("a", "a", x, x),))))).axes[0].lines
        return line.get_markersize()

    assert [size(points) for points in (100, 101, 500, 501)] == [5.0, 3.8, 3.8, 2.8]


def test_the_letters_of_a_table_are_smaller_where_it_has_more_than_eight_columns():
    def size(columns: int) -> float:
        names = tuple(str(i) for i in range(columns))
        counts = Counts(("a",), names, ((1.0,) * columns,))
        return draw(chart(Panel("", "", "", counts=counts))).axes[0].texts[0].get_fontsize()

    assert [size(columns) for columns in (8, 9)] == [8.5, 7]


def test_numbers_in_a_table_are_whole_or_have_three_digits():
    counts = Counts(("a",), ("b", "c", "d"), ((2.5, 1234.0, 0.0),))
    assert [text.get_text() for text in draw(chart(Panel("", "", "", counts=counts))).axes[0].texts] == [
        "2.5", "1,234", "0",
    ]  # fmt: skip
    empty = draw(chart(Panel("", "", "", counts=Counts(("a",), ("b", "c"), ((0.0, 0.0),))))).axes[0]
    assert np.asarray(empty.collections[0].get_array()).ravel().tolist() == [0, 0]


def test_the_legend_shows_markers_where_they_mean_nothing_else():
    plain, marked = (
        draw(
            chart(
                plane(
                    Points(
                        tuple(replace(group, marker_label=label) for group, label in zip(GROUPS, labels, strict=True))
                    )
                )
            )
        )
        for labels in (("", "", ""), ("class +1", "", ""))
    )
    assert [handle.get_marker() for handle in plain.legends[0].legend_handles] == ["+", "+"]
    assert [handle.get_marker() for handle in marked.legends[0].legend_handles] == ["s", "s", "+"]


def test_regions_reach_half_a_step_beyond_their_centres():
    regions = Regions((1.0, 3.0, 5.0), (10.0,), ("expert-1",), ((0, 0, 0),))
    (image,) = draw(chart(plane(Points((), regions)))).axes[0].images
    assert list(image.get_extent()) == [0.0, 6.0, 9.5, 10.5]


@pytest.mark.parametrize("scores", [(0.0, 2.0), (-2.0, 0.0)])
def test_a_score_of_zero_is_no_boundary_alone(scores: tuple[float, float]):
    regions = Regions((0.0, 1.0), (0.0, 1.0), scores=(scores, scores))
    assert not draw(chart(plane(Points(GROUPS, regions)))).axes[0].collections
    turning = Regions((0.0, 1.0), (0.0, 1.0), scores=((-0.5, 0.5),) * 2)
    assert draw(chart(plane(Points(GROUPS, turning)))).axes[0].collections


@pytest.mark.parametrize(
    ("panels", "columns", "inches"),
    [(1, None, (4.7, 3.3)), (3, None, (13.5, 3.3)), (4, None, (13.5, 6.4)), (3, 3, (10.2, 2.7)), (4, 4, (9.5, 1.95))],
)
def test_more_columns_have_smaller_panels(panels: int, columns: int | None, inches: tuple[float, float]):
    each = Panel("", "x", "y", blocks=Blocks((1.0,), (1.0,), ((0.5,),)))  # no legend
    figure = draw(replace(chart(*[each] * panels), columns=columns))
    assert tuple(figure.get_size_inches()) == pytest.approx(inches)
    assert panel_width(replace(chart(each), columns=columns)) == pytest.approx({None: 4.4, 3: 3.3, 4: 2.3}[columns])


def test_a_table_is_as_high_as_its_rows_and_titles_and_legend_add_to_it():
    table = Panel("", "", "", counts=Counts(("a", "b", "c"), ("d",), ((1.0,),) * 3))
    assert draw(chart(table)).get_size_inches()[1] == pytest.approx(1.0 + 3 * 0.32 + 0.2)
    titled = replace(chart(table, table), columns=1, row_titles=("one", "two"))
    assert draw(titled).get_size_inches()[1] == pytest.approx(2 * (1.0 + 3 * 0.32 + 0.3) + 0.2)
    line = lines(Series("a", "cnn", (1.0,), (1.0,)))
    assert draw(chart(line)).get_size_inches()[1] == pytest.approx(3.1 + 0.2 + 0.19)
    alone = replace(chart(line, line), columns=2)
    assert draw(alone, 0).get_size_inches() == pytest.approx((4.4, 3.3))
    assert draw(alone, "legend").get_size_inches() == pytest.approx((4.4, 0.1 + 0.19))
    uneven = draw(chart(table, line))
    assert uneven.get_size_inches()[1] == pytest.approx(3.1 + 0.2 + 0.19)


def test_a_legend_has_as_many_columns_as_fit_and_even_rows():
    def columns(label: str, count: int) -> int:
        panel = lines(*(Series(f"{label}{i}", "cnn", (1.0,), (1.0,)) for i in range(count)))
        return draw(chart(panel)).legends[0]._ncols  # type: ignore[attr-defined]

    # 4.7 inches of 13 letters, each entry with 7 more than its label: 61 // 10 and 61 // 20 fit
    assert columns("ab", 6) == 6
    assert columns("ab", 7) == 4
    assert columns("twelve chars", 3) == 3
    assert columns("twelve chars", 4) == 2
    assert columns("x" * 80, 2) == 1


def test_a_role_too_many_is_refused_and_one_fewer_is_drawn():
    def groups(count: int) -> Chart:
        return chart(plane(Points(tuple(Group(str(i), str(i), (0.0,), (0.0,)) for i in range(count)))))

    assert len({line.get_color() for line in draw(groups(MAX_ROLES)).axes[0].lines}) == MAX_ROLES
    with pytest.raises(ValueError, match="more roles"):
        draw(groups(MAX_ROLES + 1))
