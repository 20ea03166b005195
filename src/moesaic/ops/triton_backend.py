"""The ``triton`` backend: Triton kernels on CUDA devices for expert choice over patches and for gated channels.

Of a convolution with gated channels they run what follows it: BatchNorm, gates and ReLU. Everything else is as in
``torch``. The kernels are in `moesaic.ops.triton` and are imported when the first map needs them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.channel.masked import apply_gates, closed_gradients, dense_conv, scale_channels
from moesaic.ops.dispatch import (
    Activation,
    ChannelConv,
    ConvWeights,
    ExpertGate,
    MLPWeights,
    Norm,
    PatchChoice,
    PatchSelection,
    PatchSpec,
    requested_backend,
)
from moesaic.ops.eager_conditions import in_forward_ad, in_transform, is_plain_eager
from moesaic.ops.torch_backend import TorchBackend
from moesaic.routing_record import Routing

if TYPE_CHECKING:
    from moesaic.ops.triton.operands import PatchOperands

__all__ = [
    "GATE_KINDS",
    "TritonBackend",
    "kernel_refusal",
    "kernels_available",
    "norm_relu",
    "patch_operands",
    "patch_options",
]

_INSTALLED = find_spec("triton") is not None
GATE_KINDS: dict[ExpertGate, int] = {"softmax_selected": 0, "softmax_all": 1, "one": 2, "softmax_experts": 3}
"""Codes of `ExpertChoice`'s gates in kernels."""
_MAX_PATCHES = 1024
"""Patches of an image, at most: one program ranks all of them."""
_MIN_CAPABILITY = (8, 0)
_capable: dict[torch.device, bool] = {}
"""Whether a device has that compute capability: torch's own lookup takes longer than a small kernel."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonBackend(TorchBackend):
    """Gather, batched GEMM and combine in a few passes over memory, gradients included.

    No second derivatives: use ``moesaic.backend("torch")`` there. Under ``torch.func`` the ``torch`` backend runs.
    """

    name = "triton"

    def refusal(self, x: Tensor, routing: Routing) -> str | None:
        chosen = routing.unit == "patch" and routing.chooser == "expert" and routing.index is not None
        if not chosen and routing.unit != "channel":
            return "its kernels are for patches that experts choose, and for gated channels"
        return kernel_refusal(x)

    def choose(
        self, x: Tensor, router: Tensor, patches: int, gate: ExpertGate, *, detached: bool = False
    ) -> PatchSelection | None:
        p = router.shape[2]
        grid = (x.shape[2] // p, x.shape[3] // p)
        units = grid[0] * grid[1]
        if kernel_refusal(x) is not None or patches > units or units > _MAX_PATCHES:
            return None
        from moesaic.ops.triton.patch_ops import patch_route

        route = patch_route.without_gradient if detached else patch_route
        scores, index, gates, slots = route(x, router, patches, GATE_KINDS[gate])
        routing = Routing("patch", scores, index, gates, "expert", grid=grid, may_drop=False)
        return PatchSelection(x, routing, router, gate, slots, detached)

    @staticmethod
    def can_choose(x: Tensor, choice: PatchChoice) -> bool:
        """Whether the kernels support such a choice on a map."""
        p = choice.router.shape[2]
        units = (x.shape[2] // p) * (x.shape[3] // p)
        return kernel_refusal(x) is None and choice.patches <= units <= _MAX_PATCHES

    def chosen_conv(self, x: Tensor, choice: PatchChoice, experts: ConvWeights, spec: PatchSpec) -> Tensor:
        """The output of ``conv`` on the choice of ``choose``, by one operator, where `can_choose` holds."""
        from moesaic.ops.triton.patch_ops import patch_route_conv

        tensors = x, experts.weight, experts.bias, choice.router
        save = torch.is_grad_enabled() and any([each is not None and each.requires_grad for each in tensors])  # noqa: C419
        return patch_route_conv(*tensors, choice.patches, patch_options(spec, choice.gate, save))[0]

    def chosen_mlp(self, x: Tensor, choice: PatchChoice, experts: MLPWeights, spec: PatchSpec) -> Tensor | None:
        """The output of ``mlp`` on the choice of ``choose``; None for activations that the kernels do not have."""
        activation = _activation_name(experts.activation)
        if activation is None:
            return None
        from moesaic.ops.triton.activation import ACTIVATIONS
        from moesaic.ops.triton.mlp_ops import patch_route_mlp

        weights = experts.weight_in, experts.bias_in, experts.weight_out, experts.bias_out
        tensors = x, *weights, choice.router
        save = torch.is_grad_enabled() and any([each is not None and each.requires_grad for each in tensors])  # noqa: C419
        *options, _ = patch_options(spec, choice.gate, save)
        return patch_route_mlp(*tensors, choice.patches, (*options, ACTIVATIONS.index(activation)))[0]

    def conv(
        self,
        x: Tensor,
        routing: Routing,
        experts: ConvWeights,
        norm: Norm | None,
        spec: PatchSpec,
        selection: PatchSelection | None = None,
    ) -> Tensor:
        if _is_global(norm):
            return super().conv(x, _with_gradients(routing, selection), experts, norm, spec)
        from moesaic.ops.triton.patch_ops import patch_conv

        weights = experts.weight, experts.bias
        operands = patch_operands(x, routing, norm, spec, selection, weights)
        y, _, _ = patch_conv(x, *weights, *operands.flatten())
        return y

    def mlp(
        self,
        x: Tensor,
        routing: Routing,
        experts: MLPWeights,
        norm: Norm | None,
        spec: PatchSpec,
        selection: PatchSelection | None = None,
    ) -> Tensor:
        activation = _activation_name(experts.activation)
        if activation is None or _is_global(norm):
            return super().mlp(x, _with_gradients(routing, selection), experts, norm, spec)
        from moesaic.ops.triton.activation import ACTIVATIONS
        from moesaic.ops.triton.mlp_ops import patch_mlp

        weights = experts.weight_in, experts.bias_in, experts.weight_out, experts.bias_out
        operands = patch_operands(x, routing, norm, spec, selection, weights)
        operands = operands._replace(options=operands.options._replace(activation=ACTIVATIONS.index(activation)))
        y, *_ = patch_mlp(x, *weights, *operands.flatten())
        return y

    def channels(self, x: Tensor, gate_out: Routing, gate_in: Routing | None, conv: ChannelConv) -> Tensor:
        y = dense_conv(x, conv)
        norm = conv.norm
        if norm is None or not _fits_gated_norm(y, norm):
            return apply_gates(y, gate_out, conv)
        if conv.activation == "relu" and closed_gradients(gate_out):  # the kernel skips what closed gates hide
            return scale_channels(_gated_norm(y, norm, None, 1, relu=True), gate_out, conv)
        return _gated_norm(y, norm, gate_out.weights, conv.block_out, relu=conv.activation == "relu")


def norm_relu(y: Tensor, norm: Norm, gates: Tensor | None = None, block: int = 1) -> Tensor:
    """ReLU of BatchNorm of a map (B, C, H, W), in one pass where the kernels run; counts the batch in training.

    ``gates`` (B, 1, E) multiply blocks of so many channels.
    """
    if kernels_available(y) and _fits_gated_norm(y, norm):
        return _gated_norm(y, norm, gates, block, relu=True)
    norm.count()
    y = F.relu(norm.apply(y))
    if gates is not None:
        y = y * gates[:, 0].repeat_interleave(block, 1)[:, : y.shape[1], None, None].to(y.dtype)
    return y


def _fits_gated_norm(y: Tensor, norm: Norm) -> bool:
    """Whether the kernels for what follows a convolution run on its output."""
    if _is_global(norm) or norm.batches is None:
        return False
    values = y.numel() // max(y.shape[1], 1)
    # a compiler fuses such passes itself
    return values > 1 and y.is_contiguous(memory_format=torch.channels_last) and is_plain_eager(y)


def _gated_norm(y: Tensor, norm: Norm, gates: Tensor | None, block: int, *, relu: bool) -> Tensor:
    """``gates`` are (B, E) or (B, 1, E)."""
    from moesaic.ops.triton.channel_ops import gated_map_norm, gated_norm

    mean, var, options = norm.running_mean, norm.running_var, (block, int(relu), int(norm.training))
    if not norm.training:
        return gated_norm(y, norm.weight, norm.bias, gates, mean, var, options, norm.eps)
    assert norm.batches is not None
    return gated_map_norm(
        y, norm.weight, norm.bias, gates, mean, var, norm.batches, options, norm.momentum, norm.eps
    )[0]  # fmt: skip


def _with_gradients(routing: Routing, selection: PatchSelection | None) -> Routing:
    """The routing with gradients of scores and gates, for code that does not compute them from a selection."""
    if selection is None or not selection.detached or routing.gate is not selection.routing.gate:
        return routing
    from moesaic.ops.triton.patch_ops import patch_route

    assert routing.index is not None
    kind = GATE_KINDS[selection.gate]
    scores, index, gates, _ = patch_route(selection.x, selection.router, routing.index.shape[2], kind)
    return replace(routing, scores=scores, index=index, gate=gates)


@lru_cache
def patch_options(spec: PatchSpec, gate: ExpertGate, save: bool, batch_stats: bool = False) -> tuple[int, ...]:
    """Options of experts, as operators take them; ``batch_stats``: with a norm in training."""
    from moesaic.ops.triton.operands import PatchOptions

    options = PatchOptions(
        spec.patch_size,
        GATE_KINDS[gate],
        gate_on_input=spec.gate_on == "input",
        isolated=spec.context == "patch",
        sum_experts=spec.combine == "sum",
        batch_stats=batch_stats,
        save=save,
    )
    return options.flatten()


def _is_global(norm: Norm | None) -> bool:
    """Whether statistics are those of a batch on several processes, which the kernels do not exchange."""
    return norm is not None and norm.training and norm.batch is not None


def kernels_available(x: Tensor) -> bool:
    """Whether Triton kernels may run on such a tensor: no other backend was requested, and its device and dtype fit.

    >>> kernels_available(torch.zeros(2, 3, 8, 8))
    False
    """
    return requested_backend() in (None, TritonBackend.name) and kernel_refusal(x) is None


def patch_operands(
    x: Tensor,
    routing: Routing,
    norm: Norm | None,
    spec: PatchSpec,
    selection: PatchSelection | None,
    weights: tuple[Tensor | None, ...],
) -> PatchOperands:
    """Operands of operators over routed patches besides map and ``weights``, of which only ``requires_grad`` is read.

    Takes the statistics of the norm in training and updates its running ones.
    """
    from moesaic.ops.triton.operands import Constants, PatchOperands, PatchOptions

    assert routing.index is not None
    index, gate, scores, router, gate_kind = routing.index, routing.gate, None, None, 0
    if selection is None or not selection.is_for(x, routing):
        from moesaic.ops.triton.patch_ops import patch_slots

        gate = _with_gradients(routing, selection).gate
        slots = patch_slots(index, routing.units)
    else:  # the gate's gradient goes to the router inside the operator
        slots, gate_kind, scores = selection.slots, GATE_KINDS[selection.gate], routing.scores
        if not selection.detached:
            gate, scores = gate.detach(), scores.detach()
        if selection.gate != "one":  # which has no gradient
            router = selection.router
        else:
            scores = None
    mean = var = None
    if norm is not None:
        mean, var = _norm_statistics(x, index, gate if spec.gate_on == "input" else None, norm, spec.patch_size)
    norm_weight, norm_bias = (None, None) if norm is None else (norm.weight, norm.bias)
    differentiable = (x, *weights, gate, router, norm_weight, norm_bias)
    options = PatchOptions(
        spec.patch_size,
        gate_kind,
        gate_on_input=spec.gate_on == "input",
        isolated=spec.context == "patch",
        sum_experts=spec.combine == "sum",
        batch_stats=norm is not None and norm.training,
        save=torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in differentiable),
    )
    constants = Constants(index, slots, scores, mean, var)
    return PatchOperands(gate, router, norm_weight, norm_bias, constants, options, 0.0 if norm is None else norm.eps)


def kernel_refusal(x: Tensor) -> str | None:
    """Why the kernels cannot run on such a tensor, or None if they can."""
    if in_transform():
        return "its kernels have no rules for the transforms of torch.func, such as vmap"
    if in_forward_ad():
        return "its kernels compute no tangents, and torch.autograd.forward_ad would leave them out without a word"
    if x.device.type != "cuda":
        return f"the map is on {x.device.type}; its kernels run on cuda"
    if not _INSTALLED:
        return "triton is not installed"
    if x.dtype not in _DTYPES:
        return f"the map is {x.dtype}; its kernels are for bfloat16, float16 and float32"
    if not _is_capable(x.device):
        return f"the device's compute capability is below {_MIN_CAPABILITY[0]}.{_MIN_CAPABILITY[1]}"
    if x.shape[0] == 0:
        return "the batch is empty"
    if torch.onnx.is_in_onnx_export():
        return "ONNX does not know its kernels"
    return None


def _is_capable(device: torch.device) -> bool:
    if torch.compiler.is_compiling():
        return torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY
    found = _capable.get(device)
    if found is None:
        found = _capable[device] = torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY
    return found


def _norm_statistics(
    x: Tensor, index: Tensor, gate: Tensor | None, norm: Norm, patch_size: int
) -> tuple[Tensor, Tensor]:
    """Mean and variance (E, C), in float32 at least: those of the map in training, else the running ones."""
    if not norm.training:
        acc_dtype = torch.promote_types(x.dtype, torch.float32)
        return norm.running_mean.to(acc_dtype), norm.running_var.to(acc_dtype)
    from moesaic.ops.triton.patch_ops import patch_statistics

    with torch.no_grad():
        gate = None if gate is None else gate.detach()
        return patch_statistics(x.detach(), index, gate, norm.running_mean, norm.running_var, norm.momentum, patch_size)


def _activation_name(activation: Activation) -> Literal["gelu", "relu"] | None:
    """The name of an activation that a kernel applies together with the bias, or None."""
    if activation is F.gelu:
        return "gelu"
    return "relu" if activation is F.relu or activation is torch.relu else None
