"""Training steps: forward, backward, optimizers, EMA of the weights, loss scale, and their state for checkpoints.

The state is tensors and JSON, so that a resumed run goes on as if it had not been stopped. No step waits for the
device, except once where float16 has to. What changes from step to step is on the device where steps are replayed from
graphs (`step_graphs`): learning rates and the weight of the EMA.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.argument_checks import first_line
from moesaic.training.batches import split
from moesaic.training.data_parallel import OneProcess, assign, local
from moesaic.training.optimizers import build_optimizers, optimizer_state, restore_optimizers, set_learning_rate
from moesaic.training.recipe import Recipe
from moesaic.training.step_graphs import GraphPlan, StepGraphs

__all__ = ["CompileError", "TrainStep"]

T = TypeVar("T")

_torch: Any = torch  # torch does not type its _foreach functions


class CompileError(RuntimeError):
    """``torch.compile`` failed on the network."""


_ROUNDING_OF_DTYPE = {torch.bfloat16: 1e-2}
"""Rounding errors of a step in these dtypes, as a fraction of what it changes."""
_ROUNDING_OF_FLOAT32 = 1e-4
"""Rounding errors of a step without autocast, TF32 included, likewise."""

ExtraLoss = Callable[[Any, Tensor, Tensor, float], "Tensor | float"]
"""``extra_loss(output, x, labels, epoch)``: a loss that is added to the cross-entropy of a micro-batch."""


class TrainStep:
    """The training steps of a network by a recipe.

    Args:
        model: the network, on its device.
        recipe: the hyperparameters.
        device: the device.
        classes: number of classes.
        forward: computes the outputs of training in place of ``model``: logits, or an object that has ``logits``.
        extra_loss: computes a loss that is added to the cross-entropy.
        parallel: how a step is shared with other processes; by default it is not.
        graphs: how steps are recorded and replayed; by default they run eagerly.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        device: torch.device,
        classes: int,
        forward: Callable[[Tensor], Any] | None = None,
        extra_loss: ExtraLoss | None = None,
        parallel: OneProcess | None = None,
        graphs: GraphPlan | None = None,
    ) -> None:
        self.model = model
        self.parallel = parallel or OneProcess()
        """How a step is shared with other processes."""
        self.recipe = recipe
        self.device = device
        self.optimizers = build_optimizers(model, recipe, device, capturable=graphs is not None)
        """In each of their parameter groups, ``peak`` is the highest learning rate."""
        self.steps = 0
        """Steps taken so far."""
        self._classes = classes
        self._extra_loss = extra_loss
        self._autocast_dtype = recipe.autocast_dtype(device)
        self._train_forward: Callable[[Tensor], Any] = forward or model
        if recipe.compile:
            # batches have two sizes at most: a graph for each is compiled faster than one for all, and runs faster
            self._train_forward = torch.compile(self._train_forward, dynamic=False)
        self._eval_forward: Callable[[Tensor], Tensor] = self._train_forward if forward is None else model
        self._scaler = torch.amp.GradScaler(device.type, enabled=self._autocast_dtype is torch.float16)
        self._ema = None if recipe.ema_decay is None else [tensor.detach().clone() for tensor in self._averaged()]
        self._ema_weight = torch.zeros((), device=device)
        self.rounding = _ROUNDING_OF_DTYPE.get(self._autocast_dtype or torch.float32, _ROUNDING_OF_FLOAT32)
        """Rounding errors of a step, as a fraction of what it changes."""
        self._graphs = None if graphs is None else StepGraphs(graphs, self)
        self._modules, self._parameters = list(model.modules()), list(model.parameters())

    def set_learning_rates(self, epoch: float) -> None:
        """Set the learning rates of the schedule for a step at this time, counted in epochs."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                set_learning_rate(group, group["peak"] * self.recipe.lr_factor(epoch))

    def parts(self, samples: int) -> list[slice]:
        """Returns the parts of a batch of so many samples that this process computes, one for each micro-batch."""
        parts: list[slice] = []
        start = 0
        for size in self.recipe.micro_batch_sizes(samples):
            share = self.parallel.share(size)
            parts.append(slice(start + share.start, start + share.stop))
            start += size
        return parts

    def step(self, x: Tensor, labels: Tensor, epoch: float, samples: int | None = None) -> tuple[Tensor, Tensor]:
        """Train on a batch; returns its mean loss, and how many samples were classified correctly before the step.

        ``samples`` is the size of the whole batch where ``x`` has the `parts` of this process.
        """
        samples = len(x) if samples is None else samples
        if self._ema is not None and self.recipe.ema_decay is not None:
            self._ema_weight.fill_(1 - min(self.recipe.ema_decay, (2 + self.steps) / (11 + self.steps)))

        def compute(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            return self._compute(x, labels, epoch, samples)

        loss, correct = compute(x, labels) if self._graphs is None else self._graphs.run(compute, x, labels)
        self.steps += 1
        return loss, correct

    def _compute(self, x: Tensor, labels: Tensor, epoch: float, samples: int) -> tuple[Tensor, Tensor]:
        """The part of a step that a graph can replay: all its work on the device."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        sizes = self.recipe.micro_batch_sizes(samples)
        lengths = [part.stop - part.start for part in self.parts(samples)]
        total, correct = torch.zeros((), device=self.device), torch.zeros((), dtype=torch.int64, device=self.device)
        micro_batches = zip(sizes, split(x, lengths), split(labels, lengths), strict=True)
        for number, (size, images, targets) in enumerate(micro_batches, 1):
            with self.parallel.part(size, last=number == len(sizes)):
                loss, logits = self._backward(images, targets, epoch, size, samples)
            total += size / samples * loss.detach()
            correct += (logits.detach().argmax(1) == targets).sum()
        self.parallel.finish_gradients()
        if self.parallel.ranks is not None:
            total, correct = self.parallel.sum(torch.stack([total.double(), correct.double()])).unbind()
            total, correct = total.float(), correct.long()
        self._update()
        return total, correct

    def _backward(self, x: Tensor, labels: Tensor, epoch: float, size: int, samples: int) -> tuple[Tensor, Tensor]:
        """Forward and backward pass over this process' part of a micro-batch of ``size`` samples.

        Returns this process' share of the mean loss, and its logits.
        """
        with self.autocast():
            output = self._call(self._train_forward, x)
        logits = self._float_logits(getattr(output, "logits", output), x)
        extra = 0.0 if self._extra_loss is None else self._extra_loss(output, x, labels, epoch)
        if self.parallel.ranks is None:
            loss = F.cross_entropy(logits, labels, label_smoothing=self.recipe.label_smoothing)
        else:  # the shares of all ranks add up to the mean
            smoothing = self.recipe.label_smoothing
            loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing) / size
            extra = len(x) / size * extra
        factor = self.parallel.loss_factor * size / samples
        with self._calling_thread():
            self._scaler.scale(factor * (loss + extra)).backward()
        return loss, logits

    def _calling_thread(self) -> AbstractContextManager[None]:
        """Inside, a backward pass on one GPU runs in this thread: Python code of operators is slower in autograd's."""
        alone = self.parallel.ranks is None and self.device.type == "cuda"
        return cast("Any", torch.autograd.set_multithreading_enabled(False)) if alone else nullcontext()

    def outputs(self, x: Tensor) -> Tensor:
        """(B, classes): the logits of images, as float32 at least."""
        with self.autocast():
            logits = self._call(self._eval_forward, x)
        return self._float_logits(logits, x)

    def autocast(self) -> torch.autocast:
        """Inside, matmuls and convolutions are computed in the recipe's precision."""
        return torch.autocast(self.device.type, self._autocast_dtype, enabled=self._autocast_dtype is not None)

    def _float_logits(self, logits: Any, x: Tensor) -> Tensor:
        if not isinstance(logits, Tensor) or logits.shape != (len(x), self._classes):
            returned = f"{tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            raise ValueError(
                f"fit: the network returned {returned} for {len(x)} images of {self._classes} classes; build it with "
                f"num_classes={self._classes}, so that it returns ({len(x)}, {self._classes})"
            )
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _call(self, forward: Callable[[Tensor], T], x: Tensor) -> T:
        if not self.recipe.compile or self.steps:
            return forward(x)
        try:
            return forward(x)
        except Exception as error:  # compilers fail in ways of their own
            raise CompileError(
                f"fit: compile=True, but torch.compile fails on {type(self.model).__name__} here "
                f"({first_line(error)}); use compile=False"
            ) from error

    def step_tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that a step changes: weights, buffers, their EMA, and the state of optimizers."""
        tensors: dict[str, Tensor] = {f"weight {name}": tensor for name, tensor in self.model.named_parameters()}
        tensors |= {f"buffer {name}": tensor for name, tensor in self.model.named_buffers()}
        tensors |= {f"ema {i}": tensor for i, tensor in enumerate(self._ema or [])}
        return tensors | optimizer_state(self.optimizers)[0]

    def settings(self) -> Hashable:
        """Returns modes of modules, which weights learn, and the options of optimizers; tensors by identity."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        options = [(name, value) for group in groups for name, value in group.items() if name != "params"]
        return (
            tuple(module.training for module in self._modules),
            tuple(parameter.requires_grad for parameter in self._parameters),
            tuple((name, id(value) if isinstance(value, Tensor) else value) for name, value in options),
        )

    def release_graphs(self) -> None:
        """Free the memory of recorded steps; gradients go with it."""
        if self._graphs is not None:
            self._graphs.release()

    def finite(self) -> bool:
        """Whether all weights and statistics are numbers; waits for the device."""
        return self.parallel.all_finite(self._averaged())

    @contextmanager
    def ema_weights(self) -> Generator[None]:
        """Inside, the network has its EMA weights, if the recipe asks for them."""
        if self._ema is None:
            yield
            return
        weights = [tensor.detach().clone() for tensor in self._averaged()]
        self.load_ema()
        try:
            yield
        finally:
            self._load(weights)

    def load_ema(self) -> None:
        """Give the network its EMA weights for good, if the recipe asks for them."""
        if self._ema is not None:
            self._load(self._ema)

    def reset_ema(self, tensors: Iterable[Tensor]) -> None:
        """Set the EMA of these weights and buffers to their present values."""
        if self._ema is None:
            return
        ids = {id(tensor) for tensor in tensors}
        with torch.no_grad():
            for mean, tensor in zip(self._ema, self._averaged(), strict=True):
                if id(tensor) in ids:
                    local(mean).copy_(local(tensor))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns what the next step depends on, as tensors and JSON; of several ranks, the first has the tensors."""
        weights = cast("Mapping[str, Tensor]", self.model.state_dict())
        tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
        tensors |= {f"ema.{i}": tensor for i, tensor in enumerate(self._ema or [])}
        of_optimizers, numbers = optimizer_state(self.optimizers)
        tensors |= of_optimizers
        tensors["rng.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        tensors |= {f"rng.layer.{name}": rng.get_state() for name, rng in self.layer_generators().items()}
        content = {"steps": self.steps, "numbers": numbers, "scaler": self._scaler.state_dict()}
        return self.parallel.gathered(tensors), content

    def restore(self, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
        """Restores what ``state`` returned."""
        self.steps = content["steps"]
        stem = "model."
        weights = {name.removeprefix(stem): tensor for name, tensor in tensors.items() if name.startswith(stem)}
        self.parallel.load(self.model, weights)
        if self._ema is not None:
            for i, mean in enumerate(self._ema):
                assign(mean, tensors[f"ema.{i}"])
        restore_optimizers(self.optimizers, tensors, content["numbers"])
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(dict(content["scaler"]))
        torch.set_rng_state(tensors["rng.cpu"])
        if self.device.type == "cuda" and "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng.cuda"], self.device)
        for name, generator in self.layer_generators().items():
            if f"rng.layer.{name}" in tensors:
                generator.set_state(tensors[f"rng.layer.{name}"])

    def _update(self) -> None:
        """Clip the gradients, step the optimizers and update the EMA."""
        if self.recipe.clip_grad is not None:
            for optimizer in self.optimizers:
                self._scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_grad)
        for optimizer in self.optimizers:
            self._scaler.step(optimizer)
        self._scaler.update()
        if self._ema is not None:
            with torch.no_grad():
                means, tensors = [local(mean) for mean in self._ema], [local(tensor) for tensor in self._averaged()]
                changes = _torch._foreach_sub(tensors, means)
                _torch._foreach_mul_(changes, self._ema_weight)
                _torch._foreach_add_(means, changes)

    def _averaged(self) -> list[Tensor]:
        """Weights and floating-point buffers: all but counters."""
        return [tensor for tensor in (*self.model.parameters(), *self.model.buffers()) if tensor.is_floating_point()]

    def _load(self, values: Iterable[Tensor]) -> None:
        with torch.no_grad():
            for tensor, value in zip(self._averaged(), values, strict=True):
                local(tensor).copy_(local(value))

    def layer_generators(self) -> dict[str, torch.Generator]:
        """Returns the generators of layers; layers without one use torch's global generator."""
        modules = cast("Iterable[tuple[str, nn.Module]]", self.model.named_modules())
        generators = ((name, getattr(module, "generator", None)) for name, module in modules)
        return {name: generator for name, generator in generators if isinstance(generator, torch.Generator)}
