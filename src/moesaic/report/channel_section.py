"""The section on channel gates of an explanation page: its figures, sentences and tables.

`draw_gates` writes PNG files and returns data for explanation.json; `channel_section` makes the sentences
of the template.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from moesaic.insight.channel_explanation import ChannelExplanation
from moesaic.insight.channel_metrics import GateDistances
from moesaic.insight.class_routing import MIN_CLASS_IMAGES
from moesaic.insight.explain import Explanation, ForwardPass
from moesaic.insight.image_cost import Costs, MeanCost
from moesaic.intervals import Estimate
from moesaic.report.canvas import save_png
from moesaic.report.channel_figures import draw_cost_extremes, draw_patterns, gate_charts
from moesaic.report.chart import Chart
from moesaic.report.chart_drawing import draw, to_svg
from moesaic.report.formatting import number, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["GateFigures", "ShownGates", "channel_section", "draw_gates"]


@dataclass(frozen=True)
class ShownGates:
    """The gates of one image of the explorer."""

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


def draw_gates(
    folder: Path,
    explanation: Explanation,
    classes: Tensor,
    pixels: Tensor,
    shown: ForwardPass,
) -> GateFigures | None:
    """Writes the figures of channel gates into ``folder``; returns None if the network has no gates.

    ``classes`` (B,) and ``pixels`` (B, C, H, W) are those of the explanation, ``shown`` are the outputs for the
    images of the explorer.
    """
    channels = explanation.channels
    if channels is None:
        return None

    def saved(figure: Figure, name: str) -> str:
        return save_png(figure, folder / f"gates-{name}.png")

    names, costs = explanation.class_names, channels.costs
    charts = gate_charts(channels, names, classes)
    for chart in charts:
        saved(draw(chart), chart.id)
    patterns = cost_extremes = None
    if sum(count > 0 for count in explanation.class_images) > 1:
        patterns = saved(draw_patterns(channels, names, explanation.class_images), "patterns")
    if costs is not None and not costs.constant:
        cost_extremes = saved(draw_cost_extremes(costs, names, classes, pixels), "cost-extremes")
    masks = [shown.routing[layer.name].mask for layer in channels.layers]
    share_BL = cast("list[list[float]]", torch.stack([mask.flatten(1).double().mean(1) for mask in masks], 1).tolist())
    images = tuple(
        ShownGates(_cost(shown, b), tuple(round(share, 4) for share in each)) for b, each in enumerate(share_BL)
    )
    return GateFigures(patterns, cost_extremes, tuple(charts), images)


def channel_section(explanation: Explanation, figures: GateFigures) -> dict[str, Any]:
    """Returns the content of the template: sentences on the gates, figures, and functions that format numbers."""
    channels = explanation.channels
    assert channels is not None
    return {
        "channels": channels,
        "summary": _summary(channels),
        "patterns": _patterns(channels.distances, explanation),
        "embedding": _embedding(channels, explanation),
        "costs": "" if channels.costs is None else _costs(channels.costs),
        "figures": figures,
        "drawings": {chart.id: (to_svg(chart, variables=True), chart) for chart in figures.charts},
        "points": _points,
        "mean_cost": _mean_cost,
    }


def _cost(shown: ForwardPass, b: int) -> float | None:
    gated = shown.gated
    return None if gated is None else 100 * float(gated.macs[b]) / gated.dense_macs


def _summary(channels: ChannelExplanation) -> str:
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
        return f"{gates} {average}. Over a single image every gate is either dead or always on; give more images."
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
    return f"{gates} {average}. {use}"


def _points(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _patterns(found: GateDistances, explanation: Explanation) -> str:
    kind = "class" if explanation.by == "label" else "predicted class"
    if found.within is None or found.between is None or found.by_chance is None:
        return f"There are too few images, or too few {kind}es, to compare gates between {kind}es."
    measured = (
        f"Two images of the same {kind} differ in {_points(found.within)} of all gates, two images of different "
        f"{kind}es in {_points(found.between)}."
    )
    if not found.significant:
        return (
            f"These images do not show that the gates depend on the {kind}. {measured} With shuffled labels the "
            f"difference is up to {100 * found.by_chance:.2f} percentage points."
        )
    probe = ""
    if found.probe_accuracy is not None:
        probe = (
            f" A naive Bayes classifier that sees only the gates reaches {percent(found.probe_accuracy)} accuracy on "
            f"held-out images; always predicting the most frequent class would reach {percent(found.majority_share)}."
        )
    return f"The open gates depend on the {kind}. {measured}{probe}{_similar_classes(found, explanation)}"


def _similar_classes(found: GateDistances, explanation: Explanation) -> str:
    """The two classes with the most similar gates, and the two with the least similar gates."""
    large = [k for k, images in enumerate(explanation.class_images) if images >= MIN_CLASS_IMAGES]
    pairs = [(distance, j, k) for j in large for k in large if j < k and (distance := found.distance[j][k]) is not None]
    if len(large) < 3:
        return ""

    def named(pair: tuple[float, int, int]) -> str:
        distance, j, k = pair
        return f"“{explanation.class_names[j]}” and “{explanation.class_names[k]}” ({_points(distance)})"

    return f" The gates of {named(min(pairs))} are most similar, those of {named(max(pairs))} least similar."


def _embedding(channels: ChannelExplanation, explanation: Explanation) -> str:
    found = channels.map
    if found is None:
        return ""
    if found.why_not:
        return f"There is no map of the embedding: {found.why_not}."
    assert found.neighbours is not None and found.by_chance is not None
    kind = "class" if explanation.by == "label" else "predicted class"
    return (
        "A small network computes an embedding of the image, and all gates are computed from it. The nearest neighbour "
        f"of an image in the embedding has the same {kind} in {percent(found.neighbours)} of cases; a random neighbour "
        f"would have it in {percent(found.by_chance)}."
    )


def _costs(costs: Costs) -> str:
    fixed = (
        f"The dense network takes {_macs(costs.dense_macs)} multiply-adds per image. With gates the mean cost is "
        f"{_mean_cost(costs.all)} of that; {100 * costs.fixed_macs / costs.dense_macs:.1f} % are fixed: the network "
        "that computes the gates, and layers without gates."
    )
    if costs.constant:
        return f"{fixed} Every image costs the same."
    return f"{fixed}{_right_and_wrong(costs)}{_certainty(costs)}"


def _right_and_wrong(costs: Costs) -> str:
    found, right, wrong = costs.extra_cost_when_wrong, costs.right, costs.wrong
    if found is None or right is None or wrong is None:
        return ""
    within = ""
    if costs.extra_cost_within_classes is not None:
        inside = costs.extra_cost_within_classes
        value, low, high = (f"{each:.2f}".replace("-", "−") for each in (inside.value, inside.low, inside.high))
        within = f" Within classes the difference is {value} percentage points ({low} to {high})."
    verdict = _by_sign(
        found,
        "Images with a wrong prediction are more expensive",
        "Images with a wrong prediction are cheaper",
        "Images with wrong and with correct predictions do not differ significantly in cost",
    )
    means = f"{_mean_cost(wrong)} with a wrong prediction, {_mean_cost(right)} with a correct prediction"
    return f" {verdict}: {means}.{within}"


def _certainty(costs: Costs) -> str:
    found = costs.certainty
    if found is None:
        return ""
    value, low, high = (number(each, near=(-1.0, 1.0)) for each in (found.value, found.low, found.high))
    verdict = _by_sign(
        found,
        "The network is more certain about expensive images",
        "The network is more certain about cheap images",
        "Cost and certainty are not significantly correlated",
    )
    return f" {verdict}: the correlation of cost and predicted probability is {value} ({low} to {high})."


def _by_sign(found: Estimate, above: str, below: str, neither: str) -> str:
    """The text for an interval above 0, below 0, or on both sides."""
    return above if found.low > 0 else below if found.high < 0 else neither


def _mean_cost(each: MeanCost) -> str:
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
