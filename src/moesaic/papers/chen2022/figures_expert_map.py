"""Figure 1 of Chen et al. 2022: t-SNE map of test samples with their experts, expert regions and decision boundary.

t-SNE has no inverse, so regions and boundary are votes: a point of the map belongs to the expert and to the predicted
class of most of its nearest samples.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from moesaic import keyed_random
from moesaic.insight.embedding_map import tsne
from moesaic.papers.chen2022.data.synthetic_clusters import ClusterData, ClusterPatches
from moesaic.papers.chen2022.experiments_synthetic import ExperimentResults, MixtureCell
from moesaic.papers.chen2022.trial_training import train_mixtures
from moesaic.papers.chen2022.two_layer_networks import Mixtures
from moesaic.report.chart import Chart, Group, Panel, Points, Regions

__all__ = ["figure_1"]

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

_KINDS = {"cubic": "Nonlinear experts (cubic activation)", "identity": "Linear experts"}
_GRID = 60
"""Grid points of the map along each axis."""
_NEIGHBOURS = 15
"""Nearest samples that vote."""
_NOISE_SCALE = 3.0
"""Factor of the noise patch in the map (Appendix A.1)."""


def figure_1(experiment: ExperimentResults, title: str) -> Chart:
    """Draws the first trial of "figure1/…" before and after training. Cells store no weights, so it trains again."""
    panels: list[Panel] = []
    rows: list[str] = []
    places: dict[tuple[object, int], Floats] = {}
    for kind, row in _KINDS.items():
        cell = experiment.plan.get(f"figure1/{kind}")
        if not isinstance(cell, MixtureCell) or f"figure1/{kind}" not in experiment.results:
            continue
        source, key = ClusterPatches.setting(cell.setting), keyed_random.keys(experiment.runner.seed, [0])
        test = source.draw(key, cell.test_samples, "test")
        task = cell.setting, cell.test_samples
        if task not in places:
            places[task] = _map_positions(test)
        first = Mixtures.initial(cell.model, key, dim=source.dim)
        trained = train_mixtures(
            cell.model,
            source,
            trials=[0],
            samples=cell.samples,
            schedule=cell.schedule,
            seed=experiment.runner.seed,
            device=experiment.runner.device,
        )
        last = Mixtures(
            cell.model,
            trained.mixtures.weights.cpu(),
            None if trained.mixtures.bias is None else trained.mixtures.bias.cpu(),
            None if trained.mixtures.router is None else trained.mixtures.router.cpu(),
        )
        panels.append(Panel("at initialisation", "", "", points=_points(first, test, places[task], key)))
        panels.append(Panel("after training", "", "", points=_points(last, test, places[task], key)))
        rows.append(row)
    return Chart(
        "figure-1",
        "chen2022",
        "Figure 1",
        "Do experts share the clusters out among themselves?",
        "Test samples from four clusters, laid out by t-SNE so that samples that are alike lie together. A sample has "
        "the colour of the expert that the router, with its noise, sends it to; its mark tells its class. Before "
        "training colours are mixed everywhere. A router that has found the clusters gives each of them one colour. "
        f"Behind the samples: the expert and the decision of most of the {_NEIGHBOURS} nearest ones. One trial, "
        f"{title}; the noise patch is {_NOISE_SCALE:g} times as large for the layout, as the paper has it, but not for "
        "the networks.",
        tuple(panels),
        columns=2,
        row_titles=tuple(rows),
    )


def _map_positions(data: ClusterData) -> Floats:
    """Returns positions (B, 2) on the map, with patches in the order of Definition 3.1 instead of shuffled."""
    patches, signals = data.patches[0], data.places[0]
    B, N, D = patches.shape
    noise = torch.ones(B, N, dtype=torch.bool).scatter_(1, signals, False)
    order = torch.cat([signals, noise.nonzero()[:, 1].view(B, N - 3)], dim=1)
    ordered = patches.gather(1, order[..., None].expand(B, N, D)).clone()
    ordered[:, 3:] *= _NOISE_SCALE
    return tsne(ordered.flatten(1).numpy())


def _points(mixtures: Mixtures, data: ClusterData, places: Floats, key: torch.Tensor) -> Points:
    experts = mixtures.model.experts
    noise = keyed_random.coarse_uniform(key, "chen2022/figure 1", data.patches.shape[1], experts)
    outputs, chosen = mixtures.predict(data.patches, noise)
    expert = cast("Whole", chosen[0].numpy())
    label = cast("Whole", data.labels[0].numpy())
    groups = tuple(
        Group(
            f"expert {e + 1}",
            f"expert-{e + 1}",
            _rounded(places[here, 0]),
            _rounded(places[here, 1]),
            "+" if positive else "-",
            "class +1" if positive else "class −1",
        )
        for e in range(experts)
        for positive in (1, 0)
        for here in [(expert == e) & (label == positive)]
        if here.any()
    )
    taken = np.where(outputs[0].numpy() > 0, 1.0, -1.0)
    return Points(groups, _regions(places, expert, taken, experts))


def _regions(places: Floats, expert: Whole, taken: Floats, experts: int) -> Regions:
    x, y = _evenly(places[:, 0]), _evenly(places[:, 1])
    grid = torch.from_numpy(np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2))
    distance = torch.cdist(grid, torch.from_numpy(places))
    nearest = distance.topk(min(_NEIGHBOURS, len(places)), largest=False).indices.numpy()
    votes = np.stack([(expert[nearest] == e).sum(axis=1) for e in range(experts)])
    owner = cast("Whole", votes.argmax(axis=0)).reshape(_GRID, _GRID)
    score = cast("Floats", taken[nearest].mean(axis=1)).reshape(_GRID, _GRID)
    return Regions(
        _rounded(x),
        _rounded(y),
        tuple(f"expert-{e + 1}" for e in range(experts)),
        tuple(tuple(int(each) for each in row) for row in owner),
        tuple(_rounded(row) for row in score),
    )


def _evenly(values: Floats) -> Floats:
    return np.linspace(float(values.min()), float(values.max()), _GRID)


def _rounded(values: Floats) -> tuple[float, ...]:
    """Rounds to the precision of a drawing."""
    return tuple(round(float(value), 3) for value in values)
