"""Base class of frozen modules: inference only, with weights that were folded and laid out once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from moesaic.ops.hook_detection import has_hooks
from moesaic.tensor_checks import check_tensor

__all__ = ["FrozenModule", "check_freezable"]

_DTYPES = {
    "cpu": (torch.float32, torch.float64),
    "cuda": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
}
"""By device, the dtypes in which a model can be frozen."""
_CPU = torch.device("cpu")


class FrozenModule(nn.Module):
    """An inference-only module. It is always in eval mode, and its device and dtype are fixed."""

    def __init__(self, dtype: torch.dtype, device: torch.device = _CPU) -> None:
        super().__init__()
        self.dtype = dtype
        self.device = device
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
        probe = torch.zeros(1, dtype=self.dtype, device=self.device)
        applied = fn(probe)
        if (applied.device, applied.dtype) != (probe.device, probe.dtype):
            where = "the CPU" if self.device.type == "cpu" else str(self.device)
            raise RuntimeError(
                f"{type(self).__name__}: a frozen module stays on {where} and in {self.dtype}; convert the original "
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
        if x.device != self.device:
            where = "the CPU" if self.device.type == "cpu" else str(self.device)
            raise ValueError(
                f"{name}: runs on {where}, the input is on {x.device}; move the input with .to('{self.device}')"
            )
        if x.dtype != self.dtype:
            raise TypeError(
                f"{name}: the input is {x.dtype}, but the module was frozen in {self.dtype}; convert the input with "
                f".to({self.dtype})"
            )


def check_freezable(model: nn.Module, *, gpu: bool = False) -> tuple[torch.dtype, torch.device]:
    """Raise an error that says what to do if a model cannot be frozen; else return its dtype and device.

    Args:
        model: the model.
        gpu: whether it may be on a GPU.
    """
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
    device = _common_device({tensor.device for tensor in tensors}, ("cpu", "cuda") if gpu else ("cpu",))
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1 or not dtypes <= {*_DTYPES[device.type]}:
        found = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(f"freeze: the weights are {found}; call model.float() or model.double() first")
    return dtypes.pop(), device


def _common_device(devices: set[torch.device], allowed: tuple[str, ...]) -> torch.device:
    """The only device of a model's tensors, of an allowed type."""
    elsewhere = next((device for device in devices if device.type not in allowed), None)
    if elsewhere is not None:
        where = "the CPU" if allowed == ("cpu",) else "the CPU or on CUDA devices"
        raise ValueError(
            f"freeze: the model is on {elsewhere}, and what it becomes runs on {where}; call model.to('cpu') first, or "
            "run the model itself"
        )
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"freeze: the model is on {found}; move all of it to one device first")
    return devices.pop()
