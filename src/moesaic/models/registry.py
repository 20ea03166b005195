"""Registry of networks by name, and model specifications in plain JSON."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from moesaic.argument_checks import check_choice
from moesaic.layers.heads import HEAD_OPTIONS, create_head
from moesaic.models.deepmoe.network import deepmoe
from moesaic.models.feature_maps import FeatureMaps, OutIndices
from moesaic.models.headed_network import HeadedNetwork
from moesaic.models.image_classifier import ImageNetwork, check_classes
from moesaic.models.mobilenet import MobileNetV2
from moesaic.models.model_string import conversion_options, parse_model_string
from moesaic.models.pretrained import PretrainedConfig, file_sha256, load_pretrained, read_config
from moesaic.models.resnet import RESNET_DEPTHS, ResNet, ResNet18
from moesaic.models.small_cnn import SmallCNN
from moesaic.models.vgg import VGG16, VGG16_WIDENINGS, VGG16_WIDTHS
from moesaic.models.vit import VIT_SIZES, ViT, ViTMoE, ViTSkip
from moesaic.models.wide_resnet.network import WideResNet, WideResNetPMoE
from moesaic.routing.registry import RouterLike, import_router, is_built_in, registered_router

__all__ = ["ModelSpec", "create_model", "list_models", "model_options"]

_TIMM_PREFIX = "timm/"
_WEIGHT_OPTIONS = ("pretrained", "weights", "weights_sha256")
"""Arguments of `create_model` that say where weights come from."""
WIDE_RESNET_NAME = re.compile(r"wrn(\d+)_(\d+)(_pmoe)?")
_LISTED_WIDE_RESNETS = ("wrn10_1", "wrn10_2", "wrn10_4", "wrn10_10", "wrn16_4", "wrn16_8", "wrn28_10")


def _deepmoe(backbone: Callable[..., nn.Module], num_classes: int, width: float = 1.0, **options: Any) -> nn.Module:
    """A network with channel gates; the options are those of `deepmoe`, of which the backbone shares some."""
    shared = {name: options[name] for name in ("image_size", "in_channels") if name in options}
    classes = max(num_classes, 1)
    model = deepmoe(backbone(num_classes=classes, width=width, **shared), num_classes=classes, **options)
    if not num_classes:
        model.reset_classifier(0)
    return model


_VGG16 = {
    "": partial(VGG16, widths=VGG16_WIDTHS),
    **{f"_{name}": partial(VGG16, widths=widths) for name, widths in VGG16_WIDENINGS.items()},
}
_VIT = {"": ViT, "_moe": ViTMoE, "_soft_moe": partial(ViTMoE, router="soft"), "_skip": ViTSkip}
_NETWORKS: Mapping[str, Callable[..., nn.Module]] = {
    "cifar_cnn": SmallCNN,
    "cifar_mobilenetv2": MobileNetV2,
    "cifar_resnet18": ResNet18,
    **{f"resnet{depth}": partial(ResNet, depth) for depth in RESNET_DEPTHS},
    **{f"resnet{depth}_deepmoe": partial(_deepmoe, partial(ResNet, depth)) for depth in RESNET_DEPTHS},
    **{
        f"vit_{name}_patch4_32{kind}": partial(vit, **size, patch_size=4)
        for name, size in VIT_SIZES.items()
        for kind, vit in _VIT.items()
    },
    **{f"vgg16{name}": vgg16 for name, vgg16 in _VGG16.items()},
    **{f"vgg16_deepmoe{name}": partial(_deepmoe, vgg16) for name, vgg16 in _VGG16.items()},
}


def list_models(pattern: str = "*") -> list[str]:
    """Returns the names of the registered networks that match a pattern.

    Wide residual networks exist for every depth 6n + 4 and every widening factor; the common ones are listed.

    >>> list_models("wrn10*_pmoe")
    ['wrn10_10_pmoe', 'wrn10_1_pmoe', 'wrn10_2_pmoe', 'wrn10_4_pmoe']
    """
    wide = (f"{name}{kind}" for name in _LISTED_WIDE_RESNETS for kind in ("", "_pmoe"))
    return sorted(name for name in (*wide, *_NETWORKS) if fnmatchcase(name, pattern))


def create_model(
    name: str,
    *,
    num_classes: int | None = None,
    weights: str | Path | None = None,
    weights_sha256: str | None = None,
    features_only: bool = False,
    out_indices: OutIndices = None,
    **options: Any,
) -> nn.Module:
    """Creates a network by name, initialised from torch's default generator.

    ``wrn10_10`` is a wide residual network of depth 10 and widening factor 10, ``wrn10_10_pmoe`` the same with a pMoE
    layer for its last convolution; both take ``fidelity="best"``, ``"released"`` or ``"print"``, and the second
    ``image_size``, ``experts``, ``router`` and more: see `WideResNet` and `WideResNetPMoE`. ``resnet18`` and ``vgg16``,
    and their like, take ``image_size``, ``in_channels`` and ``width``, which multiplies their channels: see `ResNet`
    and `VGG16`; ``vgg16_w4_low`` is a widening of Wang et al. ``vgg16_deepmoe``, ``vgg16_deepmoe_w4_low`` and
    ``resnet18_deepmoe`` are the same networks with channels that are gated by the image; they take ``block``, ``mode``,
    ``keep``, ``bias``, ``bottleneck`` and ``embedding_share`` as well: see `deepmoe`. ``vit_tiny_patch4_32`` and
    ``vit_small_patch4_32`` are vision transformers, which take ``image_size``, ``in_channels``, ``depth`` and
    ``mlp_ratio``: see `ViT`; with ``_moe`` and ``_soft_moe`` they have mixtures of experts (``experts``, ``capacity``,
    ``every``), with ``_skip`` they skip tokens (``keep``, ``gate``, ``every``). ``timm/resnet18`` is timm's
    network of that name, where timm is installed; ``pretrained=True`` downloads its weights.

    ``head="routed"``, ``"attention"``, ``"mean"`` or ``"max"`` gives a network without channel gates another head on
    its last map: see `RoutedHead`, whose ``experts``, ``patches_per_expert`` and ``gate`` then are options too.
    ``num_classes`` is required; 0 leaves the classifier out. ``features_only=True``, which needs none, returns the maps
    of the network instead, all or those of ``out_indices``: see `FeatureMaps`.

    ``weights`` is a file of pretrained weights for any of these networks: safetensors, or what
    ``torch.load(weights_only=True)`` reads. Names and shapes must be those of the network; a classifier of another
    shape is left out. ``weights_sha256`` is the digest that the file must have.

    >>> model = create_model("wrn10_10_pmoe", num_classes=10)
    >>> len(model.moe.experts), model.moe.patches_per_expert
    (4, 16)
    """
    if num_classes is None:
        if not features_only:
            raise TypeError("create_model: num_classes is missing; give it, or 0 for a network without classifier")
        num_classes = 0
    check_classes("create_model", num_classes)
    if features_only and options.get("head") is not None:
        raise ValueError(f"create_model: features_only=True has no head, got head={options['head']!r}; leave one out")
    if out_indices is not None and not features_only:
        raise ValueError(f"create_model: out_indices={out_indices} needs features_only=True")
    model = _create(name, 0 if features_only else num_classes, options)
    if weights is not None:
        load_pretrained(model.backbone if isinstance(model, HeadedNetwork) else model, weights, weights_sha256)
    if isinstance(model, HeadedNetwork) and isinstance(model.backbone, ImageNetwork):
        model.backbone.prune_intermediate_layers()  # its own pooling, once the file of weights is compared
    if not features_only:
        return model
    if name.startswith(_TIMM_PREFIX):  # timm has a wrapper of its own for each of its networks
        loaded = {} if weights is None else {"pretrained": True, "pretrained_cfg_overlay": {"file": str(weights)}}
        indices = {} if out_indices is None else {"out_indices": out_indices}
        return _create(name, 0, {**options, **loaded, **indices, "features_only": True})
    return FeatureMaps(model, out_indices)


def _create(name: str, num_classes: int, options: Mapping[str, Any]) -> nn.Module:
    if name.startswith(_TIMM_PREFIX):
        from moesaic.models.timm_registry import timm_model

        return timm_model(name.removeprefix(_TIMM_PREFIX), num_classes, **options)
    if options.get("head") is not None and "_deepmoe" not in name:
        head = {option: options[option] for option in HEAD_OPTIONS if option in options}
        others = {option: value for option, value in options.items() if option not in ("head", *HEAD_OPTIONS)}
        backbone = _create(name, 0, others)
        assert isinstance(backbone, ImageNetwork)
        return HeadedNetwork(backbone, create_head(options["head"], backbone.num_features, num_classes, **head))
    options = {option: value for option, value in options.items() if (option, value) != ("head", None)}
    known = model_options(name)
    for option in options:
        if option not in known:
            raise TypeError(f"create_model: {name} has no option {option!r}; it takes {', '.join(known)}")
    return _constructor(name)(num_classes=num_classes, **options)


def model_options(name: str) -> tuple[str, ...]:
    """Returns the options that `create_model` takes for a network besides ``num_classes`` and ``weights``.

    For networks of timm, these are our own.

    >>> model_options("resnet18")
    ('image_size', 'in_channels', 'width', 'head')
    """
    if name.startswith(_TIMM_PREFIX):
        return ("in_channels", "image_size", "head")
    own = _options(_constructor(name))
    return own if "_deepmoe" in name else (*own, "head")


def _options(constructor: Any) -> tuple[str, ...]:
    if getattr(constructor, "func", None) is _deepmoe:  # a partial of it and its backbone
        return tuple(dict.fromkeys([*_options(constructor.args[0]), *_options(deepmoe)]))
    bound: Mapping[str, Any] = getattr(constructor, "keywords", {})
    parameters = inspect.signature(constructor).parameters.values()
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):  # those of the network that it is made from
        names += _options(getattr(constructor, "func", constructor).__base__)
    return tuple(name for name in names if name not in ("num_classes", *bound))


def _constructor(name: str) -> Callable[..., nn.Module]:
    wide = WIDE_RESNET_NAME.fullmatch(name)
    if wide is None:
        return _NETWORKS[check_choice("create_model", "name", name, list_models())]
    return partial(WideResNetPMoE if wide[3] else WideResNet, int(wide[1]), int(wide[2]))


@dataclass(frozen=True)
class ModelSpec:
    """Specification of a network, as stored in checkpoints, from which it can be built again.

    >>> spec = ModelSpec("wrn10_1", {"num_classes": 3})
    >>> ModelSpec.from_json(spec.to_json()) == spec
    True
    >>> type(spec.build()).__name__
    'WideResNet'
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of `create_model` besides the name; plain JSON, routers by their names."""
    conversions: tuple[Mapping[str, Any], ...] = ()
    """Arguments of each call of `convert` besides the model; plain JSON, routers by their names. Entries with a key
    ``"skip"`` are calls of `moesaic.skip`, with the blocks under that key."""

    @classmethod
    def parse(cls, text: str) -> ModelSpec:
        """Parses a model string of the command line; ``num_classes`` is not part of it.

        A name that `create_model` knows, with options after colons: a bare option is ``=True``; ``convert=`` names
        layers to convert, joined by ``+``, and the options of `convert` follow it; so does ``skip=`` for blocks that
        skip tokens.

        >>> ModelSpec.parse("wrn10_2_pmoe:experts=8").arguments
        {'experts': 8}
        >>> ModelSpec.parse("timm/resnet18:pretrained:convert=layer4.0.conv2+layer4.1.conv2:experts=8").conversions
        ({'layer': ['layer4.0.conv2', 'layer4.1.conv2'], 'experts': 8},)
        >>> ModelSpec.parse("timm/vit_tiny_patch16_224:skip=every-2:keep=0.25").conversions
        ({'skip': ['every-2'], 'keep': 0.25},)
        """
        name, options, conversions = parse_model_string(text)
        for each in (options, *conversions):
            if isinstance(each.get("router"), str):
                import_router(each["router"])  # the user's own words; build looks names up and imports nothing
        known = () if name.startswith(_TIMM_PREFIX) else (*model_options(name), "weights")
        unknown = next((option for option in options if option not in known), None)
        if conversions and known and unknown is not None:
            raise TypeError(
                f"{name} has no option {unknown!r}; it takes {', '.join(known)}, and after convert=: "
                f"{', '.join(conversion_options())}"
            )
        return cls(name, options, tuple(conversions))

    def with_seed(self, seed: int) -> ModelSpec:
        """Returns the specification with the seed of conversions that have none."""
        return replace(self, conversions=tuple({"seed": seed, **conversion} for conversion in self.conversions))

    def build(self, router: RouterLike | None = None) -> nn.Module:
        """Builds the network, initialised from torch's default generator.

        A specification may come from a file of someone else, so it never imports a router ``"module:Class"``: give
        ``router``, the class, or call `moesaic.routing.register_router` first.
        """
        arguments, *conversions = (self._with_router(each, router) for each in (self.arguments, *self.conversions))
        model = create_model(self.name, **arguments)
        if conversions:
            from moesaic.models.convert import convert
            from moesaic.models.skip import skip

            for conversion in conversions:
                if "skip" in conversion:
                    model = skip(model, **{("blocks" if key == "skip" else key): conversion[key] for key in conversion})
                else:
                    model = convert(model, **conversion)
        return model

    @property
    def is_pretrained(self) -> bool:
        """Whether the network begins with pretrained weights, of a file or of timm."""
        return bool(self.arguments.get("pretrained")) or "weights" in self.arguments

    def pretrained_config(self) -> PretrainedConfig:
        """Returns the image size and normalisation of the pretrained network.

        They come from the metadata of the file of weights, else from timm; of a network that is trained from scratch
        nothing is known.
        """
        found = PretrainedConfig()
        if "weights" in self.arguments:
            found = read_config(self.arguments["weights"])
        if self.is_pretrained and self.name.startswith(_TIMM_PREFIX):
            from moesaic.models.timm_registry import timm_config

            found = found.or_else(timm_config(self.name.removeprefix(_TIMM_PREFIX)))
        return found

    def with_digest(self) -> ModelSpec:
        """Returns the specification with the SHA-256 of its file of weights, if it has one."""
        if "weights" not in self.arguments:
            return self
        digest = file_sha256(self.arguments["weights"])
        return replace(self, arguments={**self.arguments, "weights_sha256": digest})

    @property
    def own_routers(self) -> tuple[str, ...]:
        """Names of routers that are not moesaic's."""
        named = (each.get("router") for each in (self.arguments, *self.conversions))
        return tuple(dict.fromkeys(name for name in named if isinstance(name, str) and not is_built_in(name)))

    def _with_router(self, options: Mapping[str, Any], router: RouterLike | None) -> Mapping[str, Any]:
        name = options.get("router")
        if name is None:
            return options
        if not isinstance(name, str):
            raise TypeError(
                f"ModelSpec: router={name!r} is a {type(name).__name__}; a specification has names alone: give its "
                "name to moesaic.routing.register_router, and here"
            )
        if router is None or is_built_in(name):
            registered_router(name)
            return options
        if len(self.own_routers) > 1:
            raise ValueError(
                f"{self.name} has the routers {' and '.join(self.own_routers)}, but one was given; register each with "
                "moesaic.routing.register_router"
            )
        return {**options, "router": router}

    def without_weights(self) -> ModelSpec:
        """Returns the specification without pretrained weights, for networks whose weights are loaded later."""
        return replace(
            self, arguments={name: self.arguments[name] for name in self.arguments if name not in _WEIGHT_OPTIONS}
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the specification as plain JSON."""
        conversions = [dict(conversion) for conversion in self.conversions]
        return {"name": self.name, "arguments": dict(self.arguments), "conversions": conversions}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ModelSpec:
        """Creates a specification from the result of `to_json`."""
        return cls(content["name"], dict(content["arguments"]), tuple(dict(each) for each in content["conversions"]))
