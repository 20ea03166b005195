"""Producer–consumer graph of convolution channels: which layers read the channels of each convolution.

Dropping a channel of a convolution saves twice: its filter is not computed, and its consumers have one input channel
less to multiply. Both are correct only where the consumer reads that channel and nothing else in its place. In a
sequential network such as VGG-16 this holds for every convolution. In a residual network it holds inside a block; the
last convolution of a block can drop filters, but its consumers read the sum with the shortcut, which has all channels.

The network is traced with `torch.fx`, not run, so any traceable network can be analysed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import fx, nn
from torch.nn import functional as F

from moesaic.argument_checks import check_choice

__all__ = ["ConvNode", "Role", "build_channel_graph", "nodes_to_gate"]

Role = Literal["inner", "branch", "shortcut", "shared", "unpaired"]

# Operations that map each channel to one channel, and a channel of zeros to zeros.
_CHANNELWISE_MODULES = (
    *(nn.Identity, nn.Dropout, nn.Dropout2d),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Tanh),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
)
_CHANNELWISE: set[Any] = {
    *(F.relu, F.relu6, F.leaky_relu, F.gelu, F.silu, F.hardswish, F.dropout, torch.relu, torch.tanh),
    *(F.max_pool2d, torch.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d),
    *("relu", "relu_", "tanh", "contiguous", "clone"),
}
_ADDITIONS: set[Any] = {operator.add, operator.iadd, torch.add, "add", "add_"}


@dataclass(frozen=True)
class ConvNode:
    """A convolution in the channel graph.

    Layers are identified by the names that `torch.nn.Module.get_submodule` takes.
    """

    conv: str
    norm: str | None
    """The BatchNorm of its channels. A gate acts after it, since BatchNorm maps zeros to its shift."""
    producer: str | None
    """The convolution whose channels it reads, and nothing else; None where it reads the image or a sum."""
    consumers: tuple[str, ...]
    """Convolutions and linear layers that read its channels and nothing else. After a flattened map, a linear layer has
    as many columns per channel as the map has pixels."""
    role: Role
    """
    ``"inner"``: exactly one layer reads its channels: both can drop closed channels.
    ``"branch"``: it ends a residual branch; it can drop filters, but its consumers read a sum.
    ``"shortcut"``: it is the shortcut of a residual branch.
    ``"shared"``: several layers read its channels, such as a block and its shortcut.
    ``"unpaired"``: another operation reads its channels; see ``reason``.
    """
    reason: str | None = None
    """Why it is unpaired, as the end of a sentence that begins with its name."""

    @property
    def can_drop_filters(self) -> bool:
        """Whether closed output channels need not be computed."""
        return self.role in ("inner", "branch")

    @property
    def consumer_can_drop(self) -> bool:
        """Whether its consumer can skip its closed channels."""
        return self.role == "inner"


def build_channel_graph(model: nn.Module) -> tuple[ConvNode, ...]:
    """Returns the convolutions of a network in execution order, each with its producer and its consumers.

    >>> from moesaic.models.resnet import ResNet
    >>> for node in build_channel_graph(ResNet(18, num_classes=10))[:4]:
    ...     print(node.conv, node.norm, node.role, node.consumers)
    body.0.0 body.0.1 shared ('body.2.first.0',)
    body.2.first.0 body.2.first.1 inner ('body.2.second.0',)
    body.2.second.0 body.2.second.1 branch ()
    body.3.first.0 body.3.first.1 inner ('body.3.second.0',)
    """
    try:
        graph = fx.Tracer().trace(model)
    except Exception as error:  # tracing runs the network's own forward, which may raise anything
        raise ValueError(
            f"build_channel_graph: {type(model).__name__} cannot be traced ({' '.join(str(error).split())}); its "
            "control flow must not depend on the image"
        ) from error
    fx_nodes = list(cast("Iterable[fx.Node]", graph.nodes))
    convs = [node for node in fx_nodes if isinstance(_module(model, node), nn.Conv2d)]
    names = [str(node.target) for node in convs]
    depth = _depths(model, fx_nodes)
    nodes: list[ConvNode] = []
    producers: dict[str, str] = {}
    for node, name in zip(convs, names, strict=True):
        uses = _Uses()
        _follow(model, node, uses)
        if names.count(name) > 1:
            uses.reasons.append("runs more than once")
        role = _role(cast(nn.Conv2d, model.get_submodule(name)), uses, depth)
        reason = uses.reasons[0] if uses.reasons else None
        nodes.append(ConvNode(name, _norm(model, node), producers.get(name), tuple(uses.consumers), role, reason))
        producers |= dict.fromkeys(uses.consumers, name)
    return tuple(nodes)


def nodes_to_gate(graph: Sequence[ConvNode], bottleneck: Literal["a", "b"] = "a") -> tuple[ConvNode, ...]:
    """Returns the convolutions whose channels DeepMoE (Wang et al. 2019) gates.

    All of a sequential network; both convolutions of a basic residual block; of a bottleneck, in form A those before
    its last one, in form B only the middle one. Stems and shortcuts are not gated.

    >>> from moesaic.models.resnet import ResNet
    >>> graph = build_channel_graph(ResNet(50, num_classes=10, width=0.1))
    >>> [node.conv for node in nodes_to_gate(graph, bottleneck="b")][:2]
    ['body.2.second.0', 'body.3.second.0']
    """
    check_choice("nodes_to_gate", "bottleneck", bottleneck, ("a", "b"))
    by_name = {node.conv: node for node in graph}
    ungated: set[str] = set()
    for node in graph:
        if node.role != "branch":
            continue
        inside: list[str] = []  # the block's other convolutions, last one first
        producer = node.producer
        while producer is not None and by_name[producer].role == "inner":
            inside.append(producer)
            producer = by_name[producer].producer
        if len(inside) > 1:
            ungated |= {node.conv, *(inside[1:] if bottleneck == "b" else ())}
    return tuple(node for node in graph if node.can_drop_filters and node.conv not in ungated)


@dataclass
class _Uses:
    """The operations that read a convolution's channels."""

    consumers: list[str] = field(default_factory=list[str])
    sums: list[tuple[fx.Node, fx.Node]] = field(default_factory=list[tuple[fx.Node, fx.Node]])
    """Additions, each with the summand that has the channels."""
    reasons: list[str] = field(default_factory=list[str])


def _follow(model: nn.Module, node: fx.Node, uses: _Uses, flat: bool = False) -> None:
    """Follow the channels in ``node`` to their consumers; ``flat`` once the map is flattened to a vector."""
    for user in node.users:
        layer = _module(model, user)
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            if isinstance(layer, nn.Conv2d) and layer.groups > 1:
                uses.reasons.append(f"is read by {user.target}, in {layer.groups} groups")
            elif isinstance(layer, nn.Linear) != flat:
                uses.reasons.append(f"is read by {user.target}, though not along its channels")
            else:
                uses.consumers.append(str(user.target))
        elif isinstance(layer, (nn.BatchNorm2d, *_CHANNELWISE_MODULES)) or user.target in _CHANNELWISE:
            _follow(model, user, uses, flat)
        elif _flattens(layer, user):
            _follow(model, user, uses, flat=True)
        elif _averages(user):
            _follow(model, user, uses, flat or not user.kwargs.get("keepdim", False))
        elif user.target in _ADDITIONS and len(user.all_input_nodes) == 2:
            uses.sums.append((user, node))
        elif user.op == "output":
            uses.reasons.append("is the network's output")
        else:
            function = getattr(user.target, "__name__", str(user.target))
            what = function if layer is None else f"{user.target} ({type(layer).__name__})"
            uses.reasons.append(f"is read by {what}, which may mix channels")


def _role(conv: nn.Conv2d, uses: _Uses, depth: dict[fx.Node, int]) -> Role:
    if conv.groups > 1:
        uses.reasons.insert(0, f"is grouped (groups={conv.groups})")
    elif not (uses.consumers or uses.sums):
        uses.reasons.append("has no consumer")
    if uses.reasons:
        return "unpaired"
    if len(uses.consumers) + len(uses.sums) > 1:
        return "shared"
    if uses.consumers:
        return "inner"
    ((total, summand),) = uses.sums
    return "branch" if depth[summand] == max(depth[each] for each in total.all_input_nodes) else "shortcut"


def _depths(model: nn.Module, nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """Convolutions on the longest path to each node, which tells a branch from its shortcut."""
    depth: dict[fx.Node, int] = {}
    for node in nodes:
        before = max((depth[each] for each in node.all_input_nodes), default=0)
        depth[node] = before + isinstance(_module(model, node), nn.Conv2d)
    return depth


def _norm(model: nn.Module, node: fx.Node) -> str | None:
    """The last BatchNorm before the channels are consumed or have several users."""
    found = None
    while len(node.users) == 1:
        (node,) = node.users
        layer = _module(model, node)
        if isinstance(layer, nn.BatchNorm2d):
            found = str(node.target)
        elif not (isinstance(layer, _CHANNELWISE_MODULES) or node.target in _CHANNELWISE):
            break
    return found


def _module(model: nn.Module, node: fx.Node) -> nn.Module | None:
    return model.get_submodule(str(node.target)) if node.op == "call_module" else None


def _flattens(layer: nn.Module | None, node: fx.Node) -> bool:
    if isinstance(layer, nn.Flatten):
        return layer.start_dim == 1
    if node.target not in (torch.flatten, "flatten"):
        return False
    return (*node.args[1:], *node.kwargs.values())[:1] == (1,)


def _averages(node: fx.Node) -> bool:
    """Whether it is the mean over the map."""
    if node.target not in (torch.mean, "mean"):
        return False
    axes = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    return isinstance(axes, (tuple, list)) and {cast(int, axis) % 4 for axis in axes} == {2, 3}
