import pytest
import torch
from strategies import NoHostSync, no_cuda_sync

import moesaic
from moesaic.experts import MLPExperts

LAYERS = {
    "expert choice": lambda: moesaic.PatchMoE(8, 16, experts=4, patches_per_expert=2, patch_size=2, kernel_size=3),
    "released": lambda: moesaic.PatchMoE(
        8, 16, experts=4, patches_per_expert=2, kernel_size=3, gate="softmax_all", gate_on="input", expert_norm=True
    ),
    "mlp": lambda: moesaic.PatchMoE(8, 16, experts=MLPExperts(4, 8, 8, 16), patches_per_expert=2, combine="sum"),
    "token choice": lambda: moesaic.PatchMoE(8, 16, experts=4, router=moesaic.TokenChoice(8, 4, 2, 2)),
    "token choice with capacity": lambda: moesaic.PatchMoE(
        8, 16, experts=4, expert_norm=True, router=moesaic.TokenChoice(8, 4, 2, 2, capacity_factor=0.5)
    ),
}


EVERY_LAYER = [(name, dtype) for name in LAYERS for dtype in (torch.bfloat16, torch.float32)]
# where units choose, a CPU has a grouped kernel for bfloat16, and for others reads the loads, which costs it nothing
WITHOUT_SYNC = [(name, dtype) for name, dtype in EVERY_LAYER if dtype == torch.bfloat16 or "token" not in name]


@pytest.mark.parametrize(("layer", "dtype"), WITHOUT_SYNC)
def test_a_training_step_needs_no_host_sync(layer, dtype):
    layer, x = LAYERS[layer]().to(dtype), torch.randn(2, 8, 8, 8, dtype=dtype, requires_grad=True)
    with NoHostSync():
        layer(x).square().sum().backward()
    assert x.grad.abs().sum() > 0


def test_the_host_sync_guard_detects_a_sync():
    with NoHostSync(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        torch.ones(()).item()


@pytest.mark.gpu
@pytest.mark.parametrize(("layer", "dtype"), EVERY_LAYER)
def test_a_training_step_needs_no_cuda_sync(layer, dtype):
    layer = LAYERS[layer]().to("cuda", dtype)
    x = torch.randn(2, 8, 8, 8, device="cuda", dtype=dtype, requires_grad=True)
    layer(x).square().sum().backward()  # what is set up once may wait
    with no_cuda_sync():
        layer(x).square().sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("layer", ["expert choice", "released", "mlp"])
def test_a_training_step_can_be_captured_in_a_cuda_graph(layer):
    layer = LAYERS[layer]().cuda()
    x = torch.randn(2, 8, 8, 8, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(x).square().sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    layer.eval()
    layer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
        y.square().sum().backward()
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(y, layer(x))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # the compiler's advice to trade precision for speed
def test_a_layer_compiles_into_one_graph_on_cuda():
    layer = LAYERS["released"]().cuda().eval()
    x = torch.randn(2, 8, 8, 8, device="cuda")
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x), rtol=1e-4, atol=1e-4)
