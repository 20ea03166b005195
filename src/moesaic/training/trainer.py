"""The training loop: one run of `fit`, from its last checkpoint to its end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from moesaic.data.image_dataset import ImageDataset
from moesaic.files import as_json
from moesaic.insight.routing_average import LayerRouting
from moesaic.models.inspection import eval_mode
from moesaic.models.registry import ModelSpec
from moesaic.ops.global_batch import GlobalBatch
from moesaic.training.backbone_features import FeatureBatches, one_thread
from moesaic.training.batches import eval_batches, train_batches
from moesaic.training.callbacks import Callback
from moesaic.training.checkpoint import CheckpointError, Metadata, save_network
from moesaic.training.data_parallel import OneProcess
from moesaic.training.fit_result import Diverged, Epoch, FitResult, check_metrics
from moesaic.training.interruption import stop_requested, stoppable
from moesaic.training.progress import Progress
from moesaic.training.recipe import Recipe
from moesaic.training.run_dir import RunDir
from moesaic.training.step_graphs import DeviceGraphs, GraphPlan
from moesaic.training.trackers import Tracker
from moesaic.training.train_step import TrainStep
from moesaic.training.trainable_layers import eval_frozen
from moesaic.validated_json import refused_as

__all__ = ["Trainer", "evaluate"]

_LOG_SECONDS = 2.0
"""Seconds from one check of the loss within an epoch to the next."""
_CHECKPOINT_STEPS = 100
"""Within an epoch, checkpoints are written after multiples of so many steps; windows of the collapse alarm end then."""
_EVAL_BATCH_SIZE = 64
"""Samples per batch of a test, at least: more where training batches are larger."""


def evaluate(
    model: nn.Module,
    dataset: ImageDataset,
    outputs: Callable[[Tensor], Tensor] | None = None,
    batch_size: int = 256,
    on_batch: Callable[[Tensor, Tensor], None] | None = None,
) -> Tensor:
    """(B,) bool: which of the test images the model classifies correctly, in eval mode and on its device.

    Args:
        model: the network.
        dataset: its test images are used.
        outputs: computes the logits in another way than by calling the model.
        batch_size: samples per batch.
        on_batch: is called with the logits and the labels of each batch, in the order of the images.
    """
    device = next(model.parameters()).device
    correct: list[Tensor] = []
    with torch.no_grad(), eval_mode(model):
        for x, labels in eval_batches(dataset, device, batch_size):
            logits = (outputs or model)(x)
            correct.append(logits.argmax(1) == labels)
            if on_batch is not None:
                on_batch(logits, labels)
    return torch.cat(correct).cpu()


@dataclass
class Trainer:
    """The state of a training run; callbacks get it in every hook."""

    model: nn.Module
    dataset: ImageDataset
    recipe: Recipe
    seed: int
    device: torch.device
    run_dir: RunDir | None
    spec: ModelSpec | None
    progress: Progress
    trackers: Sequence[Tracker]
    eval_every: int
    checkpoint_seconds: float
    callbacks: Sequence[Callback] = ()
    test_features: bool = False
    parallel: OneProcess = field(default_factory=OneProcess)
    """How steps are shared with other processes."""
    graphs: DeviceGraphs | None = None
    """Records and replays steps; None: they run eagerly."""

    def __post_init__(self) -> None:
        self.batch_sizes = self.recipe.batch_sizes(len(self.dataset.train))
        """Samples of each batch of an epoch."""
        self.checkpoint_steps = _CHECKPOINT_STEPS
        self.eval_batch_size = max(_EVAL_BATCH_SIZE, self.recipe.micro_batch_sizes(self.batch_sizes[0])[0])
        forwards = (callback.train_forward(self.model) for callback in self.callbacks)
        forward = next((forward for forward in forwards if forward is not None), None)
        self._features: FeatureBatches | None = None
        if self.dataset.backbone and self.recipe.trainable == "head":
            self._features = FeatureBatches.of(self.model, self.dataset)
            forward = self._features.logits
        self.train_step = TrainStep(
            self.model,
            self.recipe,
            self.device,
            self.dataset.num_classes,
            forward,
            self._extra_loss,
            self.parallel,
            None if self.graphs is None else GraphPlan(self.graphs, self.callbacks, self.progress.log),
        )
        self.epochs: list[Epoch] = []
        """Complete epochs."""
        self._stopwatch = _Stopwatch()
        # of the epoch in progress: steps done, and those among them done before a resume; loss and correct
        # classifications summed over its images; warnings
        self._done = self._resumed = 0
        self._loss = torch.zeros((), device=self.device)
        self._correct = torch.zeros((), dtype=torch.int64, device=self.device)
        self._alarms: tuple[str, ...] = ()
        self._logged_at = self._saved_at = time.monotonic()

    def train(self) -> FitResult:
        """Train to the end."""
        with ExitStack() as stack:
            stack.callback(self.train_step.release_graphs)
            for callback in self.callbacks:
                stack.callback(callback.on_fit_end, self)
                callback.on_fit_start(self)
            self._resume()
            self.progress.skip(len(self.epochs))
            correct = None
            if self.run_dir is not None:
                stack.enter_context(stoppable())
            while not self._stop_reason():
                correct = self._train_epoch()
            assert correct is not None, "the last epoch is tested, and no checkpoint is written after it"
            return self._finish(correct)

    # for callbacks

    @property
    def global_batch(self) -> GlobalBatch | None:
        """The batch whose samples are spread over processes; None in one process."""
        return None if self.parallel.ranks is None else self.parallel.ranks.batch

    @property
    def batches_done(self) -> int:
        """Batches of the epoch in progress that are done."""
        return self._done

    def full_weights(self) -> AbstractContextManager[None]:
        """Returns a context in which modules of the model can be called one by one, also if weights are sharded."""
        return self.parallel.full_weights(self.model)

    def warn(self, message: str) -> None:
        """Report a message to the user now, and among the alarms of the epoch."""
        self._alarms = (*self._alarms, message)
        self.progress.log(f"epoch {len(self.epochs) + 1}: {message}")

    def position(self) -> str:
        """The epoch and batch in progress, for messages."""
        steps = f"by batch {self._done} of {len(self.batch_sizes)}"
        return f"in epoch {len(self.epochs) + 1} of {self.recipe.epochs}, {steps}"

    def last_checkpoint(self) -> str:
        """A sentence on the last checkpoint, for the message of a run that has to stop."""
        if self.run_dir is None:
            return "Nothing was saved, because the run has no folder"
        if self.run_dir.network.exists():
            return f"The last good checkpoint is {self.run_dir.network}"
        return "There was no checkpoint before it"

    def last_epoch_time(self) -> float:
        """The time of the last step of the epoch in progress, in epochs."""
        return len(self.epochs) + 1 - 0.5 / len(self.batch_sizes)

    # the loop

    def _stop_reason(self) -> str:
        """Returns why training is over; empty while it is not."""
        may_stop = self.recipe.stop_at_zero_error and all(callback.may_stop() for callback in self.callbacks)
        if may_stop and self.epochs and self.epochs[-1].train_accuracy == 100:
            return "zero training error"
        return "all epochs" if len(self.epochs) >= self.recipe.epochs else ""

    def _train_epoch(self) -> Tensor | None:
        """Train for an epoch, or the rest of one; returns which test images are correct, if it was tested."""
        before = self._stopwatch.seconds
        self._run_steps()
        loss = float(self._loss)  # waits for the device, so that the time is that of all steps
        seconds = self._stopwatch.stop()
        self._refuse_divergence(loss)
        images = sum(self.batch_sizes)
        metrics: dict[str, float] = {}
        routing: dict[str, LayerRouting] = {}
        for callback in self.callbacks:
            of_callback = callback.on_epoch_end(self)
            check_metrics(callback.name, of_callback, Epoch)
            metrics |= of_callback
            routing |= callback.epoch_routing(self)
        epoch = Epoch(
            number=len(self.epochs) + 1,
            loss=loss / images,
            train_accuracy=100 * int(self._correct) / images,
            test_accuracy=None,
            seconds=seconds,
            images_per_second=sum(self.batch_sizes[self._resumed :]) / max(seconds - before, 1e-9),
            lr=self.recipe.lr_at(self.last_epoch_time()),
            alarms=self._alarms,
            metrics=metrics,
            routing=routing,
        )
        self.epochs.append(epoch)
        correct = None
        if self._stop_reason():
            for callback in self.callbacks:
                callback.on_train_end(self)
        if self._stop_reason() or epoch.number % self.eval_every == 0:
            correct = self._test()
            self.epochs[-1] = epoch = replace(epoch, test_accuracy=_percent(correct))
        self._done, self._resumed, self._alarms = 0, 0, ()
        self._loss.zero_()
        self._correct.zero_()
        self._log_epoch(epoch)
        if self._stop_reason():
            self.progress.skip(self.recipe.epochs - epoch.number)
            return correct
        stop, due = self._agree(stop_requested(), self._checkpoint_due())
        if epoch.number == 1 or due or stop:
            self._write_checkpoint()
        if stop:
            raise KeyboardInterrupt
        return correct

    def _agree(self, *flags: bool) -> tuple[bool, ...]:
        """Returns flags that are the same on all ranks: set where they are on any."""
        return flags if self.parallel.ranks is None else self.parallel.ranks.any(*flags)

    def _run_steps(self) -> None:
        self.model.train()
        if self.recipe.trainable != "all":
            eval_frozen(self.model)
        for callback in self.callbacks:
            callback.on_epoch_start(self)
        number, steps = len(self.epochs), len(self.batch_sizes)
        source = self.dataset if self._features is None else self._features.dataset
        parts = None if self.parallel.ranks is None else self.train_step.parts
        batches = train_batches(source, self.batch_sizes, self.seed, number, self.device, self._done, parts)
        with ExitStack() as stack:
            if self._features is not None:
                stack.enter_context(one_thread())
            for callback in self.callbacks:
                stack.enter_context(callback.epoch_context(self))
            self._stopwatch.start()
            for x, labels in batches:
                epoch = number + (self._done + 0.5) / steps
                self.train_step.set_learning_rates(epoch)
                for callback in self.callbacks:
                    callback.on_step_start(self, epoch)
                samples = self.batch_sizes[self._done]
                loss, correct = self.train_step.step(x, labels, epoch, samples)
                self._loss += loss * samples
                self._correct += correct
                self._done += 1
                for callback in self.callbacks:
                    callback.on_step_end(self, epoch, loss)
                if time.monotonic() - self._logged_at >= _LOG_SECONDS:
                    self._log_step()
                due = self._done % self.checkpoint_steps == 0 and self._checkpoint_due()
                stop, due = self._agree(stop_requested(), due)
                if self._done < steps and (stop or due):
                    self._write_checkpoint()
                if self._done < steps and stop:
                    raise KeyboardInterrupt

    def _extra_loss(self, output: Any, x: Tensor, labels: Tensor, epoch: float) -> Tensor | float:
        total: Tensor | float = 0.0
        for callback in self.callbacks:
            total = total + callback.extra_loss(self, output, x, labels, epoch)
        return total

    def _log_step(self) -> None:
        """Check the loss within an epoch, and report the progress."""
        self._logged_at = time.monotonic()
        loss = float(self._loss)
        self._refuse_divergence(loss, weights=False)
        mean = loss / sum(self.batch_sizes[: self._done])
        rate = sum(self.batch_sizes[self._resumed : self._done]) / max(self._stopwatch.lap, 1e-9)
        percent = 100 * self._done // len(self.batch_sizes)
        share = f"epoch {len(self.epochs) + 1} of {self.recipe.epochs}, {percent} %"
        self.progress.advance(0, f"{share}: loss {mean:.3f}, {rate:,.0f} images/s")

    def _log_epoch(self, epoch: Epoch) -> None:
        if self.run_dir is not None:
            self.run_dir.add_metrics(epoch.to_json())
        values = {name: value for name, value in asdict(epoch).items() if isinstance(value, float)}
        for tracker in self.trackers:
            tracker.log(epoch.number, {**values, **epoch.metrics})
        test = "" if epoch.test_accuracy is None else f", test {epoch.test_accuracy:.1f} %"
        more = "".join(f", {name} {value:.3g}" for name, value in epoch.metrics.items())
        speed = f"{epoch.images_per_second:,.0f} images/s"
        self.progress.advance(1, f"loss {epoch.loss:.3f}, train {epoch.train_accuracy:.1f} %{test}{more}, {speed}")

    def _test(self) -> Tensor:
        """Returns which test images are correct; the final test runs the whole network, unless ``test_features``."""

        def on_batch(logits: Tensor, labels: Tensor) -> None:
            for callback in self.callbacks:
                callback.on_test_batch(self, logits, labels)

        with self.train_step.ema_weights():
            if self._features is not None and (self.test_features or not self._stop_reason()):
                with self.train_step.autocast(), one_thread():
                    correct = self._evaluate(self._features.dataset, self._features.logits, on_batch)
            else:
                correct = self._evaluate(self.dataset, self.train_step.outputs, on_batch)
        for callback in self.callbacks:
            callback.on_test_end(self)
        return correct

    def _evaluate(
        self,
        dataset: ImageDataset,
        outputs: Callable[[Tensor], Tensor],
        on_batch: Callable[[Tensor, Tensor], None],
    ) -> Tensor:
        ranks = self.parallel.ranks
        if ranks is None:
            return evaluate(self.model, dataset, outputs, self.eval_batch_size, on_batch)
        correct: list[Tensor] = []
        remaining, size = len(dataset.test), self.eval_batch_size
        with torch.no_grad(), eval_mode(self.model):
            for x, labels in eval_batches(dataset, self.device, size, part=self.parallel.share):
                with self.parallel.part(min(size, remaining), last=False):
                    logits = outputs(x)
                remaining -= size
                logits, labels = ranks.batch.gather(logits), ranks.batch.gather(labels)
                correct.append(logits.argmax(1) == labels)
                on_batch(logits, labels)
        return torch.cat(correct).cpu()

    def _finish(self, correct: Tensor) -> FitResult:
        self.train_step.load_ema()
        self.model.eval()
        metrics: dict[str, float] = {}
        for callback in self.callbacks:
            of_callback = callback.final_metrics(self)
            check_metrics(callback.name, of_callback, FitResult)
            metrics |= of_callback
        test = self.dataset.test
        result = FitResult(
            epochs=tuple(self.epochs),
            accuracy=_percent(correct),
            class_accuracy=_percents(correct, test.labels, self.dataset.num_classes),
            cluster_accuracy=_percents(correct, test.clusters, len(self.dataset.cluster_names)),
            seconds=self.epochs[-1].seconds,
            images=len(self.epochs) * sum(self.batch_sizes),
            stopped=self._stop_reason(),
            metrics=metrics,
        )
        if self.run_dir is not None:
            groups = {"class_accuracy": result.class_accuracy, "cluster_accuracy": result.cluster_accuracy}
            self._save(self.run_dir, {"accuracy": result.accuracy, **groups, **metrics, "stopped": result.stopped})
            self.run_dir.finish(result.to_json())
        return result

    # checkpoints

    def _checkpoint_due(self) -> bool:
        return self.run_dir is not None and time.monotonic() - self._saved_at >= self.checkpoint_seconds

    def _write_checkpoint(self) -> None:
        """Write a checkpoint, unless something in it is not a number."""
        if self.run_dir is None:
            return
        loss = float(self._loss)  # waits for the device while the stopwatch runs
        with self._stopwatch.paused():
            self._refuse_divergence(loss)
            for callback in self.callbacks:
                callback.on_checkpoint(self)
            tensors, train_step = self.train_step.state()
            states: dict[str, dict[str, Any]] = {}
            for callback in self.callbacks:
                state = callback.state_dict()
                of_callback = {name: value for name, value in state.items() if isinstance(value, Tensor)}
                tensors |= {f"callback.{callback.name}.{name}": tensor for name, tensor in of_callback.items()}
                states[callback.name] = {name: value for name, value in state.items() if name not in of_callback}
            content = {
                "train_step": train_step,
                "callbacks": states,
                "epochs": [epoch.to_json() for epoch in self.epochs],
                "batches": self._done,
                "alarms": list(self._alarms),
                "seconds": self._stopwatch.seconds,
            }
            self.run_dir.write_state({**tensors, "loss": self._loss, "correct": self._correct}, content)
            with self.train_step.ema_weights():
                self._save(self.run_dir, {"accuracy": self.epochs[-1].test_accuracy if self.epochs else None})
            self._saved_at = time.monotonic()

    def _save(self, run_dir: RunDir, metrics: Mapping[str, Any]) -> None:
        self.save_network(run_dir.network, {"epochs": len(self.epochs), **metrics})

    def save_network(self, path: Path, metrics: Mapping[str, Any]) -> None:
        """Write the network as it is now to a file; of several ranks, all call this and the first one writes."""
        weights = self.parallel.gathered(cast("Mapping[str, Tensor]", self.model.state_dict()))
        if self.run_dir is None or self.run_dir.writes:
            path.parent.mkdir(exist_ok=True)
            save_network(path, weights, Metadata.of(self.dataset, self.spec, as_json(dict(metrics))))

    def _resume(self) -> None:
        if self.run_dir is None:
            return
        state = self.run_dir.read_state()
        if state is not None:
            with refused_as(f"fit: {self.run_dir.state} is of another run, or damaged", CheckpointError):
                self._restore(*state)
            self.progress.log(f"continuing after epoch {len(self.epochs)} of {self.recipe.epochs}")
            if (threads := self.run_dir.other_threads) is not None:
                self.progress.log(
                    f"the run began with {threads} CPU threads and continues with {torch.get_num_threads()}: its "
                    f"result may differ from one with a single count; OMP_NUM_THREADS={threads} keeps it the same"
                )
        self.run_dir.write_metrics(epoch.to_json() for epoch in self.epochs)

    def _restore(self, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
        self.train_step.restore(tensors, content["train_step"])
        for callback in self.callbacks:
            if callback.name in content["callbacks"]:
                stem = f"callback.{callback.name}."
                state = {name.removeprefix(stem): tensors[name] for name in tensors if name.startswith(stem)}
                callback.load_state_dict({**content["callbacks"][callback.name], **state})
        self._loss.copy_(tensors["loss"])
        self._correct.copy_(tensors["correct"])
        self.epochs = [Epoch.from_json(epoch) for epoch in content["epochs"]]
        self._done = self._resumed = content["batches"]
        self._alarms = tuple(content["alarms"])
        self._stopwatch.seconds = content["seconds"]

    def _refuse_divergence(self, loss: float, weights: bool = True) -> None:
        """Stop where the loss is not a number, or a weight, if these are to be checked."""
        if math.isfinite(loss) and (not weights or self.train_step.finite()):
            return
        raise Diverged(
            f"fit: the loss or a weight is not a number ({self.position()}). {self.last_checkpoint()}. Lower "
            f"lr={self.recipe.lr}, or add warmup_epochs=1 or clip_grad=1.0, and train again in another folder"
        )


class _Stopwatch:
    """Counts seconds of work, without interruptions.

    >>> watch = _Stopwatch()
    >>> watch.start()
    >>> with watch.paused():
    ...     before = watch.lap
    ...     unchanged = watch.lap == before
    >>> unchanged, watch.stop() > 0
    (True, True)
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """Up to the last stop."""
        self._since: float | None = None
        self._start = 0.0

    def start(self) -> None:
        self._start = self.seconds
        self._since = time.perf_counter()

    def stop(self) -> float:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
        self._since = None
        return self.seconds

    @contextmanager
    def paused(self) -> Generator[None]:
        """Inside, no time is counted."""
        was_running = self._since is not None
        self.stop()
        yield
        if was_running:
            self._since = time.perf_counter()

    @property
    def lap(self) -> float:
        """Seconds since it was started."""
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self.seconds - self._start + running


def _percent(correct: Tensor) -> float:
    return 100 * float(correct.double().mean())


def _percents(correct: Tensor, groups: Tensor, count: int) -> tuple[float, ...]:
    groups = groups.cpu()
    parts = (correct[groups == group] for group in range(count))
    return tuple(_percent(part) if len(part) else math.nan for part in parts)
