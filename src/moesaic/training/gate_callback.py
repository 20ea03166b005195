"""Trains the channel gates of a DeepMoE network inside `fit`: `GateTraining` as a callback."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moesaic.insight.channel_metrics import gate_dependence
from moesaic.models.deepmoe.embedding_network import ConstantEmbedding
from moesaic.models.deepmoe.network import DeepMoE, DeepMoEOutput
from moesaic.models.inspection import eval_mode
from moesaic.training.batches import eval_batches
from moesaic.training.callbacks import Callback
from moesaic.training.fit_result import Diverged
from moesaic.training.gate_training import ClosedLayer, GateTraining

if TYPE_CHECKING:
    from moesaic.data.image_dataset import ImageDataset
    from moesaic.training.trainer import Trainer

__all__ = ["GateCallback", "GatesClosed"]

_CALIBRATION_IMAGES = 1024
"""Training images, at most, on which gates are shifted to meet a cost."""


class GatesClosed(Diverged):
    """All channel gates of a layer are closed, for all images."""


class GateCallback(Callback):
    """The two stages of Wang et al. 2019: gates learn under an L1 penalty, then they are frozen.

    Args:
        model: the network whose gates are trained.
        teacher: a trained network to distil from, in eval mode and on the model's device.
    """

    capturable = True
    gates: GateTraining
    """The state of the gates' training; there is one from ``on_fit_start`` on."""

    def __init__(self, model: DeepMoE, teacher: nn.Module | None = None) -> None:
        self._model = model
        self._teacher = teacher

    def train_forward(self, model: nn.Module) -> Callable[[Tensor], DeepMoEOutput]:
        """Training needs the gates and the embedding's own logits besides the network's."""
        return self._model.forward_with_routing

    def on_fit_start(self, trainer: Trainer) -> None:
        """Prepares the gates."""
        steps = len(trainer.batch_sizes)
        self.gates = GateTraining(
            self._model, trainer.recipe, steps, trainer.device, self._teacher, trainer.global_batch
        )

    def on_fit_end(self, trainer: Trainer) -> None:
        """Leaves the network as it came, apart from its weights."""
        if hasattr(self, "gates"):  # not where preparing them failed
            self.gates.restore_model()

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Frozen gates stay in eval mode."""
        self.gates.set_mode()

    def on_step_start(self, trainer: Trainer, epoch: float) -> None:
        """Freezes the gates when the joint stage is over, and sets what changes from step to step."""
        if self.gates.joint_stage_over(epoch):
            self._freeze(trainer)
        self.gates.begin_step(trainer.train_step.steps, epoch)

    def graph_key(self) -> tuple[bool, bool]:
        """The stage, and whether the gates of the step are observed."""
        return self.gates.joint, self.gates.observing

    def step_tensors(self) -> Mapping[str, Tensor]:
        return self.gates.step_tensors()

    def extra_loss(self, trainer: Trainer, output: DeepMoEOutput, x: Tensor, labels: Tensor, epoch: float) -> Tensor:
        """The L1 penalty, the embedding's own cross-entropy and the distance to the teacher."""
        with trainer.train_step.autocast():
            teacher_logits = self.gates.teacher_logits(x)
        self.gates.observe(output.routing)
        return self.gates.loss(output, labels, teacher_logits)

    def on_step_end(self, trainer: Trainer, epoch: float, loss: Tensor) -> None:
        """Adapts λ and biases, relieves layers that are nearly closed, and stops where one has closed."""
        last = trainer.train_step.parts(trainer.batch_sizes[trainer.batches_done - 1])[-1]
        with self._stop_if_closed(trainer):
            messages = self.gates.update(trainer.train_step.steps, epoch, last.stop - last.start)
        for message in messages:
            trainer.warn(message)

    def on_epoch_end(self, trainer: Trainer) -> Mapping[str, float]:
        """Cost and share of open gates in the epoch, and λ at its last step."""
        means = self.gates.epoch_means()
        if means is None:
            return {}
        return {"cost": means[0], "open_share": means[1], "gate_l1": self.gates.l1_weight_at(trainer.last_epoch_time())}

    def on_checkpoint(self, trainer: Trainer) -> None:
        """No checkpoint is written of a network with a closed layer."""
        with self._stop_if_closed(trainer):
            self.gates.check_open()

    def may_stop(self) -> bool:
        """Not while gates learn: they have not come to their cost."""
        return not self.gates.joint

    def on_train_end(self, trainer: Trainer) -> None:
        """Freezes gates that learned to the end."""
        if self.gates.joint:
            self._freeze(trainer)

    def final_metrics(self, trainer: Trainer) -> Mapping[str, float]:
        """The mean cost of a test image, the embedding's own accuracy, and how much gates differ between images.

        ``gates_differing`` is the share of gates in which two images differ, ``gate_entropy`` the mean entropy of a
        gate in bits (`moesaic.insight.channel_metrics.gate_dependence`).
        """
        dataset, model = trainer.dataset, self._model
        embeddings, logits = self._embedded(trainer, dataset)
        with torch.no_grad(), trainer.full_weights():
            routing = {name: head(embeddings) for name, head in model.heads().items()}
        metrics = {"cost": float(model.macs(routing).double().mean()) / model.dense_macs}
        if not isinstance(model.embedding, ConstantEmbedding):
            correct = logits.argmax(1).cpu() == dataset.test.labels.cpu()
            metrics["embedding_accuracy"] = 100 * float(correct.double().mean())
        if len(embeddings) > 1:
            dependence = gate_dependence(routing, dataset.test.labels.cpu(), dataset.num_classes)
            metrics |= {"gates_differing": dependence.differing, "gate_entropy": dependence.entropy}
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return self.gates.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.gates.load_state_dict(state)

    def _freeze(self, trainer: Trainer) -> None:
        """Ends the joint stage; a target is met on training images."""
        target = self.gates.recipe.target_macs
        embeddings = None
        if target is not None:
            count = len(trainer.dataset.train)
            rows = torch.linspace(0, count - 1, min(count, _CALIBRATION_IMAGES)).long()
            embeddings, _ = self._embedded(trainer, replace(trainer.dataset, test=trainer.dataset.train), rows)
        cost = self.gates.freeze(embeddings, trainer.full_weights)
        frozen = (self._model.embedding, self._model.gates)
        trainer.train_step.reset_ema(tensor for part in frozen for tensor in (*part.parameters(), *part.buffers()))
        if cost is not None:
            trainer.progress.log(
                f"gates are frozen: {cost:.3f} of the dense network's multiply-adds, target {target:g}"
            )

    def _embedded(self, trainer: Trainer, dataset: ImageDataset, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Embeddings (n, D) of the test images, or of some of them, and the embedding's own logits, in eval mode."""
        network = self._model.embedding
        with torch.no_grad(), eval_mode(network), trainer.train_step.autocast(), trainer.full_weights():
            batches = eval_batches(dataset, trainer.device, trainer.eval_batch_size, rows)
            embeddings, logits = zip(*(network(x) for x, _ in batches), strict=True)
            return torch.cat(embeddings), torch.cat(logits)

    @contextmanager
    def _stop_if_closed(self, trainer: Trainer) -> Generator[None]:
        try:
            yield
        except ClosedLayer as error:
            raise GatesClosed(
                f"fit: {error} (step {trainer.train_step.steps}, {trainer.position()}), and what is closed cannot "
                f"learn. {trainer.last_checkpoint()}. {self.gates.advice()}, and train again in another folder"
            ) from error
