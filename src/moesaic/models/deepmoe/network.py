"""DeepMoE (Wang et al. 2019): a network in which every image opens only the channels that it needs.

A shallow network computes an embedding of the image, a linear head per gated convolution computes gates from the
embedding, and the gates of a convolution select its output channels and the input channels of its consumers. `deepmoe`
gates any network whose convolutions `build_channel_graph` can pair with a consumer: the convolution and its BatchNorm
become a `ChannelMoE`, all else stays as it is. With all gates 1 the output is that of the plain network. Closed
channels are masked; `moesaic.freeze` returns an inference module that computes only open ones.

Costs are multiply-adds of one image: active_in × active_out of gated convolutions, and all of everything else.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from moesaic.argument_checks import check_numbers, check_positive
from moesaic.models.deepmoe.embedding_network import (
    ConstantEmbedding,
    EmbeddingNetwork,
    embedding_macs,
    embedding_widths,
)
from moesaic.models.deepmoe.gated_conv import (
    ActiveGates,
    ConsumerConv,
    GatedConv,
    GatedReLU,
    unsupported_conv,
)
from moesaic.models.deepmoe.gating_plan import GatingPlan, get_conv, plan_gates
from moesaic.models.feature_maps import FeatureDict, OutIndices, take_indices
from moesaic.models.image_classifier import ImageNetwork
from moesaic.models.model_cost import count_macs
from moesaic.ops import autocast_dtype
from moesaic.ops.channel.masked import open_channels
from moesaic.ops.global_batch import grad_sync_expected, with_zero_gradients
from moesaic.ops.hook_detection import has_hooks
from moesaic.routing.channel_gate import ChannelGate, ChannelMode
from moesaic.routing.joint_channel_gates import route_channels
from moesaic.routing_record import Routing

__all__ = ["DeepMoE", "DeepMoEOutput", "deepmoe"]


@dataclass(frozen=True, eq=False)
class DeepMoEOutput:
    """The output of a DeepMoE for a batch."""

    logits: Tensor
    """(B, num_classes), of the backbone."""
    embedding: Tensor
    """(B, D)"""
    embedding_logits: Tensor
    """(B, num_classes), of the embedding's own classifier."""
    routing: Mapping[str, Routing]
    """By the name of the gated layer, in execution order."""


@dataclass(frozen=True)
class ConvCost:
    """Multiply-adds of a convolution with gated inputs or outputs."""

    macs_per_pair: int
    """Per pair of open input and output channel."""
    ins: str | int
    """The layer whose gates select its input channels, or their number where they are not gated."""
    outs: str | int
    """The layer whose gates select its output channels, or their number where they are not gated."""


class DeepMoE(ImageNetwork):
    """A backbone whose convolutions are gated by an embedding of the image; `deepmoe` makes one.

    Calling it returns the backbone's logits; `forward_with_routing` returns the embedding and the gates as well.

    >>> import torch
    >>> from moesaic.models.vgg import VGG16
    >>> model = deepmoe(VGG16(num_classes=10, width=0.1), num_classes=10)
    >>> output = model.forward_with_routing(torch.zeros(2, 3, 32, 32))
    >>> output.logits.shape, len(output.routing)
    (torch.Size([2, 10]), 13)
    >>> bool((model.macs(output.routing) > model.dense_macs).all())  # all gates start open
    True
    """

    embedding: EmbeddingNetwork | ConstantEmbedding
    gates: nn.ModuleDict
    """The head of each gated layer, by its name with "_" for "."."""
    backbone: nn.Module
    gated: tuple[str, ...]
    """Names of the gated layers inside the backbone, in execution order."""
    ungated: Mapping[str, str]
    """Names of the convolutions without gates, each with the reason, as the end of a sentence."""
    dense_macs: int
    """Multiply-adds of the plain backbone for one image of the size it was built for; costs are fractions of it."""
    gate_macs: int
    """Multiply-adds of the embedding network, its classifier and all heads."""
    fixed_macs: int
    """Multiply-adds that no gate can save: ``gate_macs``, and the backbone's layers without gated inputs or outputs."""

    def __init__(
        self,
        backbone: nn.Module,
        embedding: EmbeddingNetwork | ConstantEmbedding,
        gates: Mapping[str, ChannelGate],
        active: ActiveGates,
        conv_costs: Sequence[ConvCost],
        *,
        ungated: Mapping[str, str],
        dense_macs: int,
        gate_macs: int,
        fixed_macs: int,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.gates = nn.ModuleDict({_key(name): gate for name, gate in gates.items()})
        self.backbone = backbone
        self.gated = tuple(gates)
        self.ungated = dict(ungated)
        self.dense_macs = dense_macs
        self.gate_macs = gate_macs
        self.fixed_macs = fixed_macs
        self.conv_costs = tuple(conv_costs)
        self._active = active
        self.training = self.gates.training = backbone.training

    def forward(self, x: Tensor) -> Tensor:
        output = self.forward_with_routing(x)
        if grad_sync_expected(self):  # these logits are for a loss of their own, which this caller does not use
            return with_zero_gradients(output.logits, [output.embedding_logits])
        return output.logits

    def forward_with_routing(self, x: Tensor) -> DeepMoEOutput:
        """Returns the logits, the embedding with its own logits, and the gates of every layer."""
        self._check_vmap()
        embedding, embedding_logits = self.embedding(x)
        routing = self._route(embedding, x)
        with self._gated_by(routing):
            logits = self.backbone(x)
        return DeepMoEOutput(logits, embedding, embedding_logits, routing)

    def forward_features(self, x: Tensor) -> Tensor:
        with self._gated(x) as backbone:
            return backbone.forward_features(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return self._network().forward_head(x, pre_logits)

    def forward_intermediates(
        self, x: Tensor, indices: OutIndices = None, *, intermediates_only: bool = False
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        with self._gated(x) as backbone:
            return backbone.forward_intermediates(x, indices, intermediates_only=intermediates_only)

    def prune_intermediate_layers(self, indices: OutIndices = None) -> tuple[int, ...]:
        """Drops both classifiers; costs of layers and gates are of the whole network, so that these stay."""
        wanted = take_indices(len(self.feature_info), indices)
        self.reset_classifier(0)
        return wanted

    def get_classifier(self) -> nn.Module:
        """Returns the classifier of the backbone; that of the embedding is ``embedding.head``."""
        if isinstance(self.backbone, ImageNetwork):
            return self.backbone.get_classifier()
        linear = [each for each in self.backbone.modules() if isinstance(each, nn.Linear)]
        return linear[-1] if linear else nn.Identity()

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        network, embedding = self._network(), self.embedding
        before = network.num_classes
        network.reset_classifier(num_classes, global_pool)
        backbone_macs, gate_macs = network.head_hidden_size * (num_classes - before), 0
        if isinstance(embedding, ConstantEmbedding):
            embedding.num_classes = num_classes
        else:
            weight = next(embedding.parameters())
            made = nn.Linear(embedding.dimension, num_classes) if num_classes else nn.Identity()
            embedding.head = made.to(weight.device, weight.dtype).train(embedding.head.training)
            gate_macs = embedding.dimension * (num_classes - before)
        self.dense_macs += backbone_macs
        self.gate_macs += gate_macs
        self.fixed_macs += backbone_macs + gate_macs

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self._network().set_grad_checkpointing(enable)

    @property
    def num_features(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._network().num_features

    @property
    def head_hidden_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._network().head_hidden_size

    @property
    def num_classes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._network().num_classes

    @property
    def feature_info(self) -> list[FeatureDict]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return [{**each, "module": f"backbone.{each['module']}"} for each in self._network().feature_info]

    def _network(self) -> ImageNetwork:
        if not isinstance(self.backbone, ImageNetwork):
            raise TypeError(
                f"DeepMoE: its backbone is a {type(self.backbone).__name__}, whose maps and classifier it does not "
                "know; use a backbone of create_model, such as resnet18"
            )
        return self.backbone

    @contextmanager
    def _gated(self, x: Tensor) -> Generator[ImageNetwork]:
        """Inside, the backbone runs with the gates of these images."""
        network = self._network()
        embedding, _ = self.embedding(x)
        with self._gated_by(self._route(embedding, x)):
            yield network

    def _route(self, embedding: Tensor, x: Tensor) -> dict[str, Routing]:
        """The gates of each layer for these images."""
        heads = self.heads()
        found = route_channels(list(heads.values()), embedding, autocast_dtype(x) or x.dtype)
        return dict(zip(heads, found, strict=True))

    @contextmanager
    def _gated_by(self, routing: Mapping[str, Routing]) -> Generator[None]:
        before = self._active.replace(routing)
        try:
            yield
        finally:
            self._active.replace(before)

    def macs(self, routing: Mapping[str, Routing]) -> Tensor:
        """(B,): multiply-adds of each image with these gates, for the size of image that the network was built for.

        Gates are given by the names in ``gated``, as in ``DeepMoEOutput.routing``.
        """
        self._check_routing("macs", routing)
        return self._macs_of(
            {
                name: open_channels(routing[name], gate.channels, gate.block).sum(1)
                for name, gate in self.heads().items()
            }
        )

    def expected_macs(self, routing: Mapping[str, Routing]) -> Tensor:
        """(B,): expected multiply-adds of each image whose gates open independently with probability sigmoid(score).

        So do gates of ``mode="hard"`` under logistic noise of scale 1. It has gradients.

        >>> import torch
        >>> from moesaic.models.vgg import VGG16
        >>> model = deepmoe(VGG16(num_classes=10, width=0.1), num_classes=10, mode="hard", bias=0.0)
        >>> routing = model.forward_with_routing(torch.zeros(1, 3, 32, 32)).routing     # all open half of the time
        >>> bool(model.fixed_macs < model.expected_macs(routing) < model.dense_macs / 2)
        True
        """
        self._check_routing("expected_macs", routing)
        return self._macs_of(
            {
                name: (torch.sigmoid(routing[name].scores[:, 0]) * gate.block_sizes(routing[name].scores)).sum(1)
                for name, gate in self.heads().items()
            }
        )

    def _check_routing(self, method: str, routing: Mapping[str, Routing]) -> None:
        missing = [name for name in self.gated if name not in routing]
        if missing:
            raise ValueError(
                f"DeepMoE.{method}: the routing of {missing[0]} is missing (got {', '.join(routing) or 'none'}); give "
                "forward_with_routing(x).routing, which has the names in `gated`"
            )

    def _macs_of(self, active: Mapping[str, Tensor]) -> Tensor:
        """(B,): multiply-adds from the number (B,) of active channels of each gated layer."""

        def channels(of: str | int) -> int | Tensor:
            return active[of] if isinstance(of, str) else of

        total = torch.full_like(active[self.gated[0]], self.fixed_macs)
        for cost in self.conv_costs:
            total = total + channels(cost.ins) * channels(cost.outs) * cost.macs_per_pair
        return total

    def gate_parameters(self) -> list[nn.Parameter]:
        """The parameters that determine which channels are open: those of the embedding network and of all heads."""
        return [*self.embedding.parameters(), *self.gates.parameters()]

    def heads(self) -> dict[str, ChannelGate]:
        """The head of each gated layer by the layer's name, in execution order."""
        return {name: cast(ChannelGate, self.gates[_key(name)]) for name in self.gated}


def deepmoe(
    backbone: nn.Module,
    *,
    num_classes: int,
    image_size: int = 32,
    in_channels: int = 3,
    block: int = 1,
    mode: ChannelMode = "relu",
    keep: float | None = None,
    bias: float | None = 1.0,
    bottleneck: Literal["a", "b"] = "a",
    embedding_share: float = 0.02,
    center_embedding: bool = False,
) -> DeepMoE:
    """Gates the channels of a network by an embedding of the image.

    The backbone becomes part of the returned network and keeps its parameters; each gated convolution becomes a
    `ChannelMoE` under its old name that contains its BatchNorm, whose old place is taken by an identity. The
    convolutions of `nodes_to_gate` are gated; the others are in ``ungated``, with the reason. When an error is raised,
    the backbone is unchanged.

    Args:
        backbone: a network from images (B, in_channels, H, W) to logits (B, num_classes).
        num_classes: number of classes.
        image_size: side of the images for which costs are counted.
        in_channels: channels of the images.
        block: consecutive channels that share a gate; a layer with fewer channels has one gate.
        mode: ``"relu"``: the number of open channels depends on the image; ``"topk"``: it is fixed; ``"hard"``: as
            under ``"relu"``, and open gates are 1; see `ChannelGate`.
        keep: fraction of a layer's blocks that is open under ``"topk"``, above 0 and up to 1, rounded to blocks.
        bias: initial bias of the heads; None for the printed form, which has no bias.
        bottleneck: of residual bottlenecks, ``"a"``: the first two convolutions are gated, ``"b"``: the middle one.
        embedding_share: multiply-adds of the embedding network, its classifier and the heads, as a fraction of the
            backbone's; the widths of its convolutions follow from it, and are at least 8. At 0 there is no embedding
            network: gates are the same for every image, each with a learned score (`ConstantEmbedding`).
        center_embedding: whether the heads read the embedding through a BatchNorm without affine parameters.

    >>> from moesaic.models.resnet import ResNet
    >>> model = deepmoe(ResNet(18, num_classes=10, width=0.25), num_classes=10, block=8)
    >>> model.gated[:2], len(model.gated)
    (('body.2.first.0', 'body.2.second.0'), 16)
    >>> model.ungated["body.0.0"]
    'is read by several layers'
    """
    check_positive("deepmoe", num_classes=num_classes, image_size=image_size, in_channels=in_channels, block=block)
    _check_options(mode, keep, bias, embedding_share, center_embedding)
    plan = plan_gates(backbone, bottleneck)
    if len({_key(name) for name in plan.nodes}) < len(plan.nodes):
        raise ValueError(f"deepmoe: two of {', '.join(plan.nodes)} differ in '.' and '_' alone; rename one of them")
    costs = _backbone_macs(backbone, num_classes, (in_channels, image_size, image_size))
    dense_macs = sum(costs.values())
    channels = {name: get_conv(backbone, name).out_channels for name in plan.nodes}
    blocks = {name: min(block, number) for name, number in channels.items()}
    gates = {name: math.ceil(number / blocks[name]) for name, number in channels.items()}
    sizes = {"in_channels": in_channels, "image_size": image_size, "num_classes": num_classes}
    sizes["gates"] = sum(gates.values())
    widths = embedding_widths(embedding_share * dense_macs, **sizes) if embedding_share else ()

    like = get_conv(backbone, next(iter(plan.nodes))).weight
    embedding = (
        EmbeddingNetwork(in_channels, widths, num_classes, center=center_embedding)
        if widths
        else ConstantEmbedding(in_channels, num_classes)
    )
    embedding.to(like.device, like.dtype).train(backbone.training)
    heads = {
        name: ChannelGate(
            embedding.dimension,
            channels[name],
            block=blocks[name],
            mode=mode,
            keep=None if keep is None else max(round(keep * gates[name]), 1),
            bias=bias,
            device=like.device,
            dtype=like.dtype,
        ).train(backbone.training)
        for name in plan.nodes
    }
    active = ActiveGates()
    conv_costs = _gate_convs(backbone, plan, blocks, active, costs)
    gate_macs = embedding_macs(widths, **sizes) if widths else sizes["gates"]
    return DeepMoE(
        backbone,
        embedding,
        heads,
        active,
        conv_costs,
        ungated=plan.ungated,
        dense_macs=dense_macs,
        gate_macs=gate_macs,
        fixed_macs=gate_macs + sum(costs.values()),  # of layers that are left
    )


def _gate_convs(
    backbone: nn.Module, plan: GatingPlan, blocks: Mapping[str, int], active: ActiveGates, costs: dict[str, int]
) -> list[ConvCost]:
    """Replaces the convolutions with gated inputs or outputs, and takes their multiply-adds from ``costs``."""
    conv_costs: list[ConvCost] = []
    replaced: dict[str, nn.Module] = {}
    for name in list(costs):
        conv = backbone.get_submodule(name)
        if not isinstance(conv, nn.Conv2d):
            continue
        producer = plan.producer_of(name)
        block_in = 1 if producer is None else blocks[producer]
        if name in plan.nodes:
            replaced |= _gated_modules(backbone, plan, name, active, block=blocks[name], block_in=block_in)
        elif producer is not None and _can_be_consumer(conv):
            replaced[name] = ConsumerConv(conv, active, producer, block_in=block_in)
        else:
            continue
        outs = name if name in plan.nodes else conv.out_channels
        macs_per_pair = costs.pop(name) // (conv.in_channels * conv.out_channels)
        conv_costs.append(ConvCost(macs_per_pair, conv.in_channels if producer is None else producer, outs))
    for name, module in replaced.items():
        backbone.set_submodule(name, module)
    return conv_costs


def _gated_modules(
    backbone: nn.Module, plan: GatingPlan, name: str, active: ActiveGates, *, block: int, block_in: int
) -> dict[str, nn.Module]:
    """A `GatedConv` in place of a convolution, with what replaces its BatchNorm and its ReLU."""
    conv, norm, relu = get_conv(backbone, name), plan.nodes[name].norm, plan.relu_after(backbone, name)
    modules: dict[str, nn.Module] = {
        name: GatedConv(
            conv,
            None if norm is None else cast(nn.BatchNorm2d, backbone.get_submodule(norm)),
            active,
            name,
            producer=plan.producer_of(name),
            block=block,
            block_in=block_in,
            before_relu=relu is not None,
        )
    }
    if norm is not None:
        modules[norm] = nn.Identity().train(conv.training)
    if relu is not None:
        before = cast(nn.ReLU, backbone.get_submodule(relu))
        modules[relu] = GatedReLU(active, inplace=before.inplace).train(before.training)
    return modules


def _can_be_consumer(conv: nn.Conv2d) -> bool:
    """Whether a `ConsumerConv` can take over the weights of a convolution, which it does without hooks."""
    has_own_weight = "weight" in dict(conv.named_parameters(recurse=False))  # not parametrised
    return unsupported_conv(conv) is None and has_own_weight and not has_hooks(conv, include_global=False)


def _check_options(
    mode: str, keep: float | None, bias: float | None, embedding_share: float, center_embedding: bool
) -> None:
    if mode == "topk" and keep is None:
        raise TypeError("deepmoe: keep is missing; pass the fraction of each layer that is open under mode='topk'")
    if keep is not None:
        if mode != "topk":
            raise ValueError(
                f"deepmoe: keep={keep} has no meaning under mode={mode!r}, where the number of open channels depends "
                "on the image; omit keep or use mode='topk'"
            )
        limit = "a fraction of each layer's blocks: above 0 and up to 1"
        check_numbers("deepmoe", limit, lambda value: 0 < value <= 1, {"keep": keep})
    if bias is not None:
        check_numbers("deepmoe", "finite", math.isfinite, {"bias": bias})
    limit = "a fraction of the backbone's multiply-adds: from 0 to below 1"
    check_numbers("deepmoe", limit, lambda value: 0 <= value < 1, {"embedding_share": embedding_share})
    if center_embedding and not embedding_share:
        raise ValueError(
            "deepmoe: center_embedding=True has nothing to center with embedding_share=0, where the embedding is the "
            "same for every image; omit it, or use an embedding_share above 0"
        )


def _backbone_macs(backbone: nn.Module, num_classes: int, shape: tuple[int, int, int]) -> dict[str, int]:
    """Multiply-adds of the backbone's layers for one image."""
    outputs: list[Any] = []

    def record(module: nn.Module, args: object, result: object) -> None:
        outputs.append(tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__)

    hook = backbone.register_forward_hook(record)
    try:
        costs = {layer.name: layer.macs for layer in count_macs(backbone, shape).layers}
    finally:
        hook.remove()
    if outputs != [(1, num_classes)]:
        raise ValueError(
            f"deepmoe: {type(backbone).__name__} returns {outputs[0]} for one image, not logits (1, {num_classes}); "
            "pass the network's num_classes"
        )
    return costs


def _key(name: str) -> str:
    return name.replace(".", "_")
