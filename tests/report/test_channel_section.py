"""The page on gates is whole, escapes names, says what was measured, and can be made of very little."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from moesaic.insight.channel_explanation import ChannelExplanation, ChannelLayer, GatedOutputs
from moesaic.insight.channel_metrics import ChannelUsage, GateDistances
from moesaic.insight.explain import Explanation, ForwardPass, explain
from moesaic.insight.image_cost import Costs, MeanCost
from moesaic.intervals import Estimate
from moesaic.report.channel_figures import draw_patterns, gate_charts
from moesaic.report.channel_section import GateFigures, channel_section
from moesaic.report.embedded_images import picture_of
from moesaic.report.explanation_page import About, write_explanation
from moesaic.report.explorer_data import CheckpointPass, ShownImage
from moesaic.routing.channel_gate import ChannelGate

NAMES = ("cat <b>", "dog & co", "frog\x08")


def forward_pass(open_by_layer: dict[str, Tensor], macs: Tensor | None, classes: int = 3) -> ForwardPass:
    """The forward pass of a network with these gates, which predicts class 0 for all images."""
    B = len(next(iter(open_by_layer.values())))
    routing = {
        name: ChannelGate(1, each.shape[1]).choose(torch.where(each, 0.5, -0.5)) for name, each in open_by_layer.items()
    }
    generator = torch.Generator().manual_seed(5)
    gated = None if macs is None else GatedOutputs(torch.randn(B, 6, generator=generator), macs, 1000, 50)
    probabilities = torch.softmax(torch.randn(B, classes, generator=generator) + 3 * torch.eye(classes)[0], 1)
    return ForwardPass(probabilities, routing, dict.fromkeys(routing), dict.fromkeys(routing, 1), gated)


def planted(images: int = 60, classes: int = 3) -> tuple[ForwardPass, Tensor, Tensor]:
    """Of three layers one is static, one random, and one follows the class; class 2 is expensive."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(images) % classes
    static = torch.tensor([True, False]).expand(images, 2)
    random = torch.rand(images, 8, generator=generator) < 0.5
    following = torch.nn.functional.one_hot(labels, classes).bool()
    macs = 300 + 100 * labels + torch.randint(0, 20, (images,), generator=generator)
    pixels = torch.randint(0, 256, (images, 3, 8, 6), dtype=torch.uint8, generator=generator)
    return forward_pass({"conv1": static, "conv2": random, "<i>conv3</i>": following}, macs, classes), labels, pixels


def write(folder: Path, explanation: Explanation, found: ForwardPass, pixels: Tensor, classes: Tensor) -> str:
    page = write_explanation(
        folder,
        explanation,
        About("vgg16_deepmoe", "runs/a", "some images"),
        pixels=pixels,
        classes=classes,
        images=[ShownImage("<u>one</u>.png", min(1, len(explanation.class_names) - 1), picture_of(pixels[0]))],
        checkpoints=[CheckpointPass("epoch 1", found.images(0, 1), found)],
    )
    return page.read_text("utf-8")


def words(page: str) -> str:
    page = re.sub(r"<(svg|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", page).replace("\u00a0", " ").split())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("gates")
    (folder / "gates-image-7.png").write_bytes(b"of before")
    (folder / "explanation.json").write_text("{}")
    found, labels, pixels = planted()
    return folder, write(folder, explain(found, NAMES, labels=labels), found, pixels, labels)


def test_the_page_embeds_its_figures_and_charts(written: tuple[Path, str]):
    folder, page = written
    figures = {path.name for path in folder.glob("*.png")}
    kinds = ("cost-extremes", "costs", "distances", "embedding", "patterns")
    assert figures == {f"gates-{kind}.png" for kind in kinds}, "and none of an earlier explanation"
    assert page.count("<svg xmlns") == 3
    assert not re.findall(r'\ssrc="', page)
    outside = [link for link in re.findall(r'https?://[^"\s<]*', page) if "www.w3.org" not in link]
    assert not outside
    assert "--chart-orange" in page
    assert page.rstrip().endswith("</html>")


def test_names_of_classes_layers_and_files_are_escaped(written: tuple[Path, str]):
    _, page = written
    assert not re.search("<(b|i|u)>(one|conv3|$)", page)
    assert "&lt;i&gt;conv3&lt;/i&gt;" in page
    assert r"\u003cu>one\u003c/u>.png" in page, "in the block of data"
    assert "cat &lt;b&gt;" in page


def test_the_page_says_what_was_measured(written: tuple[Path, str]):
    text = words(written[1])
    assert "Channel gates of vgg16_deepmoe" in text
    assert "The network has gates for 13 channels in 3 convolutions." in text
    assert "11 gates are dynamic (open for some images, closed for others), 1 are always on and 1 are dead." in text
    assert "The open gates depend on the class." in text
    assert "sees only the gates reaches 100 % accuracy" in text
    assert "from 30." in text
    assert "no map" not in text
    assert "Images with a wrong prediction are more expensive" in text


def test_everything_on_the_page_is_in_the_json(written: tuple[Path, str]):
    folder, _ = written
    record = json.loads((folder / "explanation.json").read_text("utf-8"))
    channels = record["explanation"]["channels"]
    assert [len(layer["usage"]["dynamic"]) for layer in channels["layers"]] == [0, 8, 3]
    assert np.array(channels["layers"][2]["share"]).shape == (3, 3)
    assert channels["specific"][0]["layer"] == "<i>conv3</i>"
    assert len(channels["costs"]["cost"]) == len(channels["map"]["x"]) == 60
    assert channels["costs"]["classes"][-1]["name"] == NAMES[2]
    assert [chart["id"] for chart in record["gates"]["charts"]] == ["distances", "embedding", "costs"]
    assert record["gates"]["shown"][0]["open_share"][0] == 0.5


@pytest.mark.parametrize(("images", "classes"), [(1, 3), (2, 3), (2, 1), (12, 1)])
def test_a_page_can_be_made_of_few_images_and_of_one_class(images: int, classes: int, tmp_path: Path):
    found, labels, pixels = planted(images, classes)
    text = words(write(tmp_path, explain(found, NAMES[:classes], labels=labels), found, pixels, labels))
    if images < 10:
        assert f"There is no map of the embedding: there {'is' if images == 1 else 'are'} only {images} image" in text
    if images == 1:
        assert "Over a single image every gate is either dead or always on" in text
    assert "too few classes, to compare" in text


def test_gates_that_are_the_same_for_every_image_are_called_static(tmp_path: Path):
    found = forward_pass({"conv1": torch.tensor([[True, False]]).expand(6, 2)}, torch.full((6,), 400))
    labels, pixels = torch.arange(6) % 3, torch.zeros(6, 1, 8, 8, dtype=torch.uint8)
    text = words(write(tmp_path, explain(found, NAMES, labels=labels), found, pixels, labels))
    assert "the same channels for every image" in text
    assert "Every image costs the same." in text
    assert not (tmp_path / "gates-cost-extremes.png").exists()


def test_gates_without_embedding_and_costs_are_shown_all_the_same(tmp_path: Path):
    found = forward_pass({"conv1": torch.eye(3).bool().repeat(4, 1)}, None)
    pixels = torch.zeros(12, 3, 8, 8, dtype=torch.uint8)
    page = write(tmp_path, explain(found, NAMES), found, pixels, found.probabilities.argmax(1))
    assert "Cost of images" not in page
    assert ">Layers<" in page


def test_of_many_classes_the_largest_have_colours_and_the_others_share_one():
    labels = torch.cat([torch.arange(14), torch.arange(11)])
    found = forward_pass({"conv1": torch.rand(25, 4) < 0.5}, torch.arange(25), classes=14)
    explanation = explain(found, [f"class {k}" for k in range(14)], labels=labels)
    assert explanation.channels is not None
    chart = next(
        each for each in gate_charts(explanation.channels, explanation.class_names, labels) if each.id == "embedding"
    )
    points = chart.panels[0].points
    assert points is not None
    assert [group.label for group in points.groups] == ["5 other classes", *(f"class {k}" for k in range(9))]
    assert sum(len(group.x) for group in points.groups) == 25


def test_a_strip_is_sorted_by_how_often_gates_are_open_and_dark_where_they_are():
    open_BE = torch.tensor([[0, 1, 1], [0, 1, 0]]).bool()
    explanation = explain(forward_pass({"conv1": open_BE}, None, classes=2), ["a", "b"], labels=torch.tensor([0, 1]))
    assert explanation.channels is not None
    figure = draw_patterns(explanation.channels, ["a", "b"], [1, 1])
    _, strip = (np.asarray(image.get_array()) for image in figure.axes[0].images)
    white = strip.min(-1) == 1
    assert white.tolist() == [[False, False, True], [False, True, True]]


MEAN = MeanCost("all", 60, 40.0, (39.0, 41.0), 30.0, 50.0)
COSTS = Costs(2_000_000, 100_000, (30.0, 50.0), None, MEAN, (MEAN,), None, None, None, None, None, (0,), (1,))
DISTANCES = GateDistances(((0.1, 0.2, 0.3), (0.2, 0.1, 0.4), (0.3, 0.4, 0.1)), 0.1, 0.3, 0.05, None, 0.4)


def section(layers: int = 1, images: tuple[int, ...] = (20, 20, 20), block: int = 1, **changes) -> dict[str, str]:
    """The sentences on a network of which these numbers are known."""
    usage = ChannelUsage(60, 4, (0,), (1,), (2, 3), 0.5, 0.1, 3)
    layer = ChannelLayer("conv", block, changes.pop("usage", usage), ((0.5,) * 4,) * 3, DISTANCES)
    channels = replace(ChannelExplanation((layer,) * layers, DISTANCES, (), None, COSTS), **changes)
    explanation = SimpleNamespace(channels=channels, by="label", class_names=NAMES, class_images=images)
    return channel_section(explanation, GateFigures(None, None, (), ()))  # type: ignore[arg-type]


def costs(**changes) -> str:
    return section(costs=replace(COSTS, **changes))["costs"]


def test_the_summary_counts_convolutions_gates_and_blocks():
    assert "gates for 4 channels in one convolution." in section()["summary"]
    assert "gates for 8 channels in 2 convolutions." in section(layers=2)["summary"]
    assert "gates for 4 blocks of channels in one" in section(block=2)["summary"]
    assert "50\u00a0% of the gates are open for an image, and it costs 40.0 %" in section()["summary"]
    assert "(from 30.0 % to 50.0 %)" in section()["summary"]
    assert section()["summary"].endswith("Dead channels could be removed from the network.")
    alive = ChannelUsage(60, 4, (), (1,), (2, 3), 0.5, 0.1, 3)
    assert section(usage=alive)["summary"].endswith("1 are always on and 0 are dead.")


@pytest.mark.parametrize(
    ("macs", "text"),
    [(2_000_000_000, "2 billion"), (1_000_000_000, "1 billion"), (1_000_000, "1 million"), (999_999, "999,999")],
)
def test_multiply_adds_are_told_in_millions_and_billions(macs: int, text: str):
    assert f"takes {text} multiply-adds per image" in costs(dense_macs=macs)
    assert "with gates the mean cost is 40.0 % (39.0 to 41.0) of that; 5.0 % are fixed" in costs().lower()
    assert costs(all=replace(MEAN, least=40.0, most=40.0)).endswith("Every image costs the same.")


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.1, 2.0, ("are more expensive", "more certain about expensive images")),
        (-2.0, -0.1, ("are cheaper", "more certain about cheap images")),
        (0.0, 2.0, ("do not differ significantly", "not significantly correlated")),
        (-2.0, 0.0, ("do not differ significantly", "not significantly correlated")),
    ],
)
def test_a_difference_is_told_where_its_interval_is_on_one_side_of_zero(low: float, high: float, verdict):
    found = Estimate((low + high) / 2, low, high)
    right, wrong = replace(MEAN, mean=38.0, interval=None), replace(MEAN, mean=39.0, least=1.0, most=1.0)
    text = costs(right=right, wrong=wrong, extra_cost_when_wrong=found, certainty=found)
    assert all(part in text for part in verdict)
    assert "39.0 % with a wrong prediction, 38.0 % with a correct prediction." in text
    assert "Within classes" not in text
    within = costs(
        right=right, wrong=wrong, extra_cost_when_wrong=found, extra_cost_within_classes=Estimate(-0.5, -1.0, 0.125)
    )
    assert "Within classes the difference is −0.50 percentage points (−1.00 to 0.12)." in within
    assert "prediction" not in costs(right=None, wrong=wrong, extra_cost_when_wrong=found)


def test_classes_are_compared_if_three_have_enough_images():
    text = section()["patterns"]
    assert "same class differ in 10.0 % of all gates, two images of different classes in 30.0 %" in text
    assert f"gates of “{NAMES[0]}” and “{NAMES[1]}” (20.0 %) are most similar" in text
    assert f"those of “{NAMES[1]}” and “{NAMES[2]}” (40.0 %) least similar" in text
    assert "most similar" not in section(images=(20, 20, 19))["patterns"]
    chance = section(distances=replace(DISTANCES, by_chance=0.25))["patterns"]
    assert "do not show that the gates depend on the class" in chance
    assert "up to 25.00 percentage points" in chance
    assert "too few images" in section(distances=replace(DISTANCES, by_chance=None))["patterns"]
    probe = section(distances=replace(DISTANCES, probe_accuracy=0.75))["patterns"]
    assert (
        "reaches 75\u00a0% accuracy on held-out images; always predicting the most frequent class would reach 40\u00a0%"
        in probe
    )


def gate_chart(id: str, **changes):
    layer = ChannelLayer("conv", 1, ChannelUsage(60, 4, (), (), (), 0.5, 0.1, 3), (), DISTANCES)
    unknown = replace(layer, distances=replace(DISTANCES, within=None))
    made = replace(ChannelExplanation((unknown, layer, layer), DISTANCES, (), None, COSTS), **changes)
    return next((chart for chart in gate_charts(made, NAMES, torch.zeros(2).long()) if chart.id == id), None)


def test_distances_are_drawn_in_percent_by_the_number_of_the_layer_if_two_have_them():
    between, within = gate_chart("distances").panels[0].series
    assert (between.x, between.y) == ((2.0, 3.0), pytest.approx((30.0, 30.0)))
    assert within.y == pytest.approx((10.0, 10.0))
    alone = ChannelLayer("conv", 1, ChannelUsage(60, 4, (), (), (), 0.5, 0.1, 3), (), DISTANCES)
    assert gate_chart("distances", layers=(alone,)) is None


@pytest.mark.parametrize(("wrong", "lines"), [(19, ["all images"]), (20, ["correct prediction", "wrong prediction"])])
def test_costs_are_drawn_apart_if_twenty_predictions_are_wrong(wrong: int, lines: list[str]):
    cost = (30.0, *([50.0] * (59 + wrong)))
    correct = (*([True] * 60), *([False] * wrong))
    series = gate_chart("costs", costs=replace(COSTS, cost=cost, is_correct=correct)).panels[0].series
    assert [line.label for line in series] == lines
    first, images = series[0], 60 if len(lines) > 1 else 60 + wrong
    assert (first.x[0], first.x[-1], len(first.x)) == (30.0, 50.0, 50)
    one = 100 / images
    assert (*first.y[:4], *first.y[-3:]) == pytest.approx((0.0, one, one, 0.0, 100 - one, 100 - one, 0.0))
