"""Callbacks: objects that take part in a training run of `fit`.

A callback can add to the loss, change the model or the learning rates between steps, report metrics, stop a run by
raising an error, and save state with the checkpoints. Channel gates (`gate_callback`), the balance loss, the collapse
alarm and the recorded routing are callbacks; `moesaic.training.fit.default_callbacks` chooses those of a model, and
``fit(..., callbacks=[...])`` adds your own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from moesaic.insight.collapse_alarm import CollapseAlarm, CollapseEvent
from moesaic.insight.routing_average import LayerRouting, RoutingSums
from moesaic.layers.recording import record_routing
from moesaic.routing import load_balance_loss

if TYPE_CHECKING:
    from collections.abc import Generator

    from moesaic.routing_record import Routing
    from moesaic.training.trainer import Trainer

__all__ = ["BalanceLossCallback", "Callback", "CollapseCallback", "RoutingCallback"]

_RECORDED_STEPS = 4
"""Steps of an epoch whose routing is recorded, at most: reading it takes about as long as a small routed layer."""


class Callback:
    """Base class of callbacks; every hook does nothing unless it is overridden.

    The hooks are called in this order: ``on_fit_start``, ``load_state_dict`` where a run is resumed; in each epoch
    ``on_epoch_start``, then for each step ``on_step_start``, ``extra_loss`` and ``on_step_end``, then
    ``on_epoch_end`` and ``epoch_routing``; in each test ``on_test_batch`` and ``on_test_end``; before the last test
    ``on_train_end``, after it ``final_metrics``; and ``on_fit_end`` whatever happens.

    On a GPU steps are replayed from CUDA graphs, without their Python code: ``extra_loss`` and hooks on layers are
    then not called. A callback that overrides ``train_forward``, ``on_epoch_start``, ``epoch_context``,
    ``on_step_start`` or ``extra_loss`` makes steps run eagerly, unless it is ``capturable``.

    >>> class WeightNorm(Callback):
    ...     def on_epoch_end(self, trainer):
    ...         return {"weight_norm": float(sum(weight.norm() for weight in trainer.model.parameters()))}
    """

    capturable: bool = False
    """Whether steps can be replayed from a CUDA graph: what the callback does within them is work on the device alone,
    changes tensors in place (`step_tensors`), and its Python code depends on nothing but `graph_key`."""

    @property
    def name(self) -> str:
        """The key of the callback's state in checkpoints; unique in a run."""
        return type(self).__name__

    def train_forward(self, model: nn.Module) -> Callable[[Tensor], Any] | None:
        """Returns a function that computes the outputs of training steps in place of ``model``, or None.

        Its output is the logits (B, classes), or an object that has them as ``logits``.
        """
        return None

    def on_fit_start(self, trainer: Trainer) -> None:
        """Called once before the first step; the model is on its device."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """Called when the run ends, also by an error."""

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Called before the steps of an epoch, or of the rest of one after a resume; the model is in training mode."""

    def epoch_context(self, trainer: Trainer) -> AbstractContextManager[object]:
        """Returns a context manager that is active during the steps of an epoch."""
        return nullcontext()

    def on_step_start(self, trainer: Trainer, epoch: float) -> None:
        """Called before a step, with the learning rates set; ``epoch`` counts epochs, with fractions."""

    def graph_key(self) -> Hashable:
        """Called after ``on_step_start``; returns what the Python code of the step depends on.

        Steps with equal keys share a CUDA graph.
        """
        return None

    def step_tensors(self) -> Mapping[str, Tensor]:
        """Returns the tensors that the callback changes within a step, by names of their own."""
        return {}

    def extra_loss(self, trainer: Trainer, output: Any, x: Tensor, labels: Tensor, epoch: float) -> Tensor | float:
        """Returns what is added to the cross-entropy of a micro-batch.

        In training on several processes ``x`` are the samples of this one, of which there may be none, and what is
        returned should be a mean over them.
        """
        return 0.0

    def on_step_end(self, trainer: Trainer, epoch: float, loss: Tensor) -> None:
        """Called after a step; ``loss`` is its mean cross-entropy, on the device."""

    def on_epoch_end(self, trainer: Trainer) -> Mapping[str, float]:
        """Called after the steps of an epoch and before its test; returns metrics of the epoch."""
        return {}

    def epoch_routing(self, trainer: Trainer) -> Mapping[str, LayerRouting]:
        """Called after ``on_epoch_end``; returns the routing of the epoch, by layer."""
        return {}

    def on_test_batch(self, trainer: Trainer, logits: Tensor, labels: Tensor) -> None:
        """Called for each batch of a test, in the order of the test images."""

    def on_test_end(self, trainer: Trainer) -> None:
        """Called after a test."""

    def on_checkpoint(self, trainer: Trainer) -> None:
        """Called before a checkpoint is written."""

    def may_stop(self) -> bool:
        """Returns whether training may stop before the last epoch, where the recipe asks for it."""
        return True

    def on_train_end(self, trainer: Trainer) -> None:
        """Called after the last step, before the final test."""

    def final_metrics(self, trainer: Trainer) -> Mapping[str, float]:
        """Returns metrics of the trained model, which is in eval mode and has its final weights."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Returns what the next step depends on: tensors, and values that JSON can represent."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned; called after ``on_fit_start`` where a run is resumed."""


class BalanceLossCallback(Callback):
    """Adds the load-balance loss of routed layers in which units choose, times ``recipe.balance_weight``."""

    capturable = True

    def __init__(self) -> None:
        self._routing: Mapping[str, Routing] = {}

    @contextmanager
    def epoch_context(self, trainer: Trainer) -> Generator[None]:
        """Records the routing of every forward pass."""
        with record_routing(trainer.model) as self._routing:
            yield

    def extra_loss(self, trainer: Trainer, output: Any, x: Tensor, labels: Tensor, epoch: float) -> Tensor | float:
        """The sum over layers; where experts choose, loads are equal anyway."""
        routings = self._routing.values()
        by_units = [routing for routing in routings if routing.chooser != "expert" and routing.unit != "channel"]
        batch = trainer.global_batch
        total = cast("Tensor | float", sum(load_balance_loss(routing, batch=batch) for routing in by_units))
        # of several processes each has a share of it, and what is returned will be weighted as a mean over samples
        per_sample = 1.0 if batch is None else batch.size / max(len(x), 1)
        return trainer.recipe.balance_weight * per_sample * total


class CollapseCallback(Callback):
    """Reports experts that collapse (`CollapseAlarm`), once for each layer in a run.

    Routing is counted on the device in every step, and read at the end of an epoch or of a hundred steps.
    """

    capturable = True

    def __init__(self) -> None:
        self._reported: list[str] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        """Makes one alarm for the run, whose counters keep their addresses."""

        def report(event: CollapseEvent) -> None:
            if event.layer not in self._reported:
                self._reported.append(event.layer)
                trainer.warn(event.message)

        self._alarm = CollapseAlarm(trainer.model, every=None, on_collapse=report, batch=trainer.global_batch)

    def epoch_context(self, trainer: Trainer) -> AbstractContextManager[object]:
        """Every epoch has windows of its own, so that none extends over a checkpoint."""
        self._alarm.clear()
        return self._alarm

    def step_tensors(self) -> Mapping[str, Tensor]:
        return self._alarm.tensors()

    def on_step_end(self, trainer: Trainer, epoch: float, loss: Tensor) -> None:
        """Checks what was counted, at the end of a window."""
        if trainer.batches_done % min(trainer.checkpoint_steps, len(trainer.batch_sizes)) == 0:
            self._alarm.check()

    def state_dict(self) -> dict[str, Any]:
        return {"reported": list(self._reported)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reported = list(state["reported"])


class RoutingCallback(Callback):
    """Records the mean routing of each epoch (`LayerRouting`) over a few of its training batches."""

    capturable = True

    def __init__(self) -> None:
        self._sums: dict[str, RoutingSums] = {}
        self._routing: Mapping[str, Routing] | None = None
        self._recording = ExitStack()

    def on_fit_start(self, trainer: Trainer) -> None:
        """Remembers where sums are restored to."""
        self._device = trainer.device

    @contextmanager
    def epoch_context(self, trainer: Trainer) -> Generator[None]:
        """Ends the recording also where a step fails."""
        with self._recording:
            yield

    def on_step_start(self, trainer: Trainer, epoch: float) -> None:
        """Records a few steps at equal distances, the same ones whether or not a run was resumed."""
        steps = len(trainer.batch_sizes)
        step, recorded = int(epoch % 1 * steps), min(_RECORDED_STEPS, steps)
        if step in {(2 * i + 1) * steps // (2 * recorded) for i in range(recorded)}:
            self._routing = self._recording.enter_context(record_routing(trainer.model))

    def graph_key(self) -> bool:
        """Whether the step is recorded."""
        return self._routing is not None

    def step_tensors(self) -> Mapping[str, Tensor]:
        return self._tensors()

    def extra_loss(self, trainer: Trainer, output: Any, x: Tensor, labels: Tensor, epoch: float) -> float:
        """Adds nothing to the loss: reads the routing of a micro-batch where its labels are known."""
        for name, routing in (self._routing or {}).items():
            if len(labels) == routing.batch:
                if name not in self._sums:
                    self._sums[name] = RoutingSums.empty(routing, trainer.dataset.num_classes)
                self._sums[name].add(routing, labels, trainer.global_batch)
        return 0.0

    def on_step_end(self, trainer: Trainer, epoch: float, loss: Tensor) -> None:
        """Ends the recording, so that other steps pay nothing."""
        self._routing = None
        self._recording.close()

    def epoch_routing(self, trainer: Trainer) -> Mapping[str, LayerRouting]:
        """The means of the epoch."""
        means = {name: sums.mean() for name, sums in self._sums.items() if sums.images}
        for sums in self._sums.values():
            sums.clear()
        return means

    def state_dict(self) -> dict[str, Any]:
        return {"choosers": {name: sums.chooser for name, sums in self._sums.items()}, **self._tensors()}

    def _tensors(self) -> dict[str, Tensor]:
        return {
            f"{kind}/{name}": tensor for name, sums in self._sums.items() for kind, tensor in sums.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums = {}
        for name, chooser in state["choosers"].items():
            tensors = {kind: state[f"{kind}/{name}"] for kind in ("sums", "class_load")}
            self._sums[name] = RoutingSums.from_state(chooser, tensors, self._device)
