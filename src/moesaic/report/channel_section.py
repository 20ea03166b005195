"""The part of an explanation that is about channel gates: its pictures, and what the page says beside them.

`draw_gates` writes PNG files and gives back what the page needs besides the explanation itself, all of it
plain data that goes into explanation.json; `channel_part` puts both into sentences and rows of tables.
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
from moesaic.insight.explain import FEW, Explanation, Look
from moesaic.insight.image_cost import Costs, MeanCost
from moesaic.report.channel_charts import gate_charts
from moesaic.report.channel_figures import MOST_LAYERS, draw_cheap_and_dear, draw_patterns, evenly, thumbnail
from moesaic.report.chart import Chart
from moesaic.report.charts import draw, to_svg
from moesaic.report.formatting import number, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ChannelPart", "GatePictures", "ShownGates", "channel_part", "draw_gates"]

_DPI = 140
_COLUMNS = 16
"""Layers in the table of images, at most."""


@dataclass(frozen=True)
class ShownGates:
    """The gates of one image that is shown."""

    picture: str
    """The name of its file."""
    cost: float | None
    """In percent of the dense network."""
    open_share: tuple[float, ...]
    """Of each layer."""


@dataclass(frozen=True)
class GatePictures:
    """Names of files beside the page, charts as numbers, and the gates of the images shown."""

    patterns: str | None
    cheap_and_dear: str | None
    charts: tuple[Chart, ...]
    shown: tuple[ShownGates, ...]


@dataclass(frozen=True)
class Row:
    """A layer in the table."""

    number: int
    name: str
    channels: str
    dead: int
    dynamic: int
    always_on: int
    gates: int
    opens: str
    differ: tuple[str, str]
    told: str


@dataclass(frozen=True)
class ChannelPart:
    """What the template shows."""

    what: tuple[str, ...]
    rows: tuple[Row, ...]
    patterns: tuple[str, ...]
    """Sentences on gates and classes."""
    strips: str
    """Which layers are drawn, where not all are."""
    specific: tuple[tuple[str, str, str, str, str], ...]
    """Layer, gate, class, and for which share of its images and of others' it is open."""
    embedding: tuple[str, ...]
    costs: tuple[str, ...]
    cost_rows: tuple[tuple[MeanCost, str], ...]
    scale: float
    """The largest cost in the table, which bars are drawn against."""
    pictures: GatePictures
    drawings: dict[str, tuple[str, Chart]]
    """SVG and chart by the chart's id."""
    columns: tuple[int, ...]
    """Which layers the table of images shows."""


def draw_gates(
    folder: Path, explanation: Explanation, classes: Tensor, pixels: Tensor, shown_pixels: Tensor, shown_look: Look
) -> GatePictures | None:
    """Draw what there is to draw of gates into ``folder``; None where the network has none.

    ``classes`` (B,) and ``pixels`` (B, C, H, W) are those the explanation is over, the others those of the images
    that are shown one by one.
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
    return GatePictures(
        patterns=saved(draw_patterns(channels, explanation.class_names, explanation.class_images), "patterns")
        if several
        else None,
        cheap_and_dear=None
        if costs is None or costs.alike
        else saved(draw_cheap_and_dear(costs, explanation.class_names, classes, pixels), "cheap-and-dear"),
        charts=tuple(charts),
        shown=tuple(
            ShownGates(saved(thumbnail(image), f"image-{b}"), *_gates_of(shown_look, channels, b))
            for b, image in enumerate(shown_pixels)
        ),
    )


def channel_part(explanation: Explanation, pictures: GatePictures) -> ChannelPart:
    """What the page says of the gates."""
    channels = explanation.channels
    assert channels is not None
    costs = channels.costs
    names = explanation.class_names
    return ChannelPart(
        what=_what(channels),
        rows=tuple(_row(i, layer) for i, layer in enumerate(channels.layers, start=1)),
        patterns=_patterns(channels.distances, explanation),
        strips=_strips(len(channels.layers)),
        specific=tuple(
            (each.layer, f"{each.gate}", names[each.label], percent(each.own), percent(each.others))
            for each in channels.specific
        ),
        embedding=_embedding(channels, explanation),
        costs=() if costs is None else _costs(costs),
        cost_rows=() if costs is None else tuple((each, _cost(each)) for each in costs.classes),
        scale=100.0 if costs is None else costs.all.most,
        pictures=pictures,
        drawings={chart.id: (to_svg(chart, variables=True), chart) for chart in pictures.charts},
        columns=tuple(evenly(len(channels.layers), _COLUMNS)),
    )


def _gates_of(look: Look, channels: ChannelExplanation, b: int) -> tuple[float | None, tuple[float, ...]]:
    """What an image costs, and which share of each layer's gates it opens."""
    gated = look.gated
    cost = None if gated is None else 100 * float(gated.macs[b]) / gated.dense_macs
    masks = [look.routing[layer.name].mask[b] for layer in channels.layers]
    return cost, tuple(round(float(mask.double().mean()), 4) for mask in masks)


def _what(channels: ChannelExplanation) -> tuple[str, ...]:
    images, costs = channels.layers[0].usage.images, channels.costs
    layers = f"{len(channels.layers)} convolutions" if len(channels.layers) > 1 else "one convolution"
    blocks = any(layer.block > 1 for layer in channels.layers)
    unit = "blocks of channels" if blocks else "channels"
    what = (
        f"For each image, gates open some of the {channels.gates:,} {unit} of {layers} and close the others; what is "
        "closed is not computed."
    )
    opens = f"An image opens {percent(channels.open_share)} of them on average"
    if costs is not None:
        span = "" if costs.alike else f", from {costs.all.least:.1f} % to {costs.all.most:.1f} %"
        opens += f" and costs {costs.all.mean:.1f} % of the multiply-adds that all channels would{span}"
    if images == 1:
        return what, f"{opens}.", "Over a single image every gate is either dead or always on; give more images."
    use = (
        f"Over these {images:,} images {channels.dynamic:,} gates are dynamic, open for some and closed for others; "
        f"{channels.always_on:,} are always on, {channels.dead:,} dead."
    )
    if not channels.dynamic:
        use += (
            " So the network is the same for every image: a plain one with as many channels as are open would do what "
            "it does, at the same cost."
        )
    elif channels.dead:
        use += " Dead channels could be taken out of the network."
    return what, f"{opens}.", use


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
        opens=f"{100 * usage.open_share:.1f}{spread} %",
        differ=(_points(distances.within), _points(distances.between)),
        told=percent(distances.told)
        if distances.told is not None and usage.dynamic and distances.commonest < 1
        else "–",
    )


def _points(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _patterns(found: GateDistances, explanation: Explanation) -> tuple[str, ...]:
    kind = "class" if explanation.by == "label" else "predicted class"
    if found.within is None or found.between is None or found.by_chance is None:
        return (f"There are too few images, or too few classes, to compare the gates of one {kind} with another's.",)
    sentences = [
        f"Two images of one {kind} differ in {_points(found.within)} of all gates, two of different ones in "
        f"{_points(found.between)}."
    ]
    if found.real:
        sentences.insert(0, f"Which gates are open depends on the {kind}.")
    else:
        sentences.insert(0, f"That gates depend on the {kind} cannot be seen in these images.")
        sentences.append(
            f"With labels in random order the second would be up to {100 * found.by_chance:.2f} points larger."
        )
    if found.real and found.told is not None:
        sentences.append(
            f"From open and closed gates alone a simple rule tells the {kind} of {percent(found.told)} of images it "
            f"was not made from; always naming the commonest would get {percent(found.commonest)}."
        )
    return (*sentences, *_alike(found, explanation))


def _alike(found: GateDistances, explanation: Explanation) -> tuple[str, ...]:
    """The two classes with the most alike gates, and those with the least."""
    large = [k for k, images in enumerate(explanation.class_images) if images >= FEW]
    pairs = [(distance, j, k) for j in large for k in large if j < k and (distance := found.distance[j][k]) is not None]
    if len(large) < 3 or not found.real:
        return ()

    def told(pair: tuple[float, int, int]) -> str:
        distance, j, k = pair
        return f"“{explanation.class_names[j]}” and “{explanation.class_names[k]}” ({_points(distance)})"

    return (f"Most alike are the gates of {told(min(pairs))}, least alike those of {told(max(pairs))}.",)


def _strips(layers: int) -> str:
    if layers <= MOST_LAYERS:
        return ""
    return f"Drawn are {MOST_LAYERS} of {layers} layers; explanation.json has all."


def _embedding(channels: ChannelExplanation, explanation: Explanation) -> tuple[str, ...]:
    found = channels.map
    if found is None:
        return ()
    if found.why_not:
        return (f"No map of the embedding is drawn: {found.why_not}.",)
    assert found.neighbours is not None and found.by_chance is not None
    kind = "class" if explanation.by == "label" else "predicted class"
    return (
        "All gates follow from the embedding, a short list of numbers that a small network makes of the image.",
        f"In it, the nearest neighbour of an image is of its {kind} in {percent(found.neighbours)} of cases; one drawn "
        f"at random would be in {percent(found.by_chance)}.",
    )


def _costs(costs: Costs) -> tuple[str, ...]:
    fixed = (
        f"Of the {_macs(costs.dense_macs)} multiply-adds of the network without gates, an image costs "
        f"{_cost(costs.all)}; {100 * costs.fixed_macs / costs.dense_macs:.1f} % are what no gate can save: the network "
        "that sets the gates, and layers that have none."
    )
    if costs.alike:
        return (fixed, "Every image costs the same.")
    return fixed, *_right_and_wrong(costs), *_certainty(costs)


def _right_and_wrong(costs: Costs) -> tuple[str, ...]:
    found, right, wrong = costs.dearer_when_wrong, costs.right, costs.wrong
    if found is None or right is None or wrong is None:
        return ()
    means = f"those it gets wrong cost {_cost(wrong)} on average, those it gets right {_cost(right)}"
    inside = costs.dearer_within_classes
    within = ""
    if inside is not None:
        value, low, high = (_signed(each) for each in (inside.value, inside.low, inside.high))
        within = f" Compared with images of their own class, wrong ones cost {value} points more ({low} to {high})."
    if found.low > 0:
        return (f"Images that the network gets wrong are dearer: {means}.{within}",)
    if found.high < 0:
        return (f"Images that the network gets wrong are cheaper: {means}.{within}",)
    return (f"That images it gets wrong cost more or less than others cannot be seen here: {means}.{within}",)


def _signed(points: float) -> str:
    return f"{points:.2f}".replace("-", "−")


def _certainty(costs: Costs) -> tuple[str, ...]:
    found = costs.certainty
    if found is None:
        return ()
    value, low, high = (number(each, near=(-1.0, 1.0)) for each in (found.value, found.low, found.high))
    measured = f"the correlation of cost and the probability of its answer is {value} ({low} to {high})"
    if found.low > 0:
        return (f"It is surer of images that cost more: {measured}.",)
    if found.high < 0:
        return (f"It is surer of images that cost less: {measured}.",)
    return (f"Cost and how sure the network is are not seen to go together: {measured}.",)


def _cost(each: MeanCost) -> str:
    """With its interval."""
    if each.interval is None or each.least == each.most:
        return f"{each.mean:.1f} %"
    low, high = each.interval
    return f"{each.mean:.1f} % ({low:.1f} to {high:.1f})"


def _macs(count: int) -> str:
    for size, word in ((1_000_000_000, "billion"), (1_000_000, "million")):
        if count >= size:
            return f"{number(count / size)} {word}"
    return f"{count:,}"
