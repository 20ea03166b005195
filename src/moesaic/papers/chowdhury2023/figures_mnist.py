"""Figures 4 to 9 of Chowdhury et al. 2023 with our measurements, and figures of our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from moesaic.intervals import samples_at
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chowdhury2023.experiments_two_layer import LEVEL, ExperimentResults, Result
from moesaic.report.chart import Blocks, Chart, Panel, Series

__all__ = ["charts"]

_PAPER = "chowdhury2023"
PUBLISHED_SHARE = 0.6
"""Of the CNN's samples, with which pMoE reaches the same accuracy: the claims on Figure 4 are about it."""
_TITLES: dict[Fidelity, str] = {"print": "as printed", "released": "as released", "best": "our own"}
_SAMPLES = "Number of training samples N"
_ACCURACY = "Test accuracy (%)"
_SHARE = "Properly routed (%)"


def charts(experiments: Mapping[Fidelity, ExperimentResults]) -> list[Chart]:
    """Returns the charts for which there are results."""
    drawn = [_figure_4(experiments), _figure_5(experiments), _sweep(experiments, "fig6"), _sweep(experiments, "fig7")]
    drawn += [_figure_8(experiments), _figure_9(experiments), _coupling(experiments), _own_sweep(experiments)]
    return [chart for chart in drawn if chart.panels]


def _series(
    experiment: ExperimentResults,
    prefix: str,
    label: str,
    role: str,
    value: Callable[[Result], np.ndarray] = lambda r: r.accuracy,
) -> tuple[Series, ...]:
    """Returns mean and standard deviation over trials, as the paper's error bars; nothing without results."""
    x, results = experiment.series(prefix)
    if not results:
        return ()
    values = [value(each) for each in results]
    means, spreads = [float(v.mean()) for v in values], [float(v.std(ddof=1)) for v in values]
    return (Series(label, role, tuple(x), tuple(means), tuple(spreads)),)


def _panels(
    experiments: Mapping[Fidelity, ExperimentResults],
    draw: Callable[[ExperimentResults], tuple[Series, ...]],
    x: str,
    y: str,
    level: float | None,
) -> tuple[Panel, ...]:
    panels: list[Panel] = []
    for fidelity, experiment in experiments.items():
        series = draw(experiment)
        if series and fidelity != "best":
            panels.append(Panel(_TITLES[fidelity], x, y, series, level=level))
    return tuple(panels)


def _figure_4(experiments: Mapping[Fidelity, ExperimentResults]) -> Chart:
    best = experiments.get("best")

    def draw(experiment: ExperimentResults) -> tuple[Series, ...]:
        theirs = (
            *_series(experiment, "fig4/cnn", "CNN", "cnn"),
            *_series(experiment, "fig4/separate", "pMoE, separate training", "separate"),
            *_series(experiment, "fig4/joint", "pMoE, joint training", "joint"),
        )
        theirs = (*theirs, *_published_point(experiment))
        if not theirs or best is None:
            return theirs
        return (
            *theirs,
            *_series(best, "best/pmoe", "pMoE, our best", "best"),
            *_series(best, "best/cnn", "CNN, same care", "best-cnn"),
        )

    return Chart(
        "figure-4",
        _PAPER,
        "Figure 4",
        "How many labelled samples does routing save?",
        "Further left is better: a curve that reaches the dotted 95 % line with fewer samples needs fewer labels. Mean "
        "and standard deviation over trials. The released CNN has 4 neurons where the paper prints 40. The paper "
        "gives one number for this figure: pMoE needs 60 % of the samples with which the CNN reaches 95 %. It is drawn "
        "from our CNN, and from its largest N where the CNN does not get there.",
        _panels(experiments, draw, _SAMPLES, _ACCURACY, LEVEL),
    )


def _published_point(experiment: ExperimentResults) -> tuple[Series, ...]:
    """Where a pMoE would be that needs the share of the CNN's samples that the paper states; nothing without a CNN."""
    sizes, results = experiment.series("fig4/cnn")
    if not results:
        return ()
    needed = min(samples_at(LEVEL, sizes, np.array([each.accuracy.mean() for each in results])), sizes[-1])
    return (Series("pMoE, the paper's number", "published", (PUBLISHED_SHARE * needed,), (LEVEL,)),)


def _figure_5(experiments: Mapping[Fidelity, ExperimentResults]) -> Chart:
    panels: list[Panel] = []
    for fidelity, experiment in experiments.items():
        lines = {l: experiment.series(prefix) for l, prefix in experiment.series_prefixes("fig5").items()}
        if not lines:
            continue
        sizes = next(iter(lines.values()))[0]
        columns = [[float((each.accuracy >= LEVEL).mean()) for each in results] for _, results in lines.values()]
        blocks = Blocks(tuple(float(l) for l in lines), tuple(sizes), tuple(zip(*columns, strict=True)))
        panels.append(Panel(_TITLES[fidelity], "Patches per expert l", _SAMPLES, blocks=blocks))
    return Chart(
        "figure-5",
        _PAPER,
        "Figure 5",
        "How many samples do more patches per expert cost?",
        "Separate training. Each block is the share of trials that reach 95 % test accuracy: white all, black none. If "
        "the border between black and white rises to the right, more patches per expert need more samples.",
        tuple(panels),
    )


def _sweep(experiments: Mapping[Fidelity, ExperimentResults], figure: str) -> Chart:
    many = "experts k" if figure == "fig6" else "patches per expert l"

    def draw(experiment: ExperimentResults) -> tuple[Series, ...]:
        return tuple(
            _without_one(line)
            for prefix in experiment.series_prefixes(figure).values()
            for line in _series(experiment, prefix, prefix.removeprefix(f"{figure}/"), prefix)
        )

    prediction = (
        "The theory predicts that accuracy falls once k is large enough for every class to have its expert."
        if figure == "fig6"
        else "The theory predicts that accuracy falls once l is above l*, which the paper puts at 6. Networks learn "
        "little with l = 1, which is left out."
    )
    return Chart(
        f"figure-{figure[3:]}",
        _PAPER,
        f"Figure {figure[3:]}",
        f"What does the number of {many} do to accuracy?",
        f"Joint training with N samples, mean and standard deviation over trials. {prediction}",
        _panels(experiments, draw, f"Number of {many}", _ACCURACY, None),
    )


def _without_one(line: Series) -> Series:
    """Removes l = 1, with which accuracy is so low that it would hide all other differences on the axis."""
    shown = [i for i, x in enumerate(line.x) if x > 1]
    spread = line.spread and tuple(line.spread[i] for i in shown)
    return replace(line, x=tuple(line.x[i] for i in shown), y=tuple(line.y[i] for i in shown), spread=spread)


def _figure_8(experiments: Mapping[Fidelity, ExperimentResults]) -> Chart:
    def draw(experiment: ExperimentResults) -> tuple[Series, ...]:
        lines: list[Series] = []
        for l in (1, 2, 4, 6):
            lines += _series(
                experiment,
                "fig4/separate",
                f"in the top {l}",
                f"top-{l}",
                lambda r, l=l: 100 * r.routed[:, :, l - 1].mean(1),
            )
        return tuple(lines)

    return Chart(
        "figure-8",
        _PAPER,
        "Figure 8",
        "Does the separately trained router find the patch that matters?",
        "Share of test samples whose discriminative digit is among the l patches that its router ranks highest. A "
        "router that guesses would get 6, 12, 25 and 38 %.",
        _panels(experiments, draw, _SAMPLES, _SHARE, 95.0),
    )


def _figure_9(experiments: Mapping[Fidelity, ExperimentResults]) -> Chart:
    def draw(experiment: ExperimentResults) -> tuple[Series, ...]:
        return (
            *_series(experiment, "fig4/joint", 'class 1 (digit "1")', "class-1", lambda r: 100 * r.largest_gate[:, 1]),
            *_series(experiment, "fig4/joint", 'class 2 (digit "0")', "class-2", lambda r: 100 * r.largest_gate[:, 0]),
        )

    return Chart(
        "figure-9",
        _PAPER,
        "Figure 9",
        "Does joint training find it, too?",
        "Share of a class's test samples whose discriminative digit gets the largest gate of the class's best expert "
        "(l = 6).",
        _panels(experiments, draw, _SAMPLES, _SHARE, None),
    )


def _coupling(experiments: Mapping[Fidelity, ExperimentResults]) -> Chart:
    panels: list[Panel] = []
    titles = {"coupling": "wide networks, tiny steps: the proofs", "coupling-in-figure-4": "the networks of Figure 4"}
    roles = {"cnn": "CNN", "separate": "pMoE, separate training", "joint": "pMoE, joint training"}
    for prefix, title in titles.items():
        lines: list[Series] = []
        for kind, label in roles.items():
            for result in experiments["print"].series(f"{prefix}/{kind}")[1] if "print" in experiments else ():
                shares = 100 * result.kept_patterns
                spread = tuple(shares.std(axis=0, ddof=1).tolist())
                x = tuple(float(epoch) for epoch in range(shares.shape[1]))
                lines.append(Series(label, kind, x, tuple(shares.mean(axis=0).tolist()), spread))
        if lines:
            panels.append(Panel(title, "Epoch", "Neurons that switch as at the start (%)", tuple(lines)))
    return Chart(
        "coupling",
        _PAPER,
        "Lemmas G.1, H.1, I.1",
        "Do neurons keep the pattern they started with?",
        "The proofs need most neurons to switch on and off, on all patches of a sample, as they did before training. "
        "The higher the curve, the closer the network is to the pseudo-network of the proofs.",
        tuple(panels),
    )


def _own_sweep(experiments: Mapping[Fidelity, ExperimentResults]) -> Chart:
    series = _series(experiments["best"], "sweep/l", "TwoLayer.best, N = 300", "best") if "best" in experiments else ()
    panels = (Panel(_TITLES["best"], "Patches per expert l", _ACCURACY, series),) if series else ()
    return Chart(
        "our-own-l",
        _PAPER,
        "Our own",
        "Which l is best for our network?",
        "Accuracy against l; the estimator suggests an l from the training data alone.",
        panels,
    )
