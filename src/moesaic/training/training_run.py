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

from moesaic.data.image_tasks import ImageTask
from moesaic.insight.alarm import CollapseAlarm, CollapseWarning
from moesaic.layers.routed import routed_layers
from moesaic.models.registry import ModelSpec
from moesaic.training.batches import varied_batches, viewed_batches
from moesaic.training.checkpoints import Card, save_network
from moesaic.training.learner import Learner
from moesaic.training.outcomes import Epoch, Fit, plain
from moesaic.training.progress import Progress
from moesaic.training.recipe import Recipe
from moesaic.training.run_folder import RunFolder
from moesaic.training.stopwatch import Stopwatch
from moesaic.training.trackers import Tracker

__all__ = ["Diverged", "TrainingRun", "evaluate"]

_LOOK = 2.0
"""Seconds between two looks at the loss within an epoch."""
_ALARM = 100
"""Batches after which the collapse alarm looks; within an epoch checkpoints are written then, when it holds nothing."""
_TESTED = 64
"""Images tested together, at least: more where the network is trained on more."""


class Diverged(ArithmeticError):
    """The loss, or a weight, is no longer a number."""


def evaluate(
    model: nn.Module, task: ImageTask, outputs: Callable[[Tensor], Tensor] | None = None, size: int = 256
) -> Tensor:
    """(B,) bool: which of the images to test on the model gets right, in eval mode and where it is.

    ``outputs`` computes in another way than by calling the model, and ``size`` images are tested together.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            right = [(outputs or model)(x).argmax(1) == labels for x, labels in viewed_batches(task, device, size)]
    finally:
        model.train(was_training)
    return torch.cat(right).cpu()


@dataclass
class TrainingRun:
    """One training, from wherever its last checkpoint is to its end."""

    model: nn.Module
    task: ImageTask
    recipe: Recipe
    seed: int
    device: torch.device
    folder: RunFolder | None
    spec: ModelSpec | None
    progress: Progress
    trackers: Sequence[Tracker]
    test_every: int
    checkpoint_seconds: float

    def __post_init__(self) -> None:
        self.learner = Learner(self.model, self.recipe, self.device, self.task.labels)
        self.sizes = self.recipe.batch_sizes(len(self.task.train))
        self.watch = Stopwatch()
        self.epochs: list[Epoch] = []
        # of the epoch in progress: batches done, and those among them done before this call; loss and right answers
        # summed over its images; what the alarm said
        self.done = self.resumed = 0
        self.loss = torch.zeros((), device=self.device)
        self.right = torch.zeros((), dtype=torch.int64, device=self.device)
        self.alarms: tuple[str, ...] = ()
        self.looked_at = self.kept_at = time.monotonic()

    def train(self) -> Fit:
        """Train to the end."""
        self._resume()
        self.progress.advance(len(self.epochs))
        right = None
        while not self._ended():
            right = self._epoch()
        assert right is not None, "the last epoch is tested, and no checkpoint is written after it"
        return self._finish(right)

    def _ended(self) -> str:
        if self.recipe.stop_at_zero_error and self.epochs and self.epochs[-1].train_accuracy == 100:
            return "zero training error"
        return "all epochs" if len(self.epochs) >= self.recipe.epochs else ""

    def _epoch(self) -> Tensor | None:
        """Train for an epoch, or what is left of it; which test images are right, where it was tested."""
        before = self.watch.seconds
        self._steps()
        loss = float(self.loss)  # waits for the device, so that the time is that of all steps
        seconds = self.watch.stop()
        self._refuse_divergence(loss)
        images = len(self.task.train)
        epoch = Epoch(
            number=len(self.epochs) + 1,
            loss=loss / images,
            train_accuracy=100 * int(self.right) / images,
            test_accuracy=None,
            seconds=seconds,
            images_per_second=sum(self.sizes[self.resumed :]) / max(seconds - before, 1e-9),
            learning_rate=self.recipe.rate(len(self.epochs) + 1 - 0.5 / len(self.sizes)),
            alarms=self.alarms,
        )
        self.epochs.append(epoch)
        right = None
        if self._ended() or epoch.number % self.test_every == 0:
            right = self._test()
            self.epochs[-1] = epoch = replace(epoch, test_accuracy=_percent(right))
        self.done, self.resumed, self.alarms = 0, 0, ()
        self.loss.zero_()
        self.right.zero_()
        self._tell(epoch)
        if self._ended():
            self.progress.advance(self.recipe.epochs - epoch.number)
        elif epoch.number == 1 or self._due():
            self._keep()
        return right

    def _steps(self) -> None:
        self.model.train()
        epoch = len(self.epochs)
        batches = varied_batches(self.task, self.sizes, self.seed, epoch, self.device, skip=self.done)
        with self.learner.watching(), self._alarm():
            self.watch.start()
            for x, labels in batches:
                loss, right = self.learner.step(x, labels, epoch + (self.done + 0.5) / len(self.sizes))
                self.loss += loss * len(x)
                self.right += right
                self.done += 1
                if time.monotonic() - self.looked_at >= _LOOK:
                    self._look()
                if self.done % _ALARM == 0 and self.done < len(self.sizes) and self._due():
                    self._keep()

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
        self.progress.advance(1, f"loss {epoch.loss:.3f}, train {epoch.train_accuracy:.1f} %{test}, {speed}")

    def _test(self) -> Tensor:
        size = max(_TESTED, self.recipe.part_sizes(self.sizes[0])[0])
        with self.learner.averaged():
            return evaluate(self.model, self.task, self.learner.outputs, size)

    def _finish(self, right: Tensor) -> Fit:
        self.learner.average()
        self.model.eval()
        test = self.task.test
        found = Fit(
            epochs=tuple(self.epochs),
            accuracy=_percent(right),
            class_accuracy=_percents(right, test.labels, self.task.labels),
            cluster_accuracy=_percents(right, test.clusters, len(self.task.cluster_names)),
            seconds=self.epochs[-1].seconds,
            images=len(self.epochs) * len(self.task.train),
            stopped=self._ended(),
        )
        if self.folder is not None:
            groups = {"class_accuracy": found.class_accuracy, "cluster_accuracy": found.cluster_accuracy}
            self._save(self.folder, {"accuracy": found.accuracy, **groups, "stopped": found.stopped})
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

    def _save(self, folder: RunFolder, metrics: Mapping[str, Any]) -> None:
        card = Card.of(self.task, self.spec, plain({"epochs": len(self.epochs), **metrics}))
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
        where = f"in epoch {len(self.epochs) + 1} of {self.recipe.epochs}, by batch {self.done} of {len(self.sizes)}"
        if self.folder is None:
            last = "Nothing was kept, for there is no folder to keep it in"
        elif self.folder.network.exists():
            last = f"The last good checkpoint is {self.folder.network}"
        else:
            last = "There was no checkpoint before it"
        raise Diverged(
            f"fit: the loss or a weight is not a number ({where}). {last}. Lower learning_rate="
            f"{self.recipe.learning_rate}, or add warmup=1 or clip=1.0, and train again in another folder"
        )

    @contextmanager
    def _alarm(self) -> Generator[None]:
        """Inside, experts that collapse are noticed: each layer once in a run."""
        if self.recipe.compile or not routed_layers(self.model):
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
