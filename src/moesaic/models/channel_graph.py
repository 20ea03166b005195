"""Who reads whose channels: the convolutions of a network in the order they run, and what may be cut of each.

To skip a channel of a convolution saves twice: its filter is not computed, and whoever reads the channel has a zero
less to multiply. Both are only right where the reader gets that channel and nothing else beside it. In a chain such
as VGG-16 this holds for every convolution. In a residual network it holds inside a block; the last convolution of a
block can leave out filters, but what is read is the sum with the shortcut, which has all channels.

The network is traced, not run (`torch.fx`), so other people's networks can be asked as well as those here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import fx, nn
from torch.nn import functional as F

from moesaic.checks import one_of

__all__ = ["Link", "Place", "conv_chain", "links_to_gate"]

Place = Literal["inner", "branch", "shortcut", "shared", "unpaired"]

# Each channel becomes a channel, and one of zeros stays one of zeros.
_KEEPING_MODULES = (
    *(nn.Identity, nn.Dropout, nn.Dropout2d),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Tanh),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
)
_KEEPING: set[Any] = {
    *(F.relu, F.relu6, F.leaky_relu, F.gelu, F.silu, F.hardswish, F.dropout, torch.relu, torch.tanh),
    *(F.max_pool2d, torch.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d),
    *("relu", "relu_", "tanh", "contiguous", "clone"),
}
_ADDING: set[Any] = {operator.add, operator.iadd, torch.add, "add", "add_"}


@dataclass(frozen=True)
class Link:
    """A convolution among those before and behind it.

    Layers are told by the names that `torch.nn.Module.get_submodule` takes.
    """

    conv: str
    norm: str | None
    """The BatchNorm of its channels: a gate acts behind it, since BatchNorm would make something of zeros."""
    source: str | None
    """The convolution whose channels it reads, and nothing beside them; None where it reads the image or a sum."""
    readers: tuple[str, ...]
    """Convolutions and linear layers that read its channels and nothing beside them. Behind a flattened map, a linear
    layer has as many columns for a channel as the map has pixels."""
    place: Place
    """
    ``"inner"``: one layer reads its channels, and no one else: both can leave out what is cut.
    ``"branch"``: it ends a residual branch; it can leave out filters, but what is read is a sum.
    ``"shortcut"``: it stands beside a branch and carries what the branch leaves as it is.
    ``"shared"``: several read its channels, as a block and its shortcut do.
    ``"unpaired"``: something else happens to its channels; ``why`` tells what.
    """
    why: str | None = None
    """Why it is unpaired, as the end of a sentence that begins with its name."""

    @property
    def cuts_outputs(self) -> bool:
        """Whether it can leave out filters."""
        return self.place in ("inner", "branch")

    @property
    def cuts_inputs(self) -> bool:
        """Whether its reader can then leave out these channels."""
        return self.place == "inner"


def conv_chain(model: nn.Module) -> tuple[Link, ...]:
    """The convolutions of a network in the order they run, each with who feeds it and who reads it.

    >>> from moesaic.models.resnet import ResNet
    >>> for link in conv_chain(ResNet(18, num_classes=10))[:4]:
    ...     print(link.conv, link.norm, link.place, link.readers)
    body.0.0 body.0.1 shared ('body.2.first.0',)
    body.2.first.0 body.2.first.1 inner ('body.2.second.0',)
    body.2.second.0 body.2.second.1 branch ()
    body.3.first.0 body.3.first.1 inner ('body.3.second.0',)
    """
    try:
        graph = fx.Tracer().trace(model)
    except Exception as error:  # whatever its forward does with what it is given
        raise ValueError(
            f"conv_chain: {type(model).__name__} cannot be traced ({' '.join(str(error).split())}); the way through it "
            "must not depend on the image"
        ) from error
    nodes = list(cast("Iterable[fx.Node]", graph.nodes))
    convs = [node for node in nodes if isinstance(_module(model, node), nn.Conv2d)]
    names = [str(node.target) for node in convs]
    depth = _depths(model, nodes)
    links: list[Link] = []
    source: dict[str, str] = {}
    for node, name in zip(convs, names, strict=True):
        seen = _Seen()
        _follow(model, node, seen)
        if names.count(name) > 1:
            seen.why.append("runs more than once")
        place = _place(cast(nn.Conv2d, model.get_submodule(name)), seen, depth)
        why = seen.why[0] if seen.why else None
        links.append(Link(name, _norm(model, node), source.get(name), tuple(seen.readers), place, why))
        source |= dict.fromkeys(seen.readers, name)
    return tuple(links)


def links_to_gate(chain: Sequence[Link], bottleneck: Literal["a", "b"] = "a") -> tuple[Link, ...]:
    """The convolutions whose channels DeepMoE (Wang et al. 2019) gates.

    All of a chain; of a residual block with two convolutions both; of a bottleneck, in form A those before its last
    one, in form B the middle one alone. Stems and shortcuts are left whole.

    >>> from moesaic.models.resnet import ResNet
    >>> chain = conv_chain(ResNet(50, num_classes=10, width=0.1))
    >>> [link.conv for link in links_to_gate(chain, bottleneck="b")][:2]
    ['body.2.second.0', 'body.3.second.0']
    """
    one_of("links_to_gate", "bottleneck", bottleneck, ("a", "b"))
    named = {link.conv: link for link in chain}
    left: set[str] = set()
    for link in chain:
        if link.place != "branch":
            continue
        inside: list[str] = []  # of its block, from the last
        before = link.source
        while before is not None and named[before].place == "inner":
            inside.append(before)
            before = named[before].source
        if len(inside) > 1:
            left |= {link.conv, *(inside[1:] if bottleneck == "b" else ())}
    return tuple(link for link in chain if link.cuts_outputs and link.conv not in left)


@dataclass
class _Seen:
    """What becomes of a convolution's channels."""

    readers: list[str] = field(default_factory=list[str])
    sums: list[tuple[fx.Node, fx.Node]] = field(default_factory=list[tuple[fx.Node, fx.Node]])
    """Additions, each with the summand that the channels are in."""
    why: list[str] = field(default_factory=list[str])


def _follow(model: nn.Module, node: fx.Node, seen: _Seen, flat: bool = False) -> None:
    """Follow the channels in ``node`` to whoever reads them; ``flat`` when the map has become a vector."""
    for user in node.users:
        layer = _module(model, user)
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            if isinstance(layer, nn.Conv2d) and layer.groups > 1:
                seen.why.append(f"is read by {user.target}, in {layer.groups} groups")
            elif isinstance(layer, nn.Linear) != flat:
                seen.why.append(f"is read by {user.target}, though not along its channels")
            else:
                seen.readers.append(str(user.target))
        elif isinstance(layer, (nn.BatchNorm2d, *_KEEPING_MODULES)) or user.target in _KEEPING:
            _follow(model, user, seen, flat)
        elif _flattens(layer, user):
            _follow(model, user, seen, flat=True)
        elif _averages(user):
            _follow(model, user, seen, flat or not user.kwargs.get("keepdim", False))
        elif user.target in _ADDING and len(user.all_input_nodes) == 2:
            seen.sums.append((user, node))
        elif user.op == "output":
            seen.why.append("gives what the network gives")
        else:
            what = f"{user.target} ({type(layer).__name__})" if layer is not None else _called(user)
            seen.why.append(f"is read by {what}, which may not keep channels apart")


def _place(conv: nn.Conv2d, seen: _Seen, depth: dict[fx.Node, int]) -> Place:
    if conv.groups > 1:
        seen.why.insert(0, f"is grouped (groups={conv.groups})")
    elif not (seen.readers or seen.sums):
        seen.why.append("is read by nobody")
    if seen.why:
        return "unpaired"
    if len(seen.readers) + len(seen.sums) > 1:
        return "shared"
    if seen.readers:
        return "inner"
    ((total, summand),) = seen.sums
    return "branch" if depth[summand] == max(depth[each] for each in total.all_input_nodes) else "shortcut"


def _depths(model: nn.Module, nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """How many convolutions stand before and at each node, on the longest way: a branch is longer than its shortcut."""
    depth: dict[fx.Node, int] = {}
    for node in nodes:
        before = max((depth[each] for each in node.all_input_nodes), default=0)
        depth[node] = before + isinstance(_module(model, node), nn.Conv2d)
    return depth


def _norm(model: nn.Module, node: fx.Node) -> str | None:
    """The last BatchNorm before the channels are read, or go more than one way."""
    found = None
    while len(node.users) == 1:
        (node,) = node.users
        layer = _module(model, node)
        if isinstance(layer, nn.BatchNorm2d):
            found = str(node.target)
        elif not (isinstance(layer, _KEEPING_MODULES) or node.target in _KEEPING):
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


def _called(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
