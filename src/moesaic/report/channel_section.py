"""The section on channel gates of an explanation page: its figures, sentences and tables.

`draw_gates` writes PNG files and returns data for explanation.json; `channel_section` makes the sentences
and table rows of the template.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from moesaic.files import write_atomic
from moesaic.insight.channel_explanation import ChannelExplanation, ChannelLayer
from moesaic.insight.channel_metrics import GateDistances
from moesaic.insight.class_routing import MIN_CLASS_IMAGES
from moesaic.insight.explain import Explanation, ForwardPass
from moesaic.insight.image_cost import Costs, MeanCost
from moesaic.report.channel_charts import gate_charts
from moesaic.report.channel_figures import MAX_LAYERS, draw_cost_extremes, draw_patterns, evenly, thumbnail
from moesaic.report.chart import Chart
from moesaic.report.chart_drawing import draw, to_svg
from moesaic.report.formatting import number, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ChannelSection", "GateFigures", "ShownGates", "channel_section", "draw_gates"]

_DPI = 140
_MAX_COLUMNS = 16
"""Layers in the table of images, at most."""


@dataclass(frozen=True)
class ShownGates:
    """The gates of one shown image."""

    image: str
    """File name of its thumbnail."""
    cost: float | None
    """In percent of the dense network."""
    open_share: tuple[float, ...]
    """Share of open gates of each layer."""


@dataclass(frozen=True)
class GateFigures:
    """File names of figures, charts as data, and the gates of the shown images."""

    patterns: str | None
    cost_extremes: str | None
    charts: tuple[Chart, ...]
    shown: tuple[ShownGates, ...]


@dataclass(frozen=True)
class Row:
    """A row of the table of layers."""

    number: int
    name: str
    channels: str
    dead: int
    dynamic: int
    always_on: int
    gates: int
    open_share: str
    distances: tuple[str, str]
    """Within and between classes."""
    probe_accuracy: str


@dataclass(frozen=True)
class ChannelSection:
    """Content of the template."""

    summary: tuple[str, ...]
    rows: tuple[Row, ...]
    patterns: tuple[str, ...]
    """Sentences on gates and classes."""
    drawn_layers: str
    """Says that not all layers are drawn; empty if they are."""
    specific: tuple[tuple[str, str, str, str, str], ...]
    """Layer, gate, class, share of open gates for this class and for other classes."""
    embedding: tuple[str, ...]
    costs: tuple[str, ...]
    cost_rows: tuple[tuple[MeanCost, str], ...]
    scale: float
    """The largest cost in the table: the length of the bars is relative to it."""
    figures: GateFigures
    drawings: dict[str, tuple[str, Chart]]
    """SVG and chart by the chart's id."""
    columns: tuple[int, ...]
    """Indices of the layers in the table of images."""


def draw_gates(
    folder: Path,
    explanation: Explanation,
    classes: Tensor,
    pixels: Tensor,
    shown_pixels: Tensor,
    shown_pass: ForwardPass,
) -> GateFigures | None:
    """Writes the figures of channel gates into ``folder``; returns None if the network has no gates.

    ``classes`` (B,) and ``pixels`` (B, C, H, W) are those of the explanation, the others those of the images that are
    shown one by one.
    """
    channels = explanation.channels
    if channels is None:
        return None

    def saved(content: Figure | bytes, name: str) -> str:
        if not isinstance(content, bytes):
            file = io.BytesIO()
            content.savefig(file, dpi=_DPI, format="png", metadata={"Software": None})
            content = file.getvalue()
        path = folder / f"gates-{name}.png"
        write_atomic(path, content)
        return path.name

    charts = gate_charts(channels, explanation.class_names, classes)
    for chart in charts:
        saved(draw(chart), chart.id)
    several = sum(count > 0 for count in explanation.class_images) > 1
    costs = channels.costs
    return GateFigures(
        patterns=saved(draw_patterns(channels, explanation.class_names, explanation.class_images), "patterns")
        if several
        else None,
        cost_extremes=None
        if costs is None or costs.constant
        else saved(draw_cost_extremes(costs, explanation.class_names, classes, pixels), "cost-extremes"),
        charts=tuple(charts),
        shown=tuple(
            ShownGates(saved(thumbnail(image), f"image-{b}"), *_gates_of(shown_pass, channels, b))
            for b, image in enumerate(shown_pixels)
        ),
    )


def channel_section(explanation: Explanation, figures: GateFigures) -> ChannelSection:
    """Returns the content of the section on gates."""
    channels = explanation.channels
    assert channels is not None
    costs = channels.costs
    names = explanation.class_names
    return ChannelSection(
        summary=_summary(channels),
        rows=tuple(_row(i, layer) for i, layer in enumerate(channels.layers, start=1)),
        patterns=_patterns(channels.distances, explanation),
        drawn_layers=_drawn_layers(len(channels.layers)),
        specific=tuple(
            (each.layer, f"{each.gate}", names[each.label], percent(each.own), percent(each.others))
            for each in channels.specific
        ),
        embedding=_embedding(channels, explanation),
        costs=() if costs is None else _costs(costs),
        cost_rows=() if costs is None else tuple((each, _cost(each)) for each in costs.classes),
        scale=100.0 if costs is None else costs.all.most,
        figures=figures,
        drawings={chart.id: (to_svg(chart, variables=True), chart) for chart in figures.charts},
        columns=tuple(evenly(len(channels.layers), _MAX_COLUMNS)),
    )


def _gates_of(shown: ForwardPass, channels: ChannelExplanation, b: int) -> tuple[float | None, tuple[float, ...]]:
    """The cost of an image, and the share of open gates of each layer."""
    gated = shown.gated
    cost = None if gated is None else 100 * float(gated.macs[b]) / gated.dense_macs
    masks = [shown.routing[layer.name].mask[b] for layer in channels.layers]
    return cost, tuple(round(float(mask.double().mean()), 4) for mask in masks)


def _summary(channels: ChannelExplanation) -> tuple[str, ...]:
    images, costs = channels.layers[0].usage.images, channels.costs
    layers = f"{len(channels.layers)} convolutions" if len(channels.layers) > 1 else "one convolution"
    blocks = any(layer.block > 1 for layer in channels.layers)
    unit = "blocks of channels" if blocks else "channels"
    gates = (
        f"The network has gates for {channels.gates:,} {unit} in {layers}. For each image some gates are open; "
        "channels with a closed gate are not computed."
    )
    average = f"On average {percent(channels.open_share)} of the gates are open for an image"
    if costs is not None:
        span = "" if costs.constant else f" (from {costs.all.least:.1f} % to {costs.all.most:.1f} %)"
        average += f", and it costs {costs.all.mean:.1f} % of the dense network's multiply-adds{span}"
    if images == 1:
        return gates, f"{average}.", "Over a single image every gate is either dead or always on; give more images."
    use = (
        f"Over these {images:,} images {channels.dynamic:,} gates are dynamic (open for some images, closed for "
        f"others), {channels.always_on:,} are always on and {channels.dead:,} are dead."
    )
    if not channels.dynamic:
        use += (
            " The network therefore computes the same channels for every image: a network without gates that has only "
            "the open channels would be equivalent, at the same cost."
        )
    elif channels.dead:
        use += " Dead channels could be removed from the network."
    return gates, f"{average}.", use


def _row(number: int, layer: ChannelLayer) -> Row:
    usage, distances = layer.usage, layer.distances
    blocks = f" × {layer.block}" if layer.block > 1 else ""
    spread = f" ± {100 * usage.spread:.1f}" if usage.images > 1 else ""
    return Row(
        number=number,
        name=layer.name or "the network itself",
        channels=f"{usage.gates:,}{blocks}",
        dead=len(usage.dead),
        dynamic=len(usage.dynamic),
        always_on=len(usage.always_on),
        gates=usage.gates,
        open_share=f"{100 * usage.open_share:.1f}{spread} %",
        distances=(_points(distances.within), _points(distances.between)),
        probe_accuracy=percent(distances.probe_accuracy)
        if distances.probe_accuracy is not None and usage.dynamic and distances.majority_share < 1
        else "–",
    )


def _points(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _patterns(found: GateDistances, explanation: Explanation) -> tuple[str, ...]:
    kind = "class" if explanation.by == "label" else "predicted class"
    if found.within is None or found.between is None or found.by_chance is None:
        return (f"There are too few images, or too few {kind}es, to compare gates between {kind}es.",)
    sentences = [
        f"Two images of the same {kind} differ in {_points(found.within)} of all gates, two images of different "
        f"{kind}es in {_points(found.between)}."
    ]
    if found.significant:
        sentences.insert(0, f"The open gates depend on the {kind}.")
    else:
        sentences.insert(0, f"These images do not show that the gates depend on the {kind}.")
        sentences.append(f"With shuffled labels the difference is up to {100 * found.by_chance:.2f} percentage points.")
    if found.significant and found.probe_accuracy is not None:
        sentences.append(
            f"A naive Bayes classifier that sees only the gates reaches {percent(found.probe_accuracy)} accuracy on "
            f"held-out images; always predicting the most frequent class would reach {percent(found.majority_share)}."
        )
    return (*sentences, *_similar_classes(found, explanation))


def _similar_classes(found: GateDistances, explanation: Explanation) -> tuple[str, ...]:
    """The two classes with the most similar gates, and the two with the least similar gates."""
    large = [k for k, images in enumerate(explanation.class_images) if images >= MIN_CLASS_IMAGES]
    pairs = [(distance, j, k) for j in large for k in large if j < k and (distance := found.distance[j][k]) is not None]
    if len(large) < 3 or not found.significant:
        return ()

    def named(pair: tuple[float, int, int]) -> str:
        distance, j, k = pair
        return f"“{explanation.class_names[j]}” and “{explanation.class_names[k]}” ({_points(distance)})"

    return (f"The gates of {named(min(pairs))} are most similar, those of {named(max(pairs))} least similar.",)


def _drawn_layers(layers: int) -> str:
    if layers <= MAX_LAYERS:
        return ""
    return f"{MAX_LAYERS} of {layers} layers are shown; explanation.json contains all."


def _embedding(channels: ChannelExplanation, explanation: Explanation) -> tuple[str, ...]:
    found = channels.map
    if found is None:
        return ()
    if found.why_not:
        return (f"There is no map of the embedding: {found.why_not}.",)
    assert found.neighbours is not None and found.by_chance is not None
    kind = "class" if explanation.by == "label" else "predicted class"
    return (
        "A small network computes an embedding of the image, and all gates are computed from it.",
        f"The nearest neighbour of an image in the embedding has the same {kind} in {percent(found.neighbours)} of "
        f"cases; a random neighbour would have it in {percent(found.by_chance)}.",
    )


def _costs(costs: Costs) -> tuple[str, ...]:
    fixed = (
        f"The dense network takes {_macs(costs.dense_macs)} multiply-adds per image. With gates the mean cost is "
        f"{_cost(costs.all)} of that; {100 * costs.fixed_macs / costs.dense_macs:.1f} % are fixed: the network that "
        "computes the gates, and layers without gates."
    )
    if costs.constant:
        return (fixed, "Every image costs the same.")
    return fixed, *_right_and_wrong(costs), *_certainty(costs)


def _right_and_wrong(costs: Costs) -> tuple[str, ...]:
    found, right, wrong = costs.extra_cost_when_wrong, costs.right, costs.wrong
    if found is None or right is None or wrong is None:
        return ()
    means = f"{_cost(wrong)} with a wrong prediction, {_cost(right)} with a correct prediction"
    inside = costs.extra_cost_within_classes
    within = ""
    if inside is not None:
        value, low, high = (_signed(each) for each in (inside.value, inside.low, inside.high))
        within = f" Within classes the difference is {value} percentage points ({low} to {high})."
    if found.low > 0:
        return (f"Images with a wrong prediction are more expensive: {means}.{within}",)
    if found.high < 0:
        return (f"Images with a wrong prediction are cheaper: {means}.{within}",)
    return (f"Images with wrong and with correct predictions do not differ significantly in cost: {means}.{within}",)


def _signed(points: float) -> str:
    return f"{points:.2f}".replace("-", "−")


def _certainty(costs: Costs) -> tuple[str, ...]:
    found = costs.certainty
    if found is None:
        return ()
    value, low, high = (number(each, near=(-1.0, 1.0)) for each in (found.value, found.low, found.high))
    measured = f"the correlation of cost and predicted probability is {value} ({low} to {high})"
    if found.low > 0:
        return (f"The network is more certain about expensive images: {measured}.",)
    if found.high < 0:
        return (f"The network is more certain about cheap images: {measured}.",)
    return (f"Cost and certainty are not significantly correlated: {measured}.",)


def _cost(each: MeanCost) -> str:
    """The mean with its interval."""
    if each.interval is None or each.least == each.most:
        return f"{each.mean:.1f} %"
    low, high = each.interval
    return f"{each.mean:.1f} % ({low:.1f} to {high:.1f})"


def _macs(count: int) -> str:
    for size, word in ((1_000_000_000, "billion"), (1_000_000, "million")):
        if count >= size:
            return f"{number(count / size)} {word}"
    return f"{count:,}"
