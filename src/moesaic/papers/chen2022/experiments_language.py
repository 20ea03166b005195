"""Experiment of Chen et al. 2022, Appendix A.4: sentiment in three languages, one network against a mixture of four.

A sentence is a vector. The network is one layer with cubic activation and two logits (Wx + b)³; the mixture has four of
them and a linear router that is initialised with zeros. The paper gives no other details. Here a single network is a
mixture of one expert, and both have the same minibatches, 0.001 times torch's initialisation, normalised gradient
descent for the networks, plain gradient descent for the router, equally many epochs, and learning rates selected by the
same rule from equally many candidates.

As printed, the networks have no bias and one softmax. As released, they have a bias, a softmax before that of the
cross-entropy, a router on the sum of the vector's pieces of 32, and a load-balance loss with coefficient 0.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic import keyed_random
from moesaic.experts import LinearExperts
from moesaic.insight import DispatchTable, dispatch_table
from moesaic.layers import SampleMoE, record_routing
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chen2022.data.sentence_embeddings import Embeddings, embed_sentences
from moesaic.papers.chen2022.data.sentiment_sentences import SOURCES, Sentences, find_sentences, load_sentences
from moesaic.papers.engine import paper
from moesaic.papers.engine.runner import Runner
from moesaic.routing import SampleRouter, load_balance_loss
from moesaic.training import NormalizedGD

__all__ = [
    "CELL",
    "EXPERTS",
    "ClaimCheck",
    "ExperimentResults",
    "LanguageCell",
    "LanguageResult",
    "Plan",
    "check_data",
    "plan",
]

Array = NDArray[np.float64]

ENGINE = 1
"""Version of the training code. Raised when results change, so that older cells in the result cache are not used."""

EXPERTS = 4

CELL = "language"
"""Name of the only cell of a plan."""

_START = 0.001
_DRAWN, _DRAWN_DIMS = 900, 30


@dataclass(frozen=True)
class LanguageResult:
    """Measurements of the trials. The first axis of arrays is the trial; an axis of 2 is single network, mixture."""

    accuracy: Array
    """(T, 2) test accuracy in percent."""
    by_language: Array
    """(T, 2, K) test accuracy in each language, in percent."""
    dispatch: tuple[DispatchTable, ...]
    """Dispatch of the test sentences by each trial's mixture."""
    purity: Array
    """(T,): percentage of test sentences whose nearest neighbour has the same language."""
    rates: tuple[tuple[float, float], tuple[float, float]]
    """Selected learning rates of network and router, for the single network and for the mixture."""
    embedding_description: str
    """How sentences were embedded, for the report."""
    points: Array
    """(P, D): first principal components of some test sentences of the first trial."""
    languages: NDArray[np.int64]
    """(P,)"""
    labels: NDArray[np.int64]
    """(P,)"""
    chosen: NDArray[np.int64]
    """(P,): expert of the sentence."""


@dataclass(frozen=True)
class LanguageCell:
    """Trains both networks; each trial has its own split, embedding and initial weights."""

    trials: int = 5
    epochs: int = 20
    batch: int = 256
    most: int | None = 5000
    """Maximum number of sentences per language; with 5 000, languages have the paper's proportions."""
    dims: int = 256
    embedding: str | None = None
    """Name of a sentence-transformers model; None for character n-grams."""
    bias: bool = False
    softmax_twice: bool = False
    piece: int | None = None
    """Length of the vector's pieces whose sum is the router's input; None for the whole vector."""
    balance: float = 0.0
    """Coefficient of the load-balance loss."""
    rates: tuple[float, ...] = (0.3, 1.0, 3.0)
    """Candidate learning rates of the mixture's experts, each combined with each of the router's."""
    router_rates: tuple[float, ...] = (1.0, 10.0, 100.0)
    single_rates: tuple[float, ...] = (0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0)
    """Candidate learning rates of the single network: as many as the mixture has pairs."""

    def __post_init__(self) -> None:
        if self.piece is not None and self.dims % self.piece:
            raise ValueError(f"LanguageCell: dims={self.dims} are no whole number of pieces of {self.piece}")
        if len(self.single_rates) != len(self.rates) * len(self.router_rates):
            raise ValueError(
                f"LanguageCell: {len(self.single_rates)} single_rates for {len(self.rates)} × {len(self.router_rates)} "
                "pairs of rates and router_rates; both networks must have equally many candidates"
            )

    @property
    def steps(self) -> int:
        candidates = len(self._rate_candidates(1)) + len(self._rate_candidates(EXPERTS))
        return self.epochs * (candidates + 2 * self.trials)

    def missing_requirement(self, runner: Runner) -> str | None:
        if self.embedding is None and find_spec("sklearn") is None:
            return "needs scikit-learn (pip install scikit-learn)"
        if self.embedding is not None and find_spec("sentence_transformers") is None:
            return "needs sentence-transformers (pip install sentence-transformers)"
        if not _has_sentences(runner.data_dir):
            files = ", ".join(source.file for source in SOURCES)
            return f"needs labelled sentences in three languages, {files}, in --data-dir or in sentiment below it"
        return None

    def spec(self, runner: Runner) -> dict[str, Any]:
        present = runner.data_dir is not None and _has_sentences(runner.data_dir)
        digest = _sentences(runner.data_dir, self.most, runner.seed).digest if present and runner.data_dir else None
        return {"engine": ENGINE, "experiment": "language", **asdict(self), "sentences": digest, "seed": runner.seed}

    def measure(self, runner: Runner) -> dict[str, Any]:
        assert runner.data_dir is not None
        sentences = _sentences(runner.data_dir, self.most, runner.seed)
        rates = {
            experts: self._select_rates(experts, self._task(runner, sentences, 0), runner) for experts in (1, EXPERTS)
        }
        found: dict[str, Any] = {"rates": [rates[1], rates[EXPERTS]]}
        by_trial: dict[str, list[Any]] = {"accuracy": [], "by_language": [], "counts": [], "purity": []}
        for trial in range(self.trials):
            task = self._task(runner, sentences, trial)
            single, mixture = (
                self._train(task.train, *rates[experts], experts, runner, f"trial {trial}") for experts in (1, EXPERTS)
            )
            test = task.test
            right = [_predict(model, test.x)[0] == test.labels for model in (single, mixture)]
            spoken = test.languages
            by_trial["accuracy"].append([_percent(each) for each in right])
            by_trial["by_language"].append(
                [[_percent(each[spoken == k]) for k in range(len(sentences.names))] for each in right]
            )
            table, chosen = _predict(mixture, test.x, spoken, sentences.names)[1:]
            by_trial["counts"].append(table.counts)
            by_trial["purity"].append(purity(test.x, spoken))
            if trial == 0:
                found |= {"told": task.embedding_description, "names": sentences.names} | _drawn(test, chosen)
        return found | by_trial

    def result(self, stored: dict[str, Any]) -> LanguageResult:
        names = tuple(stored["names"])
        single, mixture = (tuple(pair) for pair in stored["rates"])
        return LanguageResult(
            np.array(stored["accuracy"]),
            np.array(stored["by_language"]),
            tuple(DispatchTable(names, tuple(tuple(row) for row in counts)) for counts in stored["counts"]),
            np.array(stored["purity"]),
            (single, mixture),
            stored["told"],
            np.array(stored["points"]),
            *(np.array(stored[key], dtype=np.int64) for key in ("languages", "labels", "chosen")),
        )

    def _task(self, runner: Runner, sentences: Sentences, trial: int) -> _Task:
        train, test = sentences.split(runner.seed, trial)
        assert runner.data_dir is not None
        values, description = _embedded(runner.data_dir, self.most, runner.seed, trial, self.embedding, self.dims)
        parts = [_Part.of(sentences, values, places, runner.device) for places in (train, test)]
        return _Task(parts[0], parts[1], description)

    def _rate_candidates(self, experts: int) -> list[tuple[float, float]]:
        """Returns the candidate pairs of learning rates; a router of one expert does not learn."""
        if experts == 1:
            return [(rate, 0.0) for rate in self.single_rates]
        return [(rate, router) for rate in self.rates for router in self.router_rates]

    def _select_rates(self, experts: int, task: _Task, runner: Runner) -> tuple[float, float]:
        """Returns the learning rates with the best accuracy on a held-out fifth of the training sentences."""
        border = round(0.8 * len(task.train.labels))
        learn, held_out = task.train.places(slice(None, border)), task.train.places(slice(border, None))
        best, best_right = self._rate_candidates(experts)[0], -1
        for pair in self._rate_candidates(experts):
            model = self._train(learn, *pair, experts, runner, "learning rates")
            right = int((_predict(model, held_out.x)[0] == held_out.labels).sum())
            if right > best_right:
                best, best_right = pair, right
        return best

    def _train(
        self, part: _Part, rate: float, router_rate: float, experts: int, runner: Runner, stream: str
    ) -> SampleMoE:
        generator = torch.Generator(runner.device)
        generator.manual_seed(
            int(keyed_random.bits(keyed_random.keys(runner.seed, [0]), f"language {stream} {experts}", 1)[0, 0])
        )
        model = self._model(part.x.shape[1], experts, generator).to(runner.device)
        learning = [
            NormalizedGD.per_expert(model.experts, rate),
            torch.optim.SGD(model.router.parameters(), router_rate),
        ]
        for _ in range(self.epochs):
            order = torch.randperm(len(part.labels), generator=generator, device=runner.device)
            for start in range(0, len(order), self.batch):
                batch = order[start : start + self.batch]
                with record_routing(model) as routing:
                    logits = model(part.x[batch])
                if self.softmax_twice:
                    logits = logits.softmax(-1)
                loss = F.cross_entropy(logits, part.labels[batch])
                if self.balance and experts > 1:
                    loss = loss + self.balance * load_balance_loss(routing[""])
                for optimizer in learning:
                    optimizer.zero_grad()
                loss.backward()
                for optimizer in learning:
                    optimizer.step()
            runner.progress.advance(1)
        return model.eval()

    def _model(self, dims: int, experts: int, generator: torch.Generator) -> SampleMoE:
        networks = LinearExperts(experts, dims, 2, activation="cubic", bias=self.bias, device=generator.device)
        networks.reset_parameters(generator)
        with torch.no_grad():
            for tensor in networks.parameters():
                tensor *= _START
        router = SampleRouter(dims, experts) if self.piece is None else _PieceRouter(self.piece, experts)
        return SampleMoE(router, networks, generator=generator)


class _PieceRouter(nn.Module):
    """A router on the sum of the vector's pieces."""

    def __init__(self, piece: int, experts: int) -> None:
        super().__init__()
        self.piece = piece
        self.router = SampleRouter(piece, experts)

    def forward(self, x: Tensor) -> Tensor:
        return self.router(x.unflatten(-1, (-1, self.piece)))


@dataclass(frozen=True)
class _Part:
    """Some of the sentences, as tensors on the device."""

    x: Tensor
    labels: Tensor
    languages: Tensor

    @classmethod
    def of(cls, sentences: Sentences, values: NDArray[np.float32], places: NDArray[np.int64], device: str) -> _Part:
        parts = (values[places], sentences.labels[places], sentences.languages[places])
        return cls(*(torch.from_numpy(part).to(device) for part in parts))

    def places(self, which: slice) -> _Part:
        return _Part(self.x[which], self.labels[which], self.languages[which])


@dataclass(frozen=True)
class _Task:
    train: _Part
    test: _Part
    embedding_description: str


@lru_cache(maxsize=2)
def _sentences(folder: Path, most: int | None, seed: int) -> Sentences:
    return load_sentences(folder, most=most, seed=seed)


@lru_cache(maxsize=8)  # both fidelities look at the same vectors
def _embedded(folder: Path, most: int | None, seed: int, trial: int, model: str | None, dims: int) -> Embeddings:
    sentences = _sentences(folder, most, seed)
    return embed_sentences(sentences.texts, sentences.split(seed, trial)[0], model=model, dims=dims, seed=seed)


def check_data(data_dir: Path) -> None:
    """Raises if sentence files in the directory cannot be read; missing files are not an error."""
    if _has_sentences(data_dir):
        load_sentences(data_dir)


def _has_sentences(folder: Path | None) -> bool:
    if folder is None:
        return False
    try:
        return all(find_sentences(folder, source) for source in SOURCES)
    except FileNotFoundError:
        return False


@torch.no_grad()
def _predict(
    model: SampleMoE, x: Tensor, clusters: Tensor | None = None, names: Sequence[str] | None = None
) -> tuple[Tensor, DispatchTable, Tensor]:
    """Returns predicted classes (B,), the dispatch of clusters, and experts (B,)."""
    with record_routing(model) as routing:
        classes = model(x).argmax(-1)
    record = routing[""]
    clusters = torch.zeros(len(x), dtype=torch.long) if clusters is None else clusters
    assert record.index is not None
    return classes, dispatch_table(record, clusters, names), record.index[:, 0, 0]


def _percent(right: Tensor) -> float:
    return 100 * right.double().mean().item()


def purity(x: Tensor, languages: Tensor) -> float:
    """Returns the percentage of vectors whose nearest other vector has the same language."""
    alike = x @ x.T
    alike.fill_diagonal_(-torch.inf)
    return _percent(languages[alike.argmax(1)] == languages)


def _drawn(part: _Part, chosen: Tensor) -> dict[str, Any]:
    """Returns some sentences for a figure, reduced to a size that can be stored."""
    vectors: Array = part.x.double().cpu().numpy()
    centred = vectors - vectors.mean(axis=0)
    principal = np.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, :_DRAWN_DIMS]
    points = (centred @ principal)[:_DRAWN].round(3)
    arrays = {"languages": part.languages, "labels": part.labels, "chosen": chosen}
    return {"points": points.tolist()} | {name: values[:_DRAWN].tolist() for name, values in arrays.items()}


Plan = paper.Plan[LanguageResult]
ExperimentResults = paper.ExperimentResults[LanguageResult]
ClaimCheck = paper.ClaimCheck[LanguageResult]


def plan(preset: str, fidelity: Fidelity) -> dict[str, LanguageCell]:
    """Returns the cell of a fidelity, in all but the quick preset."""
    if preset == "quick" or fidelity == "best":
        return {}
    released = LanguageCell(bias=True, softmax_twice=True, piece=32, balance=0.1)
    return {CELL: LanguageCell() if fidelity == "print" else released}
