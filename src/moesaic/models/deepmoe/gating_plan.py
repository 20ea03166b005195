"""Which convolutions of a backbone `deepmoe` gates, why it leaves the others, and what is replaced with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from torch import fx, nn

from moesaic.models.channel_graph import ConvNode, build_channel_graph, nodes_to_gate
from moesaic.models.deepmoe.gated_conv import unsupported_conv, unsupported_norm
from moesaic.ops.hook_detection import has_hooks

__all__ = ["GatingPlan", "get_conv", "plan_gates"]

_UNGATED_ROLES = {"shared": "is read by several layers", "shortcut": "is a shortcut"}


@dataclass(frozen=True)
class GatingPlan:
    """The convolutions of a backbone to gate, by name in execution order."""

    nodes: Mapping[str, ConvNode]
    ungated: Mapping[str, str]
    """The other convolutions, each with the reason, as the end of a sentence."""
    next_module: Mapping[str, str | None]
    """The only module that reads the output of each module, if any."""

    def producer_of(self, name: str) -> str | None:
        """The gated convolution whose channels the convolution ``name`` reads."""
        nodes = self.nodes.values()
        return next((node.conv for node in nodes if node.consumer_can_drop and name in node.consumers), None)

    def relu_after(self, backbone: nn.Module, name: str) -> str | None:
        """The name of the ReLU that alone reads a gated convolution, behind its BatchNorm if it has one."""
        following = self.next_module[self.nodes[name].norm or name]
        relu = None if following is None else backbone.get_submodule(following)
        return following if type(relu) is nn.ReLU and not has_hooks(relu, include_global=False) else None


def plan_gates(backbone: nn.Module, bottleneck: Literal["a", "b"]) -> GatingPlan:
    """Plans the gates of a backbone; raises if none of its convolutions can be gated.

    >>> from moesaic.models.resnet import ResNet
    >>> plan = plan_gates(ResNet(18, num_classes=10, width=0.1), "a")
    >>> list(plan.nodes)[:2], plan.producer_of("body.2.second.0"), plan.ungated["body.0.0"]
    (['body.2.first.0', 'body.2.second.0'], 'body.2.first.0', 'is read by several layers')
    """
    graph = build_channel_graph(backbone)
    wanted = {node.conv for node in nodes_to_gate(graph, bottleneck)}
    next_module, calls = _module_order(backbone)
    nodes: dict[str, ConvNode] = {}
    ungated: dict[str, str] = {}
    for node in graph:
        reason = node.reason or _UNGATED_ROLES.get(node.role)
        if reason is None and node.conv not in wanted:
            reason = f"is not gated in bottlenecks of form {bottleneck!r}"
        reason = reason or _norm_refusal(backbone, node, next_module[node.conv], calls)
        reason = reason or unsupported_conv(get_conv(backbone, node.conv))
        if reason is None:
            nodes[node.conv] = node
        else:
            ungated[node.conv] = reason
    if not nodes:
        raise ValueError(_no_gates(type(backbone).__name__, ungated))
    return GatingPlan(nodes, ungated, next_module)


def get_conv(backbone: nn.Module, name: str) -> nn.Conv2d:
    """Returns a convolution by its name."""
    conv = backbone.get_submodule(name)
    assert isinstance(conv, nn.Conv2d)
    return conv


def _no_gates(backbone: str, ungated: Mapping[str, str]) -> str:
    if not ungated:
        return f"deepmoe: {backbone} has no convolution to gate; give a network that has"
    reasons = "; ".join(f"{conv} {reason}" for conv, reason in list(ungated.items())[:3])
    more = f"; and {len(ungated) - 3} more" if len(ungated) > 3 else ""
    return (
        f"deepmoe: no convolution of {backbone} can drop channels: {reasons}{more}. It can where one convolution "
        "or linear layer alone reads them, or at the end of a residual branch"
    )


def _norm_refusal(backbone: nn.Module, node: ConvNode, following: str | None, calls: Mapping[str, int]) -> str | None:
    """Why the BatchNorm of a convolution cannot become part of a gated layer, or None; ``following`` reads the conv."""
    if node.norm is None:
        return None
    if following != node.norm:
        return f"has other layers before its BatchNorm {node.norm}, or another one"
    if calls[node.norm] > 1:
        return f"shares its BatchNorm {node.norm}"
    return unsupported_norm(cast(nn.BatchNorm2d, backbone.get_submodule(node.norm)))


def _module_order(backbone: nn.Module) -> tuple[dict[str, str | None], Counter[str]]:
    """The only module that reads the output of each module, if any, and the number of calls of each."""
    nodes = list(cast("Iterable[fx.Node]", fx.Tracer().trace(backbone).nodes))
    modules = [node for node in nodes if node.op == "call_module"]
    next_module: dict[str, str | None] = {}
    for node in modules:
        users = list(node.users)
        alone = len(users) == 1 and users[0].op == "call_module"
        next_module[str(node.target)] = str(users[0].target) if alone else None
    return next_module, Counter(str(node.target) for node in modules)
