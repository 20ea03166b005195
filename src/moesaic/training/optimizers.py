"""The optimizers of a recipe: which weights have which learning rate and weight decay, and their state in checkpoints.

Parameter groups have the highest learning rate of the schedule as ``peak``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moesaic.layers.recording import routed_layers
from moesaic.models.weight_decay import undecayed_parameters
from moesaic.routing import ChannelGate
from moesaic.training.data_parallel import is_sharded, shard_like
from moesaic.training.normalized_gd import NormalizedGD
from moesaic.training.recipe import Recipe
from moesaic.training.trainable_layers import layer_factors

__all__ = ["build_optimizers", "optimizer_state", "restore_optimizers", "set_learning_rate"]


def set_learning_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a parameter group, in place where a graph reads it.

    >>> group = {"lr": torch.tensor(1.0)}
    >>> set_learning_rate(group, 0.5)
    >>> group
    {'lr': tensor(0.5000)}
    """
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def build_optimizers(
    model: nn.Module, recipe: Recipe, device: torch.device, *, capturable: bool = False
) -> list[Optimizer]:
    """Builds the optimizers of a recipe, in which routers and channel gates have parameter groups of their own.

    The steps of ``capturable`` optimizers can be replayed from a CUDA graph: learning rates are tensors on the device.
    """
    fused = capturable or device.type == "cuda"
    optimizers: list[Optimizer]
    if recipe.optimizer == "normalized_gd":
        optimizers = _build_normalized_gd(model, recipe, fused)
    elif recipe.optimizer == "adamw":
        groups = _parameter_groups(model, recipe)
        optimizers = [torch.optim.AdamW(groups, recipe.lr, weight_decay=recipe.weight_decay, fused=fused)]
    else:
        optimizers = [_build_sgd(_parameter_groups(model, recipe), recipe, fused)]
    if capturable:
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = torch.tensor(float(group["lr"]), device=device)
            group["capturable"] = True
    return optimizers


def optimizer_state(optimizers: Sequence[Optimizer]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Returns the state of optimizers as named tensors and as JSON, which `restore_optimizers` reads."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, float] = {}
    for k, optimizer in enumerate(optimizers):
        state: Mapping[int, Mapping[str, Any]] = optimizer.state_dict()["state"]
        for i, values in state.items():
            for name, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{k}.{i}.{name}"] = value
                elif value is not None:
                    numbers[f"{k}.{i}.{name}"] = value
    return tensors, numbers


def restore_optimizers(
    optimizers: Sequence[Optimizer], tensors: Mapping[str, Tensor], numbers: Mapping[str, float]
) -> None:
    """Restores what `optimizer_state` returned; other tensors are ignored."""
    stem = "optimizer."
    values: dict[str, Any] = {
        name.removeprefix(stem): tensor for name, tensor in tensors.items() if name.startswith(stem)
    }
    states: list[dict[int, dict[str, Any]]] = [{} for _ in optimizers]
    for place, value in (values | dict(numbers)).items():
        k, i, name = place.split(".", 2)
        states[int(k)].setdefault(int(i), {})[name] = value
    for optimizer, state in zip(optimizers, states, strict=True):
        parameters: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for i, of_parameter in state.items():
            for name, value in of_parameter.items():
                # in the memory format and sharding of the parameter, with which it is combined
                if isinstance(value, Tensor) and value.shape == parameters[i].shape:
                    of_parameter[name] = shard_like(parameters[i], value)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _build_normalized_gd(model: nn.Module, recipe: Recipe, fused: bool) -> list[Optimizer]:
    """NormalizedGD for the experts of each layer, and SGD for other weights; without experts, the network is one."""
    options: dict[str, Any] = {"momentum": recipe.momentum, "weight_decay": recipe.weight_decay}
    layers = routed_layers(model).values()
    stacks = [cast("nn.Module", layer.experts) for layer in layers if hasattr(layer, "experts")]
    if not stacks:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return [NormalizedGD([{"params": trained, "peak": recipe.lr}], recipe.lr, **options)]
    stacks = [stack for stack in stacks if all(parameter.requires_grad for parameter in stack.parameters())]
    optimizers: list[Optimizer] = [NormalizedGD.per_expert(experts, recipe.lr, **options) for experts in stacks]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["peak"] = recipe.lr
    groups = _parameter_groups(model, recipe, _parameter_ids(stacks))
    if groups or not optimizers:
        optimizers.append(_build_sgd(groups, recipe, fused))
    return optimizers


def _build_sgd(groups: list[dict[str, Any]], recipe: Recipe, fused: bool) -> Optimizer:
    # torch 2.13 has fused SGD for whole tensors only, and fused AdamW for shards too
    fused = fused and not any(is_sharded(parameter) for group in groups for parameter in group["params"])
    optimizer = torch.optim.SGD(groups, recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay, fused=fused)
    if fused and recipe.momentum:
        optimizer.register_step_pre_hook(_init_momentum)
    return optimizer


def _init_momentum(optimizer: Optimizer, *_: object) -> None:
    """Sets the momentum of weights to 0 before their first step, in which it then becomes the gradient, as in SGD.

    Fused SGD raises an error where some weights have their first gradient later than others, as those of an expert
    without samples; and where the first gradient of float16 overflows, it leaves momentum that was never initialised.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _parameter_groups(
    model: nn.Module, recipe: Recipe, excluded: AbstractSet[int] = frozenset()
) -> list[dict[str, Any]]:
    """Parameter groups of the weights to train: of most layers, then of routers, then of channel gates.

    Each is divided by the factors of layer-wise learning rates, and by whether there is weight decay.
    """
    # the layers of channel gates have no router: a gate is a module of its own
    layers = routed_layers(model).values()
    routers = _parameter_ids(cast("nn.Module", layer.router) for layer in layers if hasattr(layer, "router"))
    gates = _parameter_ids(module for module in model.modules() if isinstance(module, ChannelGate)) - routers
    router_lr, gate_lr = recipe.lr / 10 if recipe.optimizer == "adamw" else recipe.lr, recipe.lr
    if recipe.router_lr is not None:
        router_lr = gate_lr = recipe.router_lr
    named = dict(model.named_parameters())
    undecayed = {id(named[name]) for name in undecayed_parameters(model)}
    factors = layer_factors(model, recipe.layer_decay)
    rates = (recipe.lr, router_lr, gate_lr)

    def kind(parameter: nn.Parameter) -> int:
        return 1 if id(parameter) in routers else 2 if id(parameter) in gates else 0

    groups: dict[tuple[int, float, bool], dict[str, Any]] = {}
    trained = [parameter for parameter in named.values() if parameter.requires_grad and id(parameter) not in excluded]
    for parameter in sorted(trained, key=kind):
        factor, is_decayed = factors.get(id(parameter), 1.0), id(parameter) not in undecayed
        options = {"peak": rates[kind(parameter)] * factor} | ({} if is_decayed else {"weight_decay": 0.0})
        group = groups.setdefault((kind(parameter), factor, is_decayed), {"params": [], **options})
        group["params"].append(parameter)
    return list(groups.values())


def _parameter_ids(modules: Iterable[nn.Module]) -> set[int]:
    return {id(parameter) for module in modules for parameter in module.parameters()}
