"""Invariant 5: compiled, exported and ONNX models compute what eager computes."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import moesaic
from moesaic.experts import LinearExperts, MLPExperts
from moesaic.layers import TokenSkip

VARIANTS = {
    "default": {},
    "released": {"gate": "softmax_all", "gate_on": "input", "expert_norm": True},
    "disjoint sum": {"context": "patch", "combine": "sum"},
    "pixels": {"patch_size": 1, "kernel_size": 1},
    "soft": {
        "router": moesaic.SoftRouter(8, 4, 2, 2),
        "context": "patch",
        "patch_size": 2,
        "patches_per_expert": None,
    },
    "mlp": {"experts": MLPExperts(4, 8, 5, 2), "kernel_size": 1},
}
BATCH = {"x": {0: torch.export.Dim("batch", min=2)}}


@pytest.fixture(params=VARIANTS)
def layer(request) -> moesaic.PatchMoE:
    torch.manual_seed(0)
    options = {"experts": 4, "patches_per_expert": 2, "patch_size": 2, "kernel_size": 3} | VARIANTS[request.param]
    layer = moesaic.PatchMoE(8, 8, **options)
    with torch.no_grad():  # as after training: a norm that does something, with a background
        for name, tensor in layer.state_dict().items():
            if ".norm." in name and tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5).sub_(0.0 if name.endswith("var") else 0.7)
    return layer


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 8, 6, 6, generator=torch.Generator().manual_seed(1))


NORMED = {"released"}  # the others compute the same in training as in use
MODES = [(name, training) for name in VARIANTS for training in (True, False) if training or name in NORMED]


@pytest.mark.parametrize(("layer", "training"), MODES, indirect=["layer"])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_expert_choice_compiles_into_one_graph(layer, x, training, backend):
    torch.compiler.reset()
    layer.train(training)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    outputs, gradients = [], []
    for model in (layer, compiled):
        layer.zero_grad()
        with moesaic.backend(backend):
            y = model(x)
        y.square().sum().backward()
        outputs.append(y)
        gradients.append([p.grad for p in layer.parameters()])
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_choice_compiles_into_one_graph(dtype):
    torch.compiler.reset()
    router = moesaic.TokenChoice(8, 4, 2, 2)
    layer = moesaic.PatchMoE(8, 8, experts=4, kernel_size=3, router=router).to(dtype)
    x = torch.randn(3, 8, 6, 6, dtype=dtype)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_equals_eager(x):
    """A step through a normed layer in eval mode and a plain one in training; they share the time that g++ takes."""
    torch.compiler.reset()
    options = {"experts": 4, "patches_per_expert": 2, "patch_size": 2, "kernel_size": 3}
    normed = moesaic.PatchMoE(8, 8, expert_norm=True, gate_on="input", **options).eval()
    layers = nn.Sequential(normed, moesaic.PatchMoE(8, 16, **options))
    found = []
    for call in (layers, torch.compile(layers, fullgraph=True)):
        layers.zero_grad()
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.square().sum().backward()
        found.append([y.detach(), leaf.grad, *(weight.grad for weight in layers.parameters())])
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)


def test_a_compiled_layer_uses_the_requested_backend(x):
    torch.compiler.reset()
    ran = []
    compiled = torch.compile(
        moesaic.PatchMoE(8, 8, experts=4, patches_per_expert=2),
        backend=lambda graph, _: ran.append("index_add" in graph.code) or graph.forward,
    )
    for backend in ("torch", "reference"):
        with moesaic.backend(backend), torch.no_grad():
            compiled(x)
    assert ran == [True, False]


def test_a_compiled_layer_uses_the_backend_of_the_thread_that_calls_it(x):
    torch.compiler.reset()
    graphs: list[bool] = []
    compiled = torch.compile(
        moesaic.PatchMoE(8, 8, experts=4, patches_per_expert=2),
        backend=lambda graph, _: graphs.append("index_add" in graph.code) or graph.forward,
    )

    def run() -> None:
        with torch.no_grad():
            compiled(x)

    with moesaic.backend("reference"), ThreadPoolExecutor(1) as threads:
        run()
        threads.submit(run).result()
        assert graphs == [False, True]
        run()
        threads.submit(run).result()
    assert graphs == [False, True], "both graphs are used again"


@pytest.mark.parametrize("breaks", [False, True], ids=["one graph", "graph break"])
@pytest.mark.parametrize("decorated", [False, True])
def test_compiled_code_may_choose_the_backend(x, breaks, decorated):
    torch.compiler.reset()
    layer, graphs = moesaic.PatchMoE(8, 8, experts=4, patches_per_expert=2).eval(), []

    def run(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        if breaks:
            torch._dynamo.graph_break()
        return y + 1

    def inside(x: torch.Tensor) -> torch.Tensor:
        with moesaic.backend("reference"):
            return run(x)

    compiled = torch.compile(
        moesaic.backend("reference")(run) if decorated else inside,
        fullgraph=not breaks,
        backend=lambda graph, _: graphs.append("index_add" in graph.code) or graph.forward,
    )
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x) + 1)
    assert graphs
    assert not any(graphs), "the reference backend runs"
    assert moesaic.ops.requested_backend() is None


def test_an_exported_layer_runs_all_experts_for_any_batch_size(layer, x):
    exported = torch.export.export(layer.eval(), (x,), dynamic_shapes=BATCH)
    assert set(exported.graph_signature.parameters) == {name for name, _ in layer.named_parameters()}
    for batch in (2, 7):
        other = torch.randn(batch, 8, 6, 6)
        index = layer.route(other).index
        assert index is None or index.unique().numel() > 4, "the inputs must differ in where they go"
        torch.testing.assert_close(exported.module()(other), layer(other))


def units_that_choose() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Layers whose experts get numbers of units that depend on the values, or a share of the units; and inputs."""
    torch.manual_seed(0)
    scores = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    experts = [nn.Sequential(nn.Flatten(), nn.Linear(12, 2)) for _ in range(3)]
    mlp = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    return {
        "patches": (moesaic.PatchMoE(3, 4, experts=2, router=moesaic.TokenChoice(3, 2)), torch.randn(8, 3, 4, 4)),
        "samples, listed": (moesaic.SampleMoE(scores, experts), torch.randn(8, 3, 2, 2)),
        "samples, padded": (moesaic.SampleMoE(scores, experts, pad=True), torch.randn(8, 3, 2, 2)),
        "samples, stacked": (moesaic.SampleMoE(nn.Linear(4, 3), LinearExperts(3, 4, 2)), torch.randn(8, 4)),
        "tokens": (moesaic.TokenMoE(4, experts=2, hidden_dim=3, capacity=0.6), torch.randn(8, 9, 4)),
        "capacity": (
            moesaic.TokenMoE(4, experts=2, router=moesaic.TokenChoice(4, 2, capacity_factor=0.6)),
            torch.randn(8, 9, 4),
        ),
        "skipped tokens": (TokenSkip(mlp, 4, keep=0.3), torch.randn(8, 9, 4)),
    }


@pytest.mark.parametrize("name", units_that_choose())
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_routes_other_inputs_as_the_layer_does(name):
    made, x = units_that_choose()[name]
    made.eval()
    with torch.no_grad():
        traced = torch.jit.trace(made, x, check_trace=False)
        other = torch.randn_like(x)
        torch.testing.assert_close(traced(other), made(other))


@pytest.mark.parametrize("name", units_that_choose())
def test_shapes_are_known_without_values(name):
    made, x = units_that_choose()[name]
    made.eval()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        faked = made(mode.from_tensor(x)).shape
    assert faked == made.to("meta")(x.to("meta")).shape == units_that_choose()[name][0](x).shape


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_onnx_output_equals_torch(layer, x, tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    program = torch.onnx.export(layer.eval(), (x,), dynamo=True, verbose=False, dynamic_shapes=BATCH)
    program.save(tmp_path / "layer.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "layer.onnx")
    ties = torch.ones(2, 8, 6, 6)
    for other in (x, torch.randn(5, 8, 6, 6), torch.randn(1, 8, 6, 6), ties):
        (y,) = session.run(None, {session.get_inputs()[0].name: other.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), layer(other).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_routed_head_is_exported_without_a_map_of_logits(tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    head, x = moesaic.RoutedHead(8, 3, experts=4).eval(), torch.randn(3, 8, 5, 4)
    torch.onnx.export(head, (x,), dynamo=True, verbose=False, dynamic_shapes=BATCH).save(tmp_path / "head.onnx")
    assert "ScatterND" not in {node.op_type for node in onnx.load(tmp_path / "head.onnx").graph.node}
    session = onnxruntime.InferenceSession(tmp_path / "head.onnx")
    for other in (x, torch.randn(1, 8, 5, 4)):
        (y,) = session.run(None, {session.get_inputs()[0].name: other.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), head(other).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("prefix", ["join", "bypass"])
@pytest.mark.parametrize("router", ["expert choice", "soft"])
def test_onnx_output_of_tokens_equals_torch(router, prefix, tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    options = {"capacity": 1.5} if router == "expert choice" else {"router": moesaic.SoftRouter(8, 4, 2)}
    layer = moesaic.TokenMoE(8, experts=4, hidden_dim=6, prefix_tokens=1, prefix=prefix, **options).eval()
    x = torch.randn(3, 10, 8)
    program = torch.onnx.export(layer, (x,), dynamo=True, verbose=False, dynamic_shapes=BATCH)
    program.save(tmp_path / "tokens.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "tokens.onnx")
    for other in (x, torch.randn(5, 10, 8), torch.ones(1, 10, 8)):
        (y,) = session.run(None, {session.get_inputs()[0].name: other.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), layer(other).detach(), rtol=1e-4, atol=1e-5)
