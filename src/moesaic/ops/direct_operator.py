"""Custom operators that eager code calls without torch's dispatcher.

A call of a ``torch.library.custom_op`` takes the host tens of microseconds, as long as several kernels: the schema is
matched, arguments are flattened, outputs are checked for aliases. Tracing and dispatch modes need that. Eager code does
not: there a `DirectOperator` runs the same implementation, with the same gradient in a `torch.autograd.Function`.
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

from moesaic.ops.plan_cache import LaunchPlans, Parts, parts_of

__all__ = ["DirectOperator", "JointOperator", "direct_operator", "joint_operator"]

_PLAIN = {Tensor, nn.Parameter}
_C: Any = torch._C  # pyright: ignore[reportPrivateUsage] # the state of the dispatcher has no public name
_keys: Any = _C.DispatchKeySet
_EXCLUDED = (
    _keys(_C.DispatchKey.AutogradCPU)
    | _keys(_C.DispatchKey.AutogradCUDA)
    | _keys(_C.DispatchKey.ADInplaceOrView)
    | _keys(_C.DispatchKey.AutocastCPU)
    | _keys(_C.DispatchKey.AutocastCUDA)
)
"""Dispatch keys that an implementation runs below.

Autograd: the gradient is the operator's own. ADInplaceOrView: a permuted output would be a view made inside of an
autograd function, which the next layer may not change in place. Autocast: a backward pass runs outside of it, and would
record other matmuls under it.
"""


class _Given(threading.local):
    """Parts of the arguments that a function of autograd is about to be applied to."""

    arguments: tuple[Any, ...] = ()
    parts: Parts | None = None

    def take(self, arguments: tuple[Any, ...]) -> Parts:
        """The parts of these arguments, if they are the given ones; autograd may have unwrapped some."""
        given, parts = self.arguments, self.parts
        self.arguments, self.parts = (), None
        if parts is None or len(given) != len(arguments) or not all(map(is_, given, arguments)):
            return parts_of(arguments)
        return parts


_given = _Given()


class DirectOperator:
    """An operator: called directly on plain tensors in eager mode, through the dispatcher otherwise.

    Args:
        name: Qualified name, such as ``"moesaic::patch_conv"``.
        implementation: Computes the outputs; its annotations give the schema.
        mutates: Names of the arguments that it changes in place.
    """

    def __init__(self, name: str, implementation: Callable[..., Any], mutates: Sequence[str] = ()) -> None:
        plans = LaunchPlans(implementation, mutates=bool(mutates))

        @wraps(implementation)
        def planned(*arguments: Any) -> Any:
            with _C._ExcludeDispatchKeyGuard(_EXCLUDED):
                return plans(*arguments)

        self.operator: Any = custom_op(name, planned, mutates_args=tuple(mutates))
        self._describe(implementation, plans, mutates)

    def _describe(self, implementation: Callable[..., Any], plans: LaunchPlans, mutates: Sequence[str]) -> None:
        self.__name__, self.__doc__ = implementation.__name__, implementation.__doc__
        self._implementation = plans
        self._function: type[torch.autograd.Function] | None = None
        parameters = implementation.__code__.co_varnames[: implementation.__code__.co_argcount]
        self._mutated = tuple(parameters.index(each) for each in mutates)

    def run(self, arguments: tuple[Any, ...], parts: Parts) -> Any:
        """Computes the outputs below autograd, as the dispatcher does; ``parts`` are those of the arguments."""
        with _C._ExcludeDispatchKeyGuard(_EXCLUDED):
            return self._implementation.call(arguments, parts)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Registers the implementation for tracing, as ``torch.library`` does."""
        return self.operator.register_fake(fake)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Registers the gradient, as ``torch.library`` does, for both ways of calling."""
        self.operator.register_autograd(backward, setup_context=setup_context)
        self._function = _function(self.run, backward, setup_context)

    def without_gradient(self, *arguments: Any) -> Any:
        """The same with outputs that have no gradient, of an operator that changes none of its arguments."""
        parts = parts_of(arguments)
        if _needs_dispatch(parts.tensors):
            with torch.no_grad():
                return self.operator(*arguments)
        return self.run(arguments, parts)

    def __call__(self, *arguments: Any) -> Any:
        parts = parts_of(arguments)
        tensors = parts.tensors
        if _needs_dispatch(tensors):
            return self.operator(*arguments)
        if torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors]):  # noqa: C419  faster
            if self._function is None:  # has no gradient: the dispatcher says so when one is asked for
                return self.operator(*arguments)
            _given.arguments, _given.parts = arguments, parts
            output = cast("Any", self._function).apply(*arguments)
        else:
            output = self.run(arguments, parts)
        if self._mutated:
            torch.autograd.graph.increment_version(parts_of([arguments[place] for place in self._mutated]).tensors)
        return output


class JointOperator(DirectOperator):
    """Several operators that eager code runs as one: one call, one plan, one node of autograd.

    Where the dispatcher is needed they are called one after the other. As it is no operator of torch itself, it may
    have a gradient and change arguments, such as running statistics, which torch does not let an operator do.

    Args:
        implementation: Computes the outputs of all.
        apart: The same from operators, for compilers, modes and transforms.
        mutates: Names of the arguments that it changes in place.
    """

    def __init__(
        self, implementation: Callable[..., Any], apart: Callable[..., Any], mutates: Sequence[str] = ()
    ) -> None:
        self.operator = apart
        self._describe(implementation, LaunchPlans(implementation, mutates=bool(mutates)), mutates)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        raise TypeError(f"{self.__name__}: its operators have fake implementations; it needs none")

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Registers the gradient."""
        self._function = _function(self.run, backward, setup_context)


def _function(
    run: Callable[[tuple[Any, ...], Parts], Any], backward: Callable[..., Any], setup_context: Callable[..., None]
) -> type[torch.autograd.Function]:
    """What autograd applies instead of an operator."""

    # setup_context inside of forward: given apart, torch binds the arguments by the signature at every call
    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            output = run(arguments, _given.take(arguments))
            setup_context(ctx, arguments, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            found = backward(ctx, *gradients)
            # a list of tensors has a list of gradients in an operator, None in a function
            return tuple([None if isinstance(each, list) else each for each in found])

    return Direct


def joint_operator(
    apart: Callable[..., Any], mutates: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], JointOperator]:
    """Makes a function a `JointOperator`."""

    def decorate(implementation: Callable[..., Any]) -> JointOperator:
        return JointOperator(implementation, apart, mutates)

    return decorate


def direct_operator(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], DirectOperator]:
    """Makes a function a `DirectOperator`."""

    def decorate(implementation: Callable[..., Any]) -> DirectOperator:
        return DirectOperator(name, implementation, mutates)

    return decorate


def _needs_dispatch(tensors: list[Tensor]) -> bool:
    """Whether something watches or replaces operators: a compiler, a mode, a transform, a subclass of tensors."""
    if torch.compiler.is_compiling():
        return True
    if _C._len_torch_dispatch_stack() or _C._are_functorch_transforms_active() or _C._get_tracing_state() is not None:
        return True
    return not _PLAIN.issuperset(map(type, tensors))
