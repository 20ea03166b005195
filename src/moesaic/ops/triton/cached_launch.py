"""Launches of Triton kernels that skip, after the first one of a kind, what Triton does in Python for every launch.

``kernel[grid](…)`` binds arguments by name, specialises each, reads settings from the environment and builds strings to
find the compiled kernel: that takes the host longer than most of these kernels take the GPU. A `CachedKernel` finds it
in a dictionary instead. The key has all that Triton specialises on: dtype and alignment of tensors, and the values of
everything else.
"""

# Triton is installed on GPU machines alone, so its types are unknown to a type checker.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from triton.tools.tensor_descriptor import TensorDescriptor

from moesaic.ops.launch_plan import Place, Step
from moesaic.ops.launch_recorder import recorder
from moesaic.ops.plan_cache import bypass_plans_if, plan_on

__all__ = ["CachedKernel", "InterpretedKernel", "cached_launch"]

_MAX_LAUNCHES = 1 << 14
"""Launches that are remembered per kernel; sizes that change all the time must not fill the memory."""

_runtime: Any = triton.knobs.runtime
_C: Any = torch._C  # pyright: ignore[reportPrivateUsage] # torch.cuda's own functions take three times as long


class CachedKernel:
    """A kernel, launched as ``kernel[grid](*arguments, **constants)``; tensors come by position.

    Args:
        jitted: what ``triton.jit`` has made of it.
    """

    def __init__(self, jitted: Any) -> None:
        self.jitted = jitted
        self.__doc__ = jitted.__doc__
        self._launches: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        device = -1
        key: list[Any] = []
        given: list[Any] = []
        for each in arguments:
            if isinstance(each, Tensor):
                address = each.data_ptr()
                if device < 0:
                    device = each.get_device()
                # a tensor on the CPU has another key, for which Triton raises its error
                key += (each.dtype, each.is_cuda, not address & 15)
                given.append(address)  # for which the launcher need not ask the tensor, nor the driver
            elif isinstance(each, TensorDescriptor):
                base = each.base
                key += (base.dtype, *each.block_shape, *each.shape, *each.strides, not base.data_ptr() & 15)
                given.append(each)
                if device < 0:
                    device = base.get_device()
            else:
                key.append(each)
                given.append(each)
        if 0 <= device != _C._cuda_getDevice():
            with torch.cuda.device(device):  # Triton launches on the current one
                return self._launch(grid, *arguments, **constants)
        key += (device, *constants, *constants.values())
        launch = self._launches.get(found := tuple(key))
        if launch is None or _has_launch_hooks():
            launch = self._first_launch(found, grid, arguments, constants)
        else:
            run, function, metadata, last = launch
            x, y, z = (*grid, 1, 1)[:3]
            stream = _C._cuda_getCurrentRawStream(device)
            run(x, y, z, stream, function, metadata, None, None, None, *given, *last)
        recording = recorder()
        if recording is not None:
            if any(isinstance(each, TensorDescriptor) for each in arguments):
                recording.fail("a descriptor has the address of its tensor")
            recording.add_launch(lambda placed: _replay(grid, placed, launch), arguments)
        return None

    def _first_launch(
        self, key: tuple[Any, ...], grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Launches by Triton, which compiles the kernel if need be, and remembers what it has found."""
        compiled = self.jitted[grid](*arguments, **constants)
        compiled = compiled.result() if hasattr(compiled, "result") else compiled  # was compiled in another thread
        if len(self._launches) >= _MAX_LAUNCHES:
            self._launches.clear()
        parameters = list(self.jitted.signature.parameters.values())[len(arguments) :]
        last = tuple(constants.get(each.name, each.default) for each in parameters)
        if any(isinstance(each, Tensor) for each in last):
            raise TypeError(f"{self.jitted.__name__}: give tensors by position; the key has not those given by name")
        self._launches[key] = launch = (compiled.run, compiled.function, compiled.packed_metadata, last)
        return launch


class InterpretedKernel:
    """A kernel in Triton's interpreter, whose launches are recorded as those on a GPU are."""

    def __init__(self, jitted: Any) -> None:
        self.jitted = jitted
        self.__doc__ = jitted.__doc__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        with _disable_current_modes():  # a recorder must not see the interpreter's own operators
            self.jitted[grid](*arguments, **constants)

        def make(placed: list[Any]) -> Step:
            def replay(slots: list[Any], addresses: list[int], stream: int) -> None:
                given = [each.tensor(slots) if isinstance(each, Place) else each for each in placed]
                self.jitted[grid](*given, **constants)

            return replay

        recording = recorder()
        if recording is not None:
            recording.add_launch(make, arguments, as_tensors=True)


def _replay(grid: tuple[int, ...], placed: list[Any], launch: tuple[Any, ...]) -> Step:
    """Returns the step that launches a kernel on the memory of a plan."""
    run, function, metadata, last = launch
    values = [0 if isinstance(each, Place) else each for each in placed]
    call = [*(*grid, 1, 1)[:3], 0, function, metadata, None, None, None, *values, *last]
    first = len(call) - len(values) - len(last)
    patches = [(first + number, each.slot, each.byte) for number, each in enumerate(placed) if isinstance(each, Place)]

    def replay(slots: list[Any], addresses: list[int], stream: int) -> None:
        given = call.copy()
        given[3] = stream
        for place, slot, byte in patches:
            given[place] = addresses[slot] + byte
        run(*given)

    return replay


def _has_launch_hooks() -> bool:
    """Whether a profiler has hooks on launches."""
    return bool(_runtime.launch_enter_hook.calls or _runtime.launch_exit_hook.calls)


bypass_plans_if(_has_launch_hooks)
if _runtime.interpret:
    plan_on("cpu")


def cached_launch(jitted: Any) -> Any:
    """Decorates a kernel, above ``triton.jit``."""
    return InterpretedKernel(jitted) if _runtime.interpret else CachedKernel(jitted)
