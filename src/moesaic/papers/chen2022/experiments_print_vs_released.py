"""Ablations of the released code of Chen et al. 2022: one difference from print undone, the rest as released.

`DatasetCell` trains several initialisations on each of several datasets, as the released code does with one dataset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chen2022 import experiments_synthetic
from moesaic.papers.chen2022.data.synthetic_clusters import ClusterSetting
from moesaic.papers.chen2022.experiments_ensembles import SharedSamplesCell
from moesaic.papers.chen2022.experiments_synthetic import MixtureCell, test_accuracy
from moesaic.papers.engine import paper
from moesaic.papers.engine.cells import Cell, CellArrays
from moesaic.papers.engine.runner import Runner

__all__ = ["BALANCE_FORMS", "BALANCE_SETTINGS", "FIGURE_1_FORMS", "GROUP_FORMS", "PRINTED_START", "DatasetCell", "plan"]

ENGINE = 1
"""Version of the experiment. Raised when results change, so that older cells in the result cache are not used."""

FIGURE_1_FORMS: Mapping[str, str] = MappingProxyType(
    {
        "gate": "the gate is softmax(h)",
        "loss": "the loss has one softmax",
        "steps": "2000 steps without early stopping",
    }
)
"""What is as printed in each form of the mixture of Figure 1."""

GROUP_FORMS: Mapping[str, str] = MappingProxyType(
    {"gate": "the gate is softmax(h)", "norm": "gradients are divided by their Frobenius norm"}
)
"""What is as printed in each form of the mixture of eight nonlinear experts in setting 3."""

BALANCE_FORMS: Mapping[str, str] = MappingProxyType(
    {
        "softmax": "the loss multiplies an expert's load by its softmax(h)",
        "coefficient": "the coefficient is 1e-3, which the paper prints for images",
    }
)
"""What is as printed in each form of the load-balancing loss."""
BALANCE_SETTINGS: tuple[ClusterSetting, ...] = (3, 4)
"""Settings in which the paper's mixture loses by the load-balancing loss."""


PRINTED_START = 0.01 / 10 * 150**0.5
"""``init_scale`` of uniform weights with the standard deviation σ0 = 0.01 of print, on data ten times as large, d = 50.

The code has 0.001, which is σ0 = 0.0008 in the units of print."""


@dataclass(frozen=True)
class DatasetCell(SharedSamplesCell):
    """Trains ``starts`` networks from different initial weights on each of several datasets."""

    datasets: int = 5
    starts: int = 4
    """Networks per dataset."""
    samples: int = 16_000
    test_samples: int = 16_000

    @property
    def steps(self) -> int:
        return self.datasets * self.starts * self.schedule.steps

    def spec(self, runner: Runner) -> dict[str, Any]:
        return {"experiment": "datasets", "engine": ENGINE, **asdict(self), "seed": runner.seed}

    def measure(self, runner: Runner) -> dict[str, Any]:
        source, trained = self._train(runner, self.datasets, self.starts, self.samples)
        accuracy: list[float] = []
        for network in range(self.datasets * self.starts):
            own = trained.keys[network : network + 1]
            test = source.draw(own, self.test_samples, "test")
            mixture = trained.mixtures.of(torch.tensor([network], device=own.device))
            accuracy.append(test_accuracy(mixture, test, own)[0])
        rows = range(0, len(accuracy), self.starts)
        return {"accuracy": [accuracy[row : row + self.starts] for row in rows]}


def plan(preset: str, fidelity: Fidelity) -> paper.Plan[CellArrays]:
    """Returns the cells of a preset, by names such as "ablated/figure1/gate": as released, and not with quick."""
    if preset == "quick" or fidelity != "released":
        return {}
    released = experiments_synthetic.plan(preset, fidelity)
    cells: dict[str, Cell[CellArrays]] = {}
    mixture = released["figure1/cubic"]
    assert isinstance(mixture, MixtureCell)
    cells["ablated/figure1/gate"] = replace(mixture, model=replace(mixture.model, gate="softmax"))
    cells["ablated/figure1/loss"] = replace(mixture, model=replace(mixture.model, softmax_twice=False))
    longer = replace(mixture.schedule, steps=2000, stop="never")
    cells["ablated/figure1/steps"] = replace(mixture, schedule=longer, follow=40)
    for setting in (1, 3, 4):
        mixture = released[f"moe/cubic/s{setting}"]
        assert isinstance(mixture, MixtureCell)
        cells[f"ablated/s{setting}/gate"] = replace(mixture, model=replace(mixture.model, gate="softmax"))
        if setting == 3:
            schedule = replace(mixture.schedule, norm="frobenius")
            cells[f"ablated/s{setting}/norm"] = replace(mixture, schedule=schedule)
            model = replace(mixture.model, init_scale=PRINTED_START)
            cells[f"ablated/start/s{setting}"] = replace(mixture, model=model)
    for setting in BALANCE_SETTINGS:
        balanced = released[f"balanced/identity/s{setting}"]
        assert isinstance(balanced, MixtureCell)
        schedule = balanced.schedule
        cells[f"ablated/balance/softmax/s{setting}"] = replace(
            balanced, schedule=replace(schedule, balance_on="softmax")
        )
        cells[f"ablated/balance/coefficient/s{setting}"] = replace(balanced, schedule=replace(schedule, balance=1e-3))
        cells[f"datasets/balanced/s{setting}"] = DatasetCell(
            balanced.model, schedule, setting, samples=balanced.samples, test_samples=balanced.test_samples
        )
    return cells
