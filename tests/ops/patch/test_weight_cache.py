from collections.abc import Callable

import pytest
import torch
from torch import nn

from moesaic.ops.patch.cpu_inference import CachedValue


class Doubled:
    """Caches twice a layer's weights, and counts how often they were computed."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer, self.cached, self.computed = layer, CachedValue[torch.Tensor](), 0

    def __call__(self) -> torch.Tensor:
        return self.cached.get([self.layer.weight], self.compute)

    def compute(self) -> torch.Tensor:
        self.computed += 1
        return 2 * self.layer.weight.detach()


def step(layer: nn.Linear) -> None:
    layer(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()


def fused_step(optimizer: Callable[..., torch.optim.Optimizer], compiled: bool = False) -> Callable[[nn.Linear], None]:
    def change(layer: nn.Linear) -> None:
        layer(torch.ones(1, 2)).sum().backward()
        run = optimizer(layer.parameters(), lr=0.1, fused=True).step
        run = torch.compile(run, backend="aot_eager") if compiled else run
        run()

    return change


def edit(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight[0, 0] = 7


def edit_data(layer: nn.Linear) -> None:
    layer.weight.data.mul_(2)


CHANGES = {
    "a step of training": step,
    "a step of fused SGD": fused_step(torch.optim.SGD),
    "a step of fused AdamW": fused_step(torch.optim.AdamW),
    "a step of fused Adagrad": fused_step(torch.optim.Adagrad),
    "a compiled step of fused SGD": fused_step(torch.optim.SGD, compiled=True),
    "load_state_dict": lambda layer: layer.load_state_dict(nn.Linear(2, 2).state_dict()),
    "load_state_dict, assigned": lambda layer: layer.load_state_dict(nn.Linear(2, 2).state_dict(), assign=True),
    "to another dtype": lambda layer: layer.double(),
    "there and back": lambda layer: layer.half().float(),
    "an edit in place": edit,
    "a view of the data, assigned": lambda layer: setattr(layer.weight, "data", layer.weight.data.T),
    "a part of the data, assigned": lambda layer: setattr(layer.weight, "data", layer.weight.data[:1]),
    "an edit of the data": edit_data,
    "another parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(2, 2))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_value_is_recomputed_after(change):
    doubled = Doubled(nn.Linear(2, 2))
    doubled()
    CHANGES[change](doubled.layer)
    for _ in range(3):
        assert torch.equal(doubled(), 2 * doubled.layer.weight)
    assert doubled.computed == 2


def test_the_value_is_computed_once_while_nothing_changes():
    doubled = Doubled(nn.Linear(2, 2))
    assert all(doubled() is doubled() for _ in range(3))
    assert doubled.computed == 1


def test_nothing_is_cached_for_tensors_of_inference_mode():
    with torch.inference_mode():
        layer = nn.Linear(2, 2)
        doubled = Doubled(layer)
        doubled()
        layer.weight.zero_()
        assert not doubled().any()


def test_a_value_computed_in_inference_mode_can_be_used_outside():
    doubled = Doubled(nn.Linear(2, 2))
    with torch.inference_mode():
        doubled()
    assert not doubled().is_inference()


def test_weights_with_gaps_in_memory_can_be_cached():
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(torch.ones(4, 4)[::2, ::2])
    doubled = Doubled(layer)
    assert doubled() is doubled()
    edit_data(layer)
    assert torch.equal(doubled(), torch.full((2, 2), 4.0))
