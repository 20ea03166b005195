"""Expert choice over patches by Triton kernels, on CUDA devices; whatever else is plain torch's.

The kernels are in `moesaic.ops.triton` and are imported when the first map asks for them.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.dispatch import (
    Activation,
    ConvWeights,
    MLPWeights,
    Norm,
    PatchSelection,
    PatchSpec,
    Softmax,
    requested_backend,
)
from moesaic.ops.torch_backend import TorchBackend
from moesaic.routing_record import Routing

__all__ = ["GATE_KINDS", "TritonBackend", "kernel_operands", "kernel_refusal", "kernels_available"]

_INSTALLED = find_spec("triton") is not None
GATE_KINDS: dict[Softmax, int] = {"softmax_selected": 0, "softmax_all": 1, "one": 2}
"""Gates of `ExpertChoice`, as kernels know them."""
_MAX_PATCHES = 1024
"""An image's patches are ranked by one program, against each other."""
_CAPABILITY = (8, 0)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonBackend(TorchBackend):
    """Gather, batched GEMM and combine in a few passes over memory, gradients included.

    No second derivatives, no ``torch.func``: ask for ``moesaic.backend("torch")`` there.
    """

    name = "triton"

    def refusal(self, x: Tensor, routing: Routing) -> str | None:
        if routing.unit != "patch" or routing.chooser != "expert" or routing.index is None:
            return "its kernels are for patches that experts choose"
        return kernel_refusal(x)

    def choose(self, x: Tensor, router: Tensor, patches: int, gate: Softmax) -> PatchSelection | None:
        p = router.shape[2]
        grid = (x.shape[2] // p, x.shape[3] // p)
        units = grid[0] * grid[1]
        if kernel_refusal(x) is not None or patches > units or units > _MAX_PATCHES:
            return None
        from moesaic.ops.triton.autograd_ops import patch_route

        scores, index, gates, slots = patch_route(x, router, patches, GATE_KINDS[gate])
        routing = Routing("patch", scores, index, gates, "expert", grid=grid, may_drop=False)
        return PatchSelection(x, routing, router, gate, slots)

    def conv(
        self,
        x: Tensor,
        routing: Routing,
        experts: ConvWeights,
        norm: Norm | None,
        spec: PatchSpec,
        selection: PatchSelection | None = None,
    ) -> Tensor:
        from moesaic.ops.triton.autograd_ops import patch_conv

        weights = experts.weight, experts.bias
        choice, normed, save = kernel_operands(x, routing, norm, spec, selection, weights)
        y, _, _ = patch_conv(
            x, *weights, *choice[:5], *normed, spec.patch_size, choice[5],
            spec.gate_on == "input", spec.context == "patch", spec.combine == "sum", save,
        )  # fmt: skip
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
        if activation is None:
            return super().mlp(x, routing, experts, norm, spec)
        from moesaic.ops.triton.autograd_ops import patch_mlp

        weights = experts.weight_in, experts.bias_in, experts.weight_out, experts.bias_out
        choice, normed, save = kernel_operands(x, routing, norm, spec, selection, weights)
        y, *_ = patch_mlp(
            x, *weights, *choice[:5], *normed, spec.patch_size, choice[5], spec.gate_on == "input",
            spec.combine == "sum", activation, save,
        )  # fmt: skip
        return y


def kernels_available(x: Tensor) -> bool:
    """Whether Triton kernels may run on such a tensor: no other backend was requested, and its device and dtype fit.

    >>> kernels_available(torch.zeros(2, 3, 8, 8))
    False
    """
    return requested_backend() in (None, TritonBackend.name) and kernel_refusal(x) is None


Choice = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, int]
NormArguments = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, float, bool]


def kernel_operands(
    x: Tensor,
    routing: Routing,
    norm: Norm | None,
    spec: PatchSpec,
    selection: PatchSelection | None,
    weights: tuple[Tensor | None, ...],
) -> tuple[Choice, NormArguments, bool]:
    """What operators take of the routing and of the norm, and whether any input needs a gradient."""
    choice = _choice(x, routing, selection)
    normed = _norm(x, choice, norm, spec)
    return choice, normed, _wants_gradients(x, *weights, *choice[2:5], *normed[:2])


def kernel_refusal(x: Tensor) -> str | None:
    """Why the kernels cannot run on such a tensor, or None if they can."""
    if x.device.type != "cuda":
        return f"the map is on {x.device.type}; its kernels run on cuda"
    if not _INSTALLED:
        return "triton is not installed"
    if x.dtype not in _DTYPES:
        return f"the map is {x.dtype}; its kernels are for bfloat16, float16 and float32"
    if torch.cuda.get_device_capability(x.device) < _CAPABILITY:
        return f"the device's compute capability is below {_CAPABILITY[0]}.{_CAPABILITY[1]}"
    if x.shape[0] == 0:
        return "the batch is empty"
    if torch.onnx.is_in_onnx_export():
        return "ONNX does not know its kernels"
    return None


def _choice(
    x: Tensor, routing: Routing, selection: PatchSelection | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, int]:
    """Index, slots, gate, scores and router where the gates are that router's, and how they come from scores."""
    assert routing.index is not None
    if selection is None or not selection.is_for(x, routing):
        from moesaic.ops.triton.autograd_ops import patch_slots

        return routing.index, patch_slots(routing.index, routing.units), routing.gate, None, None, 0
    if selection.gate == "one":  # nothing flows back
        return routing.index, selection.slots, routing.gate.detach(), None, None, GATE_KINDS["one"]
    gate, scores = routing.gate.detach(), routing.scores.detach()
    return routing.index, selection.slots, gate, scores, selection.router, GATE_KINDS[selection.gate]


def _norm(
    x: Tensor,
    choice: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, int],
    norm: Norm | None,
    spec: PatchSpec,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, float, bool]:
    """Weight, bias, and the statistics that apply now; ε, and whether these are the map's own."""
    if norm is None:
        return None, None, None, None, 0.0, False
    wide = torch.promote_types(x.dtype, torch.float32)
    if not norm.training:
        return norm.weight, norm.bias, norm.running_mean.to(wide), norm.running_var.to(wide), norm.eps, False
    from moesaic.ops.triton.autograd_ops import patch_statistics

    with torch.no_grad():
        gate = choice[2].detach() if spec.gate_on == "input" else None
        mean, var = patch_statistics(
            x.detach(), choice[0], gate, norm.running_mean, norm.running_var, norm.momentum, spec.patch_size
        )
    return norm.weight, norm.bias, mean, var, norm.eps, True


def _wants_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _activation_name(activation: Activation) -> str | None:
    """The name of an activation that a kernel applies together with the bias."""
    if activation is F.gelu:
        return "gelu"
    return "relu" if activation is F.relu or activation is torch.relu else None
