"""Functions for networks of any kind: modules by name, device and dtype, eval mode, first output, inputs of layers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = ["all_named_modules", "eval_mode", "example_images", "first_tensor", "first_weight", "input_hooks"]


def all_named_modules(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Returns the modules of a network with their names; a module with two names comes twice."""
    return cast("Iterable[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=False))


def first_weight(module: nn.Module) -> Tensor:
    """Returns a tensor with the device and dtype of a module."""
    return next((weight for weight in module.parameters() if weight.is_floating_point()), torch.zeros(()))


def example_images(model: nn.Module, shape: tuple[int, int, int], batch: int = 1) -> Tensor:
    """Returns random images (batch, C, H, W) on the device and in the dtype of a network, the same in every call."""
    like = first_weight(model)
    images = torch.rand(batch, *shape, generator=torch.Generator().manual_seed(0), device="cpu")
    return images.to(like.device, like.dtype)


def first_tensor(output: Any) -> Tensor:
    """Returns the first tensor in the output of a network: a tensor, mapping, list, tuple or object with ``logits``.

    >>> first_tensor({"loss": None, "logits": (torch.ones(2),)})
    tensor([1., 1.])
    """
    found = next(_tensors(output), None)
    if found is None:
        raise TypeError(
            f"the network returns a {type(output).__name__} without a tensor; its output must be a tensor, a mapping, "
            "list or tuple with one, or an object that has it as logits"
        )
    return found


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | list | tuple):
        parts = cast("Iterable[Any]", output.values() if isinstance(output, Mapping) else output)
        for part in parts:
            yield from _tensors(part)
    elif hasattr(output, "logits"):
        yield from _tensors(output.logits)


@contextmanager
def eval_mode(model: nn.Module) -> Generator[None]:
    """Puts a model in eval mode inside the block, and restores the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def input_hooks(modules: Mapping[str, nn.Module], record: Callable[[str, Tensor], None]) -> Generator[None]:
    """Inside, calls ``record`` with the name and the first argument of a module, in every run of one of them.

    >>> layer = nn.Linear(2, 3)
    >>> with input_hooks({"fc": layer}, lambda name, x: print(name, tuple(x.shape))):
    ...     y = layer(torch.zeros(4, 2))
    fc (4, 2)
    """

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = next(iter((*args, *kwargs.values())), None)
            if isinstance(x, Tensor):
                record(name, x)

        return hook

    hooks = [module.register_forward_pre_hook(hook_of(name), with_kwargs=True) for name, module in modules.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
