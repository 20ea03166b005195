"""Invariant: models that several threads call at once compute what one thread computes."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moesaic
from moesaic.experts import MLPExperts
from moesaic.models.deepmoe.network import DeepMoE

THREADS, CALLS, CLASSES = 8, 5, 4


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Threads take turns every few bytecodes, as they would within hours of serving."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def assert_threads_agree(model: Callable[[Tensor], Tensor], inputs: Sequence[Tensor]) -> None:
    """The first calls are those of the threads, so that they fill caches at once; all inputs have other outputs."""
    start = threading.Barrier(THREADS, timeout=60)

    def run(thread: int) -> list[Tensor]:
        start.wait()
        with torch.no_grad():
            return [model(inputs[(thread + call) % len(inputs)]) for call in range(CALLS)]

    with ThreadPoolExecutor(THREADS) as threads:
        found = list(threads.map(run, range(THREADS)))
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    for one, other in combinations(expected, 2):
        if one.shape == other.shape:
            assert (one - other).abs().max() > 1e-2 * one.abs().max(), "mixed up inputs would go unnoticed"
    for thread, outputs in enumerate(found):
        for call, y in enumerate(outputs):
            torch.testing.assert_close(y, expected[(thread + call) % len(inputs)], rtol=1e-4, atol=1e-5)


def create(name: str) -> nn.Module:
    narrow: dict[str, Any] = {"width": 0.1} if name.startswith(("resnet", "vgg")) else {}
    narrow = {"depth": 2} if name.startswith("vit") else narrow
    size = {"image_size": image_size(name)} if name.endswith("_pmoe") or name.startswith("vit") else {}
    model = moesaic.create_model(name, num_classes=CLASSES, **narrow, **size)
    for gate in model.gates.values() if isinstance(model, DeepMoE) else ():
        nn.init.normal_(gate.weight)  # about half of the channels are closed, others for each image
    return lived_in(model, image_size(name))


def lived_in(model: nn.Module, size: int) -> nn.Module:
    """In eval mode with the statistics of a batch, without which all images have nearly the same output."""
    for module in model.modules():
        if getattr(module, "momentum", None) is not None:
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(torch.randn(8, 3, size, size))
    return model.eval()


def image_size(name: str) -> int:
    return 8 if name.startswith("wrn") else 16 if name.startswith("vit") else 32


def images(size: int, count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(torch.initial_seed())
    return [torch.randn(1 + number % 2, 3, size, size, generator=generator) for number in range(count)]


@pytest.mark.parametrize("name", moesaic.list_models())
def test_every_network_of_the_registry_may_be_called_from_threads(name):
    assert_threads_agree(create(name), images(image_size(name)))


@pytest.mark.parametrize("options", [{}, {"block": 8}, {"mode": "topk", "keep": 0.5}], ids=str)
@pytest.mark.parametrize("name", ["vgg16_deepmoe", "resnet18_deepmoe"])
def test_a_frozen_network_may_be_called_from_threads(name, options):
    model = moesaic.create_model(name, num_classes=CLASSES, width=0.2, **options)
    assert_threads_agree(moesaic.freeze(lived_in(model, 32)), images(32))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "expert choice": lambda: moesaic.PatchMoE(3, 4, experts=2, patches_per_expert=2, patch_size=2, kernel_size=3),
    "released block": lambda: moesaic.PatchMoE(
        3, 4, experts=2, patches_per_expert=2, gate="softmax_all", gate_on="input", expert_norm=True
    ),
    "token choice": lambda: moesaic.PatchMoE(3, 4, experts=4, router=moesaic.TokenChoice(3, 4, capacity_factor=0.5)),
    "soft": lambda: moesaic.PatchMoE(3, 4, experts=2, router=moesaic.SoftRouter(3, 2, 2)),
    "mlp": lambda: moesaic.PatchMoE(3, 4, experts=MLPExperts(2, 3, 5, 2), patches_per_expert=2),
    "samples": lambda: moesaic.SampleMoE(
        moesaic.routing.SampleRouter(3, experts=2, patch_size=4),
        [nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)) for _ in range(2)],
    ),
    "routed head": lambda: moesaic.RoutedHead(3, CLASSES, experts=2, patches_per_expert=2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_may_be_called_from_threads_with_maps_of_several_sizes(name):
    inputs = [*images(8, 2), *images(12, 2)]
    if name == "samples":
        inputs = images(8)
    assert_threads_agree(lived_in(LAYERS[name](), 8), inputs)


def test_timm_networks_with_routed_layers_may_be_called_from_threads(timm):
    converted = moesaic.convert(
        moesaic.create_model("timm/resnet10t", num_classes=CLASSES), "layer4.0.conv2", experts=4, patches_per_expert=1
    )
    headed = moesaic.create_model("timm/resnet10t", num_classes=CLASSES, head="routed", experts=2, patches_per_expert=1)
    for model in (converted, headed):
        assert_threads_agree(lived_in(model, 64), images(64))


def test_threads_with_different_backends_agree():
    layer, x = LAYERS["released block"]().eval(), images(8)

    def run(number: int) -> list[Tensor]:
        name = ("reference", "torch")[number % 2]
        with moesaic.backend(name), torch.no_grad():
            return [layer(each) for each in x]

    with torch.no_grad():
        expected = [layer(each) for each in x]
    with ThreadPoolExecutor(THREADS) as threads:
        for found in threads.map(run, range(THREADS)):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_gates_of_an_image_stay_with_it_while_another_runs():
    """Two threads are inside of the backbone at once; each must have its own gates, in every layer."""
    model, (one, two, *_) = create("vgg16_deepmoe"), images(32)
    with torch.no_grad():
        expected = [model.forward_with_routing(x) for x in (one, two)]
    inside = threading.Barrier(2, timeout=60)

    def meet(*_: Any) -> None:
        inside.wait()

    def run(x: Tensor) -> Any:
        with torch.no_grad(), moesaic.record_routing(model) as routing:
            return model.forward_with_routing(x), routing

    hooks = [model.backbone.get_submodule(name).register_forward_pre_hook(meet) for name in model.gated]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(run, (one, two)))
    for hook in hooks:
        hook.remove()
    for (output, recorded), right in zip(found, expected, strict=True):
        torch.testing.assert_close(output.logits, right.logits, rtol=1e-4, atol=1e-5)
        for name in model.gated:
            assert recorded[f"backbone.{name}"] is output.routing[name]
    with pytest.raises(RuntimeError, match="has no gates outside of its DeepMoE"):
        model.backbone(one)
