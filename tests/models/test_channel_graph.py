"""Who reads whose channels, in chains, residual networks and what is neither; and what may be cut, by cutting it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.models.channel_graph import Link, conv_chain, links_to_gate
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


def first(then: Callable[[nn.Module, Tensor], Tensor]) -> Link:
    return conv_chain(Written(then))[0]


@pytest.mark.parametrize("size", [32, 224])
def test_vgg16_is_one_chain_down_to_its_linear_layer(size):
    with torch.device("meta"):
        chain = conv_chain(VGG16(10, image_size=size))
    names = [f"body.conv{number}" for number in range(1, 14)]
    last = "head" if size == 32 else "body.hidden1.0"
    assert [link.conv for link in chain] == names
    assert [link.norm for link in chain] == [f"body.norm{number}" for number in range(1, 14)]
    assert [link.source for link in chain] == [None, *names[:-1]]
    assert [link.readers for link in chain] == [(name,) for name in [*names[1:], last]]
    assert all(link.cuts_outputs and link.cuts_inputs for link in chain)
    assert links_to_gate(chain) == links_to_gate(chain, "b") == chain


@pytest.mark.parametrize(("depth", "size", "blocks"), [(18, 32, 8), (34, 224, 16), (56, 32, 27)])
def test_of_a_basic_block_both_convolutions_are_gated_and_the_first_feeds_the_second_alone(depth, size, blocks):
    with torch.device("meta"):
        chain = conv_chain(ResNet(depth, 10, image_size=size))
    assert chain[0].conv == "body.0.0"
    assert chain[0].place == "shared"
    gated = links_to_gate(chain)
    assert len(gated) == 2 * blocks
    for inner, end in zip(gated[::2], gated[1::2], strict=True):
        block = inner.conv.removesuffix(".first.0")
        assert (inner.place, inner.readers) == ("inner", (f"{block}.second.0",))
        assert (end.conv, end.place, end.source, end.readers) == (f"{block}.second.0", "branch", inner.conv, ())
        assert end.cuts_outputs
        assert not end.cuts_inputs
    assert {link.place for link in chain if ".shortcut." in link.conv} == {"shortcut"}
    assert all(link.norm == link.conv[:-1] + "1" for link in chain)


@pytest.mark.parametrize("size", [32, 224])
def test_of_a_bottleneck_form_a_gates_the_first_and_the_middle_and_form_b_the_middle_convolution(size):
    with torch.device("meta"):
        chain = conv_chain(ResNet(50, 10, image_size=size))
    inside = [link.conv for link in chain if link.conv.endswith((".first.0", ".second.0"))]
    assert len(inside) == 32
    assert [link.conv for link in links_to_gate(chain, "a")] == inside
    assert [link.conv for link in links_to_gate(chain, "b")] == inside[1::2]
    assert [link.place for link in chain if ".third." in link.conv] == ["branch"] * 16
    stem, *_ = chain
    block = "body.3" if size == 224 else "body.2"
    assert (stem.place, set(stem.readers)) == ("shared", {f"{block}.first.0", f"{block}.shortcut.0"})


def test_where_batchnorm_stands_before_the_convolution_the_gate_goes_behind_the_next_one():
    chain = {link.conv: link for link in conv_chain(WideResNet(10, 1, 2))}
    assert chain["body.group2.0.conv1"].norm == "body.group2.0.norm2"
    assert chain["body.group2.0.conv1"].readers == ("body.group2.0.conv2",)
    assert (chain["body.group2.0.conv2"].place, chain["body.group2.0.conv2"].norm) == ("branch", None)
    assert chain["body.group2.0.shortcut"].place == "shortcut"


@pytest.mark.parametrize("make", [lambda: VGG16(3, width=0.1), lambda: ResNet(18, 3, width=0.1)])
def test_what_may_be_cut_can_be_cut(make):
    """With a channel closed behind its BatchNorm, neither its filter nor what its reader has for it matters."""
    torch.manual_seed(0)
    model, x = make().eval().double(), torch.rand(2, 3, 32, 32, dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.bias)  # or zeros would stay zeros in BatchNorm too
    with torch.no_grad():
        dense = model(x)
        for link in links_to_gate(conv_chain(model)):
            conv = model.get_submodule(link.conv)
            shut = torch.arange(conv.out_channels) % 2 == 1
            gate = (~shut).double()[:, None, None]
            hook = model.get_submodule(link.norm).register_forward_hook(lambda _, __, y, gate=gate: y * gate)
            gated = model(x)
            assert not torch.allclose(gated, dense), link
            readers = [model.get_submodule(name) for name in link.readers] if link.cuts_inputs else []
            weights = [layer.weight.clone() for layer in (conv, *readers)]
            conv.weight[shut] = torch.randn_like(conv.weight[shut])
            for reader in readers:
                reader.weight[:, shut] = torch.randn_like(reader.weight[:, shut])
            assert torch.allclose(model(x), gated, rtol=0, atol=1e-12), link
            for layer, weight in zip((conv, *readers), weights, strict=True):
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
def test_what_treats_each_channel_alone_does_not_hide_the_reader(then):
    link = first(then)
    assert link.place == "inner", link.why
    assert link.readers in (("next",), ("linear",))


@pytest.mark.parametrize(
    ("then", "why"),
    [
        (lambda self, y: self.wide(torch.cat([y, y], 1)), "is read by cat, which may not keep channels apart"),
        (lambda self, y: self.next(y.sigmoid()), "is read by sigmoid, which"),
        (lambda self, y: self.next(y + 1), "is read by add, which"),
        (lambda self, y: self.next(y.mean(1, keepdim=True)), "is read by mean, which"),
        (lambda self, y: self.depthwise(y), "is read by depthwise, in 6 groups"),
        (lambda self, y: self.linear(y), "is read by linear, though not along its channels"),
        (lambda self, y: F.relu(y), "gives what the network gives"),
        (lambda self, y: self.conv(y[:, :3]), "is read by getitem, which"),
    ],
)
def test_what_cannot_be_paired_is_told_with_the_reason(then, why):
    link = first(then)
    assert link.place == "unpaired"
    assert link.why is not None
    assert link.why.startswith(why)
    assert not link.cuts_outputs
    assert not link.cuts_inputs


def test_a_convolution_that_runs_twice_is_unpaired():
    chain = conv_chain(Written(lambda self, y: self.linear(self.next(F.relu(self.next(y))).mean((2, 3)))))
    assert [(link.conv, link.place) for link in chain] == [("conv", "inner"), *2 * [("next", "unpaired")]]
    assert chain[1].why == "runs more than once"


def test_grouped_convolutions_and_those_before_them_are_unpaired():
    chain = {link.conv: link for link in conv_chain(MobileNetV2(2))}
    assert chain["body.4.filter.0"].why == "is grouped (groups=144)"
    assert chain["body.4.widen.0"].why == "is read by body.4.filter.0, in 144 groups"
    assert chain["body.19.0"].place == "inner"


def test_a_network_whose_way_depends_on_the_image_is_refused():
    with pytest.raises(ValueError, match=r"conv_chain: WideResNetPMoE cannot be traced \(.*must not depend on"):
        conv_chain(WideResNetPMoE(10, 1, 2))


def test_an_unknown_form_of_bottleneck_is_refused():
    with pytest.raises(ValueError, match="bottleneck='c' is unknown; use 'a' or 'b'"):
        links_to_gate((), "c")
