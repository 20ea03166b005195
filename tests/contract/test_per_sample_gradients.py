"""Gradients of every sample at once, ``vmap(grad(loss))``, equal those of a loop over the samples."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import BACKENDS, Case, cases
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, stack_module_state, vmap

import moesaic
from moesaic.experts import MLPExperts
from moesaic.ops.eager_conditions import has_vmap_axis, in_transform, in_vmap
from moesaic.ops.triton_backend import kernel_refusal
from moesaic.routing import SampleRouter

each_backend = pytest.mark.parametrize("backend", [*BACKENDS, None])
S = 3  # samples


def per_sample(model: nn.Module, samples: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Gradients (S, …) of ⟨weights, model(sample)⟩ for every parameter."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def loss(parameters: dict[str, Tensor], sample: Tensor, weight: Tensor) -> Tensor:
        return (functional_call(model, (parameters, buffers), (sample[None],)) * weight).sum()

    return vmap(grad(loss), (None, 0, 0))({name: each.detach() for name, each in parameters.items()}, samples, weights)


def one_by_one(model: nn.Module, samples: Tensor, weights: Tensor) -> dict[str, Tensor]:
    found: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for sample, weight in zip(samples, weights, strict=True):
        model.zero_grad()
        (model(sample[None]) * weight).sum().backward()
        for name, each in model.named_parameters():
            found[name].append(torch.zeros_like(each) if each.grad is None else each.grad.clone())
    return {name: torch.stack(each) for name, each in found.items()}


def assert_equal(model: nn.Module, samples: Tensor, backend: str | None) -> None:
    model, samples = model.double().eval(), samples.double()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
        weights = torch.randn(len(samples), *model(samples[:1]).shape[1:], dtype=torch.float64)
    with nullcontext() if backend is None else moesaic.backend(backend):
        together, alone = per_sample(model, samples, weights), one_by_one(model, samples, weights)
    assert together.keys() == alone.keys()
    for name, expected in alone.items():
        torch.testing.assert_close(
            together[name], expected, rtol=1e-8, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}"
        )


@each_backend
@settings(max_examples=40)
@given(case=cases(batch=st.just(S)))
def test_layers_of_every_kind(backend, case: Case):
    layer = case.build().eval()
    assert_equal(layer, case.map(), backend)


@each_backend
@pytest.mark.parametrize(
    "make",
    [
        lambda: moesaic.PatchMoE(
            3, 8, experts=4, router=moesaic.SoftRouter(3, 4, 2, 2), context="patch", kernel_size=3
        ),
        lambda: moesaic.PatchMoE(3, 8, experts=4, patches_per_expert=2, patch_size=4, kernel_size=3, pad=True),
        lambda: moesaic.RoutedHead(3, 4, experts=3),
        lambda: moesaic.SampleMoE(SampleRouter(3, experts=4, patch_size=2), [network() for _ in range(4)], top_k=2),
    ],
    ids=["soft", "padded", "head", "samples"],
)
def test_other_layers(backend, make):
    assert_equal(make(), torch.randn(S, 3, 6, 6), backend)


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


@each_backend
def test_stacked_experts_of_samples(backend):
    layer = moesaic.SampleMoE(SampleRouter(12, experts=4), MLPExperts(4, 12, 7, 6), top_k=2)
    assert_equal(layer, torch.randn(S, 12), backend)


@each_backend
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("wrn10_1_pmoe", {}),
        ("wrn10_1_pmoe", {"fidelity": "print"}),
        ("wrn10_1_pmoe", {"router": "token-choice"}),
        ("wrn10_1_pmoe", {"router": "soft"}),
        ("wrn10_1", {"head": "routed"}),
        ("vgg16_deepmoe", {"width": 0.1}),
    ],
)
def test_networks(backend, name, options):
    side = 32 if name.startswith("vgg") else 16
    model = moesaic.create_model(name, num_classes=3, **options)
    model.set_grad_checkpointing()  # torch.func knows no checkpoints: without effect
    assert_equal(model, torch.randn(S, 3, side, side), backend)


@pytest.mark.parametrize(
    ("make", "owner"),
    [
        (lambda: moesaic.PatchMoE(3, 8, experts=2, patches_per_expert=2, expert_norm=True), "ExpertNorm"),
        (lambda: moesaic.create_model("wrn10_1_pmoe", num_classes=2), "WideResNetPMoE"),
        (lambda: moesaic.create_model("vgg16_deepmoe", num_classes=2, width=0.1), "DeepMoE"),
        (lambda: moesaic.create_model("wrn10_1", num_classes=2, head="routed"), "WideResNet"),
    ],
)
def test_training_mode_is_refused_in_one_line(make, owner):
    model = make().train()
    before = {name: each.clone() for name, each in model.named_buffers()}
    x = torch.randn(2, 3, 32, 32)
    with pytest.raises(RuntimeError) as caught:
        per_sample(model, x, torch.ones(2, 1))
    message = str(caught.value)
    assert message.startswith(f"{owner}: BatchNorm in training mode updates running statistics that all samples")
    assert message.endswith("call eval() on the network for per-sample gradients")
    assert all(torch.equal(each, before[name]) for name, each in model.named_buffers())


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_ensemble_with_statistics_of_its_own_trains_under_vmap(backend):
    options: dict[str, Any] = {"experts": 2, "patches_per_expert": 2, "patch_size": 2, "expert_norm": True}
    layers = [moesaic.PatchMoE(3, 4, **options).train() for _ in range(2)]
    x = torch.randn(5, 3, 6, 6)
    weights, buffers = stack_module_state(layers)
    skeleton = moesaic.PatchMoE(3, 4, **options).to("meta")
    with moesaic.backend(backend):
        together = vmap(lambda w, b: functional_call(skeleton, (w, b), (x,)))(weights, buffers)
        torch.testing.assert_close(together, torch.stack([layer(x) for layer in layers]))


def test_kernels_are_not_for_transforms():
    def refused(x: Tensor) -> Tensor:
        assert in_transform()
        reason = kernel_refusal(x)
        assert reason is not None
        assert "torch.func, such as vmap" in reason
        return x.sum()

    grad(refused)(torch.ones(2))
    vmap(refused)(torch.ones(2, 3))
    assert not in_transform()

    layer = moesaic.PatchMoE(3, 4, experts=2, patches_per_expert=1)

    def asked(x: Tensor) -> Tensor:
        with moesaic.backend("triton"):
            return layer(x[None])

    with pytest.raises(ValueError, match=r"backend 'triton' cannot run this: its kernels have no rules for the tr"):
        vmap(asked)(torch.ones(2, 3, 2, 2))


def test_vmap_is_noticed_inside_and_outside_of_other_transforms():
    def inside(x: Tensor, shared: Tensor) -> Tensor:
        assert in_vmap()
        assert has_vmap_axis(x)
        assert not has_vmap_axis(shared)
        return (x * shared).sum()

    vmap(grad(inside), (0, None))(torch.ones(2, 3), torch.ones(3))
    vmap(inside, (0, None))(torch.ones(2, 3), torch.ones(3))
    grad(lambda x: x.sum() * (not in_vmap()))(torch.ones(2))
    assert not in_vmap()


def test_kernels_are_not_for_forward_mode_derivatives():
    with forward_ad.dual_level():
        assert "compute no tangents" in str(kernel_refusal(torch.ones(2)))
    assert "compute no tangents" not in str(kernel_refusal(torch.ones(2)))
