"""Expert choice over patches by Triton kernels, on CUDA devices; whatever else is plain torch's.

The kernels are in `moesaic.ops.triton` and are imported when the first map asks for them.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.dispatch import Activation, ChosenPatches, ConvWeights, MLPWeights, Norm, PatchSpec, Softmax
from moesaic.ops.torch_backend import TorchBackend
from moesaic.routing_record import Routing

__all__ = ["KINDS", "TritonBackend"]

_INSTALLED = find_spec("triton") is not None
KINDS: dict[Softmax, int] = {"softmax_selected": 0, "softmax_all": 1, "one": 2}
"""Gates of `ExpertChoice`, as kernels know them."""
_MOST_PATCHES = 1024
"""An image's patches are ranked by one program, against each other."""
MOST_REACHED = 1.0
"""Share of a map that may be reached by an expert's patches, each for itself, if the map is not to be written."""
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
        return _refusal(x)

    def choose(self, x: Tensor, router: Tensor, patches: int, softmax: Softmax) -> ChosenPatches | None:
        p = router.shape[2]
        grid = (x.shape[2] // p, x.shape[3] // p)
        units = grid[0] * grid[1]
        if _refusal(x) is not None or patches > units or units > _MOST_PATCHES:
            return None
        from moesaic.ops.triton.autograd_ops import patch_route

        scores, index, gate, slots = patch_route(x, router, patches, KINDS[softmax])
        return ChosenPatches(
            "patch", scores, index, gate, "expert", grid=grid, may_drop=False,
            seen=x, router=router, softmax=softmax, slots=slots, made=(index, gate),
        )  # fmt: skip

    def conv(self, x: Tensor, routing: Routing, experts: ConvWeights, norm: Norm | None, spec: PatchSpec) -> Tensor:
        from moesaic.ops.triton.autograd_ops import patch_conv

        choice = _choice(x, routing)
        normed = _norm(x, choice, norm, spec)
        keep = _wants_gradients(x, experts.weight, experts.bias, *choice[2:5], *normed[:2])
        y, _, _ = patch_conv(
            x, experts.weight, experts.bias, *choice[:5], *normed, spec.patch_size, choice[5],
            spec.gate_on == "input", spec.context == "patch", spec.combine == "sum", keep,
        )  # fmt: skip
        return y

    def pools(self, x: Tensor) -> bool:
        return _refusal(x) is None

    def conv_pooled(
        self, x: Tensor, routing: Routing, experts: ConvWeights, norm: Norm | None, spec: PatchSpec, after: Norm
    ) -> Tensor | None:
        positions = x.shape[0] * x.shape[2] * x.shape[3]
        if spec.combine == "sum" or positions == 1 or _reached(x, routing, experts, spec) > MOST_REACHED:
            return None
        from moesaic.ops.triton.pooled import patch_conv_pooled

        choice = _choice(x, routing)
        *normed, eps, training = _norm(x, choice, norm, spec)
        keep = _wants_gradients(x, experts.weight, experts.bias, *choice[2:5], *normed[:2], after.weight, after.bias)
        running = None if after.training else after.running_mean, None if after.training else after.running_var
        pooled, moments, *_ = patch_conv_pooled(
            x, experts.weight, experts.bias, *choice[:5], *normed, after.weight, after.bias, *running, eps, training,
            spec.patch_size, choice[5], spec.gate_on == "input", spec.context == "patch", after.eps, keep,
        )  # fmt: skip
        if after.training:
            with torch.no_grad():
                mean, var = moments.detach().to(after.running_mean.dtype).unbind()
                after.running_mean.lerp_(mean, after.momentum)
                after.running_var.lerp_(var * (positions / (positions - 1)), after.momentum)
        return pooled

    def mlp(self, x: Tensor, routing: Routing, experts: MLPWeights, norm: Norm | None, spec: PatchSpec) -> Tensor:
        activation = _known(experts.activation)
        if activation is None:
            return super().mlp(x, routing, experts, norm, spec)
        from moesaic.ops.triton.autograd_ops import patch_mlp

        choice = _choice(x, routing)
        normed = _norm(x, choice, norm, spec)
        weights = experts.weight_in, experts.bias_in, experts.weight_out, experts.bias_out
        keep = _wants_gradients(x, *weights, *choice[2:5], *normed[:2])
        y, *_ = patch_mlp(
            x, *weights, *choice[:5], *normed, spec.patch_size, choice[5], spec.gate_on == "input",
            spec.combine == "sum", activation, keep,
        )  # fmt: skip
        return y


def _refusal(x: Tensor) -> str | None:
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


def _choice(x: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, int]:
    """Index, slots, gate, scores and router where the gates are that router's, and how they come from scores."""
    from moesaic.ops.triton.autograd_ops import patch_slots

    assert routing.index is not None
    if not isinstance(routing, ChosenPatches) or not routing.is_of(x):
        return routing.index, patch_slots(routing.index, routing.units), routing.gate, None, None, 0
    assert routing.slots is not None
    if routing.softmax == "one":  # nothing flows back
        return routing.index, routing.slots, routing.gate.detach(), None, None, KINDS["one"]
    gate, scores = routing.gate.detach(), routing.scores.detach()
    return routing.index, routing.slots, gate, scores, routing.router, KINDS[routing.softmax]


def _reached(x: Tensor, routing: Routing, experts: ConvWeights, spec: PatchSpec) -> float:
    """How many positions an expert's patches of an image reach, taken together, by those that there are."""
    assert routing.index is not None
    halo = 2 * (experts.weight.shape[3] // 2) if spec.gate_on == "input" and spec.context == "map" else 0
    return routing.index.shape[2] * (spec.patch_size + halo) ** 2 / (x.shape[2] * x.shape[3])


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


def _known(activation: Activation) -> str | None:
    """The name of an activation that a kernel applies together with the bias."""
    if activation is F.gelu:
        return "gelu"
    return "relu" if activation is F.relu or activation is torch.relu else None
