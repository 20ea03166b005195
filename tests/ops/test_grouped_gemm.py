import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import NoHostSync, no_cuda_sync

import moesaic
from moesaic.experts import LinearExperts, MLPExperts, PatchNetExperts
from moesaic.ops.grouped_gemm import _blocked_bmm, _grouped_mm, _matmul_loop, group_sizes, grouped_matmul
from moesaic.routing import SampleRouter
from moesaic.training import NormalizedGD

LOADS = st.lists(st.sampled_from([0, 0, 1, 2, 15, 16, 17, 40]), min_size=1, max_size=5)
STACKS = {
    "linear": (lambda: LinearExperts(4, 8, 3), (20, 8)),
    "patch net": (lambda: PatchNetExperts(4, 8, 4, init_std=1.0), (20, 3, 8)),
    "collapsed": (lambda: PatchNetExperts(4, 8, 4, init_std=1.0, activation="identity"), (20, 3, 8)),
    "mlp": (lambda: MLPExperts(4, 8, 16, 5), (20, 8)),
}


def product(way, rows, weight, ends):
    rows, weight = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    y = way(rows, weight, ends)
    y.backward((torch.arange(y.numel(), device=y.device) % 7 - 3).to(y.dtype).view(y.shape))  # exact in every dtype
    return y.detach(), rows.grad, weight.grad


@given(loads=LOADS, inner=st.sampled_from([(), (3,), (2, 3)]), C=st.integers(1, 5), O=st.integers(1, 5))
def test_every_implementation_equals_the_einsum(loads, inner, C, O):
    rows = torch.randn(sum(loads), *inner, C, dtype=torch.float64)
    weight = torch.randn(len(loads), C, O, dtype=torch.float64)
    ends = torch.tensor(loads).cumsum(0)
    expert = torch.arange(len(loads)).repeat_interleave(torch.tensor(loads))

    def written_out(rows, weight, _):
        return torch.einsum("r...c,rco->r...o", rows, weight[expert])

    expected = product(written_out, rows, weight, ends)
    for way in (_matmul_loop, _blocked_bmm, grouped_matmul):
        torch.testing.assert_close(product(way, rows, weight, ends), expected, rtol=1e-12, atol=1e-12)


@given(loads=LOADS.filter(any), inner=st.sampled_from([(), (3,)]), C=st.integers(1, 9), O=st.integers(1, 9))
def test_bfloat16_widths_that_are_not_aligned_are_padded(loads, inner, C, O):
    rows = torch.randn(sum(loads), *inner, C).bfloat16()
    weight = torch.randn(len(loads), C, O).bfloat16()
    ends = torch.tensor(loads).cumsum(0)
    found = product(_grouped_mm, rows, weight, ends)
    expected = product(_matmul_loop, rows.float(), weight.float(), ends)
    for ours, exact in zip(found, expected, strict=True):
        scale = exact.abs().amax().clamp_min(1).item()
        torch.testing.assert_close(ours.float(), exact, rtol=0, atol=0.02 * scale)


@pytest.mark.parametrize("stack", STACKS)
def test_stacked_experts_need_no_host_sync(stack, monkeypatch):
    # on a CPU there is nothing to wait for; elsewhere blocks take the place of the loop
    monkeypatch.setattr(moesaic.ops.sample_dispatch, "grouped_matmul", _blocked_bmm)
    build, shape = STACKS[stack]
    layer, x = moesaic.SampleMoE(SampleRouter(8, 4), build(), top_k=2), torch.randn(shape)
    optimizer = NormalizedGD.per_expert(layer.experts, lr=0.1, momentum=0.9)
    with NoHostSync():
        layer(x).square().sum().backward()
        optimizer.step()


def test_listed_experts_need_one_host_sync_and_run_only_if_used(monkeypatch):
    waits, calls = [], []

    def counted(ends):
        waits.append(ends)
        return group_sizes(ends)

    monkeypatch.setattr(moesaic.ops.sample_dispatch, "group_sizes", counted)
    layer = moesaic.SampleMoE(SampleRouter(8, 16), [torch.nn.Linear(8, 2) for _ in range(16)])
    for e, expert in enumerate(layer.experts):
        expert.register_forward_hook(lambda *_, e=e: calls.append(e))
    with moesaic.record_routing(layer) as routing, NoHostSync():
        layer(torch.randn(10, 8)).square().sum().backward()
    assert len(waits) == 1
    assert calls == routing[""].index.unique().tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stack", STACKS)
def test_a_training_step_of_stacked_experts_needs_no_cuda_sync(stack, dtype):
    build, shape = STACKS[stack]
    layer = moesaic.SampleMoE(SampleRouter(8, 4), build(), top_k=2).to("cuda", dtype)
    x = torch.randn(shape, device="cuda", dtype=dtype)
    optimizer = NormalizedGD.per_expert(layer.experts, lr=0.1, momentum=0.9)

    def step() -> None:
        layer(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # what is set up once may wait
    with no_cuda_sync():
        step()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_implementation_equals_the_einsum_on_cuda(dtype):
    loads = [0, 3, 40, 0, 17, 16]
    rows = torch.randn(sum(loads), 3, 24, device="cuda").to(dtype)
    weight = torch.randn(len(loads), 24, 8, device="cuda").to(dtype)
    ends = torch.tensor(loads, device="cuda").cumsum(0)
    found = product(grouped_matmul, rows, weight, ends)
    expected = product(_matmul_loop, rows.double(), weight.double(), ends)
    for ours, exact in zip(found, expected, strict=True):
        scale = exact.abs().amax().clamp_min(1).item()
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=16 * torch.finfo(dtype).eps * scale)
