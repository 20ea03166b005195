"""The page about a training run: learning curves, confusion matrix, worst mistakes, routing over time.

It is made from the folder of the run alone (`read_run`), complete or not, so that the page after `moesaic train` and
the one that `moesaic view` updates are the same. Styles, drawings and images are inline, there is no script, and a
Content-Security-Policy forbids the browser to load anything. Names of classes, files and layers are escaped.
"""

from __future__ import annotations

import base64
import io
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from moesaic.argument_checks import printable
from moesaic.files import write_atomic
from moesaic.report.formatting import duration, number, percent
from moesaic.report.svg_line_chart import Line, LineChart, spaced
from moesaic.report.templates import render
from moesaic.training.fit_result import Epoch
from moesaic.training.run_reader import RunRecord, read_run
from moesaic.training.saved_predictions import Mistake, SavedPredictions

__all__ = ["training_page", "write_training_page"]

_MATRIX_CLASSES = 20
"""Confusion matrices of more classes are shown as a list of the most frequent confusions."""
_CONFUSIONS = 20
_CLASS_ROWS = 20
"""Classes beyond so many are behind a fold."""
_TABLE_ROWS = 1000
_EXPERT_LINES = 8
"""More experts are drawn as the smallest, the middle and the largest load."""
_LAYERS = 4
"""Layers beyond so many are behind a fold."""


@dataclass(frozen=True)
class _Figure:
    """Charts with the numbers behind them."""

    charts: tuple[LineChart, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str
    """Which epochs the table has, where it does not have all."""


@dataclass(frozen=True)
class _ClassRow:
    name: str
    images: int
    accuracy: float | None


@dataclass(frozen=True)
class _Matrix:
    names: tuple[str, ...]
    rows: tuple[tuple[tuple[int, float], ...], ...]
    """Count of each cell, and its share of the row."""


@dataclass(frozen=True)
class _MistakeView:
    image: str
    """A data URI."""
    pixelated: bool
    file: str
    label: str
    label_probability: str
    guesses: tuple[tuple[str, str], ...]
    """Class and probability; the first was predicted."""


@dataclass(frozen=True)
class _LayerView:
    name: str
    chooser: str
    figure: _Figure
    summary: str


def write_training_page(folder: Path, *, stopped: str = "") -> Path:
    """Writes report.html into the folder of a run and returns its path.

    Args:
        folder: the folder of the run.
        stopped: why training is not complete; empty where it is, or where that is not known.
    """
    path = folder / "report.html"
    write_atomic(path, training_page(read_run(folder), stopped=stopped).encode())
    return path


def training_page(run: RunRecord, *, stopped: str = "", live: Mapping[str, str] | None = None) -> str:
    """Returns the page about a run.

    Args:
        run: what is in its folder.
        stopped: why training is not complete; empty where it is, or where that is not known.
        live: the script of a page that updates itself, its digest, and the version of what the page shows.
    """
    return render(
        "training.html",
        run=run,
        live=live,
        status=_status(run, stopped),
        done=run.result is not None,
        headline=_headline(run),
        facts=_facts(run),
        curves=_curves(run),
        layers=_layers(run.epochs),
        layers_open=_LAYERS,
        alarms=[(epoch.number, printable(alarm)) for epoch in run.epochs for alarm in epoch.alarms],
        matrix=_matrix(run.data.classes, run.predictions),
        confusions=_confusions(run.data.classes, run.predictions),
        classes=_class_rows(run.data.classes, run.predictions),
        class_rows=_CLASS_ROWS,
        tested_epoch=0 if run.predictions is None else run.predictions.epoch,
        mistakes=_mistakes(run.data.classes, run.predictions),
        wrong=0 if run.predictions is None else int((run.predictions.labels != run.predictions.predicted).sum()),
        settings=_settings(run),
        commands=_commands(run),
        number=number,
        percent=percent,
    )


def _headline(run: RunRecord) -> str:
    accuracy = run.result.accuracy if run.result is not None else _last_test(run.epochs)
    name = f"{run.model_name} on {printable(run.data.name) or 'your images'}"
    return name if accuracy is None else f"{name}: {accuracy:.1f} % test accuracy"


def _status(run: RunRecord, stopped: str) -> str:
    if run.result is not None:
        return "complete" if run.result.stopped == "all epochs" else f"complete: {printable(run.result.stopped)}"
    done = f"after epoch {len(run.epochs)} of {run.total_epochs}"
    return f"{stopped} {done}" if stopped else f"not complete: {done}"


def _last_test(epochs: Sequence[Epoch]) -> float | None:
    return next((epoch.test_accuracy for epoch in reversed(epochs) if epoch.test_accuracy is not None), None)


def _facts(run: RunRecord) -> list[tuple[str, str]]:
    """The numbers at the top."""
    facts: list[tuple[str, str]] = []
    accuracy = run.result.accuracy if run.result is not None else _last_test(run.epochs)
    if accuracy is not None:
        facts.append(("test accuracy", f"{accuracy:.1f} %"))
    if run.predictions is not None and len(run.predictions.labels):
        often = 100 * int(run.predictions.labels.bincount().max()) / len(run.predictions.labels)
        facts.append(("most frequent class alone", f"{often:.1f} %"))
    tested = [epoch for epoch in run.epochs if epoch.test_accuracy is not None]
    if len(tested) > 1:
        best = max(tested, key=lambda epoch: epoch.test_accuracy or 0.0)
        facts.append(("best test accuracy", f"{best.test_accuracy:.1f} % in epoch {best.number}"))
    if run.epochs:
        last = run.epochs[-1]
        facts.append(("training accuracy", f"{last.train_accuracy:.1f} %"))
        facts.append(("epochs", f"{len(run.epochs)} of {run.total_epochs}"))
        facts.append(("training time", duration(last.seconds)))
        facts.append(("speed", f"{last.images_per_second:,.0f} images/s"))
    facts.append(("images", f"{run.data.train:,} to train, {run.data.test:,} to test"))
    cost = run.result.cost if run.result is not None else None
    if cost is not None:
        facts.append(("multiply-adds of a test image", f"{percent(cost)} of those without gates"))
    return facts


def _curves(run: RunRecord) -> _Figure | None:
    epochs = run.epochs
    if not epochs:
        return None
    x = tuple(epoch.number for epoch in epochs)
    accuracies = (
        _line("training", [epoch.train_accuracy for epoch in epochs]),
        _line("test", [epoch.test_accuracy for epoch in epochs]),
    )
    charts = [
        LineChart(
            "Accuracy (%)",
            "percent",
            x,
            accuracies,
            "Training accuracy is measured during the epoch, on each batch before the step on it.",
            high=100.0,
        ),
        LineChart(
            "Loss",
            "cross-entropy",
            x,
            (_line("training", [epoch.loss for epoch in epochs]),),
            "Cross-entropy of the training images.",
        ),
        LineChart("Learning rate", "", x, (_line("rate", [epoch.lr for epoch in epochs]),), low=0.0),
    ]
    columns = ["epoch", "loss", "training %", "test %", "learning rate", "images/s", "seconds"]
    metrics = list(dict.fromkeys(name for epoch in epochs for name in epoch.metrics))
    shares = [name for name in ("cost", "open_share") if name in metrics]
    if shares:
        labels = {"cost": "multiply-adds", "open_share": "open gates"}
        charts.append(
            LineChart(
                "Cost of the gates",
                "share",
                x,
                tuple(_line(labels[name], [epoch.metrics.get(name) for epoch in epochs]) for name in shares),
                "Multiply-adds of a training image and open gates, as shares of the network without gates.",
                low=0.0,
                high=1.0,
            )
        )
    picked = [epochs[row] for row in spaced(len(epochs), _TABLE_ROWS)]
    rows = [
        (
            str(epoch.number),
            f"{epoch.loss:.4f}",
            f"{epoch.train_accuracy:.2f}",
            "–" if epoch.test_accuracy is None else f"{epoch.test_accuracy:.2f}",
            f"{epoch.lr:.3g}",
            f"{epoch.images_per_second:,.0f}",
            f"{epoch.seconds:.1f}",
            *(_cell(epoch.metrics.get(name)) for name in metrics),
        )
        for epoch in picked
    ]
    return _Figure(tuple(charts), (*columns, *map(printable, metrics)), tuple(rows), _thinned(len(picked), len(epochs)))


def _line(label: str, values: Sequence[float | None]) -> Line:
    """A line without the values that are not numbers."""
    return Line(label, tuple(None if value is None or math.isnan(value) else value for value in values))


def _layers(epochs: Sequence[Epoch]) -> list[_LayerView]:
    names = list(dict.fromkeys(name for epoch in epochs for name in epoch.routing))
    return [_layer(name, [epoch for epoch in epochs if name in epoch.routing]) for name in names]


def _layer(name: str, epochs: Sequence[Epoch]) -> _LayerView:
    x = tuple(epoch.number for epoch in epochs)
    routings = [epoch.routing[name] for epoch in epochs]
    last = routings[-1]
    experts = max(len(each.load) for each in routings)
    loads = [(*each.load, *[0.0] * (experts - len(each.load))) for each in routings]
    measures: dict[str, list[float | None]] = {
        "routing entropy": [each.entropy for each in routings],
        "class entropy of experts": [each.class_entropy for each in routings],
        "coverage": [each.coverage for each in routings],
    }
    if last.chooser == "expert":
        measures["overlap of experts"] = [each.overlap for each in routings]
        measures["overlap by chance"] = [each.chance for each in routings]
    lines = tuple(_line(label, values) for label, values in measures.items())
    charts = [LineChart("Measures of the routing (0 to 1)", "0 to 1", x, lines, low=0.0, high=1.0)]
    if last.chooser != "expert":
        charts.insert(0, LineChart("Load of the experts", "share", x, _load_lines(loads, experts), low=0.0))
    picked = spaced(len(epochs), _TABLE_ROWS)
    rows = [
        (
            str(x[row]),
            *(_cell(values[row]) for values in measures.values()),
            *(f"{share:.3f}" for share in loads[row]),
        )
        for row in picked
    ]
    columns = ("epoch", *measures, *(f"load {e}" for e in range(experts)))
    who = {"expert": "experts choose their patches", "unit": "units choose their experts", "soft": "soft routing"}
    figure = _Figure(tuple(charts), columns, tuple(rows), _thinned(len(picked), len(epochs)))
    return _LayerView(printable(name) or "the network", who[last.chooser], figure, _layer_summary(last, experts))


def _load_lines(loads: Sequence[Sequence[float]], experts: int) -> tuple[Line, ...]:
    if experts <= _EXPERT_LINES:
        return tuple(Line(f"expert {e}", tuple(load[e] for load in loads)) for e in range(experts))
    ordered = [sorted(load) for load in loads]
    places = {"largest": experts - 1, "middle": experts // 2, "smallest": 0}
    return tuple(Line(label, tuple(load[place] for load in ordered)) for label, place in places.items())


def _layer_summary(last: Any, experts: int) -> str:
    what = "patches" if last.chooser == "expert" else "units"
    parts = [f"{experts} experts; in the last epoch {percent(last.coverage)} of the {what} had an expert"]
    if last.overlap is not None and last.chance is not None:
        parts.append(
            f"two experts shared {percent(last.overlap)} of their patches, where random choices share "
            f"{percent(last.chance)}"
        )
    else:
        parts.append(f"loads were from {percent(min(last.load))} to {percent(max(last.load))}")
    return f"{', '.join(parts)}."


def _matrix(names: Sequence[str], predictions: SavedPredictions | None) -> _Matrix | None:
    if predictions is None or len(names) > _MATRIX_CLASSES:
        return None
    rows = cast("list[list[int]]", predictions.confusion(len(names)).tolist())
    return _Matrix(
        tuple(map(printable, names)),
        tuple(tuple((count, count / max(sum(row), 1)) for count in row) for row in rows),
    )


def _confusions(names: Sequence[str], predictions: SavedPredictions | None) -> list[tuple[str, str, int, str]]:
    """The most frequent ones: true class, predicted class, images, share of the class."""
    if predictions is None:
        return []
    totals = predictions.class_counts(len(names))[0]
    return [
        (printable(names[label]), printable(names[guess]), count, percent(count / int(totals[label])))
        for label, guess, count in predictions.confusions(_CONFUSIONS)
    ]


def _class_rows(names: Sequence[str], predictions: SavedPredictions | None) -> list[_ClassRow]:
    """All classes, the worst first."""
    if predictions is None:
        return []
    totals, right = (cast("list[int]", each.tolist()) for each in predictions.class_counts(len(names)))
    rows = [
        _ClassRow(printable(name), total, 100 * hits / total if total else None)
        for name, total, hits in zip(names, totals, right, strict=True)
    ]
    return sorted(rows, key=lambda row: 101.0 if row.accuracy is None else row.accuracy)


def _mistakes(names: Sequence[str], predictions: SavedPredictions | None) -> list[_MistakeView]:
    return [] if predictions is None else [_mistake(names, each) for each in predictions.mistakes]


def _mistake(names: Sequence[str], mistake: Mistake) -> _MistakeView:
    guesses = [
        (guess, probability)
        for guess, probability in zip(mistake.top, mistake.probabilities, strict=True)
        if guess != mistake.label  # which has a line of its own
    ]
    return _MistakeView(
        _data_uri(mistake.image),
        max(mistake.image.shape[1:]) < 64,
        printable(mistake.name),
        printable(names[mistake.label]),
        percent(mistake.label_probability),
        tuple((printable(names[guess]), percent(probability)) for guess, probability in guesses),
    )


def _data_uri(image: Tensor) -> str:
    from PIL import Image

    pixels = image.permute(1, 2, 0).contiguous().numpy()
    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _settings(run: RunRecord) -> list[tuple[str, str]]:
    """Model, data and recipe as rows of a table."""
    model = {name: value for name, value in run.model.items() if name not in ("name", "class")}
    shape = "×".join(map(str, run.data.shape))
    rows: list[tuple[str, Any]] = [
        ("network", run.model_name),
        *(_flat("network ", model)),
        ("images", f"{run.data.name}: {run.data.train:,} to train, {run.data.test:,} to test, {shape}"),
        ("classes", len(run.data.classes)),
        *_flat("", run.recipe),
        ("seed", run.seed),
        ("device", run.device),
    ]
    return [(printable(name).replace("_", " "), printable(_plain(value))) for name, value in rows]


def _flat(stem: str, content: Mapping[str, Any]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in content.items():
        if isinstance(value, dict):
            rows += _flat(f"{stem}{name} ", cast("dict[str, Any]", value))
        elif value not in (None, "", [], {}):
            rows.append((f"{stem}{name}", value))
    return rows


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_plain, cast("list[Any]", value)))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(each)}" for name, each in cast("dict[str, Any]", value).items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def _commands(run: RunRecord) -> list[tuple[str, str]]:
    """What to run next, and what for."""
    here = printable(shlex.quote(str(run.folder)))
    commands = [(f"moesaic predict {here} IMAGE…", "classes of other images")]
    gated = any("open_share" in epoch.metrics for epoch in run.epochs)
    if gated or any(epoch.routing for epoch in run.epochs):
        purpose = "open channels of each image" if gated else "patches that each expert selects"
        commands.append((f"moesaic explain {here} IMAGE…", purpose))
    return [*commands, (f"moesaic export {here} --format onnx", "one file for a server")]


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _thinned(shown: int, count: int) -> str:
    return "" if shown == count else f"{shown:,} of {count:,} epochs, equally spaced."
