"""Ensembles of single networks (Chen et al. 2022, below Theorem 4.1): the mean output of M networks.

A single network adds up its patches, and so does the mean of several. The members of an ensemble train on the same
samples from different initial weights.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from moesaic import keyed_random
from moesaic.data.splits import Split
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chen2022.data.synthetic_clusters import ClusterData, ClusterPatches, ClusterSetting
from moesaic.papers.chen2022.trial_training import MixtureSchedule, TrainedMixtures, train_mixtures
from moesaic.papers.chen2022.two_layer_networks import FilterActivation, Mixture
from moesaic.papers.engine import paper
from moesaic.papers.engine.cells import ArrayCell, CellArrays
from moesaic.papers.engine.runner import Runner

__all__ = [
    "MEMBERS",
    "SIZES",
    "EnsembleCell",
    "EnsembleSizes",
    "SharedSamples",
    "SharedSamplesCell",
    "plan",
    "shared_samples",
]

ENGINE = 1
"""Version of the experiment. Raised when results change, so that older cells in the result cache are not used."""

MEMBERS = (1, 2, 4, 8)
"""M, numbers of networks whose outputs are averaged."""


@dataclass(frozen=True)
class SharedSamples(ClusterPatches):
    """Samples that all members of an ensemble share: those of its first member."""

    member_keys: tuple[int, ...] = ()
    """Random keys of all networks, ensemble by ensemble."""
    members: int = 1

    def draw(self, keys: Tensor, samples: int, split: Split) -> ClusterData:
        place = {key: number for number, key in enumerate(self.member_keys)}
        first = [self.member_keys[place[int(key)] // self.members * self.members] for key in keys]
        return super().draw(torch.tensor(first, dtype=keys.dtype, device=keys.device), samples, split)


def shared_samples(setting: ClusterSetting, networks: range, members: int, seed: int) -> SharedSamples:
    """The samples of a setting for networks of which each ``members`` in a row share theirs."""
    keys = tuple(int(key) for key in keyed_random.keys(seed, networks))
    return SharedSamples(**asdict(ClusterPatches.setting(setting)), member_keys=keys, members=members)


@dataclass(frozen=True)
class SharedSamplesCell(ArrayCell):
    """Base class of cells that train groups of networks, each group on samples of its own."""

    model: Mixture
    schedule: MixtureSchedule
    setting: ClusterSetting

    def _train(self, runner: Runner, groups: int, members: int, samples: int) -> tuple[SharedSamples, TrainedMixtures]:
        """Returns the distribution of the samples, and the networks, group by group."""
        networks = range(groups * members)
        source = shared_samples(self.setting, networks, members, runner.seed)
        trained = train_mixtures(
            self.model,
            source,
            trials=networks,
            samples=samples,
            schedule=self.schedule,
            seed=runner.seed,
            device=runner.device,
            progress=runner.progress,
        )
        return source, trained


@dataclass(frozen=True)
class EnsembleCell(SharedSamplesCell):
    """Trains ensembles of single networks, each ensemble on its own samples, and tests their mean outputs."""

    trials: int = 10
    """Number of ensembles."""
    samples: int = 16_000
    test_samples: int = 16_000
    members: int = max(MEMBERS)
    """Networks of an ensemble."""

    @property
    def steps(self) -> int:
        return self.trials * self.members * self.schedule.steps

    def spec(self, runner: Runner) -> dict[str, Any]:
        return {"experiment": "ensembles", "engine": ENGINE, **asdict(self), "seed": runner.seed}

    def measure(self, runner: Runner) -> dict[str, Any]:
        source, trained = self._train(runner, self.trials, self.members, self.samples)
        sizes = [size for size in MEMBERS if size <= self.members]
        singles: list[list[float]] = []
        ensembles: list[list[float]] = []
        for trial in range(self.trials):
            outputs, signs = self._outputs(trained, source, trial)
            singles.append([_accuracy(each, signs) for each in outputs])
            ensembles.append([_accuracy(outputs[:size].mean(dim=0), signs) for size in sizes])
        return {"members": sizes, "single_accuracy": singles, "ensemble_accuracy": ensembles}

    def _outputs(self, trained: TrainedMixtures, source: ClusterPatches, trial: int) -> tuple[Tensor, Tensor]:
        """Returns the outputs (members, B) of an ensemble's networks on its test samples, and their signs (B,)."""
        numbers = range(trial * self.members, (trial + 1) * self.members)
        test = source.draw(trained.keys[numbers.start : numbers.start + 1], self.test_samples, "test")
        outputs = [
            trained.mixtures.of(torch.tensor([number], device=trained.keys.device)).predict(test.patches)[0]
            for number in numbers
        ]
        return torch.cat(outputs).double(), 2.0 * test.labels[0] - 1.0


def _accuracy(outputs: Tensor, signs: Tensor) -> float:
    """Percentage of outputs (B,) that have the sign of the class."""
    return 100 * (outputs * signs > 0).double().mean().item()


@dataclass(frozen=True)
class EnsembleSizes:
    """Sizes of a preset."""

    activations: tuple[FilterActivation, ...]
    trials: int
    samples: int
    """Training samples of an ensemble."""
    test_samples: int


SIZES: dict[str, EnsembleSizes] = {
    "quick": EnsembleSizes(("cubic",), 2, 500, 4000),
    "short": EnsembleSizes(("identity", "cubic", "celu"), 5, 2000, 16_000),
    "full": EnsembleSizes(("identity", "cubic", "celu"), 10, 16_000, 16_000),
}


def plan(preset: str, fidelity: Fidelity) -> paper.Plan[CellArrays]:
    """Returns the cells of a preset, by names such as "ensemble/cubic": networks of Table 7, as printed."""
    if fidelity != "print":
        return {}
    sizes = SIZES[preset]
    return {
        f"ensemble/{activation}": EnsembleCell(
            Mixture.single(fidelity, activation),
            MixtureSchedule.single(fidelity, activation),
            7,
            sizes.trials,
            sizes.samples,
            sizes.test_samples,
        )
        for activation in sizes.activations
    }
