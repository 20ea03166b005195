"""Channel graphs of sequential, residual and other networks; channels that may be dropped are dropped."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.models.channel_graph import ConvNode, build_channel_graph, nodes_to_gate
from moesaic.models.mobilenet import MobileNetV2
from moesaic.models.resnet import ResNet
from moesaic.models.vgg import VGG16
from moesaic.models.wide_resnet.network import WideResNet, WideResNetPMoE


class Written(nn.Module):
    """A convolution, whatever is done with its channels, and one that may read the result."""

    def __init__(self, then: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.next = nn.Conv2d(6, 6, 1)
        self.wide = nn.Conv2d(12, 6, 1)
        self.depthwise = nn.Conv2d(6, 6, 3, groups=6)
        self.linear = nn.Linear(6, 2)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.conv(x))


def first(then: Callable[[nn.Module, Tensor], Tensor]) -> ConvNode:
    return build_channel_graph(Written(then))[0]


@pytest.mark.parametrize("size", [32, 224])
def test_every_convolution_of_vgg16_has_one_consumer(size):
    with torch.device("meta"):
        graph = build_channel_graph(VGG16(10, image_size=size))
    names = [f"body.conv{number}" for number in range(1, 14)]
    last = "head" if size == 32 else "body.hidden1.0"
    assert [node.conv for node in graph] == names
    assert [node.norm for node in graph] == [f"body.norm{number}" for number in range(1, 14)]
    assert [node.producer for node in graph] == [None, *names[:-1]]
    assert [node.consumers for node in graph] == [(name,) for name in [*names[1:], last]]
    assert all(node.can_drop_filters and node.consumer_can_drop for node in graph)
    assert nodes_to_gate(graph) == nodes_to_gate(graph, "b") == graph


@pytest.mark.parametrize(("depth", "size", "blocks"), [(18, 32, 8), (34, 224, 16), (56, 32, 27)])
def test_of_a_basic_block_both_convolutions_are_gated_and_the_first_feeds_the_second_alone(depth, size, blocks):
    with torch.device("meta"):
        graph = build_channel_graph(ResNet(depth, 10, image_size=size))
    assert graph[0].conv == "body.0.0"
    assert graph[0].role == "shared"
    gated = nodes_to_gate(graph)
    assert len(gated) == 2 * blocks
    for inner, end in zip(gated[::2], gated[1::2], strict=True):
        block = inner.conv.removesuffix(".first.0")
        assert (inner.role, inner.consumers) == ("inner", (f"{block}.second.0",))
        assert (end.conv, end.role, end.producer, end.consumers) == (f"{block}.second.0", "branch", inner.conv, ())
        assert end.can_drop_filters
        assert not end.consumer_can_drop
    assert {node.role for node in graph if ".shortcut." in node.conv} == {"shortcut"}
    assert all(node.norm == node.conv[:-1] + "1" for node in graph)


@pytest.mark.parametrize("size", [32, 224])
def test_of_a_bottleneck_form_a_gates_the_first_and_the_middle_and_form_b_the_middle_convolution(size):
    with torch.device("meta"):
        graph = build_channel_graph(ResNet(50, 10, image_size=size))
    inside = [node.conv for node in graph if node.conv.endswith((".first.0", ".second.0"))]
    assert len(inside) == 32
    assert [node.conv for node in nodes_to_gate(graph, "a")] == inside
    assert [node.conv for node in nodes_to_gate(graph, "b")] == inside[1::2]
    assert [node.role for node in graph if ".third." in node.conv] == ["branch"] * 16
    stem, *_ = graph
    block = "body.3" if size == 224 else "body.2"
    assert (stem.role, set(stem.consumers)) == ("shared", {f"{block}.first.0", f"{block}.shortcut.0"})


def test_where_batchnorm_stands_before_the_convolution_the_gate_goes_behind_the_next_one():
    graph = {node.conv: node for node in build_channel_graph(WideResNet(10, 1, 2))}
    assert graph["body.group2.0.conv1"].norm == "body.group2.0.norm2"
    assert graph["body.group2.0.conv1"].consumers == ("body.group2.0.conv2",)
    assert (graph["body.group2.0.conv2"].role, graph["body.group2.0.conv2"].norm) == ("branch", None)
    assert graph["body.group2.0.shortcut"].role == "shortcut"


@pytest.mark.parametrize("make", [lambda: VGG16(3, width=0.1), lambda: ResNet(18, 3, width=0.1)])
def test_channels_that_may_be_dropped_do_not_change_the_output(make):
    """With a channel closed behind its BatchNorm, neither its filter nor its consumer's weights for it matter."""
    torch.manual_seed(0)
    model, x = make().eval().double(), torch.rand(2, 3, 32, 32, dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.bias)  # or zeros would stay zeros in BatchNorm too
    with torch.no_grad():
        dense = model(x)
        for node in nodes_to_gate(build_channel_graph(model)):
            conv = model.get_submodule(node.conv)
            shut = torch.arange(conv.out_channels) % 2 == 1
            gate = (~shut).double()[:, None, None]
            hook = model.get_submodule(node.norm).register_forward_hook(lambda _, __, y, gate=gate: y * gate)
            gated = model(x)
            assert not torch.allclose(gated, dense), node
            consumers = [model.get_submodule(name) for name in node.consumers] if node.consumer_can_drop else []
            weights = [layer.weight.clone() for layer in (conv, *consumers)]
            conv.weight[shut] = torch.randn_like(conv.weight[shut])
            for consumer in consumers:
                consumer.weight[:, shut] = torch.randn_like(consumer.weight[:, shut])
            assert torch.allclose(model(x), gated, rtol=0, atol=1e-12), node
            for layer, weight in zip((conv, *consumers), weights, strict=True):
                layer.weight.copy_(weight)
            hook.remove()
        assert torch.equal(model(x), dense)


@pytest.mark.parametrize(
    "then",
    [
        lambda self, y: self.next(F.max_pool2d(F.relu(y), 2)),
        lambda self, y: self.next(F.avg_pool2d(torch.tanh(y).contiguous(), 2)),
        lambda self, y: self.next(F.dropout(F.gelu(self.norm(y)))),
        lambda self, y: self.linear(y.mean((-2, -1))),
        lambda self, y: self.linear(torch.mean(y, dim=[2, 3], keepdim=True).flatten(1)),
        lambda self, y: self.linear(torch.flatten(F.adaptive_avg_pool2d(y, 1), start_dim=1)),
    ],
)
def test_channelwise_operations_are_followed_to_the_consumer(then):
    node = first(then)
    assert node.role == "inner", node.reason
    assert node.consumers in (("next",), ("linear",))


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        (lambda self, y: self.wide(torch.cat([y, y], 1)), "is read by cat, which may mix channels"),
        (lambda self, y: self.next(y.sigmoid()), "is read by sigmoid, which"),
        (lambda self, y: self.next(y + 1), "is read by add, which"),
        (lambda self, y: self.next(y.mean(1, keepdim=True)), "is read by mean, which"),
        (lambda self, y: self.depthwise(y), "is read by depthwise, in 6 groups"),
        (lambda self, y: self.linear(y), "is read by linear, though not along its channels"),
        (lambda self, y: F.relu(y), "is the network's output"),
        (lambda self, y: self.conv(y[:, :3]), "is read by getitem, which"),
    ],
)
def test_unpaired_convolutions_have_a_reason(then, reason):
    node = first(then)
    assert node.role == "unpaired"
    assert node.reason is not None
    assert node.reason.startswith(reason)
    assert not node.can_drop_filters
    assert not node.consumer_can_drop


def test_a_convolution_that_runs_twice_is_unpaired():
    graph = build_channel_graph(Written(lambda self, y: self.linear(self.next(F.relu(self.next(y))).mean((2, 3)))))
    assert [(node.conv, node.role) for node in graph] == [("conv", "inner"), *2 * [("next", "unpaired")]]
    assert graph[1].reason == "runs more than once"


def test_grouped_convolutions_and_those_before_them_are_unpaired():
    graph = {node.conv: node for node in build_channel_graph(MobileNetV2(2))}
    assert graph["body.4.filter.0"].reason == "is grouped (groups=144)"
    assert graph["body.4.widen.0"].reason == "is read by body.4.filter.0, in 144 groups"
    assert graph["body.19.0"].role == "inner"


def test_a_network_whose_control_flow_depends_on_the_image_is_refused():
    with pytest.raises(
        ValueError, match=r"build_channel_graph: WideResNetPMoE cannot be traced \(.*must not depend on"
    ):
        build_channel_graph(WideResNetPMoE(10, 1, 2))


def test_an_unknown_form_of_bottleneck_is_refused():
    with pytest.raises(ValueError, match="bottleneck='c' is unknown; use 'a' or 'b'"):
        nodes_to_gate((), "c")
