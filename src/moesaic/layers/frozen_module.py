"""Base class of frozen modules: inference only, with weights that were folded and laid out once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from moesaic.input_checks import check_tensor
from moesaic.ops.hooks import has_hooks

__all__ = ["FrozenModule", "check_freezable"]

_DTYPES = (torch.float32, torch.float64)


class FrozenModule(nn.Module):
    """An inference-only module on the CPU. It is always in eval mode, and its device and dtype are fixed."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.training = False

    def train(self, mode: bool = True) -> FrozenModule:
        if mode:
            raise RuntimeError(f"{type(self).__name__}: a frozen module cannot be trained; train the original model")
        return self

    def state_dict(self, *args: Any, **options: Any) -> NoReturn:
        raise RuntimeError(f"{type(self).__name__}: a frozen module has no state_dict; save that of the original model")

    def load_state_dict(self, *args: Any, **options: Any) -> NoReturn:
        raise RuntimeError(f"{type(self).__name__}: load weights into the original model, and freeze it again")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenModule:
        probe = torch.zeros(1, dtype=self.dtype)
        applied = fn(probe)
        if (applied.device, applied.dtype) != (probe.device, probe.dtype):
            raise RuntimeError(
                f"{type(self).__name__}: a frozen module stays on the CPU and in {self.dtype}; convert the original "
                "model with .to(…), and freeze it again"
            )
        return self

    def _check_input(self, x: Tensor, in_channels: int) -> None:
        name = type(self).__name__
        if torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export():
            raise RuntimeError(f"{name}: a frozen module cannot be compiled or exported; use the original model")
        check_tensor(name, x, f"maps (B, {in_channels}, H, W)")
        if x.ndim != 4 or x.shape[1] != in_channels:
            raise ValueError(f"{name}: takes (B, {in_channels}, H, W), got {tuple(x.shape)}")
        if x.device.type != "cpu":
            raise ValueError(f"{name}: runs on the CPU, the input is on {x.device}; move the input with .to('cpu')")
        if x.dtype != self.dtype:
            raise TypeError(
                f"{name}: the input is {x.dtype}, but the module was frozen in {self.dtype}; convert the input with "
                f".to({self.dtype})"
            )


def check_freezable(model: nn.Module) -> torch.dtype:
    """Raise an error that says what to do if a model cannot be frozen; else return its dtype."""
    modules = dict(cast("Iterable[tuple[str, nn.Module]]", model.named_modules()))  # torch types it in part
    training = next((name for name, module in modules.items() if module.training), None)
    if training is not None:
        which = f"module {training!r}" if training else "the model"
        raise ValueError(f"freeze: {which} is in training mode; call model.eval() first")
    hooked = next((name for name, module in modules.items() if has_hooks(module, include_global=False)), None)
    if hooked is not None:
        which = f"module {hooked!r}" if hooked else "the model"
        raise ValueError(
            f"freeze: {which} has a hook, which a frozen module would not call; remove the hook, or run the "
            "model itself"
        )
    tensors = [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.is_floating_point())]
    elsewhere = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
    if elsewhere is not None:
        raise ValueError(
            f"freeze: the model is on {elsewhere}, and frozen modules run on the CPU; call model.to('cpu') first, or "
            "run the model itself, which is faster on a GPU"
        )
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1 or not dtypes <= {*_DTYPES}:
        found = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(f"freeze: the weights are {found}; call model.float() or model.double() first")
    return dtypes.pop()
