"""``convert``: replaces layers of any network by mixtures of experts.

A convolution becomes a ``PatchMoE`` (`moesaic.models.convert_conv`), an MLP of a transformer or of a modern CNN a
``TokenMoE`` (`moesaic.models.convert_mlp`). The network may be pretrained or not.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast, get_args

from torch import Tensor, nn

from moesaic.argument_checks import check_choice, check_positive
from moesaic.layers.token_moe import Prefix
from moesaic.models.convert_candidates import find_layers
from moesaic.models.convert_conv import ChannelsLastPatchMoE, plan_conv
from moesaic.models.convert_mlp import hidden_activations, plan_mlp
from moesaic.models.convert_plan import Init, Replacement, refuse_ddp
from moesaic.models.input_shapes import OTHER_SIZE, LayerInputs, input_shape, trace_inputs
from moesaic.models.mlp_candidates import MLPUnit, find_mlps
from moesaic.models.rescaled_routers import RescaledExpertChoice
from moesaic.ops import Combine, Context, GateOn
from moesaic.routing import RouterLike
from moesaic.routing.expert_choice import ExpertGate
from moesaic.routing.registry import DEFAULT_ROUTER, is_default, router_name

__all__ = ["ChannelsLastPatchMoE", "Init", "RescaledExpertChoice", "applied_conversions", "convert"]

Model = TypeVar("Model", bound=nn.Module)

_RECORD = "_moesaic_conversions"
_CONV_OPTIONS = ("patches_per_expert", "patch_size", "pad", "gate_on", "context", "expert_norm", "combine")
_TOKEN_OPTIONS = ("tokens_per_expert", "capacity", "top_k", "prefix", "images")


def convert(
    model: Model,
    layer: str | Sequence[str],
    *,
    experts: int,
    patches_per_expert: int | None = None,
    patch_size: int | str = "auto",
    pad: bool = False,
    tokens_per_expert: int | None = None,
    capacity: float | None = None,
    top_k: int | None = None,
    prefix: Prefix | None = None,
    gate: ExpertGate | None = None,
    gate_on: GateOn = "output",
    context: Context | None = None,
    expert_norm: bool = False,
    combine: Combine = "concat",
    router: RouterLike = DEFAULT_ROUTER,
    init: Init = "scratch",
    images: Tensor | None = None,
    seed: int = 0,
    input_size: int | Sequence[int] | None = None,
) -> Model:
    """Replaces convolutions of ``model`` by `PatchMoE`, or MLPs by `TokenMoE`, in place, and returns the model.

    **Convolutions.** Each expert owns out_channels / experts of the convolution's filters, so the experts have as many
    parameters as the convolution; the default router adds E·C·p². Linear layers on maps (B, H, W, C) are converted as
    1×1 convolutions.

    **MLPs** of two linear layers or 1×1 convolutions, with an activation between them, are converted as one: those of
    ViT, Swin, ConvNeXt, MLP-Mixer and their like in timm and transformers, and any ``nn.Sequential(Linear, GELU,
    Linear)``. Each expert is an MLP of the same size, under ``init="split"`` a part of it.

    The layer keeps its name.

    Args:
        model: any network; it is unchanged if an error is raised.
        layer: name of a convolution or MLP as in ``model.named_modules()``, a pattern such as ``"layer4.*.conv2"`` or
            ``"blocks.*.mlp"``, a rule, or several of them. The rule ``"last-2"`` is the last two MLPs, ``"every-2"``
            every second one. A pattern that matches MLPs is for these alone. `moesaic.models.convertible_layers` lists
            what can be converted.
        experts: number of experts E.
        patches_per_expert: of convolutions: patches per expert L; None: N / E, at least 1, so that all experts together
            compute one map. Slots per expert of a soft router; routers without such a number, as token choice, take
            None alone.
        patch_size: of convolutions: patch size p, a divisor of the sides of the layer's maps; ``"auto"``: the one that
            gives the number of patches closest to 32 (16 to 64 if possible), the larger one of two; ``"nearest-4"``:
            the one closest to 4, the larger one of two.
        pad: of convolutions: pad maps with zeros, as in `PatchMoE`, so that p need not divide their sides.
        tokens_per_expert: of MLPs: tokens of an image that each expert takes, slots of a soft router; or give
            ``capacity``.
        capacity: of MLPs: tokens per expert as a multiple of N / E; None: 1, so that all experts together process as
            many tokens as there are. Of token choice the limit in training as a multiple of K·N / E; None: no limit.
        top_k: of MLPs under token choice: experts of each token; None: 2.
        prefix: of MLPs: class and register tokens ``"join"`` the others (None), or ``"bypass"`` the layer. Their number
            is the network's.
        gate: as in `PatchMoE` and `TokenMoE`; None: ``"softmax_selected"`` of convolutions and token choice,
            ``"softmax_experts"`` of MLPs under expert choice, ``"softmax_all"`` with ``top_k=1``.
        gate_on: of convolutions: as in `PatchMoE`.
        context: of convolutions: as in `PatchMoE`; None: ``"map"``, under a soft router ``"patch"``.
        expert_norm: of convolutions: as in `PatchMoE`.
        combine: of convolutions: as in `PatchMoE`; ``"sum"`` gives every expert all of the filters, E times as many
            parameters.
        router: ``"expert-choice"``, ``"token-choice"``, ``"soft"``, ``"module:Class"``, a registered name
            (`moesaic.routing.register_router`), a router class, or a factory ``(in_channels, experts, patch_size) ->
            Router``. Each layer gets a router of its own, with gates of its own unless it is expert choice, or of MLPs
            token choice.
        init: ``"scratch"``: new random weights. ``"upcycle"``: those of the convolution, each expert with its filters,
            or of the MLP, each expert a copy. ``"split"``, of MLPs: each expert has J / E of its J hidden neurons, as
            many parameters as before. Gates are then rescaled so that the output keeps its mean
            (`RescaledExpertChoice`, `RescaledTokenChoice`); other routers have their own gates. The converted model
            computes exactly what the original did if every expert takes everything with ``gate="one"``, and an upcycled
            MLP also under token choice with ``gate="softmax_selected"``. Otherwise it is an approximation: update
            BatchNorm statistics, if there are any (``torch.optim.swa_utils.update_bn``), then fine-tune it.
        images: a batch of images (B, C, H, W) as the model takes them, for ``init="split"``: hidden neurons that are
            active together on them go to the same expert; None: neurons go to experts in order.
        seed: seed of new weights, those of routers included, and of clusters of neurons; every layer has its own random
            numbers.
        input_size: height and width of the images, or (C, H, W), for a forward pass before and after the conversion.
            Required for ``patch_size="auto"`` and ``patches_per_expert=None``, and for the slots of a soft router.
            Models of timm and transformers know their own size.

    >>> import torch
    >>> from moesaic.models import ResNet18
    >>> model = convert(ResNet18(num_classes=10), "body.9.second.0", experts=8, input_size=32)
    >>> model.body[9].second[0].patches_per_expert, model.body[9].second[0].patch_size
    (2, 1)
    >>> model(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])

    >>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    >>> model, tokens = torch.nn.Sequential(torch.nn.LayerNorm(8), mlp), torch.randn(2, 50, 8)
    >>> before = model(tokens)
    >>> model = convert(model, "1", experts=4, router="token-choice", init="upcycle")
    >>> type(model[1]).__name__, bool(torch.allclose(model(tokens), before, atol=1e-5))
    ('TokenMoE', True)
    """
    given = {name: value for name, value in locals().items() if name not in ("model", "layer")}
    refuse_ddp("convert", model)
    check_positive("convert", experts=experts)
    check_choice("convert", "init", init, get_args(Init))
    if init == "upcycle" and expert_norm:
        raise ValueError(
            "convert: expert_norm=True puts BatchNorm and ReLU before filters that were trained without them; "
            "use init='scratch', or expert_norm=False to upcycle"
        )
    shape = input_shape(model, input_size)
    units = find_mlps(model)
    hint = "" if isinstance(input_size, Sequence) else OTHER_SIZE
    traced = None if shape is None else _trace(model, shape, "does not run", units, hint)
    found = find_layers(model, layer, units, traced)
    mlps = [each for each in found.values() if isinstance(each, MLPUnit)]
    _refuse_options(given, [name for name, each in found.items() if not isinstance(each, MLPUnit)], mlps)
    active = {} if images is None else hidden_activations(model, mlps, images, seed)
    plans: list[Replacement] = []
    for name, old in found.items():
        if isinstance(old, MLPUnit):
            plans.append(plan_mlp(model, old, given, traced, active.get(name)))
        else:
            maps = None if traced is None else traced.maps
            plans.append(plan_conv(name, old, given, router, init, seed, maps))
    _replace(model, plans, shape)
    size = None if shape is None else list(shape)
    # earlier versions have no option router
    more = {"init": init, "seed": seed, "input_size": size, **({} if is_default(router) else {"router": router})}
    model.__dict__.setdefault(_RECORD, []).extend({**plan.record, **more} for plan in plans)
    return model


def _replace(model: nn.Module, plans: Sequence[Replacement], shape: tuple[int, int, int] | None) -> None:
    """Replaces modules and runs the model, which is unchanged if it fails."""
    new = {name: module for plan in plans for name, module in plan.modules.items()}
    old = {name: model.get_submodule(name) for name in new}
    for name, module in new.items():
        model.set_submodule(name, module)
    if shape is None:
        return
    try:
        layers = ", ".join(repr(plan.record["layer"]) for plan in plans)
        _trace(model, shape, f"no longer runs with {layers} converted")
    except BaseException:
        for name, module in old.items():
            model.set_submodule(name, module)
        raise


def _refuse_options(given: Mapping[str, Any], convs: Sequence[str], mlps: Sequence[MLPUnit]) -> None:
    """Refuses options that were given and do not apply to a layer."""
    defaults = inspect.signature(convert).parameters
    set_options = {name: value for name, value in given.items() if value is not defaults[name].default}
    for name, value in set_options.items():
        text = "images" if name == "images" else f"{name}={value!r}"
        if name in _CONV_OPTIONS and mlps and value != defaults[name].default:
            way_out = "use tokens_per_expert or capacity" if name == "patches_per_expert" else "leave it out"
            raise ValueError(f"convert: {text} is for convolutions, and {mlps[0].name!r} is an MLP; {way_out}")
        if name in _TOKEN_OPTIONS and convs:
            way_out = "use patches_per_expert" if name in ("tokens_per_expert", "capacity") else "leave it out"
            raise ValueError(f"convert: {text} is for MLPs, and {convs[0]!r} is none; {way_out}")
    if given["init"] == "split" and convs:
        raise ValueError(
            f"convert: init='split' shares out hidden neurons of MLPs, and {convs[0]!r} is none; init='upcycle' gives "
            "each expert a part of its filters"
        )
    if given["images"] is not None and given["init"] != "split":
        raise ValueError(f"convert: images are for init='split', not for init={given['init']!r}; leave them out")


def applied_conversions(model: nn.Module) -> tuple[dict[str, Any], ...]:
    """Returns the conversions of a model as arguments of `convert` in plain JSON, to repeat them on a new model.

    Layers and routers are given by their names, patch sizes and counts by numbers.

    >>> from torch import nn
    >>> model = convert(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)), "0", experts=4, input_size=16)
    >>> (conversion,) = applied_conversions(model)
    >>> conversion["layer"], conversion["patch_size"], conversion["patches_per_expert"]
    ('0', 4, 4)
    >>> again = convert(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)), **conversion)
    """
    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    return tuple(
        {
            **record,
            "layer": f"{name}.{record['layer']}".lstrip("."),
            **({"router": router_name(record["router"])} if "router" in record else {}),
        }
        for name, module in modules
        for record in module.__dict__.get(_RECORD, ())
    )


def _trace(
    model: nn.Module, shape: tuple[int, int, int], failure: str, mlps: Collection[str] = (), hint: str = ""
) -> LayerInputs:
    try:
        return trace_inputs(model, shape, mlps)
    except Exception as error:
        size = "×".join(map(str, shape))
        why = str(error).strip() or type(error).__name__
        raise ValueError(f"convert: {type(model).__name__} {failure} on an image of {size}: {why}{hint}") from error
