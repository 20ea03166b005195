"""Statistics of a batch that is spread over ranks, on one rank: those of torch. Several ranks: tests/training."""

from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
from torch import distributed, nn

from moesaic.layers import PatchMoE
from moesaic.ops.dispatch import Norm
from moesaic.ops.global_batch import GlobalBatch, global_moments, with_zero_gradients
from moesaic.training.global_batch_layers import spread_batch, sync_batch_norm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def batch(request: pytest.FixtureRequest) -> Iterator[GlobalBatch]:
    device = request.node.callspec.params.get("device", "cpu") if hasattr(request.node, "callspec") else "cpu"
    backend = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    yield GlobalBatch()
    distributed.destroy_process_group()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 3, 4, 2), (7, 3)])
def test_one_rank_normalises_as_torch_does(shape, dtype, device, batch):
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    kind = {"device": device, "dtype": torch.promote_types(dtype, torch.float32)}
    statistics = [[torch.zeros(3, **kind), torch.ones(3, **kind)] for _ in range(2)]
    weight, bias = (torch.randn(3, **kind).requires_grad_() for _ in range(2))
    found = []
    for each, (mean, var) in zip((None, batch), statistics, strict=True):
        y = Norm(weight, bias, mean, var, 0.1, 1e-5, True, each).apply(x)
        found.append([y, *torch.autograd.grad((y * x.detach().sin()).sum(), (x, weight, bias))])
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    for ours, theirs in zip(*statistics, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_maps_that_are_channels_last_stay_so(device, batch):
    x = torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(2, 3, 4, 5, device=device)
    norm = nn.BatchNorm2d(3, device=device)
    found = []
    for each in (norm, sync_batch_norm(deepcopy(norm))):
        y = each(x)
        (grad,) = torch.autograd.grad((y * weight).sum(), x)
        assert y.is_contiguous(memory_format=torch.channels_last)
        assert grad.is_contiguous(memory_format=torch.channels_last)
        found.append((y, grad))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_without_samples_changes_nothing(device, batch):
    norm = sync_batch_norm(nn.BatchNorm2d(3, device=device))
    x = torch.randn(0, 3, 4, 5, device=device, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad.shape == x.shape
    assert norm.weight.grad.tolist() == norm.bias.grad.tolist() == [0, 0, 0]
    assert (norm.running_mean.tolist(), norm.running_var.tolist()) == ([0, 0, 0], [1, 1, 1])


@pytest.mark.parametrize("device", DEVICES)
def test_expert_norms_of_one_rank_are_those_of_one_process(device, batch):
    layer = PatchMoE(4, 4, experts=2, patches_per_expert=2, patch_size=4, kernel_size=3, expert_norm=True).to(device)
    x, found = torch.randn(3, 4, 8, 8, device=device), []
    for spread in (False, True):
        layer.zero_grad()
        layer.experts.norm.reset_parameters()
        with spread_batch(layer, batch) if spread else torch.enable_grad():
            y = layer(x)
        y.square().sum().backward()
        found.append(
            [y.detach(), layer.experts.norm.running_var.clone(), *(p.grad.clone() for p in layer.parameters())]
        )
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("momentum", [0.3, None])
def test_modules_keep_their_running_statistics_as_torch_does(momentum, batch):
    plain, ours = nn.BatchNorm1d(3, momentum=momentum), sync_batch_norm(nn.BatchNorm1d(3, momentum=momentum))
    for step in range(3):
        x = torch.randn(4 + step, 3)
        torch.testing.assert_close(ours(x), plain(x))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)
    assert list(ours.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(ours.eval()(x), plain.eval()(x))


def test_a_norm_without_running_statistics_or_weights_works(batch):
    x = torch.randn(5, 3)
    ours = sync_batch_norm(nn.BatchNorm1d(3, affine=False, track_running_stats=False))
    torch.testing.assert_close(ours(x), nn.functional.batch_norm(x, None, None, training=True))


def test_a_single_value_has_no_variance(batch):
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        sync_batch_norm(nn.BatchNorm1d(3))(torch.randn(1, 3))


def test_moments_have_gradients(batch):
    mean, squares = (torch.rand(2, 3, dtype=torch.float64).requires_grad_() for _ in range(2))
    count = torch.tensor([[2.0], [5.0]], dtype=torch.float64)

    def merged(mean: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        return torch.stack(global_moments(count, mean, squares, 7, batch)[1:3])

    assert torch.autograd.gradcheck(merged, (mean, squares))


def test_dropout_of_the_whole_batch_is_that_of_one_process(batch):
    layer, x = nn.Dropout(0.4), torch.ones(6, 5, 2, 2).contiguous(memory_format=torch.channels_last)
    torch.manual_seed(0)
    expected = layer(x)
    torch.manual_seed(0)
    with spread_batch(layer, batch), batch.part(2, 3, 6):
        assert layer(x[2:5]).equal(expected[2:5])
    assert type(layer) is nn.Dropout


def test_layers_that_drop_whole_samples_drop_those_of_one_process(batch):
    class DropPath(nn.Module):  # as timm has it
        drop_prob = 0.5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.new_empty(len(x), 1).bernoulli_(1 - self.drop_prob) / (1 - self.drop_prob)

    layer, x = DropPath(), torch.randn(40, 3)
    torch.manual_seed(0)
    expected = layer(x)
    torch.manual_seed(0)
    with spread_batch(layer, batch), batch.part(10, 20, 40):
        torch.testing.assert_close(layer(x[10:30]), expected[10:30])


def test_tensors_that_are_not_used_get_zeros():
    used, unused = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    y = with_zero_gradients(used.exp(), [unused])
    assert not y._is_view()
    y.sum().backward()
    assert used.grad.equal(used.detach().exp())
    assert unused.grad.equal(torch.zeros(3))
