"""Wide residual networks (Zagoruyko and Komodakis 2016), and with a pMoE layer for their last convolution.

WRN-d-k has d = 6n + 4 layers: a 3×3 stem of 16 channels, three groups of n residual blocks with 16k,
32k and 64k channels, of which the second and the third halve the map, then BatchNorm, ReLU, the mean
over the map, and a linear layer. WRN-pMoE (Chowdhury et al. 2023, Section 5.2, Figures 17 and 18) has
a `PatchMoE` in place of its last 3×3 convolution.

Each network exists in three forms:

- ``"print"``: as printed in the papers. The block with the pMoE layer stays residual; the gate is a softmax
  over the selected patches (eq. 4) and scales the experts' outputs; the layer has as many parameters as
  the convolution it replaces; routers start as in eq. 7.
- ``"released"``: as in the authors' code. The pMoE layer has no residual connection; each expert has its
  own BatchNorm and ReLU over its gated map; the gate is a softmax over all patches. Convolutions have a
  bias, weights start Glorot-uniform, routers with a standard deviation of 1e-4, and BatchNorm has Keras'
  momentum and ε (``keras_norm=False`` takes torch's). On CIFAR's small maps experts are 1×1, which gives
  the layer a ninth of the parameters.
- ``"best"``: the default, chosen by measurement (see the page on training): the released network with torch's
  BatchNorm and without biases of convolutions, which cost time. The next BatchNorm cancels a bias, also through sums
  and 1×1 shortcuts. Only in front of experts with norms would a bias change anything, because unselected positions are
  zero with or without it; networks reach the same accuracy without.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.argument_checks import check_choice, check_positive
from moesaic.experts import ConvExperts
from moesaic.layers import PatchMoE
from moesaic.models.feature_maps import FeatureDict
from moesaic.models.image_classifier import GlobalAvgPool, ImageClassifier
from moesaic.models.wide_resnet.pooled_head import pooled_head
from moesaic.models.wide_resnet.thin_conv import fits_thin, fits_thin_add, plus_thin_conv2d, thin_conv2d
from moesaic.ops import GateOn, kernels_available
from moesaic.ops.hook_detection import has_hooks
from moesaic.paper_fidelity import Fidelity
from moesaic.routing import ExpertChoice, RouterLike, SoftRouter
from moesaic.routing.expert_choice import ExpertGate
from moesaic.routing.registry import DEFAULT_ROUTER, build_router, has_patch_count
from moesaic.routing.router import router_init_std

__all__ = ["WideResNet", "WideResNetPMoE"]

_KERAS: dict[str, Any] = {"momentum": 0.01, "eps": 1e-3}
_GROUP_WIDTHS = (16, 32, 64)
_SHRINK = 4
"""The last group's map has a quarter of the image's side."""
_SMALL_MAP = 8
"""Up to this side a map is cut into single pixels, as the paper does on CIFAR-10."""


@dataclass(frozen=True)
class _Style:
    """Options of the modules in which fidelities differ."""

    bias: bool
    """Whether convolutions have one."""
    keras_norm: bool
    glorot: bool
    """Glorot-uniform weights rather than He-normal ones."""
    early_shortcut: bool
    """Whether a block that changes the shape takes its shortcut from its input rather than from behind BatchNorm."""
    drops_biases: bool
    """Whether convolutions lose their biases once weights are initialised."""

    @classmethod
    def of(cls, fidelity: Fidelity, keras_norm: bool | None) -> _Style:
        printed = check_choice("WideResNet", "fidelity", fidelity, get_args(Fidelity)) == "print"
        keras_norm = fidelity == "released" if keras_norm is None else keras_norm
        return cls(
            not printed, keras_norm, glorot=not printed, early_shortcut=not printed, drops_biases=fidelity == "best"
        )

    def norm(self, channels: int) -> nn.BatchNorm2d:
        return nn.BatchNorm2d(channels, **(_KERAS if self.keras_norm else {}))

    def conv(self, before: int, channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
        return nn.Conv2d(before, channels, kernel, stride, padding=kernel // 2, bias=self.bias)

    def initialise(self, network: nn.Module) -> None:
        for module in cast("Iterable[nn.Module]", network.modules()):  # torch types it in part
            if isinstance(module, nn.Conv2d):
                self._initialise(module.weight, module.bias)
            elif isinstance(module, ConvExperts):
                for weight in module.weight:
                    self._initialise(weight, module.bias)
            elif isinstance(module, nn.Linear) and self.glorot:
                self._initialise(module.weight, module.bias)
        if self.drops_biases:  # last, so that a seed gives the same weights as in the released network
            _drop_biases(network)

    def _initialise(self, weight: Tensor, bias: Tensor | None) -> None:
        if self.glorot:
            nn.init.xavier_uniform_(weight)
        else:
            nn.init.kaiming_normal_(weight)
        if bias is not None:
            nn.init.zeros_(bias)


@dataclass(frozen=True)
class _Form:
    """How a pMoE layer is used in the network."""

    residual: bool
    gate: ExpertGate
    gate_on: GateOn
    expert_norm: bool
    """BatchNorm and ReLU of each expert's gated map, or of the whole map in front of the router."""
    router_std: float | None
    """Standard deviation of the router's initial weights; None for its own."""


_FORMS: dict[Fidelity, _Form] = {
    "print": _Form(True, "softmax_selected", "output", expert_norm=False, router_std=None),
    "released": _Form(False, "softmax_all", "input", expert_norm=True, router_std=1e-4),
    "best": _Form(False, "softmax_all", "input", expert_norm=True, router_std=1e-4),
}


class WideResNet(ImageClassifier):
    """WRN-d-k for images (B, in_channels, H, W) with sides divisible by 4.

    Args:
        depth: d = 6n + 4.
        width: k, the widening factor.
        num_classes: Number of classes.
        in_channels: Channels of the images.
        fidelity: ``"print"``, ``"released"`` or ``"best"``; the last two differ in BatchNorm and biases alone.
        keras_norm: BatchNorm with Keras' momentum (0.99 in its terms, 0.01 in torch's) and ε = 1e-3; by default
            where the fidelity is ``"released"``. Such averages need some 500 steps before they can be relied on.

    >>> sum(weight.numel() for weight in WideResNet(10, 10, num_classes=10).parameters())
    7435354
    """

    def __init__(
        self,
        depth: int,
        width: int,
        num_classes: int,
        *,
        in_channels: int = 3,
        fidelity: Fidelity = "best",
        keras_norm: bool | None = None,
    ) -> None:
        self._assemble(depth, width, num_classes, in_channels, _Style.of(fidelity, keras_norm))

    def _assemble(
        self,
        depth: int,
        width: int,
        num_classes: int,
        in_channels: int,
        style: _Style,
        last_block: Callable[[int, int, int], nn.Module] | None = None,
    ) -> None:
        """Build the network; ``last_block`` makes the last residual block from channels before, after and stride."""
        blocks = _blocks(depth)
        check_positive(type(self).__name__, width=width, in_channels=in_channels)
        parts: OrderedDict[str, nn.Module] = OrderedDict(stem=style.conv(in_channels, _GROUP_WIDTHS[0], 3))
        before = _GROUP_WIDTHS[0]
        maps: list[FeatureDict] = [{"num_chs": before, "reduction": 1, "module": "body.stem"}]
        for group, base in enumerate(_GROUP_WIDTHS, start=1):
            channels = base * width
            made: list[nn.Module] = []
            for number in range(blocks):
                stride = 2 if number == 0 and group > 1 else 1
                last = group == len(_GROUP_WIDTHS) and number == blocks - 1
                if last and last_block is not None:
                    made.append(last_block(before, channels, stride))
                else:
                    made.append(_Block(before, channels, stride, style))
                before = channels
            parts[f"group{group}"] = nn.Sequential(*made)
            # BatchNorm and ReLU belong to the last map
            module = f"body.group{group}" if group < len(_GROUP_WIDTHS) else "body.relu"
            maps.append({"num_chs": channels, "reduction": 2 ** (group - 1), "module": module})
        parts |= {"norm": style.norm(before), "relu": nn.ReLU(), "mean": GlobalAvgPool()}
        super().__init__(nn.Sequential(parts), before, num_classes, feature_info=maps)
        style.initialise(self)

    def features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, width)."""
        body = self.body
        if type(body) is not nn.Sequential or has_hooks(body):
            return body(x)
        for part in body:
            x = _apply_module(part, x)
        return x

    def _run_part(self, part: nn.Module, x: Tensor) -> Tensor:
        return _apply_module(part, x)


class WideResNetPMoE(WideResNet):
    """WRN-d-k with a `PatchMoE` in place of its last 3×3 convolution.

    Args:
        depth: d = 6n + 4.
        width: k of WRN-d-k, the widening factor.
        num_classes: Number of classes.
        image_size: Side of the images, which fixes the patch grid on the map, a quarter as large. Other sizes
            work where the map is divisible into patches.
        in_channels: Channels of the images.
        fidelity: ``"print"``, ``"released"`` or ``"best"``.
        keras_norm: as in `WideResNet`.
        experts: Number of experts; must divide the channels, 64k.
        patches_per_expert: Patches of an image that each expert selects.
        patch_size: Side of a patch on the map.
        kernel_size: Kernel size of the experts.
        pad: see `PatchMoE`.
        gate: see `PatchMoE`, as for ``gate_on`` and ``expert_norm``.
        gate_on: see `PatchMoE`.
        expert_norm: see `PatchMoE`; without it BatchNorm and ReLU are taken once, in front of the router.
        residual: Whether the block's input is added to the pMoE layer's output.
        router: ``"expert-choice"``, ``"token-choice"``, ``"soft"``, ``"module:Class"``, a registered name
            (`moesaic.routing.register_router`), a router class, or a factory ``(in_channels, experts, patch_size) ->
            Router``. Under another router than expert choice, gates are its own; ``patches_per_expert`` are the slots
            of each expert of a soft router, which takes ``gate_on="output"``, ``expert_norm=False`` and each patch
            alone.

    Arguments that are left out follow the fidelity, and patches the size of the map as in the paper: maps of 8×8 and
    below are divided into single pixels, of which each of 4 experts selects a quarter; larger ones into a grid of about
    4×4 patches, of which each of 8 experts selects an eighth.

    >>> network = WideResNetPMoE(10, 10, num_classes=2, image_size=64)
    >>> moe = network.moe
    >>> len(moe.experts), moe.patches_per_expert, moe.patch_size, moe.kernel_size
    (8, 2, 4, 3)
    """

    def __init__(
        self,
        depth: int,
        width: int,
        num_classes: int,
        *,
        image_size: int = 32,
        in_channels: int = 3,
        fidelity: Fidelity = "best",
        keras_norm: bool | None = None,
        experts: int | None = None,
        patches_per_expert: int | None = None,
        patch_size: int | None = None,
        kernel_size: int | None = None,
        pad: bool = False,
        gate: ExpertGate | None = None,
        gate_on: GateOn | None = None,
        expert_norm: bool | None = None,
        residual: bool | None = None,
        router: RouterLike = DEFAULT_ROUTER,
    ) -> None:
        style = _Style.of(fidelity, keras_norm)
        given = {"gate": gate, "gate_on": gate_on, "expert_norm": expert_norm, "residual": residual}
        form = replace(_FORMS[fidelity], **{name: value for name, value in given.items() if value is not None})
        plan = _patch_plan(image_size, fidelity, experts, patches_per_expert, patch_size, kernel_size, pad)
        if fidelity == "print":
            form = replace(form, router_std=_printed_router_std(image_size, plan["patch_size"], width))
        chosen = None if router in (DEFAULT_ROUTER, ExpertChoice) else router
        if chosen is not None and patches_per_expert is not None and not has_patch_count(chosen):
            raise ValueError(
                f"WideResNetPMoE: patches_per_expert={patches_per_expert}, but router={router!r} has no such number; "
                "leave it out"
            )

        def last_block(before: int, channels: int, stride: int) -> nn.Module:
            if chosen is None:
                return _RoutedBlock(before, channels, stride, style, form, plan)
            return _RoutedBlock(before, channels, stride, style, *_with_router(chosen, channels, form, plan, given))

        self._assemble(depth, width, num_classes, in_channels, style, last_block)

    def features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, width); on a GPU and in ONNX files by `pooled_head`."""
        body = cast(nn.Sequential, self.body)
        if not (kernels_available(x) or torch.onnx.is_in_onnx_export()) or not _can_pool(body):
            return super().features(x)
        *front, last, norm, _relu, _mean = body
        for part in front:
            x = _apply_module(part, x)
        *blocks, block = cast(nn.Sequential, last)
        for part in blocks:
            x = part(x)
        assert isinstance(block, _RoutedBlock) and isinstance(norm, nn.BatchNorm2d)
        return pooled_head(block.moe, block.before_moe(F.relu(block.norm1(x))), norm)

    @property
    def moe(self) -> PatchMoE:
        """The routed layer."""
        return next(module for module in self.modules() if isinstance(module, PatchMoE))


def _patch_plan(
    image_size: int,
    fidelity: Fidelity,
    experts: int | None,
    patches_per_expert: int | None,
    patch_size: int | None,
    kernel_size: int | None,
    pad: bool,
) -> dict[str, Any]:
    """Patch grid and experts of a pMoE layer, as arguments of `PatchMoE`."""
    check_positive("WideResNetPMoE", image_size=image_size)
    side = -(-image_size // _SHRINK)  # halved twice, rounded up
    small = side <= _SMALL_MAP
    if patch_size is None:
        patch_size = 1 if small else _divisor(side, side / 4)
    if side % patch_size and not pad:
        raise ValueError(
            f"WideResNetPMoE: image_size={image_size} gives a {side}×{side} map, which is not divisible into "
            f"{patch_size}×{patch_size} patches; use patch_size={_divisor(side, patch_size)}, pad=True, or images of "
            f"{_SHRINK * patch_size * (side // patch_size + 1)}×{_SHRINK * patch_size * (side // patch_size + 1)}"
        )
    if experts is None:
        experts = 4 if small else 8
    if patches_per_expert is None:
        patches_per_expert = max((-(-side // patch_size)) ** 2 // experts, 1)
    if kernel_size is None:
        kernel_size = 1 if small and fidelity != "print" else 3
    plan = {"experts": experts, "patches_per_expert": patches_per_expert}
    return {**plan, "patch_size": patch_size, "kernel_size": kernel_size, "pad": pad}


def _printed_router_std(image_size: int, patch_size: int, width: int) -> float:
    """σ_r of eq. 7 for the patches of the last map."""
    side = -(-image_size // _SHRINK)
    return router_init_std((-(-side // patch_size)) ** 2, _GROUP_WIDTHS[-1] * width * patch_size**2)


def _with_router(
    router: RouterLike, channels: int, form: _Form, plan: dict[str, Any], given: Mapping[str, Any]
) -> tuple[_Form, dict[str, Any]]:
    """Form and plan of a pMoE layer with another router; ``given`` are the options that the user set."""
    plan = dict(plan)
    experts, patch_size, patches = plan["experts"], plan["patch_size"], plan.pop("patches_per_expert")
    made = build_router(router, channels, experts, patch_size, patches, gate=form.gate)
    form = replace(form, router_std=None)  # the router has its own initial weights
    if not isinstance(made, ExpertChoice):
        form = replace(form, gate=given["gate"] or "softmax_selected")  # and its own gates, which `PatchMoE` compares
    if isinstance(made, SoftRouter):
        plan["context"] = "patch"
        needed: dict[str, Any] = {"gate_on": "output", "expert_norm": False}
        form = replace(form, **{name: value for name, value in needed.items() if given[name] is None})
    return form, {**plan, "router": made}


class _Block(nn.Module):
    """BatchNorm, ReLU and a 3×3 convolution, twice, plus the input or a 1×1 convolution of it."""

    def __init__(self, before: int, channels: int, stride: int, style: _Style) -> None:
        super().__init__()
        self.norm1 = style.norm(before)
        self.conv1 = style.conv(before, channels, 3, stride)
        self.norm2 = style.norm(channels)
        self.conv2 = style.conv(channels, channels, 3)
        self.shortcut = _shortcut(before, channels, stride, style)
        self.early_shortcut = style.early_shortcut

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.norm1(x))
        y = self.conv2(F.relu(self.norm2(_apply_module(self.conv1, first))))
        if self.shortcut is None:
            return y + x
        return _add_shortcut(y, self.shortcut, x if self.early_shortcut else first)


class _RoutedBlock(nn.Module):
    """A block whose second convolution is a pMoE layer."""

    def __init__(
        self, before: int, channels: int, stride: int, style: _Style, form: _Form, plan: dict[str, Any]
    ) -> None:
        super().__init__()
        self.norm1 = style.norm(before)
        self.conv1 = style.conv(before, channels, 3, stride)
        self.norm2 = None if form.expert_norm else style.norm(channels)
        self.moe = PatchMoE(
            channels, channels, **plan, gate=form.gate, gate_on=form.gate_on, expert_norm=form.expert_norm
        )
        if style.keras_norm and self.moe.experts.norm is not None:
            self.moe.experts.norm.momentum, self.moe.experts.norm.eps = _KERAS["momentum"], _KERAS["eps"]
        if form.router_std is not None:
            nn.init.normal_(cast(Tensor, self.moe.router.weight), std=form.router_std)
        self.residual = form.residual
        self.shortcut = _shortcut(before, channels, stride, style) if form.residual else None
        self.early_shortcut = style.early_shortcut

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.norm1(x))
        y = self.moe(self.before_moe(first))
        if not self.residual:
            return y
        if self.shortcut is None:
            return y + x
        return y + self.shortcut(x if self.early_shortcut else first)

    def before_moe(self, first: Tensor) -> Tensor:
        """The map that is routed, from the block's input after BatchNorm and ReLU."""
        y = self.conv1(first)
        return y if self.norm2 is None else F.relu(self.norm2(y))


def _apply_module(part: nn.Module, x: Tensor) -> Tensor:
    """``part(x)``; a convolution of few channels by `thin_conv2d` where kernels can run and the module has no hooks."""
    if type(part) is nn.Conv2d and fits_thin(part) and _kernels_available(x) and not has_hooks(part):
        return thin_conv2d(x, part.weight)
    return part(x)


def _add_shortcut(y: Tensor, conv: nn.Conv2d, x: Tensor) -> Tensor:
    """``y + conv(x)``, likewise in one pass where kernels can run."""
    if type(conv) is nn.Conv2d and fits_thin_add(conv) and _kernels_available(x) and not has_hooks(conv):
        return plus_thin_conv2d(y, x, conv.weight)
    return y + conv(x)


def _kernels_available(x: Tensor) -> bool:
    """Not while a network is traced by torch.fx: ``x`` is then a proxy, and modules must be called."""
    return isinstance(x, Tensor) and kernels_available(x)  # pyright: ignore[reportUnnecessaryIsInstance]


def _can_pool(body: nn.Sequential) -> bool:
    """Whether routed layer, BatchNorm, ReLU and mean follow each other, and none of them has hooks."""
    if len(body) < 4:
        return False
    *_, last, norm, relu, mean = body
    block = last[-1] if isinstance(last, nn.Sequential) else None
    if not isinstance(block, _RoutedBlock) or block.residual or type(block.moe) is not PatchMoE:
        return False
    if not isinstance(block.moe.router, ExpertChoice):
        return False
    if not (isinstance(norm, nn.BatchNorm2d) and type(relu) is nn.ReLU and type(mean) is GlobalAvgPool):
        return False
    return not any(has_hooks(module) for module in (body, last, block, block.moe, block.moe.experts, norm, relu, mean))


def _drop_biases(network: nn.Module) -> None:
    for module in cast("Iterable[nn.Module]", network.modules()):
        if isinstance(module, nn.Conv2d):
            module.bias = None
        elif isinstance(module, PatchMoE) and module.gate_on == "input":  # a gate on the output multiplies the bias too
            experts = module.experts
            assert isinstance(experts, ConvExperts)
            experts.bias, experts.has_bias = None, False


def _shortcut(before: int, channels: int, stride: int, style: _Style) -> nn.Conv2d | None:
    """A 1×1 convolution, or None where the shapes agree."""
    return None if before == channels and stride == 1 else style.conv(before, channels, 1, stride)


def _blocks(depth: int) -> int:
    """Blocks of a group."""
    blocks, rest = divmod(depth - 4, 6)
    if blocks < 1 or rest:
        near = 6 * max(round((depth - 4) / 6), 1) + 4
        raise ValueError(f"WideResNet: depth={depth}; it must be 6n + 4, such as {near}")
    return blocks


def _divisor(side: int, near: float) -> int:
    return min((d for d in range(1, side + 1) if side % d == 0), key=lambda d: abs(d - near))
