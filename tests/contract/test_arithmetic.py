"""Routing saves arithmetic: the sparse backend does little more than L/N of the dense multiply-adds."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import moesaic


def flops(model: nn.Module, x: torch.Tensor, backward: bool = False) -> int:
    with FlopCounterMode(display=False) as counter:
        y = model(x)
        if backward:
            y.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gate": "softmax_all", "gate_on": "input", "expert_norm": True},
        {"gate_on": "output", "expert_norm": True},
        {"context": "patch"},
    ],
    ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()) or "default",
)
def test_the_celeba_shape_costs_at_most_a_tenth_more_than_ideal(options, backward):
    with torch.device("meta"):
        x = torch.randn(8, 640, 16, 16, requires_grad=backward)
        dense = flops(nn.Conv2d(640, 640, 3, padding=1), x, backward)
        layer = moesaic.PatchMoE(640, 640, experts=8, patches_per_expert=2, patch_size=4, kernel_size=3, **options)
        routed = flops(layer, x, backward)
    assert routed <= 1.1 * dense * 2 / 16
    assert routed <= dense / 7


def test_token_choice_costs_its_assignments_only():
    # float64, because FlopCounterMode counts its GEMMs and overlooks grouped_mm
    x = torch.randn(2, 64, 16, 16, dtype=torch.float64)
    dense = flops(nn.Conv2d(64, 64, 3, padding=1, dtype=torch.float64), x)
    router = moesaic.TokenChoice(64, 8, 1, dtype=torch.float64)
    layer = moesaic.PatchMoE(64, 64, experts=8, kernel_size=3, router=router, dtype=torch.float64)
    router_alone = flops(router, x)
    assert flops(layer, x) == router_alone + dense / 8
