import copy
import gc
from itertools import product

import pytest
import torch
from strategies import PickyChoice

import moesaic
from moesaic.ops.patch import inference
from moesaic.ops.patch.inference import may_run_unlearned


def layer(experts=3, L=2, p=2, kernel=3, seed=0, **options):
    torch.manual_seed(seed)
    made = moesaic.PatchMoE(
        5, 6, experts=experts, patches_per_expert=L, patch_size=p, kernel_size=kernel, dtype=torch.float64, **options
    )
    if made.experts.norm is not None:
        for values in (made.experts.norm.running_mean, made.experts.norm.bias, made.experts.norm.weight):
            torch.nn.init.normal_(values)
        torch.nn.init.uniform_(made.experts.norm.running_var, 0.5, 2)
    return made.eval()


def by_reference(of, x):
    with moesaic.backend("reference"):
        return of(x)


@pytest.fixture
def kept_way(monkeypatch):
    """Counts how often the way is taken."""
    runs: list[object] = []
    run = inference.conv_unlearned
    monkeypatch.setattr("moesaic.ops.torch_backend.conv_unlearned", lambda *given: runs.append(1) or run(*given))
    return runs


OPTIONS = list(
    product(["output", "input"], ["map", "patch"], ["concat", "sum"], [False, True], [1, 3, 5], [1, 2, 3, 4])
)[::5]  # each value meets each of the others


@torch.no_grad()
def test_every_option_equals_the_reference_however_many_images_run_at_a_time(kept_way, monkeypatch):
    for number, (gate_on, context, combine, norm, kernel, p) in enumerate(OPTIONS):
        torch.manual_seed(number)
        rows, columns, experts = 1 + number % 4, 1 + number % 3, 1 + number % 3
        L = 1 + number % (rows * columns)
        made = layer(
            experts,
            L,
            p,
            kernel,
            gate_on=gate_on,
            context=context,
            combine=combine,
            expert_norm=norm,
            bias=number % 5 > 0,
        )
        width = kernel**2 * made.experts.out_channels
        monkeypatch.setattr(
            inference, "_VALUES_AT_A_TIME", (1, 2, 100)[number % 3] * experts * L * p * p * max(5, width)
        )
        x = torch.randn(3, 5, rows * p, columns * p, dtype=torch.float64)
        torch.testing.assert_close(made(x), by_reference(made, x), rtol=1e-10, atol=1e-10)
    assert len(kept_way) == len(OPTIONS)


@torch.no_grad()
def test_what_is_kept_follows_every_change_of_the_weights(kept_way):
    made, x = layer(gate_on="input", expert_norm=True), torch.randn(2, 5, 6, 4, dtype=torch.float64)
    other = layer(gate_on="input", expert_norm=True, seed=1)

    def train():
        made.train()
        with torch.enable_grad():
            made(x).square().sum().backward()
        torch.optim.SGD(made.parameters(), lr=0.1).step()
        made.eval()

    changes = [
        lambda: made.experts.weight.mul_(2),
        lambda: made.experts.norm.running_mean.add_(1),
        lambda: made.load_state_dict(other.state_dict()),
        train,
        lambda: setattr(made.experts.norm, "eps", 0.5),
        lambda: setattr(made.experts, "bias", torch.nn.Parameter(torch.ones_like(made.experts.bias))),
    ]
    for change in changes:
        before = made(x)
        change()
        assert (made(x) - before).abs().max() > 1e-6
        torch.testing.assert_close(made(x), by_reference(made, x), rtol=1e-10, atol=1e-10)
    assert kept_way


@torch.no_grad()
def test_maps_of_another_size_are_answered_too():
    made = layer(gate_on="input", expert_norm=True)
    for rows, columns in ((2, 2), (4, 2), (2, 2)):
        x = torch.randn(1, 5, 2 * rows, 2 * columns, dtype=torch.float64)
        torch.testing.assert_close(made(x), by_reference(made, x), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_nothing_is_kept_of_a_layer_that_is_gone():
    gc.collect()
    before = len(inference._kept)
    made = layer()
    made(torch.randn(1, 5, 4, 4, dtype=torch.float64))
    copied = copy.deepcopy(made)
    copied(torch.randn(1, 5, 4, 4, dtype=torch.float64))
    assert len(inference._kept) == before + 2
    del made, copied
    gc.collect()
    assert len(inference._kept) == before


def test_results_of_inference_mode_do_not_linger():
    made, x = layer(gate_on="input", expert_norm=True), torch.randn(2, 5, 4, 4, dtype=torch.float64)
    with torch.inference_mode():
        first = made(x)
    with torch.no_grad():
        torch.testing.assert_close(made(x), first)
    x.requires_grad_()
    made(x).sum().backward()
    assert x.grad.abs().sum() > 0


def test_whoever_learns_takes_the_other_way(kept_way):
    x = torch.randn(2, 5, 4, 4, dtype=torch.float64)
    layer()(x)
    frozen = layer().requires_grad_(False)
    frozen(x.clone().requires_grad_())
    with torch.no_grad():
        layer(expert_norm=True).train()(x)
        moesaic.PatchMoE(5, 6, experts=2, router=PickyChoice(5, 2, 2, 2, dtype=torch.float64), dtype=torch.float64)(x)
        moesaic.PatchMoE(5, 6, experts=2, router=moesaic.TokenChoice(5, 2, dtype=torch.float64), dtype=torch.float64)(x)
        layer().to(torch.bfloat16)(x.bfloat16())
        layer()(x[:0])
    assert not kept_way
    frozen(x)
    assert kept_way


def test_dtypes_that_differ_are_refused():
    made, x = layer(), torch.randn(1, 5, 4, 4, dtype=torch.float64)
    routing, experts = made.route(x), moesaic.ops.ConvWeights(made.experts.weight, None)
    with torch.no_grad():
        assert may_run_unlearned(x, routing, experts, None)
        assert not may_run_unlearned(x.float(), routing, experts, None)
