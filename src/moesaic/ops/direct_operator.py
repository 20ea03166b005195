"""Custom operators that eager code calls without torch's dispatcher.

A call of a ``torch.library.custom_op`` takes the host tens of microseconds, as long as several kernels: the schema is
matched, arguments are flattened, outputs are checked for aliases. Tracing and dispatch modes need that, eager code does
not: in eager mode a `DirectOperator` runs the same implementation, with its gradient in a `torch.autograd.Function`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import wraps
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.library import custom_op

from moesaic.ops.plan_cache import FlatArguments, LaunchPlans, flatten

__all__ = ["DirectOperator", "JointOperator", "direct_operator", "joint_operator"]

_PLAIN_TYPES = {Tensor, nn.Parameter}
_C: Any = torch._C  # pyright: ignore[reportPrivateUsage] # the state of the dispatcher has no public name
_keys: Any = _C.DispatchKeySet
_KEYS_ABOVE = (
    _keys(_C.DispatchKey.ADInplaceOrView) | _keys(_C.DispatchKey.AutocastCPU) | _keys(_C.DispatchKey.AutocastCUDA)
)
"""Dispatch keys above an implementation, which it runs without.

ADInplaceOrView: a permuted output would be a view made inside of an autograd function, which the next layer may not
change in place. Autocast: a backward pass runs outside of it, and would record other matmuls under it. Autograd stays:
it breaks composite operators up into those that launch plans can capture, and gradients are off in implementations.
"""


class _FlattenedCall(threading.local):
    """Flattened arguments of a call, for the autograd function that it applies, which need not flatten them again."""

    arguments: tuple[Any, ...] = ()
    flat: FlatArguments | None = None

    def take(self, arguments: tuple[Any, ...]) -> FlatArguments:
        """Returns these arguments flattened, anew if autograd has unwrapped some of them; forgets the call."""
        expected, flat = self.arguments, self.flat
        self.arguments, self.flat = (), None
        if flat is None or len(expected) != len(arguments) or not all(map(is_, expected, arguments)):
            return flatten(arguments)
        return flat


_flattened_call = _FlattenedCall()


class DirectOperator:
    """An operator that is called directly on plain tensors in eager mode, and through the dispatcher otherwise.

    Args:
        name: Qualified name, such as ``"moesaic::patch_conv"``.
        implementation: Computes the outputs; its annotations give the schema.
        mutates: Names of the arguments that the implementation changes in place.
    """

    def __init__(self, name: str, implementation: Callable[..., Any], mutates: Sequence[str] = ()) -> None:
        plans = LaunchPlans(implementation, mutates=bool(mutates))

        @wraps(implementation)
        def planned(*arguments: Any) -> Any:
            with _C._ExcludeDispatchKeyGuard(_KEYS_ABOVE):
                return plans(*arguments)

        self.operator: Any = custom_op(name, planned, mutates_args=tuple(mutates))
        self._set_up(implementation, plans, mutates)

    def _set_up(self, implementation: Callable[..., Any], plans: LaunchPlans, mutates: Sequence[str]) -> None:
        self.__name__, self.__doc__ = implementation.__name__, implementation.__doc__
        self._implementation = plans
        self._autograd_function: type[torch.autograd.Function] | None = None
        parameters = implementation.__code__.co_varnames[: implementation.__code__.co_argcount]
        self._mutated = tuple(parameters.index(each) for each in mutates)

    def run(self, arguments: tuple[Any, ...], flat: FlatArguments) -> Any:
        """Computes the outputs below autograd, as the dispatcher does; ``flat``: the same arguments."""
        with _C._ExcludeDispatchKeyGuard(_KEYS_ABOVE):
            return self._implementation.call(arguments, flat)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Registers the implementation for tracing, as ``torch.library.register_fake`` does."""
        return self.operator.register_fake(fake)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Registers the gradient for eager and dispatched calls, as ``torch.library.register_autograd`` does."""
        self.operator.register_autograd(backward, setup_context=setup_context)
        self._autograd_function = _autograd_function(self.run, backward, setup_context)

    def without_gradient(self, *arguments: Any) -> Any:
        """Calls an operator that changes no arguments; its outputs have no gradient, as under ``torch.no_grad()``."""
        flat = flatten(arguments)
        with torch.no_grad():
            return self.operator(*arguments) if _needs_dispatch(flat.tensors) else self.run(arguments, flat)

    def __call__(self, *arguments: Any) -> Any:
        flat = flatten(arguments)
        tensors = flat.tensors
        if _needs_dispatch(tensors):
            return self.operator(*arguments)
        if torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors]):  # noqa: C419  faster
            if self._autograd_function is None:  # the dispatcher raises torch's own error in the backward pass
                return self.operator(*arguments)
            _flattened_call.arguments, _flattened_call.flat = arguments, flat
            output = cast("Any", self._autograd_function).apply(*arguments)
        else:
            output = self.run(arguments, flat)
        if self._mutated:
            torch.autograd.graph.increment_version(flatten([arguments[place] for place in self._mutated]).tensors)
        return output


class JointOperator(DirectOperator):
    """Several operators fused for eager mode: one call, one plan, one autograd node.

    Where the dispatcher is needed, its decomposition into those operators runs. A joint operator is not registered with
    torch, so that it may both have a gradient and change arguments, such as running statistics.

    Args:
        implementation: Computes the outputs of all operators.
        decomposition: Computes the same by separate operators, for compilers, modes and transforms.
        mutates: Names of the arguments that the implementation changes in place.
    """

    def __init__(
        self, implementation: Callable[..., Any], decomposition: Callable[..., Any], mutates: Sequence[str] = ()
    ) -> None:
        self.operator = decomposition
        self._set_up(implementation, LaunchPlans(implementation, mutates=bool(mutates)), mutates)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        raise TypeError(f"{self.__name__}: its operators have fake implementations; it needs none")

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Registers the gradient of eager calls; the operators of the decomposition have their own."""
        self._autograd_function = _autograd_function(self.run, backward, setup_context)


def _autograd_function(
    run: Callable[[tuple[Any, ...], FlatArguments], Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., None],
) -> type[torch.autograd.Function]:
    """Returns the autograd function of eager calls."""

    # forward calls setup_context: for a separate one torch binds the arguments to the signature at every call
    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            output = run(arguments, _flattened_call.take(arguments))
            setup_context(ctx, arguments, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            input_gradients = backward(ctx, *gradients)
            # the gradient of a list of tensors is a list for an operator, but None for an autograd function
            return tuple([None if isinstance(each, list) else each for each in input_gradients])

    return Direct


def joint_operator(
    decomposition: Callable[..., Any], mutates: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], JointOperator]:
    """Returns a decorator that turns an implementation into a `JointOperator`."""

    def decorate(implementation: Callable[..., Any]) -> JointOperator:
        return JointOperator(implementation, decomposition, mutates)

    return decorate


def direct_operator(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], DirectOperator]:
    """Returns a decorator that turns an implementation into a `DirectOperator`."""

    def decorate(implementation: Callable[..., Any]) -> DirectOperator:
        return DirectOperator(name, implementation, mutates)

    return decorate


def _needs_dispatch(tensors: list[Tensor]) -> bool:
    """Whether operators may be traced or intercepted: by a compiler, a mode, a transform or a tensor subclass."""
    if torch.compiler.is_compiling():
        return True
    if _C._len_torch_dispatch_stack() or _C._are_functorch_transforms_active() or _C._get_tracing_state() is not None:
        return True
    return not _PLAIN_TYPES.issuperset(map(type, tensors))
