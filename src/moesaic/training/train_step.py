"""What changes from step to step while a network learns: weights, optimizers, running mean, loss scale, luck.

All of it can be taken out as tensors and JSON and put back, so that a run that was stopped goes on as if it had
not been. No step waits for the device, but for the one time that float16 has to.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Set
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from moesaic.layers.recording import RoutedLayer, record_routing, routed_layers
from moesaic.models.deepmoe.network import DeepMoE, DeepMoEOutput
from moesaic.routing import load_balance_loss
from moesaic.routing_record import Routing
from moesaic.training.gates import GateTraining
from moesaic.training.optim import NormalizedGD
from moesaic.training.recipe import Recipe

__all__ = ["CompileError", "TrainStep", "build_optimizers"]

T = TypeVar("T")

_torch: Any = torch  # what torch's own optimizers use to update many tensors at once is not part of its typed face


class CompileError(RuntimeError):
    """``torch.compile`` could not make anything of the network."""


class TrainStep:
    """A network that learns by a recipe, on the device it is on; ``gates`` is for one that has channel gates."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        device: torch.device,
        classes: int,
        gates: GateTraining | None = None,
    ) -> None:
        self.model = model
        self.gates = gates
        self.recipe = recipe
        self.device = device
        self.steps = 0
        """Steps taken so far."""
        self._classes = classes
        self._half = recipe.half(device)
        # batches have two sizes at most: a graph for each is compiled faster than one for all, and runs faster
        self._run: Callable[[Tensor], Tensor] = torch.compile(model, dynamic=False) if recipe.compile else model
        if isinstance(model, DeepMoE):  # tests look at the gates to see what can be skipped, which no compiler follows
            self._run = model
            self._teach: Callable[[Tensor], DeepMoEOutput] = (
                torch.compile(model.forward_with_routing, dynamic=False)
                if recipe.compile
                else model.forward_with_routing
            )
        self._optimizers = build_optimizers(model, recipe, device)
        self._scaler = torch.amp.GradScaler(device.type, enabled=self._half is torch.float16)
        self._mean = None if recipe.ema is None else [tensor.detach().clone() for tensor in self._averaged()]
        self._routing: Mapping[str, Routing] = {}

    @contextmanager
    def watching(self) -> Generator[None]:
        """Inside, steps know the routing where the balance loss needs it."""
        if not self.recipe.balance or not routed_layers(self.model):
            yield
            return
        with record_routing(self.model) as self._routing:
            yield

    def step(self, x: Tensor, labels: Tensor, epoch: float) -> tuple[Tensor, Tensor]:
        """Learn from a batch at a time counted in epochs; its mean loss and how many it had right before."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * self.recipe.share(epoch)
        sizes = self.recipe.part_sizes(len(x))
        total, right = torch.zeros((), device=self.device), torch.zeros((), dtype=torch.int64, device=self.device)
        for part, answers in zip(_split(x, sizes), _split(labels, sizes), strict=True):
            logits, beside = self._study(part, answers, epoch)
            loss = F.cross_entropy(logits, answers, label_smoothing=self.recipe.label_smoothing)
            share = len(part) / len(x)
            self._scaler.scale(share * (loss + beside)).backward()
            total += share * loss.detach()
            right += (logits.detach().argmax(1) == answers).sum()
        self._move()
        return total, right

    def outputs(self, x: Tensor) -> Tensor:
        """What the network answers to images, as float32 at least (B, classes)."""
        with self.autocast():
            logits = self._answer(self._run, x)
        return self._wide(logits, x)

    def autocast(self) -> torch.autocast:
        """Inside, products are computed as the recipe asks."""
        return torch.autocast(self.device.type, self._half, enabled=self._half is not None)

    def _study(self, x: Tensor, labels: Tensor, epoch: float) -> tuple[Tensor, Tensor | float]:
        """What the network answers to images, and what is added to the loss of it."""
        if self.gates is None:
            logits = self.outputs(x)
            return logits, self.recipe.balance * self._imbalance()
        self.gates.begin(epoch)
        with self.autocast():
            answer, hints = self._answer(self._teach, x), self.gates.hints(x)
        self.gates.show(answer.routing, self.steps)
        return self._wide(answer.logits, x), self.gates.loss(answer, labels, hints, epoch)

    def _wide(self, logits: Tensor, x: Tensor) -> Tensor:
        if not isinstance(logits, Tensor) or logits.shape != (len(x), self._classes):  # pyright: ignore[reportUnnecessaryIsInstance]
            found = f"{tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"fit: the network returned {found} for {len(x)} images of {self._classes} classes; build it with "
                f"num_classes={self._classes}, so that it returns ({len(x)}, {self._classes})"
            )
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _answer(self, run: Callable[[Tensor], T], x: Tensor) -> T:
        if not self.recipe.compile or self.steps:
            return run(x)
        try:
            return run(x)
        except Exception as error:  # compilers fail in ways of their own
            first = str(error).strip().splitlines() or [type(error).__name__]
            raise CompileError(
                f"fit: compile=True, but torch.compile fails on {type(self.model).__name__} here ({first[0]}); "
                "use compile=False"
            ) from error

    def finite(self) -> bool:
        """Whether all weights and statistics are numbers; waits for the device."""
        tensors = [tensor.detach() for tensor in self._averaged()]
        return bool(torch.nn.utils.get_total_norm(tensors).isfinite())

    @contextmanager
    def averaged(self) -> Generator[None]:
        """Inside, the network has its mean weights, if the recipe asks for a mean."""
        if self._mean is None:
            yield
            return
        own = [tensor.detach().clone() for tensor in self._averaged()]
        self.average()
        try:
            yield
        finally:
            self._put(own)

    def freeze_gates(self, embeddings: Tensor | None) -> float | None:
        """End the stage in which gates learn, as `GateTraining.freeze` does; the mean weights get them as they are."""
        assert self.gates is not None
        cost = self.gates.freeze(embeddings)
        if self._mean is not None and isinstance(self.model, DeepMoE):
            parts = (self.model.embedding, self.model.gates)
            frozen = {id(tensor) for part in parts for tensor in (*part.parameters(), *part.buffers())}
            with torch.no_grad():
                for mean, tensor in zip(self._mean, self._averaged(), strict=True):
                    if id(tensor) in frozen:
                        mean.copy_(tensor)
        return cost

    def average(self) -> None:
        """Give the network its mean weights for good, if the recipe asks for a mean."""
        if self._mean is not None:
            self._put(self._mean)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the next step depends on, as tensors and JSON."""
        weights = cast("Mapping[str, Tensor]", self.model.state_dict())
        tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
        tensors |= {f"mean.{i}": tensor for i, tensor in enumerate(self._mean or [])}
        numbers: dict[str, float] = {}
        for k, optimizer in enumerate(self._optimizers):
            kept: Mapping[int, Mapping[str, Any]] = optimizer.state_dict()["state"]
            for i, values in kept.items():
                for name, value in values.items():
                    if isinstance(value, Tensor):
                        tensors[f"optimizer.{k}.{i}.{name}"] = value
                    elif value is not None:
                        numbers[f"{k}.{i}.{name}"] = value
        tensors["luck.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["luck.cuda"] = torch.cuda.get_rng_state(self.device)
        tensors |= {f"luck.layer.{name}": each.get_state() for name, each in self._generators().items()}
        content = {"steps": self.steps, "numbers": numbers, "scaler": self._scaler.state_dict()}
        if self.gates is not None:
            of_gates, content["gates"] = self.gates.state()
            tensors |= of_gates
        return tensors, content

    def restore(self, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave."""
        self.steps = content["steps"]
        self.model.load_state_dict(_below(tensors, "model."))
        if self._mean is not None:
            for i, mean in enumerate(self._mean):
                mean.copy_(tensors[f"mean.{i}"])
        for k, optimizer in enumerate(self._optimizers):
            _restore_optimizer(optimizer, k, tensors, content["numbers"])
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(dict(content["scaler"]))
        if self.gates is not None:
            self.gates.restore(tensors, content["gates"])
        torch.set_rng_state(tensors["luck.cpu"])
        if self.device.type == "cuda" and "luck.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["luck.cuda"], self.device)
        for name, generator in self._generators().items():
            if f"luck.layer.{name}" in tensors:
                generator.set_state(tensors[f"luck.layer.{name}"])

    def _move(self) -> None:
        """Take the step that the gradients ask for."""
        if self.recipe.clip is not None:
            for optimizer in self._optimizers:
                self._scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        for optimizer in self._optimizers:
            self._scaler.step(optimizer)
        self._scaler.update()
        self.steps += 1
        if self._mean is not None and self.recipe.ema is not None:
            stays = min(self.recipe.ema, (1 + self.steps) / (10 + self.steps))
            with torch.no_grad():
                _torch._foreach_lerp_(self._mean, self._averaged(), 1 - stays)

    def _imbalance(self) -> Tensor | float:
        every = self._routing.values()
        chosen = [routing for routing in every if routing.chooser != "expert" and routing.unit != "channel"]
        return cast("Tensor | float", sum(load_balance_loss(routing) for routing in chosen))

    def _averaged(self) -> list[Tensor]:
        """Weights and statistics: all but counters."""
        return [tensor for tensor in (*self.model.parameters(), *self.model.buffers()) if tensor.is_floating_point()]

    def _put(self, values: Iterable[Tensor]) -> None:
        with torch.no_grad():
            for tensor, value in zip(self._averaged(), values, strict=True):
                tensor.copy_(value)

    def _generators(self) -> dict[str, torch.Generator]:
        """Generators that layers have for themselves; others draw from torch's own."""
        modules = cast("Iterable[tuple[str, nn.Module]]", self.model.named_modules())
        found = ((name, getattr(module, "generator", None)) for name, module in modules)
        return {name: generator for name, generator in found if isinstance(generator, torch.Generator)}


def build_optimizers(model: nn.Module, recipe: Recipe, device: torch.device) -> list[Optimizer]:
    """The optimizers that a recipe asks for, with groups of their own for routers; each group knows its peak rate."""
    # channels are experts without weights of their own, and what chooses them lies outside of their layer
    layers = [layer for layer in routed_layers(model).values() if hasattr(layer, "experts")]
    if recipe.optimizer != "normalized_gd":
        heads = {id(weight) for weight in model.gates.parameters()} if isinstance(model, DeepMoE) else set[int]()
        routers, others = _parted(model, _router_parameters(layers))
        return [_plain(recipe, routers, others, device, heads)]
    options: dict[str, Any] = {"momentum": recipe.momentum, "weight_decay": recipe.weight_decay}
    if not layers:
        alone = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return [NormalizedGD([{"params": alone, "peak": recipe.learning_rate}], recipe.learning_rate, **options)]
    made: list[Optimizer] = []
    taken: set[int] = set()
    for layer in layers:
        experts = cast("nn.Module", layer.experts)
        expert_steps = NormalizedGD.per_expert(experts, recipe.learning_rate, **options)
        for group in expert_steps.param_groups:
            group["peak"] = recipe.learning_rate
        made.append(expert_steps)
        taken |= {id(parameter) for parameter in experts.parameters()}
    routers, others = _parted(model, _router_parameters(layers), taken)
    return [*made, _plain(recipe, routers, others, device)] if routers or others else made


def _plain(
    recipe: Recipe, routers: list[Tensor], others: list[Tensor], device: torch.device, heads: Set[int] = frozenset()
) -> Optimizer:
    """SGD, or AdamW where the recipe says so; ``heads`` are those of the others that make the gates of channels."""
    rate = recipe.learning_rate
    own = rate / 10 if recipe.optimizer == "adamw" else rate
    groups = [
        {"params": [each for each in others if id(each) not in heads], "peak": rate},
        {"params": routers, "peak": own if recipe.router_rate is None else recipe.router_rate},
        {
            "params": [each for each in others if id(each) in heads],
            "peak": rate if recipe.router_rate is None else recipe.router_rate,
        },
    ]
    groups = [group for group in groups if group["params"]]
    fused = device.type == "cuda"
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, recipe.learning_rate, weight_decay=recipe.weight_decay, fused=fused)
    decay = recipe.weight_decay
    return torch.optim.SGD(groups, recipe.learning_rate, recipe.momentum, weight_decay=decay, fused=fused)


def _router_parameters(layers: Iterable[RoutedLayer]) -> set[int]:
    routers = (cast("nn.Module", layer.router) for layer in layers)
    return {id(parameter) for router in routers for parameter in router.parameters()}


def _parted(model: nn.Module, some: set[int], without: set[int] | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters that learn, some of them and the others; without those of ``without``."""
    left = [each for each in model.parameters() if each.requires_grad and id(each) not in (without or set())]
    return [each for each in left if id(each) in some], [each for each in left if id(each) not in some]


def _restore_optimizer(
    optimizer: Optimizer, k: int, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]
) -> None:
    parameters: list[Tensor] = [each for group in optimizer.param_groups for each in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for place, tensor in _below(tensors, f"optimizer.{k}.").items():
        i, _, name = place.partition(".")
        parameter = parameters[int(i)]
        if tensor.shape == parameter.shape:  # in the layout of its parameter, with which it is combined
            tensor = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
        state.setdefault(int(i), {})[name] = tensor
    for place, number in numbers.items():
        owner, i, name = place.split(".", 2)
        if int(owner) == k:
            state.setdefault(int(i), {})[name] = number
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _below(tensors: Mapping[str, Tensor], stem: str) -> dict[str, Tensor]:
    return {name.removeprefix(stem): tensor for name, tensor in tensors.items() if name.startswith(stem)}


def _split(values: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", values.split(sizes))  # torch types it in part
