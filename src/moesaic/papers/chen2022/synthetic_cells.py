"""The cells of Chen et al. 2022 on synthetic data: trials of one network in one setting of Definition 3.1."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic import keyed_random
from moesaic.insight import expert_accuracy, inner_products
from moesaic.papers.chen2022.cluster_data import ClusterData, ClusterPatches, ClusterSetting
from moesaic.papers.chen2022.mixture_networks import Mixture, Mixtures
from moesaic.papers.chen2022.theory.exploration import exploration_steps, initial_groups
from moesaic.papers.chen2022.theory.smoothing import routing_probabilities
from moesaic.papers.chen2022.trial_training import MixtureSchedule, TrainedMixtures, train_mixtures
from moesaic.papers.engine import claims
from moesaic.papers.engine.analytic_experiment import Measured, arrays
from moesaic.papers.engine.findings import Claim
from moesaic.papers.engine.runner import Lab

__all__ = ["MixtureCell", "Plan", "Study", "Test", "claim"]

Array = NDArray[np.float64]
Plan = claims.Plan[Measured]
Study = claims.Study[Measured]
Test = claims.Test[Measured]

ENGINE = 1
"""Raised when trials come out differently than before, so that no cell of before is taken for one of now."""

_PROBE = 2000
"""Samples on which accuracy and expected load are followed."""


def claim(id: str, where: str, statement: str, published: float | str | None, rule: str) -> Claim:
    """A claim of this paper."""
    return Claim(id, "chen2022", where, statement, published, rule)


@dataclass(frozen=True)
class MixtureCell:
    """Trials of one network, each on samples of its own."""

    model: Mixture
    schedule: MixtureSchedule
    setting: ClusterSetting
    trials: int = 10
    samples: int = 16_000
    test_samples: int = 16_000
    follow: int = 0
    """Steps between two looks at what the network does during training; 0: nobody looks."""

    @property
    def steps(self) -> int:
        return self.trials * self.schedule.steps

    @property
    def explored(self) -> int:
        """T1, the steps of the exploration stage, by the printed rates and σ0."""
        return exploration_steps(self.schedule.learning_rate, self.model.init_scale)

    def obstacle(self, lab: Lab) -> str | None:
        return None

    def spec(self, lab: Lab) -> dict[str, Any]:
        return {"engine": ENGINE, "mixture": asdict(self), "probe": _PROBE, "seed": lab.seed}

    def result(self, kept: dict[str, Any]) -> Measured:
        return arrays(kept)

    def measure(self, lab: Lab) -> dict[str, Any]:
        source = ClusterPatches.setting(self.setting)
        follower = _Follower(self, source, lab.seed) if self.follow else None
        trained = train_mixtures(
            self.model,
            source,
            trials=range(self.trials),
            samples=self.samples,
            schedule=self.schedule,
            seed=lab.seed,
            device=lab.device,
            progress=lab.progress,
            watch=follower,
            watch_at=() if follower is None else follower.moments,
        )
        measured: dict[str, Any] = {
            "steps": trained.steps.tolist(),
            "losses": _rounded(trained.losses),
            "errors": trained.errors.tolist(),
            **self._tested(source, trained),
        }
        if follower is not None:
            measured |= follower.arrays()
        return measured

    def _tested(self, source: ClusterPatches, trained: TrainedMixtures) -> dict[str, Any]:
        """A trial at a time: the samples of all of them together are hundreds of megabytes."""
        found: list[dict[str, Any]] = []
        for t in range(self.trials):
            keys = trained.keys[t : t + 1]
            mixtures = trained.mixtures.of(torch.tensor([t], device=keys.device))
            test = source.draw(keys, self.test_samples, "test")
            noise = None
            if self.model.noise_in_test:
                noise = keyed_random.coarse(keys, "chen2022/test noise", self.test_samples, self.model.experts)
            said, chosen = mixtures.predict(test.patches, noise)
            each: dict[str, Any] = {"accuracy": 100 * _right(said, test.labels).double().mean().item()}
            if self.model.routed:
                train = source.draw(keys, self.samples, "train")
                each |= {
                    "test_dispatch": _table(chosen, test, self.model.experts)[0].tolist(),
                    "train_dispatch": _table(trained.dispatch[t : t + 1], train, self.model.experts)[0].tolist(),
                    "expert_accuracy": _rounded(_experts_right(mixtures, test)[0]),
                }
            found.append(each)
        return {name: [each[name] for each in found] for name in found[0]}


class _Follower:
    """Looks at networks while they train."""

    def __init__(self, cell: MixtureCell, source: ClusterPatches, seed: int) -> None:
        self._regular = range(0, cell.schedule.steps + 1, cell.follow)
        explored = (cell.explored,) if cell.explored <= cell.schedule.steps else ()
        self.moments = sorted({*self._regular, *explored})
        self._cell, self._source, self._seed = cell, source, seed
        self._seen: dict[tuple[int, int], dict[str, Any]] = {}
        self._probes: dict[tuple[int, ...], ClusterData] = {}

    def __call__(self, step: int, mixtures: Mixtures, data: ClusterData, which: Tensor) -> None:
        E, router = mixtures.model.experts, mixtures.router
        if router is None:
            raise ValueError("MixtureCell: follow looks at routers, and a single network has none; use follow=0")
        keys = keyed_random.keys(self._seed, which.cpu(), which.device)
        trials = tuple(int(trial) for trial in which)
        probe = self._probes.setdefault(trials, self._source.draw(keys, _PROBE, "test"))
        scores = mixtures.scores(data.patches)
        noise = keyed_random.coarse(keys, f"chen2022/look {step}", scores.shape[1], E)
        counts = _table(mixtures.choose(scores, noise), data, E)
        tested = (
            keyed_random.coarse(keys, f"chen2022/probe {step}", _PROBE, E) if mixtures.model.noise_in_test else None
        )
        said, _ = mixtures.predict(probe.patches, tested)
        features, centres = (each.to(keys.device) for each in (self._source.features, self._source.centres))
        rows = router[:, :, None]
        looks: dict[str, Tensor] = {
            "dispatch": counts,
            "probe_accuracy": 100 * _right(said, probe.labels).double().mean(dim=1),
            "load": routing_probabilities(scores[:, :_PROBE].double()).mean(dim=1),
            "expert_feature": inner_products(mixtures.weights, features),
            "expert_centre": inner_products(mixtures.weights, centres),
            "router_feature": inner_products(rows, features),
            "router_centre": inner_products(rows, centres),
        }
        if step == 0:
            looks["groups"] = initial_groups(mixtures.weights, features)
        if step <= self._cell.explored:  # a trial that stops before the stage ends stays as it was
            looks["explored_accuracy"] = _experts_right(mixtures, probe)
        for place, trial in enumerate(trials):
            self._seen[step, trial] = {name: _rounded(look[place]) for name, look in looks.items()}

    def arrays(self) -> dict[str, Any]:
        """(T, S, …) of what was seen at the S regular moments, and what was seen only once (T, …)."""
        trials = range(self._cell.trials)
        names = [name for name in self._seen[0, 0] if name not in ("groups", "explored_accuracy")]
        seen: dict[str, Any] = {
            f"track_{name}": [[self._last(step, t)[name] for step in self._regular] for t in trials] for name in names
        }
        seen["groups"] = [self._seen[0, t]["groups"] for t in trials]
        if self._cell.explored in self.moments:
            seen["explored_accuracy"] = [self._last(self._cell.explored, t)["explored_accuracy"] for t in trials]
        return {"track_steps": list(self._regular), **seen}

    def _last(self, step: int, trial: int) -> dict[str, Any]:
        """What was seen then, or last before training stopped."""
        return next(self._seen[moment, trial] for moment in range(step, -1, -1) if (moment, trial) in self._seen)


def _right(said: Tensor, labels: Tensor) -> Tensor:
    """Whether y·F > 0."""
    return (2.0 * labels - 1.0) * said > 0


def _table(chosen: Tensor, data: ClusterData, experts: int) -> Tensor:
    """(T, K, E): how many samples of a cluster went to an expert."""
    clusters = int(data.clusters.max()) + 1
    pair = torch.nn.functional.one_hot(data.clusters * experts + chosen, clusters * experts)
    return pair.sum(dim=1).view(-1, clusters, experts)


def _experts_right(mixtures: Mixtures, data: ClusterData) -> Tensor:
    """(T, E, K): the share of a cluster that an expert would get right."""
    starts = range(0, data.patches.shape[1], 2000)
    parts = [mixtures.expert_outputs(data.patches[:, start : start + 2000]) for start in starts]
    guesses = (torch.cat(parts, dim=1) > 0).long().transpose(1, 2)
    return expert_accuracy(guesses, data.labels, data.clusters)


def _rounded(values: Tensor) -> Any:
    """As a list, with as many digits as anybody reads: cells are kept as text."""
    exact: Array = values.double().cpu().numpy()
    size = 10.0 ** (4 - np.floor(np.log10(np.where(exact == 0, 1, np.abs(exact)))))
    return (np.round(exact * size) / size).tolist()
