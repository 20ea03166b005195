"""Dispatch: which backend runs the experts of routed patches, samples and channels.

A backend implements ``conv`` and ``mlp`` for the patches of a map, ``stacked`` and ``each`` for whole samples, and
``channels`` for a convolution with gated channels; the ``reference`` backend defines what each computes. Backends are
registered by name. Layers call the ``run_`` functions, which select a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic import context_stacks
from moesaic.argument_checks import check_choice
from moesaic.ops.autocast import autocast_dtype, autocast_off
from moesaic.ops.global_batch import GlobalBatch
from moesaic.ops.global_batch_norm import global_batch_norm
from moesaic.routing_record import Routing

if TYPE_CHECKING:
    from contextlib import _GeneratorContextManager  # pyright: ignore[reportPrivateUsage]

    from moesaic.ops.patch.cpu_inference import PreparedCache

__all__ = [
    "Activation",
    "Backend",
    "BackendChoice",
    "ChannelActivation",
    "ChannelConv",
    "Combine",
    "Context",
    "ConvWeights",
    "ExpertChoiceBackend",
    "ExpertGate",
    "GateOn",
    "MLPWeights",
    "Norm",
    "PatchChoice",
    "PatchSelection",
    "PatchSpec",
    "Samples",
    "StackedExecutor",
    "backend",
    "backends",
    "explain_backend",
    "register_backend",
    "requested_backend",
    "run_channels",
    "run_chosen_conv",
    "run_chosen_mlp",
    "run_conv",
    "run_each",
    "run_expert_choice",
    "run_mlp",
    "run_stacked",
    "select_backend",
]

GateOn = Literal["output", "input"]
Context = Literal["map", "patch"]
Combine = Literal["concat", "sum"]
Activation = Callable[[Tensor], Tensor]
ChannelActivation = Literal["relu", "identity"]
ExpertGate = Literal["softmax_selected", "softmax_all", "softmax_experts", "one"]


@dataclass(frozen=True)
class PatchSpec:
    """How experts apply to the patches of a map; the options are those of ``PatchMoE``."""

    patch_size: int
    gate_on: GateOn
    context: Context
    combine: Combine


@dataclass(frozen=True)
class Norm:
    """BatchNorm of each expert's masked map, followed by ReLU; tensors are (E, C).

    Of a ``ChannelConv`` it is the BatchNorm of the convolution's result, without ReLU; tensors are (O,).
    In training the running statistics are updated in place.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    momentum: float
    eps: float
    training: bool
    batch: GlobalBatch | None = None
    """The batch over which statistics are taken in training, if it is spread over processes."""
    batches: Tensor | None = None
    """Of a ``ChannelConv``, the number of batches in training, which goes up by one with the running statistics."""

    def count(self) -> None:
        """Counts a batch in training."""
        if self.training and self.batches is not None:
            self.batches.add_(1)

    def apply(self, y: Tensor) -> Tensor:
        """BatchNorm of a map (B, O, H, W), for tensors (O,)."""
        if self.training and self.batch is not None:
            return global_batch_norm(y, self)
        return F.batch_norm(
            y, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )


@dataclass(frozen=True)
class ConvWeights:
    """Stacked convolutions. ``weight`` (E, O, C, ks, ks) has the dtype to compute in."""

    weight: Tensor
    bias: Tensor | None
    cache: PreparedCache | None = None
    """Of inference on a CPU, for what it computes from the weights alone."""

    def to(self, dtype: torch.dtype) -> ConvWeights:
        """The weights in another dtype."""
        return ConvWeights(self.weight.to(dtype), _to(self.bias, dtype), self.cache)


@dataclass(frozen=True)
class MLPWeights:
    """Stacked two-layer MLPs, applied to each pixel: C → J → O."""

    weight_in: Tensor
    """(E, J, C)"""
    bias_in: Tensor | None
    weight_out: Tensor
    """(E, O, J)"""
    bias_out: Tensor | None
    activation: Activation

    def to(self, dtype: torch.dtype) -> MLPWeights:
        """The weights in another dtype."""
        first, last = self.weight_in.to(dtype), self.weight_out.to(dtype)
        return MLPWeights(first, _to(self.bias_in, dtype), last, _to(self.bias_out, dtype), self.activation)


@dataclass(frozen=True)
class ChannelConv:
    """A convolution whose channels are gated in blocks: gate ⊙ activation(norm(conv(x))).

    The last block of either side may be shorter. ``weight`` has the dtype to compute in.
    """

    weight: Tensor
    """(O, C, ks, ks)"""
    bias: Tensor | None
    norm: Norm | None
    stride: int
    padding: int
    activation: ChannelActivation
    block_out: int
    block_in: int


@dataclass(frozen=True, eq=False)
class PatchSelection:
    """State of an expert choice that a backend's kernels made, which the same backend's ``conv`` and ``mlp`` reuse.

    With it the gradient of the gates goes on to the router inside ``conv`` and ``mlp``; without it the gates are an
    input like any other. It belongs to one map and one routing, and is separate from the routing so that records of the
    routing do not keep the map alive.
    """

    x: Tensor
    """(B, C, H, W): the map that was scored."""
    routing: Routing
    router: Tensor
    """(E, C, p, p): the kernels the map was scored with."""
    gate: ExpertGate
    """How gates come from scores."""
    slots: Tensor
    """(B, E, N): which of its L slots an expert gave to a patch, -1 for none."""
    detached: bool = False
    """Whether scores and gates of the routing have no gradient, because only ``conv`` and ``mlp`` read them."""

    def is_for(self, x: Tensor, routing: Routing) -> bool:
        """Whether map and routing are still those of the choice: a hook may have replaced either."""
        return self.x is x and routing.index is self.routing.index and routing.gate is self.routing.gate


@dataclass(frozen=True)
class PatchChoice:
    """An expert choice that is still to be made."""

    router: Tensor
    """(E, C, p, p): the kernels to score the map with."""
    patches: int
    """L, patches that an expert selects."""
    gate: ExpertGate


class Samples(Protocol):
    """Samples as a backend arranges them for stacked experts; the leading axes depend on the backend."""

    def linear(self, values: Tensor, weight_EOC: Tensor, bias_EO: Tensor | None = None) -> Tensor:
        """Values (…, C) times the matrix of each sample's expert, and its bias: (…, O), in the values' dtype."""
        ...


class StackedExecutor(Protocol):
    """The executor of stacked experts: a backend, or an `ExpertDispatcher` where ranks share the experts."""

    def conv(
        self,
        x: Tensor,
        routing: Routing,
        experts: ConvWeights,
        norm: Norm | None,
        spec: PatchSpec,
        selection: PatchSelection | None = None,
    ) -> Tensor: ...

    def mlp(
        self,
        x: Tensor,
        routing: Routing,
        experts: MLPWeights,
        norm: Norm | None,
        spec: PatchSpec,
        selection: PatchSelection | None = None,
    ) -> Tensor: ...

    def stacked(self, x: Tensor, routing: Routing, run: Callable[[Tensor, Samples], Tensor]) -> Tensor: ...


class Backend(StackedExecutor, Protocol):
    """The operations of a backend.

    ``conv`` and ``mlp`` take a map (B, C, H, W) and return (B, O', H, W). O' is E·O for
    ``combine="concat"`` and O for ``"sum"``; the result has the weights' dtype and any memory
    format. Maps come in channels_last, so that a pixel's channels are adjacent in memory. ``selection`` is what this
    or another backend's ``choose`` returned for the map, or None; a backend may ignore it.

    ``stacked`` and ``each`` take a batch of samples (B, …), of which sample b goes to the experts
    ``routing.index[b, 0]``, and return the gated sum of their outputs. ``stacked`` arranges the samples
    and calls ``run`` on them once; ``each`` calls ``call(e, samples)`` for experts
    that have samples, and for those in ``also``.

    ``channels`` takes a map (B, C, H, W), an open block of ``gate_out`` for every block of channels to
    compute, and of ``gate_in`` for every block of the map's channels that is not zero (None: any may
    be other than zero), and returns (B, O, H', W'), zero in closed channels.
    """

    name: str

    def refusal(self, x: Tensor, routing: Routing) -> str | None:
        """Why this backend cannot run here, or None if it can."""
        ...

    def each(
        self, x: Tensor, routing: Routing, call: Callable[[int, Tensor], Tensor], also: Collection[int] = ()
    ) -> Tensor: ...

    def channels(self, x: Tensor, gate_out: Routing, gate_in: Routing | None, conv: ChannelConv) -> Tensor: ...


class ExpertChoiceBackend(Protocol):
    """A backend that has kernels for expert choice too."""

    def choose(
        self, x: Tensor, router: Tensor, patches: int, gate: ExpertGate, *, detached: bool
    ) -> PatchSelection | None:
        """Every expert's top patches of a map (B, C, H, W), or None, which leaves the choice to the router.

        If ``detached``, only this backend's ``conv`` or ``mlp`` needs the gradient of scores and gates.
        """
        ...


_registered: dict[str, Backend] = {}


_traced: list[str] = []
"""Backends of the blocks inside of code that `torch.compile` traces, which cannot set a context variable; empty when
that code runs: a block opens and closes within one trace."""


def register_backend(candidate: Backend) -> None:
    """Register a backend by its name; those registered later are preferred where they can run."""
    _registered[candidate.name] = candidate


def backends() -> list[str]:
    """Names of the registered backends, the preferred one last.

    >>> backends()
    ['reference', 'torch', 'triton']
    """
    return list(_registered)


def backend(name: str) -> _GeneratorContextManager[None]:
    """Run everything inside the block on the backend of that name, instead of the preferred one.

    Works as a decorator too. The choice holds for the current thread or asyncio task alone. A thread that is started
    inside the block has no requested backend, as it has gradients inside of ``torch.no_grad()``; to pass the choice on,
    run its function with ``contextvars.copy_context().run`` or `asyncio.to_thread`.

    >>> import torch, moesaic
    >>> layer, x = moesaic.PatchMoE(4, 4, experts=2, patches_per_expert=3), torch.randn(1, 4, 5, 5)
    >>> with moesaic.backend("reference"):
    ...     y = layer(x)
    >>> torch.allclose(y, layer(x), atol=1e-6)
    True
    """
    return _request(check_choice("backend", "name", name, list(_registered)))


@contextmanager
def _request(name: str) -> Generator[None]:
    # a generator: torch.compile traces it as part of its caller or not at all, never one half alone
    if torch.compiler.is_dynamo_compiling():
        _traced.append(name)
        try:
            yield
        finally:
            _traced.pop()
    else:
        context_stacks.push("backends", name)
        try:
            yield
        finally:
            context_stacks.pop("backends", name)


def requested_backend() -> str | None:
    """The name given to the innermost ``backend(...)`` block of the current context, or None outside of any."""
    names = _traced or context_stacks.backends
    return names[-1] if names else None


def select_backend(x: Tensor, routing: Routing) -> Backend:
    """The backend requested with ``backend(...)``, or else the preferred one that can run this."""
    name = requested_backend()
    if name is not None:
        requested = _registered[name]
        refusal = requested.refusal(x, routing)
        if refusal is not None:
            raise ValueError(f"backend {requested.name!r} cannot run this: {refusal}; leave the choice to moesaic")
        return requested
    for name in reversed(_registered):
        if _registered[name].refusal(x, routing) is None:
            return _registered[name]
    reasons = "; ".join(f"{name}: {known.refusal(x, routing)}" for name, known in _registered.items())
    raise ValueError(f"no backend can run this: {reasons}")


@dataclass(frozen=True)
class BackendChoice:
    """The selected backend and the reason."""

    name: str
    why: str
    refused: dict[str, str]
    """Why each of the other backends cannot run this, by name."""


def explain_backend(x: Tensor, routing: Routing) -> BackendChoice:
    """Returns the backend that runs a routed map, and why.

    >>> import torch, moesaic
    >>> layer, x = moesaic.PatchMoE(4, 4, experts=2, patches_per_expert=3), torch.randn(1, 4, 5, 5)
    >>> choice = explain_backend(x, layer.route(x))
    >>> choice.name, "torch" in choice.refused
    ('torch', False)
    """
    reasons = {name: known.refusal(x, routing) for name, known in _registered.items()}
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    name = select_backend(x, routing).name
    if requested_backend() is not None:
        return BackendChoice(name, f"moesaic.backend({name!r}) asks for it", refused)
    better = backends()[backends().index(name) + 1 :]
    rejected = [f"{other} cannot run this: {refused[other]}" for other in better if other in refused]
    return BackendChoice(name, "; ".join(["the preferred backend of those that fit", *rejected]), refused)


def run_expert_choice(
    x: Tensor, router: Tensor, patches: int, gate: ExpertGate, *, detached: bool = False
) -> PatchSelection | None:
    """Every expert's top patches of a map (B, C, H, W) and their gates, or None if no backend has kernels for that.

    ``detached``: only the experts need the gradient of scores and gates. They have none then, where the backend that
    will run the experts computes it there.
    """
    requested = requested_backend()
    names = reversed(_registered) if requested is None else [requested]
    for name in names:
        candidate = _registered[name]
        if hasattr(candidate, "choose"):  # an instance check against the protocol takes ten times as long
            selection = cast("ExpertChoiceBackend", candidate).choose(x, router, patches, gate, detached=detached)
            if selection is not None:
                return selection
        detached = False  # this backend is preferred, and may run the experts
    return None


def run_conv(
    x: Tensor,
    routing: Routing,
    experts: ConvWeights,
    norm: Norm | None,
    spec: PatchSpec,
    selection: PatchSelection | None = None,
    dispatcher: StackedExecutor | None = None,
) -> Tensor:
    """Run stacked convolutions over the routed patches of a map, on a backend or by a dispatcher."""
    cast = experts.to(autocast_dtype(x) or x.dtype)
    with autocast_off(x):
        executor = dispatcher or select_backend(x, routing)
        return executor.conv(x, routing, cast, norm, spec, selection)


def run_chosen_conv(x: Tensor, choice: PatchChoice, experts: ConvWeights, spec: PatchSpec) -> Tensor | None:
    """Makes an expert choice and runs stacked convolutions on it; None where the preferred backend has no such kernels.

    For a map (B, C, H, W) in channels_last whose routing only the experts read.
    """
    return _run_chosen("chosen_conv", x, choice, experts, spec)


def run_chosen_mlp(x: Tensor, choice: PatchChoice, experts: MLPWeights, spec: PatchSpec) -> Tensor | None:
    """Makes an expert choice and runs stacked MLPs on it, as `run_chosen_conv` does convolutions."""
    return _run_chosen("chosen_mlp", x, choice, experts, spec)


def _run_chosen(
    name: str, x: Tensor, choice: PatchChoice, experts: ConvWeights | MLPWeights, spec: PatchSpec
) -> Tensor | None:
    preferred: Any = _registered[requested_backend() or next(reversed(_registered))]
    fused = getattr(preferred, name, None)
    if fused is None or not preferred.can_choose(x, choice):
        return None
    cast = experts.to(autocast_dtype(x) or x.dtype)
    with autocast_off(x):
        return fused(x, choice, cast, spec)


def run_mlp(
    x: Tensor,
    routing: Routing,
    experts: MLPWeights,
    norm: Norm | None,
    spec: PatchSpec,
    selection: PatchSelection | None = None,
    dispatcher: StackedExecutor | None = None,
) -> Tensor:
    """Run stacked MLPs over the routed patches of a map, pixel by pixel, on a backend or by a dispatcher."""
    cast = experts.to(autocast_dtype(x) or x.dtype)
    with autocast_off(x):
        executor = dispatcher or select_backend(x, routing)
        return executor.mlp(x, routing, cast, norm, spec, selection)


def run_stacked(
    x: Tensor,
    routing: Routing,
    run: Callable[[Tensor, Samples], Tensor],
    dispatcher: StackedExecutor | None = None,
) -> Tensor:
    """Run stacked experts over routed samples (B, …): ``run`` computes the experts' outputs."""
    x = x.to(autocast_dtype(x) or x.dtype)
    with autocast_off(x):
        return (dispatcher or select_backend(x, routing)).stacked(x, routing, run)


def run_each(x: Tensor, routing: Routing, call: Callable[[int, Tensor], Tensor], also: Collection[int] = ()) -> Tensor:
    """Run experts of any kind over routed samples (B, …): ``call(e, samples)`` returns expert e's outputs.

    Experts without samples are not called, but for those in ``also``.
    """
    return select_backend(x, routing).each(x, routing, call, also)


def run_channels(x: Tensor, gate_out: Routing, gate_in: Routing | None, conv: ChannelConv) -> Tensor:
    """Run a convolution whose channels are gated over a map."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):  # the rest costs time that small layers notice
        return select_backend(x, gate_out).channels(x, gate_out, gate_in, conv)
    dtype = autocast_dtype(x) or x.dtype
    cast = replace(conv, weight=conv.weight.to(dtype), bias=_to(conv.bias, dtype))
    with autocast_off(x):
        return select_backend(x, gate_out).channels(x.to(dtype), gate_out, gate_in, cast)


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
