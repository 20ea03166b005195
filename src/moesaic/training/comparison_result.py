"""The measurements of a comparison of models, as plain data: one run for each model, number of samples and trial.

A report needs nothing else: leads and savings (`paired_comparison`) follow from the runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from moesaic.files import write_json
from moesaic.training.checkpoint import CheckpointError
from moesaic.training.recipe import rename_old_keys
from moesaic.validated_json import InvalidFile, decode, read_json

__all__ = ["ComparedModel", "Comparison", "CurvePoint", "Run", "read_comparison", "run_from_json", "write_comparison"]


@dataclass(frozen=True)
class CurvePoint:
    """A test during training."""

    images: int
    """Training images seen until then, with repetition."""
    accuracy: float
    """Test accuracy in percent."""
    seconds: float
    """Seconds of training until then."""


@dataclass(frozen=True)
class Run:
    """One training run."""

    model: str
    samples: int
    trial: int
    accuracy: float
    """Test accuracy at the end, in percent."""
    groups: tuple[float, ...]
    """Test accuracy in each group, NaN for groups without test images; empty where groups are classes."""
    curve: tuple[CurvePoint, ...]
    stopped: str
    """Why training ended: "all epochs" or "zero training error"."""
    seconds: float
    """Seconds of training, without tests."""


@dataclass(frozen=True)
class ComparedModel:
    """A model, and what it costs."""

    name: str
    parameters: int
    macs: int
    """Multiply-adds of one image, as executed."""
    routed_share: float
    """Percent of the parameters in routed layers."""
    spelling: str = ""
    """The network as `ModelSpec.parse` reads it, where its name is shorter."""


@dataclass(frozen=True)
class Comparison:
    """A complete comparison: a run for each trial of each model with each number of samples.

    All models have ``trials`` trials. Where trials were added one by one, the first model has so many, and another one
    has fewer where fewer decided.
    """

    data: str
    """Name of the dataset."""
    digest: str
    """Digest of images and labels."""
    classes: tuple[str, ...]
    groups: tuple[str, ...]
    """Names of groups other than classes, such as smiling × hair; empty where there are none."""
    pool: int
    """Number of training images to draw from."""
    tested: int
    """Number of test images."""
    guessing: float
    """Accuracy, in percent, of always predicting the most frequent class."""
    models: tuple[ComparedModel, ...]
    """The first is the one that others are compared with."""
    samples: tuple[int, ...]
    """Numbers of training images, in ascending order."""
    trials: int
    seed: int
    recipe: Mapping[str, Any]
    """The recipe as JSON, and other settings of the runs."""
    machine: str
    """Description of the machine."""
    runs: tuple[Run, ...]
    notes: tuple[str, ...] = ()
    """Notes for readers of the report, such as images that were skipped."""
    max_trials: int | None = None
    """Where trials were added one by one (`group_sequential`): how many there could have been. None: ``trials`` were
    asked for."""
    ended: str = ""
    """Why no more trials were added; empty where they were not added one by one."""

    def __post_init__(self) -> None:
        runs = {(run.model, run.samples, run.trial) for run in self.runs}
        trials, samples = {model.name: self.trials_of(model.name) for model in self.models}, sorted(self.samples)
        # one by one: a file may announce any number of trials
        wanted = ((model, n, trial) for model in sorted(trials) for n in samples for trial in range(trials[model]))
        missing = next((run for run in wanted if run not in runs), None)
        if missing is not None:
            total = len(samples) * sum(trials.values())
            there = sum(n in samples and 0 <= trial < trials.get(model, 0) for model, n, trial in runs)
            model, n, trial = missing
            raise ValueError(
                f"Comparison: {total - there} of {total} runs are missing, such as trial {trial} of {model} with {n} "
                "samples; finish them first"
            )

    def trials_of(self, model: str) -> int:
        """The number of trials of a model."""
        if self.max_trials is None or model == self.models[0].name:
            return self.trials
        return max((run.trial + 1 for run in self.runs if run.model == model), default=self.trials)

    def model(self, name: str) -> ComparedModel:
        """The model of that name."""
        return next(model for model in self.models if model.name == name)

    def runs_of(self, model: str, samples: int) -> tuple[Run, ...]:
        """Returns the runs of a model with so many samples, trial by trial."""
        runs = (run for run in self.runs if run.model == model and run.samples == samples)
        return tuple(sorted(runs, key=lambda run: run.trial))


def write_comparison(path: Path, comparison: Comparison, derived: Mapping[str, Any] | None = None) -> None:
    """Write result.json, with what was ``derived`` from the runs beside them; a reader never sees half a file."""
    write_json(path, {**(derived or {}), **asdict(comparison)})


def read_comparison(path: Path) -> Comparison:
    """The comparison of a result.json."""
    try:
        loaded: Any = read_json(path)
        made = {**loaded, "recipe": rename_old_keys(loaded["recipe"])}
        return cast("Comparison", decode(Comparison, made, "comparison", more=True))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidFile(f"{path}: not the result of a comparison ({error!r}); run moesaic compare again") from error


def run_from_json(loaded: Mapping[str, Any]) -> Run:
    """A run, as a result.json or a finished cell has it; null stands for no number."""
    try:
        return cast("Run", decode(Run, loaded, "a run", more=True))
    except InvalidFile as error:
        raise CheckpointError(f"{error}; remove its file from cells in the output folder, and run it again") from error
