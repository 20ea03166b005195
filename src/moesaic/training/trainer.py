"""One training of a network on images, from wherever its last checkpoint is to its end."""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.data.datasets import ImageDataset
from moesaic.insight.collapse_alarm import CollapseAlarm, CollapseWarning
from moesaic.layers.recording import routed_layers
from moesaic.models.deepmoe.network import DeepMoE
from moesaic.models.model_cost import eval_mode
from moesaic.models.registry import ModelSpec
from moesaic.training.batches import eval_batches, train_batches
from moesaic.training.checkpoint import Metadata, save_network
from moesaic.training.gates import ClosedLayer, GateTraining, gate_costs
from moesaic.training.progress import Progress
from moesaic.training.recipe import Recipe
from moesaic.training.results import Epoch, FitResult, plain
from moesaic.training.run_dir import RunDir
from moesaic.training.stopwatch import Stopwatch
from moesaic.training.trackers import Tracker
from moesaic.training.train_step import TrainStep

__all__ = ["Diverged", "GatesClosed", "Trainer", "evaluate"]

_LOOK = 2.0
"""Seconds between two looks at the loss within an epoch."""
_ALARM = 100
"""Batches after which the collapse alarm looks; within an epoch checkpoints are written then, when it holds nothing."""
_TESTED = 64
"""Images tested together, at least: more where the network is trained on more."""
_CALIBRATED = 1024
"""Images to train on, at most, on which gates are shifted to meet a cost."""


class Diverged(ArithmeticError):
    """The loss, or a weight, is no longer a number."""


class GatesClosed(Diverged):
    """All channel gates of a layer are closed, for all images."""


def evaluate(
    model: nn.Module, dataset: ImageDataset, outputs: Callable[[Tensor], Tensor] | None = None, size: int = 256
) -> Tensor:
    """(B,) bool: which of the images to test on the model gets right, in eval mode and where it is.

    ``outputs`` computes in another way than by calling the model, and ``size`` images are tested together.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            right = [(outputs or model)(x).argmax(1) == labels for x, labels in eval_batches(dataset, device, size)]
    finally:
        model.train(was_training)
    return torch.cat(right).cpu()


@dataclass
class Trainer:
    """One training, from wherever its last checkpoint is to its end."""

    model: nn.Module
    dataset: ImageDataset
    recipe: Recipe
    seed: int
    device: torch.device
    folder: RunDir | None
    spec: ModelSpec | None
    progress: Progress
    trackers: Sequence[Tracker]
    eval_every: int
    checkpoint_seconds: float
    teacher: nn.Module | None = None

    def __post_init__(self) -> None:
        self.sizes = self.recipe.batch_sizes(len(self.dataset.train))
        self.gates = None
        if isinstance(self.model, DeepMoE):
            self.gates = GateTraining(self.model, self.recipe, len(self.sizes), self.device, self.teacher)
        self.learner = TrainStep(self.model, self.recipe, self.device, self.dataset.num_classes, self.gates)
        self.watch = Stopwatch()
        self.epochs: list[Epoch] = []
        # of the epoch in progress: batches done, and those among them done before this call; loss and right answers
        # summed over its images; what the alarm said
        self.done = self.resumed = 0
        self.loss = torch.zeros((), device=self.device)
        self.right = torch.zeros((), dtype=torch.int64, device=self.device)
        self.alarms: tuple[str, ...] = ()
        self.looked_at = self.kept_at = time.monotonic()

    def train(self) -> FitResult:
        """Train to the end."""
        try:
            self._resume()
            self.progress.skip(len(self.epochs))
            right = None
            while not self._ended():
                right = self._epoch()
            assert right is not None, "the last epoch is tested, and no checkpoint is written after it"
            return self._finish(right)
        finally:
            if self.gates is not None:
                self.gates.release()

    def _ended(self) -> str:
        done = self.gates is None or not self.gates.joint  # gates that still learn have not come to their cost
        if done and self.recipe.stop_at_zero_error and self.epochs and self.epochs[-1].train_accuracy == 100:
            return "zero training error"
        return "all epochs" if len(self.epochs) >= self.recipe.epochs else ""

    def _epoch(self) -> Tensor | None:
        """Train for an epoch, or what is left of it; which test images are right, where it was tested."""
        before = self.watch.seconds
        self._steps()
        loss = float(self.loss)  # waits for the device, so that the time is that of all steps
        seconds = self.watch.stop()
        self._refuse_divergence(loss)
        images = len(self.dataset.train)
        epoch = Epoch(
            number=len(self.epochs) + 1,
            loss=loss / images,
            train_accuracy=100 * int(self.right) / images,
            test_accuracy=None,
            seconds=seconds,
            images_per_second=sum(self.sizes[self.resumed :]) / max(seconds - before, 1e-9),
            learning_rate=self.recipe.rate(len(self.epochs) + 1 - 0.5 / len(self.sizes)),
            alarms=self.alarms,
            **self._gate_metrics(),
        )
        self.epochs.append(epoch)
        right = None
        if self._ended() and self.gates is not None and self.gates.joint:
            self._freeze_gates()  # there was one stage alone
        if self._ended() or epoch.number % self.eval_every == 0:
            right = self._test()
            self.epochs[-1] = epoch = replace(epoch, test_accuracy=_percent(right))
        self.done, self.resumed, self.alarms = 0, 0, ()
        self.loss.zero_()
        self.right.zero_()
        self._tell(epoch)
        if self._ended():
            self.progress.skip(self.recipe.epochs - epoch.number)
        elif epoch.number == 1 or self._due():
            self._keep()
        return right

    def _steps(self) -> None:
        self.model.train()
        if self.gates is not None:
            self.gates.settle()
        epoch = len(self.epochs)
        batches = train_batches(self.dataset, self.sizes, self.seed, epoch, self.device, skip=self.done)
        with self.learner.watching(), self._alarm():
            self.watch.start()
            for x, labels in batches:
                now = epoch + (self.done + 0.5) / len(self.sizes)
                if self.gates is not None and self.gates.over(now):
                    self._freeze_gates()
                loss, right = self.learner.step(x, labels, now)
                self.loss += loss * len(x)
                self.right += right
                self.done += 1
                if self.gates is not None:
                    self._look_at_gates(self.gates, now)
                if time.monotonic() - self.looked_at >= _LOOK:
                    self._look()
                if self.done % _ALARM == 0 and self.done < len(self.sizes) and self._due():
                    self._keep()

    def _look_at_gates(self, gates: GateTraining, now: float) -> None:
        with self._refusing_closed_gates():
            told = gates.look(self.learner.steps, now)
        for text in told:
            self.alarms = (*self.alarms, text)
            self.progress.log(f"epoch {len(self.epochs) + 1}: {text}")

    def _freeze_gates(self) -> None:
        """End the stage in which gates learn; where a cost is wanted, it is met on images to train on."""
        assert self.gates is not None
        embeddings = None
        if self.gates.recipe.target_macs is not None:
            count = len(self.dataset.train)
            rows = torch.linspace(0, count - 1, min(count, _CALIBRATED)).long()
            embeddings = self._embeddings(replace(self.dataset, test=self.dataset.train), rows)
        cost = self.learner.freeze_gates(embeddings)
        if cost is not None:
            wanted = self.gates.recipe.target_macs
            self.progress.log(f"gates are frozen: {cost:.3f} of the dense network's multiply-adds, wanted {wanted:g}")

    def _embeddings(self, dataset: ImageDataset, rows: Tensor | None = None) -> Tensor:
        """(n, D): of the images to test on, or some of them, in eval mode."""
        assert isinstance(self.model, DeepMoE)
        network = self.model.embedding
        with torch.no_grad(), eval_mode(network), self.learner.autocast():
            return torch.cat([network(x)[0] for x, _ in eval_batches(dataset, self.device, self._tested(), rows)])

    def _gate_metrics(self) -> dict[str, float]:
        """What the gates did in the epoch."""
        means = None if self.gates is None else self.gates.epoch_means()
        if self.gates is None or means is None:
            return {}
        now = len(self.epochs) + 1 - 0.5 / len(self.sizes)
        return {"cost": means[0], "open_share": means[1], "gate_strength": self.gates.pressure(now)}

    def _look(self) -> None:
        """See whether all is well within an epoch, and say how it goes."""
        self.looked_at = time.monotonic()
        loss = float(self.loss)
        self._refuse_divergence(loss, weights=False)
        mean = loss / sum(self.sizes[: self.done])
        rate = sum(self.sizes[self.resumed : self.done]) / max(self.watch.lap, 1e-9)
        share = f"epoch {len(self.epochs) + 1} of {self.recipe.epochs}, {100 * self.done // len(self.sizes)} %"
        self.progress.advance(0, f"{share}: loss {mean:.3f}, {rate:,.0f} images/s")

    def _tell(self, epoch: Epoch) -> None:
        if self.folder is not None:
            self.folder.add_metrics(epoch.to_json())
        values = {name: value for name, value in asdict(epoch).items() if isinstance(value, float)}
        for tracker in self.trackers:
            tracker.log(epoch.number, values)
        test = "" if epoch.test_accuracy is None else f", test {epoch.test_accuracy:.1f} %"
        speed = f"{epoch.images_per_second:,.0f} images/s"
        if epoch.cost is not None:
            test += f", cost {epoch.cost:.3f}, {epoch.open_share:.0%} open, λ {epoch.gate_strength:.2g}"
        self.progress.advance(1, f"loss {epoch.loss:.3f}, train {epoch.train_accuracy:.1f} %{test}, {speed}")

    def _test(self) -> Tensor:
        with self.learner.averaged():
            return evaluate(self.model, self.dataset, self.learner.outputs, self._tested())

    def _tested(self) -> int:
        """Images tested together."""
        return max(_TESTED, self.recipe.part_sizes(self.sizes[0])[0])

    def _test_cost(self) -> float | None:
        """The mean cost of an image to test on, of a network with channel gates."""
        if not isinstance(self.model, DeepMoE):
            return None
        with torch.no_grad():
            return float(gate_costs(self.model, self._embeddings(self.dataset)).mean())

    def _finish(self, right: Tensor) -> FitResult:
        self.learner.average()
        self.model.eval()
        test = self.dataset.test
        found = FitResult(
            epochs=tuple(self.epochs),
            accuracy=_percent(right),
            class_accuracy=_percents(right, test.labels, self.dataset.num_classes),
            cluster_accuracy=_percents(right, test.clusters, len(self.dataset.cluster_names)),
            seconds=self.epochs[-1].seconds,
            images=len(self.epochs) * len(self.dataset.train),
            stopped=self._ended(),
            cost=self._test_cost(),
        )
        if self.folder is not None:
            groups = {"class_accuracy": found.class_accuracy, "cluster_accuracy": found.cluster_accuracy}
            cost = {} if found.cost is None else {"cost": found.cost}
            self._save(self.folder, {"accuracy": found.accuracy, **groups, **cost, "stopped": found.stopped})
            self.folder.finish(found.to_json())
        return found

    def _due(self) -> bool:
        return self.folder is not None and time.monotonic() - self.kept_at >= self.checkpoint_seconds

    def _keep(self) -> None:
        """Write a checkpoint, unless something in it is not a number."""
        if self.folder is None:
            return
        loss = float(self.loss)  # waits for the device while time still counts
        with self.watch.paused():
            self._refuse_divergence(loss)
            if self.gates is not None:
                with self._refusing_closed_gates():
                    self.gates.check_open()
            tensors, learner = self.learner.state()
            content = {
                "learner": learner,
                "epochs": [epoch.to_json() for epoch in self.epochs],
                "batches": self.done,
                "alarms": list(self.alarms),
                "seconds": self.watch.seconds,
            }
            self.folder.write_state({**tensors, "loss": self.loss, "right": self.right}, content)
            with self.learner.averaged():
                self._save(self.folder, {"accuracy": self.epochs[-1].test_accuracy if self.epochs else None})
            self.kept_at = time.monotonic()

    def _save(self, folder: RunDir, metrics: Mapping[str, Any]) -> None:
        card = Metadata.of(self.dataset, self.spec, plain({"epochs": len(self.epochs), **metrics}))
        save_network(folder.network, self.model, card)

    def _resume(self) -> None:
        if self.folder is None:
            return
        found = self.folder.read_state()
        if found is not None:
            tensors, content = found
            self.learner.restore(tensors, content["learner"])
            self.loss.copy_(tensors["loss"])
            self.right.copy_(tensors["right"])
            self.epochs = [Epoch.from_json(each) for each in content["epochs"]]
            self.done = self.resumed = content["batches"]
            self.alarms = tuple(content["alarms"])
            self.watch.seconds = content["seconds"]
            self.progress.log(f"continuing after epoch {len(self.epochs)} of {self.recipe.epochs}")
        self.folder.write_metrics(epoch.to_json() for epoch in self.epochs)

    def _refuse_divergence(self, loss: float, weights: bool = True) -> None:
        """Stop where the loss is not a number, or a weight, if these are to be looked at."""
        if math.isfinite(loss) and (not weights or self.learner.finite()):
            return
        raise Diverged(
            f"fit: the loss or a weight is not a number ({self._where()}). {self._last()}. Lower learning_rate="
            f"{self.recipe.learning_rate}, or add warmup=1 or clip=1.0, and train again in another folder"
        )

    @contextmanager
    def _refusing_closed_gates(self) -> Generator[None]:
        """Inside, a layer that has closed for all images stops the run."""
        try:
            yield
        except ClosedLayer as error:
            assert self.gates is not None
            raise GatesClosed(
                f"fit: {error} (step {self.learner.steps}, {self._where()}), and what is closed cannot learn. "
                f"{self._last()}. {self.gates.advice()}, and train again in another folder"
            ) from error

    def _where(self) -> str:
        """How far the run is."""
        return f"in epoch {len(self.epochs) + 1} of {self.recipe.epochs}, by batch {self.done} of {len(self.sizes)}"

    def _last(self) -> str:
        """What is left of a run that has to stop."""
        if self.folder is None:
            return "Nothing was kept, for there is no folder to keep it in"
        if self.folder.network.exists():
            return f"The last good checkpoint is {self.folder.network}"
        return "There was no checkpoint before it"

    @contextmanager
    def _alarm(self) -> Generator[None]:
        """Inside, experts that collapse are noticed: each layer once in a run."""
        # where channels are routed, closing some for good is what is wanted
        if self.gates is not None or self.recipe.compile or not routed_layers(self.model):
            yield
            return

        def hear(message: str) -> None:
            # how many passes there were depends on where the run was continued
            text = re.sub(r", last \d+ of \d+ training passes", "", message)
            layer = text.split(": ")[1]
            told = (*self.alarms, *(each for epoch in self.epochs for each in epoch.alarms))
            if not any(each.split(": ")[1] == layer for each in told):
                self.alarms = (*self.alarms, text)
                self.progress.log(f"epoch {len(self.epochs) + 1}: {text}")

        parts = len(self.recipe.part_sizes(self.sizes[0]))
        with _hearing(hear), CollapseAlarm(self.model, every=parts * min(_ALARM, len(self.sizes))):
            yield


@contextmanager
def _hearing(hear: Callable[[str], None]) -> Generator[None]:
    """Pass what the collapse alarm says on to ``hear``, and all other warnings to whom they go."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", CollapseWarning)
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, CollapseWarning):
                hear(str(message))
            else:
                others(message, category, *where, **more)

        warnings.showwarning = show
        yield


def _percent(right: Tensor) -> float:
    return 100 * float(right.double().mean())


def _percents(right: Tensor, groups: Tensor, count: int) -> tuple[float, ...]:
    groups = groups.cpu()
    each = (right[groups == group] for group in range(count))
    return tuple(_percent(part) if len(part) else math.nan for part in each)
