"""Tables and figures of Chen et al. 2022 on synthetic data with our measurements.

Charts show the cells that have results and leave out the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chen2022.claims_synthetic import PUBLISHED, entropies, final_entropy
from moesaic.papers.chen2022.data.synthetic_clusters import ClusterPatches, ClusterSetting
from moesaic.papers.chen2022.experiments_synthetic import ACTIVATIONS, ExperimentResults
from moesaic.papers.chen2022.figures_expert_map import figure_1
from moesaic.papers.chen2022.theory.additive_classifiers import additive_error
from moesaic.papers.engine.cells import CellArrays
from moesaic.report.chart import Chart, Counts, Panel, Series

__all__ = ["charts"]

Array = NDArray[np.float64]

_PAPER = "chen2022"
_TITLES: dict[Fidelity, str] = {"print": "as printed", "released": "as released"}
_ACCURACY, _ENTROPY, _STEP = "Test accuracy (%)", "Dispatch entropy (nats)", "Training step"
_BLIND = round(math.log(4), 2)
"""Dispatch entropy of a router that ignores the four clusters."""

_TRACKS = {
    "expert_feature": ("Experts and feature signals", "Expert's product"),
    "expert_centre": ("Experts and centre signals", "Expert's product"),
    "router_feature": ("Router and feature signals", "Router's product"),
    "router_centre": ("Router and centre signals", "Router's product"),
}


def charts(experiments: Mapping[Fidelity, ExperimentResults]) -> list[Chart]:
    """Returns the charts for which there are results."""
    shown: dict[Fidelity, ExperimentResults] = {name: experiments[name] for name in _TITLES if name in experiments}
    drawn = [
        _tables_1_and_3(shown),
        *_figure_1(shown),
        _figure_3(shown),
        _inner_products(shown, "cubic"),
        _inner_products(shown, "identity"),
        *_dispatch_tables(shown),
        _activations(shown),
        _table_9(shown),
        _specialists(shown),
        _loads(shown),
        _initialisation(shown),
    ]
    return [chart for chart in drawn if chart.panels]


# accuracies


def _tables_1_and_3(experiments: Mapping[Fidelity, ExperimentResults]) -> Chart:
    networks = {
        "single/identity-128": "one linear, 128 filters",
        "single/identity-512": "one linear, 512 filters",
        "single/cubic-128": "one nonlinear, 128 filters",
        "single/cubic-512": "one nonlinear, 512 filters",
        "moe/identity": "eight linear experts",
        "moe/cubic": "eight nonlinear experts",
    }
    panels = [
        Panel(title, "Setting", _ACCURACY, lines)
        for name, title in networks.items()
        if (lines := _settings(experiments, name, name))
    ]
    panels += [
        Panel(networks[f"moe/{kind}"], "Setting", _ENTROPY, lines, level=_BLIND)
        for kind in ("identity", "cubic")
        if (lines := _settings(experiments, f"moe/{kind}", f"entropy/{kind}"))
    ]
    return Chart(
        "tables-1-and-3",
        _PAPER,
        "Table 1",
        "Does a mixture of experts learn what one network cannot?",
        "Tables 1 and 3: test accuracy of one network and of mixtures of eight experts, in four settings; 2 and 4 have "
        "more noise, and in 1 and 2 the misleading feature can be stronger than the one that tells the class. "
        "Mean and standard deviation over trials, beside the paper's. Last, how mixed the samples of an expert are: "
        f"0 if each expert gets one cluster, {_BLIND:g} if the router does not see the clusters.",
        tuple(panels),
        columns=4 if len(panels) > 4 else None,
    )


def _settings(experiments: Mapping[Fidelity, ExperimentResults], name: str, published: str) -> tuple[Series, ...]:
    """Returns a value against the setting: a series per fidelity and the paper's; nothing without results."""
    lines: list[Series] = []
    for fidelity, experiment in experiments.items():
        found = [s for s in range(1, 5) if f"{name}/s{s}" in experiment.results]
        if found:
            cells = [f"{name}/s{s}" for s in found]
            entropy = published.startswith("entropy")
            values = [
                final_entropy(experiment, cell) if entropy else experiment.results[cell]["accuracy"] for cell in cells
            ]
            lines.append(_means(_TITLES[fidelity], fidelity, found, values))
    return (*lines, *_of_the_paper(published)) if lines else ()


def _of_the_paper(name: str) -> tuple[Series, ...]:
    """Returns the paper's values for settings 1 to 4, with standard deviations if it prints them."""
    if name not in PUBLISHED:
        return ()
    pairs = [each if isinstance(each, tuple) else (each, None) for each in PUBLISHED[name]]
    spreads = [spread for _, spread in pairs if spread is not None]
    means = tuple(value for value, _ in pairs)
    return (Series("the paper's value", "paper", (1.0, 2.0, 3.0, 4.0), means, tuple(spreads) or None),)


def _activations(experiments: Mapping[Fidelity, ExperimentResults]) -> Chart:
    settings: dict[float, ClusterSetting] = {1.0: 1, 2.0: 2, 3.0: 7}
    sources = {x: ClusterPatches.setting(setting) for x, setting in settings.items()}
    best = tuple(100 * (1 - additive_error(source.alpha, source.gamma)) for source in sources.values())
    panels: list[Panel] = []
    printed = [PUBLISHED[name] for name in ("table8/s1", "table8/s2", "table7")]
    for activation, *published in zip(ACTIVATIONS, *printed, strict=True):
        names = {
            1.0: (f"table8/{activation}/s1", f"single/{activation}-128/s1"),
            2.0: (f"table8/{activation}/s2", f"single/{activation}-128/s2"),
            3.0: (f"table7/{activation}",),
        }
        lines: list[Series] = []
        for fidelity, experiment in experiments.items():
            found = {x: result for x, either in names.items() if (result := _first(experiment, either)) is not None}
            if found:
                accuracies = [each["accuracy"] for each in found.values()]
                lines.append(_means(_TITLES[fidelity], fidelity, found, accuracies))
        if lines:
            lines.append(Series("the paper's value", "paper", tuple(settings), tuple(map(_value, published))))
            lines.append(Series("best possible for one network", "possible", tuple(settings), best))
            panels.append(
                Panel("linear" if activation == "identity" else activation, "Setting", _ACCURACY, tuple(lines))
            )
    return Chart(
        "tables-7-and-8",
        _PAPER,
        "Table 7",
        "Does another activation help one network?",
        "Tables 7 and 8: test accuracy of one network of 128 filters, by its activation. However wide it is and "
        "whatever its activation, it adds up what it says of each patch, and no such network can be above the upper "
        "line: 92.5 % in settings 1 and 2, and the theorem's 87.5 % where signal and noise are equally strong, which "
        "is the setting of Table 7, here 3. Mean and standard deviation over trials.",
        tuple(panels),
        columns=3 if len(panels) > 2 else None,
    )


def _table_9(experiments: Mapping[Fidelity, ExperimentResults]) -> Chart:
    names = {
        "moe/identity": "eight linear experts",
        "balanced/identity": "linear, with load balancing",
        "moe/cubic": "eight nonlinear experts",
    }
    panels = [
        Panel(title, "Setting", _ACCURACY, lines)
        for name, title in names.items()
        if (lines := _settings(experiments, name, name))
    ]
    balanced = any(name.startswith("balanced/") for experiment in experiments.values() for name in experiment.results)
    return Chart(
        "table-9",
        _PAPER,
        "Table 9",
        "Is it load balancing that makes a mixture work?",
        "Test accuracy of linear experts alone, of linear experts with a loss that gives all of them equally many "
        "samples, and of nonlinear experts without it. If balance were what counts, the second would look like the "
        "third. Mean and standard deviation over trials, beside the paper's.",
        tuple(panels) if balanced else (),
        columns=3,
    )


def _initialisation(experiments: Mapping[Fidelity, ExperimentResults]) -> Chart:
    experiment = experiments.get("print")
    found: dict[float, CellArrays] = {}
    if experiment is not None:
        named = {float(name.removeprefix("init/")): name for name in experiment.results if name.startswith("init/")}
        found = {scale: experiment.results[named[scale]] for scale in sorted(named)}
    panels: tuple[Panel, ...] = ()
    if found:
        accuracy = _means("nonlinear mixture, setting 3", "print", found, [each["accuracy"] for each in found.values()])
        mixed = [entropies(each["test_dispatch"]) for each in found.values()]
        entropy = _means("nonlinear mixture, setting 3", "print", found, mixed)
        scale = "Standard deviation σ0 of the first weights"
        panels = (
            Panel("accuracy", scale, _ACCURACY, (accuracy,), log_x=True),
            Panel("entropy", scale, _ENTROPY, (entropy,), log_x=True, level=_BLIND),
        )
    low, high = 50 ** (-1 / 3), 50**-0.01
    return Chart(
        "initialisation",
        _PAPER,
        "Theorem 4.2",
        "How small must the first weights be?",
        "The theory lets experts find their clusters from tiny differences at the start, so they must start small. "
        "Test accuracy and dispatch entropy of the nonlinear mixture against σ0, as printed; mean and standard "
        f"deviation over trials. The theorem's interval from d^(−1/3) to d^(−0.01) is {low:.2f} to {high:.2f} "
        "at d = 50.",
        panels,
    )


# routing


def _figure_1(experiments: Mapping[Fidelity, ExperimentResults]) -> Iterable[Chart]:
    """Returns Figure 1, or nothing without scikit-learn: a finished run must not end with an ImportError."""
    if find_spec("sklearn") is None:
        return []
    for fidelity, experiment in experiments.items():
        if any(name.startswith("figure1/") for name in experiment.results):
            return [figure_1(experiment, _TITLES[fidelity])]
    return []


def _figure_3(experiments: Mapping[Fidelity, ExperimentResults]) -> Chart:
    panels: list[Panel] = []
    for fidelity, experiment in experiments.items():
        lines: list[Series] = []
        for setting in (1, 2):
            for kind, name in (("identity", "linear"), ("cubic", "nonlinear")):
                result = experiment.results.get(f"moe/{kind}/s{setting}")
                if result is not None and "track_dispatch" in result:
                    by_step = np.moveaxis(result["track_dispatch"], 1, 0)  # (S, T, K, E)
                    values = [entropies(each) for each in by_step]
                    label = f"{name}, setting {setting}"
                    lines.append(_means(label, label, result["track_steps"].tolist(), values))
        if lines:
            panels.append(Panel(_TITLES[fidelity], _steps(lines), _ENTROPY, tuple(lines), level=_BLIND))
    return Chart(
        "figure-3",
        _PAPER,
        "Figure 3",
        "When does the router find the clusters?",
        "How mixed the training samples are that an expert gets, over training: 0 if every expert gets samples of one "
        f"cluster, {_BLIND:g} if the router sends them anywhere. Nonlinear experts fall to nearly 0 if the paper is "
        "right, and linear ones stay up. Mean and standard deviation over trials.",
        tuple(panels),
    )


def _inner_products(experiments: Mapping[Fidelity, ExperimentResults], kind: str) -> Chart:
    """One column per cluster: experts and features above routers and centres."""
    panels: list[Panel] = []
    rows: list[str] = []
    setting = ""
    found = _first_result(experiments, (f"moe/{kind}/s1",), "track_expert_feature")
    if found is not None:
        setting, result = found
        for name, (row, label) in _TRACKS.items():
            products = result[f"track_{name}"][0]  # (S, E, K)
            rows.append(row)
            for k in range(products.shape[2]):
                lines = _by_expert(result["track_steps"], products[:, :, k])
                panels.append(Panel(f"cluster {k + 1}", _STEP, label, lines))
    number, experts = ("4", "nonlinear") if kind == "cubic" else ("5", "linear")
    expected = (
        "If the paper is right, an expert's line leaves the ground in one column only, in the first row, and the same "
        "expert's line does so in that column of the last row: it has learnt the feature of one cluster, and the "
        "router has learnt to send it that cluster. Rows two and three stay low."
        if kind == "cubic"
        else "If the paper is right, the same experts rise in several columns and in all rows: nobody specialises, and "
        "the router looks at features, which do not tell the cluster, as much as at centres, which do."
    )
    return Chart(
        f"figure-{number}",
        _PAPER,
        f"Figure {number}",
        f"What do {experts} experts and their router learn?",
        "How far the weights of each expert, and those with which the router scores it, have turned to the feature "
        "and to the centre of each cluster: the inner product, its magnitude, the largest of the expert's filters. "
        f"{expected} One trial, {setting}.",
        tuple(panels),
        columns=len(panels) // len(rows) if rows else None,
        row_titles=tuple(rows),
    )


def _dispatch_tables(experiments: Mapping[Fidelity, ExperimentResults]) -> list[Chart]:
    """Tables 4 to 6: the nonlinear mixtures with the lowest and the highest entropy, and the median linear one."""
    picks = {
        "4": ("cubic", 0.0, "the purest of the nonlinear mixtures"),
        "5": ("cubic", 1.0, "the least pure of the nonlinear mixtures"),
        "6": ("identity", 0.5, "a linear mixture, the median"),
    }
    drawn: list[Chart] = []
    for number, (kind, place, which) in picks.items():
        panels: list[Panel] = []
        for fidelity, experiment in experiments.items():
            result = experiment.results.get(f"moe/{kind}/s1")
            if result is not None and "track_dispatch" in result:
                panels.append(_dispatched(result, place, _TITLES[fidelity]))
        drawn.append(
            Chart(
                f"table-{number}",
                _PAPER,
                "Table 6" if number == "6" else "Tables 4 and 5",
                f"Which expert gets which cluster: {which}",
                "How many training samples went to each expert before the first step and after the last one, and from "
                "which clusters those of the last step came. The darker a number, the more of its row. Setting 1; of "
                f"all trials {which}, by dispatch entropy.",
                tuple(panels),
            )
        )
    return drawn


def _dispatched(result: CellArrays, place: float, title: str) -> Panel:
    tables = result["train_dispatch"]  # (T, K, E)
    mixed = entropies(tables)
    trial = int(np.argsort(mixed, kind="stable")[round(place * (len(mixed) - 1))])
    table = tables[trial]
    values = [result["track_dispatch"][trial, 0].sum(axis=0), table.sum(axis=0), *table]
    return Panel(
        f"{title}: accuracy {result['accuracy'][trial]:.2f} %, entropy {abs(mixed[trial]):.3f}",
        "Expert",
        "",
        counts=Counts(
            ("at first", "at the end", *(f"cluster {k + 1}" for k in range(len(table)))),
            tuple(str(e + 1) for e in range(table.shape[1])),
            tuple(tuple(float(value) for value in row) for row in values),
        ),
    )


def _specialists(experiments: Mapping[Fidelity, ExperimentResults]) -> Chart:
    panels: list[Panel] = []
    printed: dict[Fidelity, ExperimentResults] = {
        name: experiment for name, experiment in experiments.items() if name == "print"
    }
    setting = ""
    found = _first_result(printed, _theory_cells(), "groups")
    if found is not None:
        setting, result = found
        groups = result["groups"][0]
        rows = tuple(f"expert {e + 1}, of cluster {int(k) + 1}" for e, k in enumerate(groups))
        for name, title in (("explored_accuracy", "after exploration"), ("expert_accuracy", "at the end")):
            if name in result:
                wrong = 100 * (1 - result[name][0])  # (E, K)
                columns = tuple(f"cluster {k + 1}" for k in range(wrong.shape[1]))
                values = tuple(tuple(round(float(value), 1) for value in row) for row in wrong)
                panels.append(Panel(title, "", "", counts=Counts(rows, columns, values)))
    return Chart(
        "lemma-5-2",
        _PAPER,
        "Lemma 5.2",
        "Is every expert good at its own cluster, and bad at the others?",
        "Test error of each expert on each cluster (%), were all of it sent there: 50 is guessing. At the start, each "
        "expert has a cluster whose feature is nearest to one of its filters; the lemma says that after the "
        "exploration stage, long before the router has learnt anything, this expert errs on hardly any sample of that "
        f"cluster, a light cell, and on many of the others, dark cells. One trial, {setting}.",
        tuple(panels),
    )


def _loads(experiments: Mapping[Fidelity, ExperimentResults]) -> Chart:
    panels: list[Panel] = []
    setting = ""
    for kind, title in (("cubic", "nonlinear experts"), ("identity", "linear experts")):
        found = _first_result(experiments, _theory_cells(kind), "track_load")
        if found is not None:
            setting, result = found
            loads = 100 * result["track_load"][0]  # (S, E)
            lines = _by_expert(result["track_steps"], loads)
            level = round(100 / loads.shape[1], 1)
            panels.append(Panel(title, _STEP, "Expected load (% of samples)", lines, level=level))
    return Chart(
        "load",
        _PAPER,
        "Equation 5.1",
        "Does one expert take all the work?",
        "The share of samples that each expert can expect, over training; the dotted line is an equal share. Steps of "
        "equal length for all experts are meant to keep those that get more samples from learning faster, and so from "
        f"getting more still. One trial, {setting}.",
        tuple(panels),
    )


# what charts are made of


def _value(published: float | tuple[float, float]) -> float:
    return published[0] if isinstance(published, tuple) else published


def _means(label: str, role: str, x: Iterable[float], values: Sequence[Array]) -> Series:
    """Returns mean and standard deviation over the last axis, the trials."""
    means = tuple(float(each.mean()) for each in values)
    spreads = tuple(float(each.std(ddof=1)) for each in values) if len(values[0]) > 1 else None
    return Series(label, role, tuple(float(each) for each in x), means, spreads)


def _by_expert(steps: Array, values: Array) -> tuple[Series, ...]:
    """Returns a series per expert from values (S, E)."""
    x = tuple(float(step) for step in steps)
    return tuple(
        Series(f"expert {e + 1}", f"expert-{e + 1}", x, tuple(float(value) for value in values[:, e]))
        for e in range(values.shape[1])
    )


def _steps(lines: Sequence[Series]) -> str:
    """Returns the label of an axis of steps, unique to the number of steps, since equal labels share an axis."""
    return f"{_STEP}, up to {lines[0].x[-1]:g}" if lines else _STEP


def _first(experiment: ExperimentResults, names: Iterable[str]) -> CellArrays | None:
    return next((experiment.results[name] for name in names if name in experiment.results), None)


def _first_result(
    experiments: Mapping[Fidelity, ExperimentResults], names: Sequence[str], needed: str
) -> tuple[str, CellArrays] | None:
    """Returns the first result, over fidelities and cell names, that has the needed array, and its fidelity's title."""
    for fidelity, experiment in experiments.items():
        for name in names:
            result = experiment.results.get(name)
            if result is not None and needed in result:
                return f"{_TITLES[fidelity]}, setting {name.rpartition('/s')[2]}", result
    return None


def _theory_cells(kind: str = "cubic") -> tuple[str, ...]:
    """Setting 3 is first: its signal and noise have the same distribution, as in the theory."""
    return tuple(f"moe/{kind}/s{setting}" for setting in (3, 1, 4, 2))
