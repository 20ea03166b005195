"""Fusion of BatchNorm, additions, ReLU and max pooling into the convolutions before them, in traced networks."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from moesaic.models.deepmoe.fused_conv import FusedConv

__all__ = ["fuse_followers"]

_ADDITIONS = cast("tuple[Any, ...]", (operator.add, operator.iadd, torch.add))
_RELUS = (F.relu, torch.relu)


def fuse_followers(graph: fx.Graph, modules: dict[str, Any]) -> None:
    """Fuses the followers of each `FusedConv` of a traced network into it, and folds BatchNorm into other convolutions.

    Args:
        graph: the trace; it is changed.
        modules: the modules that it calls, by name; they are changed.
    """
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    for node in list(graph.nodes):
        module = _module(node, modules)
        if calls[node.target] > 1:
            continue
        if isinstance(module, FusedConv):
            _fuse_all(graph, node, module, modules)
        elif type(module) is nn.Conv2d:
            _fold_norm(graph, node, module, modules, calls)
    graph.lint()


def _fuse_all(graph: fx.Graph, conv: fx.Node, module: FusedConv, modules: dict[str, Any]) -> None:
    x, current = conv.args[0], conv
    while True:
        follower = _only_user(current)
        if follower is None or _changes_between(x, current, follower, modules):
            return
        added = _added_to(current, follower)
        absorbed = _absorbs(module, follower, modules) if added is None else module.absorb_add()
        if not absorbed:
            return
        current = _replace(graph, current, follower, {} if added is None else {"residual": added})


def _absorbs(module: FusedConv, follower: fx.Node, modules: dict[str, Any]) -> bool:
    """Whether a convolution took over a follower that reads its output alone."""
    following = _module(follower, modules)
    if isinstance(following, nn.Identity):
        return True
    if type(following) is nn.BatchNorm2d:
        return following.track_running_stats and following.affine and module.absorb_norm(following)
    by_name = follower.op == "call_method" and follower.target in ("relu", "relu_")
    if type(following) is nn.ReLU or follower.target in _RELUS or by_name:
        return module.absorb_relu()
    return _is_pool_of_2(following) and module.absorb_pool()


def _replace(graph: fx.Graph, current: fx.Node, follower: fx.Node, more: dict[str, fx.Node]) -> fx.Node:
    """The convolution's call in place of its follower."""
    with graph.inserting_before(follower):
        made = graph.call_module(str(current.target), current.args, {**current.kwargs, **more})
    follower.replace_all_uses_with(made)
    graph.erase_node(follower)
    graph.erase_node(current)
    return made


def _added_to(conv: fx.Node, follower: fx.Node) -> fx.Node | None:
    """The other map, where a follower adds two."""
    if follower.target not in _ADDITIONS or follower.kwargs or len(follower.args) != 2:
        return None
    others = [each for each in follower.args if isinstance(each, fx.Node) and each is not conv]
    return others[0] if len(others) == 1 else None


def _changes_between(x: object, conv: fx.Node, follower: fx.Node, modules: dict[str, Any]) -> bool:
    """Whether something between a convolution and its follower changes the convolution's input in place."""
    node = conv.next
    while node is not follower:
        in_place = bool(node.kwargs.get("inplace")) or str(node.target).endswith("_") or node.target is operator.iadd
        if x in node.all_input_nodes and (in_place or getattr(_module(node, modules), "inplace", False)):
            return True
        node = node.next
    return False


def _fold_norm(graph: fx.Graph, node: fx.Node, conv: nn.Conv2d, modules: dict[str, Any], calls: Counter[Any]) -> None:
    """Folds the BatchNorm that alone reads an ungated convolution."""
    follower = _only_user(node)
    norm = None if follower is None else _module(follower, modules)
    if (
        follower is None
        or type(norm) is not nn.BatchNorm2d
        or not norm.track_running_stats
        or calls[follower.target] > 1
    ):
        return
    modules[str(node.target)] = fuse_conv_bn_eval(conv, norm).requires_grad_(False)
    follower.replace_all_uses_with(node)
    graph.erase_node(follower)


def _only_user(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].op != "output" else None


def _module(node: fx.Node, modules: dict[str, Any]) -> nn.Module | None:
    return cast("nn.Module", modules[str(node.target)]) if node.op == "call_module" else None


def _is_pool_of_2(module: nn.Module | None) -> bool:
    if type(module) is not nn.MaxPool2d or module.return_indices or module.ceil_mode:
        return False
    sides = [_pair(each) for each in (module.kernel_size, module.stride, module.padding, module.dilation)]
    return sides == [(2, 2), (2, 2), (0, 0), (1, 1)]


def _pair(side: int | tuple[int, ...]) -> tuple[int, ...]:
    return (side, side) if isinstance(side, int) else side
