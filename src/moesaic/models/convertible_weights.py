"""Whether the weights of a layer can become those of experts: not shared, parametrised or used in another way."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

from moesaic.models.inspection import eval_mode
from moesaic.ops.hook_detection import has_hooks

__all__ = ["weight_refusal"]


def weight_refusal(model: nn.Module, name: str, layer: nn.Conv2d | nn.Linear) -> str | None:
    """Returns why the weights of a layer cannot be those of experts, as the end of a sentence; None if they can."""
    if isinstance(layer.weight, UninitializedParameter):
        return "has no weights yet; run the model once"
    if is_parametrized(layer):
        return (
            "has a parametrised weight, such as spectral norm's; remove it first with "
            "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')"
        )
    if "weight" not in dict(layer.named_parameters()):
        return "computes its weight before each run, as weight norm does; remove that first"
    if has_hooks(layer, include_global=False):
        return "has forward hooks, which would be lost; remove them first"
    own = {id(weight) for weight in layer.parameters()}
    shared = [
        other
        for other, weight in model.named_parameters(remove_duplicate=False)
        if id(weight) in own and other.rpartition(".")[0] != name
    ]
    if shared:
        return f"shares its weights with {shared[0].rpartition('.')[0]!r}; give each a copy of its own first"
    if type(layer) not in (nn.Conv2d, nn.Linear) and not _computes_plain_layer(layer):
        return f"is a {type(layer).__name__}, which does not compute the plain layer of its weights"
    return None


def _computes_plain_layer(layer: nn.Conv2d | nn.Linear) -> bool:
    """Whether a subclass of Conv2d or Linear computes what the plain layer with its weights computes.

    Both run with random weights: the layer's own may be zeros, or on the meta device.
    """
    generator = torch.Generator().manual_seed(0)
    device = "cpu" if layer.weight.is_meta else layer.weight.device

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device, layer.weight.dtype)

    weights = {name: random(*weight.shape) for name, weight in layer.named_parameters()}
    weight, bias = weights["weight"], weights.get("bias")
    with eval_mode(layer), torch.no_grad():
        if isinstance(layer, nn.Linear):
            x = random(1, 2, 3, layer.in_features)
            expected = F.linear(x, weight, bias)
        else:
            side = layer.kernel_size[0] + 2
            x = random(1, layer.in_channels, side, side + 1)
            expected = F.conv2d(x, weight, bias, padding=layer.kernel_size[0] // 2)
        try:
            output = functional_call(layer, weights, x)
        except Exception:  # it does not take a map
            return False
    if not isinstance(output, Tensor) or output.shape != expected.shape:
        return False
    return bool(torch.allclose(output, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().mean())))
