"""``convert``: replaces convolutions of any network by ``PatchMoE`` layers with as many parameters.

Chowdhury et al. 2023, Section 5.2, build WRN-pMoE from a WRN in this way: each expert owns an equal part of the filters
of the last 3×3 convolution and runs on its own patches. `convert` does it to any network, pretrained or not.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from moesaic.checks import check_choice, check_positive
from moesaic.experts import ConvExperts
from moesaic.layers import PatchMoE
from moesaic.models.convert_candidates import MapSizes, find_layers, input_shape, trace_map_sizes
from moesaic.ops import Combine, Context, GateOn
from moesaic.routing import ExpertChoice, RouterLike, SoftRouter
from moesaic.routing.expert_choice import ExpertGate
from moesaic.routing.registry import DEFAULT_ROUTER, build_router, has_patch_count, router_name
from moesaic.routing_record import Routing, Unit

__all__ = ["ChannelsLastPatchMoE", "Init", "RescaledExpertChoice", "applied_conversions", "convert"]

Init = Literal["scratch", "upcycle"]
Model = TypeVar("Model", bound=nn.Module)

_RECORD = "_moesaic_conversions"
_DEFAULT = (DEFAULT_ROUTER, ExpertChoice)


def convert(
    model: Model,
    layer: str | Sequence[str],
    *,
    experts: int,
    patches_per_expert: int | None = None,
    patch_size: int | str = "auto",
    pad: bool = False,
    gate: ExpertGate = "softmax_selected",
    gate_on: GateOn = "output",
    context: Context | None = None,
    expert_norm: bool = False,
    combine: Combine = "concat",
    router: RouterLike = DEFAULT_ROUTER,
    init: Init = "scratch",
    seed: int = 0,
    input_size: int | Sequence[int] | None = None,
) -> Model:
    """Replaces convolutions of ``model`` by `PatchMoE`, in place, and returns the model.

    Each expert owns out_channels / experts of the convolution's filters, so the experts have as many parameters as the
    convolution; the default router adds E·C·p². The layer keeps its name. Linear layers on maps (B, H, W, C) are
    converted as 1×1 convolutions.

    Args:
        model: any network; it is unchanged if an error is raised.
        layer: name of a convolution as in ``model.named_modules()``, a pattern such as ``"layer4.*.conv2"``, or several
            of them. `moesaic.models.convertible_layers` lists the layers that can be converted.
        experts: number of experts E.
        patches_per_expert: patches per expert L; None: N / E, at least 1, so that all experts together compute one map.
            Slots per expert of a soft router; routers without such a number, as token choice, take None alone.
        patch_size: patch size p, a divisor of the sides of the layer's maps; ``"auto"``: the one that gives the number
            of patches closest to 32 (16 to 64 if possible), the larger one of two; ``"nearest-4"``: the one closest to
            4, the larger one of two.
        pad: pad maps with zeros, as in `PatchMoE`, so that p need not divide their sides.
        gate: as in `PatchMoE`.
        gate_on: as in `PatchMoE`.
        context: as in `PatchMoE`; None: ``"map"``, under a soft router ``"patch"``.
        expert_norm: as in `PatchMoE`.
        combine: as in `PatchMoE`; ``"sum"`` gives every expert all of the filters, E times as many parameters.
        router: ``"expert-choice"``, ``"token-choice"``, ``"soft"``, ``"module:Class"``, a registered name
            (`moesaic.routing.register_router`), a router class, or a factory ``(in_channels, experts, patch_size) ->
            Router``. Each layer gets a router of its own, with gates of its own unless it is expert choice.
        init: ``"scratch"``: new random weights; ``"upcycle"``: the weights of the convolution, with the gates of
            `RescaledExpertChoice`, which preserve the mean output; other routers have their own gates. With
            ``gate="one"`` and L = N the converted model computes exactly what the original did. With L < N it is an
            approximation, which improves once BatchNorm statistics are updated (``torch.optim.swa_utils.update_bn``);
            then fine-tune it.
        seed: seed of new weights, those of routers included; every layer has its own random numbers.
        input_size: height and width of the images, or (C, H, W), for a forward pass before and after the conversion.
            Required for ``patch_size="auto"`` and ``patches_per_expert=None``. Models of timm know their own size.

    >>> import torch
    >>> from moesaic.models import ResNet18
    >>> model = convert(ResNet18(num_classes=10), "body.9.second.0", experts=8, input_size=32)
    >>> model.body[9].second[0].patches_per_expert, model.body[9].second[0].patch_size
    (2, 1)
    >>> model(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    check_positive("convert", experts=experts)
    check_choice("convert", "init", init, get_args(Init))
    if init == "upcycle" and expert_norm:
        raise ValueError(
            "convert: expert_norm=True puts BatchNorm and ReLU before filters that were trained without them; "
            "use init='scratch', or expert_norm=False to upcycle"
        )
    shape = input_shape(model, input_size)
    maps = None if shape is None else _trace(model, shape, "does not run")
    records: list[dict[str, Any]] = []
    made: dict[str, tuple[nn.Module, nn.Module]] = {}
    counted = has_patch_count(router)
    if not counted and patches_per_expert is not None:
        raise ValueError(
            f"convert: patches_per_expert={patches_per_expert}, but router={router!r} has no such number; leave it out"
        )
    for name, old in find_layers(model, layer, maps).items():
        p, L = _patches(name, experts, patch_size, pad, patches_per_expert if counted else 1, maps)
        options: dict[str, Any] = {
            "experts": experts,
            "patches_per_expert": L if counted else None,
            "patch_size": p,
            "gate": gate,
            "gate_on": gate_on,
            "context": context,
            "expert_norm": expert_norm,
            "combine": combine,
            **({"pad": True} if pad else {}),  # earlier versions have no such option
        }
        assert isinstance(old, (nn.Conv2d, nn.Linear))
        new = _replacement(name, old, options, router, init, seed)
        made[name] = old, new
        size = None if shape is None else list(shape)
        record = {"layer": name, **options, "context": new.context, "init": init, "seed": seed, "input_size": size}
        # earlier versions have no such option
        records.append(record if router in _DEFAULT else {**record, "router": router})
    for name, (_, new) in made.items():
        model.set_submodule(name, new)
    if shape is not None:
        try:
            _trace(model, shape, f"no longer runs with {', '.join(map(repr, made))} converted")
        except BaseException:
            for name, (old, _) in made.items():
                model.set_submodule(name, old)
            raise
    model.__dict__.setdefault(_RECORD, []).extend(records)
    return model


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


class RescaledExpertChoice(ExpertChoice):
    """Expert choice with gates rescaled to a mean of 1 over the map, for filters that were trained without gates.

    While all patches have equal scores, each of an expert's L patches has the gate N / L, for every kind of ``gate``,
    which preserves the mean output of the filters over the map. If the experts are ``summed``, the sum of their gates
    has a mean of 1.

    >>> import torch
    >>> router = RescaledExpertChoice(3, experts=4, patches_per_expert=2)
    >>> router(torch.zeros(1, 3, 4, 4)).gate[0, 0].tolist()  # two of 16 patches
    [8.0, 8.0]
    """

    def __init__(self, *args: Any, summed: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.summed = summed

    def choose(
        self, scores: Tensor, *, unit: Unit = "patch", grid: tuple[int, int] | None = None, mask: Tensor | None = None
    ) -> Routing:
        routing = super().choose(scores, unit=unit, grid=grid, mask=mask)
        N, L = scores.shape[1], self.count(scores.shape[1])
        even = {"one": 1, "softmax_selected": 1 / L, "softmax_all": 1 / N, "softmax_experts": 1 / self.experts}[
            self.gate
        ]
        factor = N / (L * even * (self.experts if self.summed else 1))
        return replace(routing, gate=routing.gate * factor)


class ChannelsLastPatchMoE(PatchMoE):
    """A ``PatchMoE`` on maps (B, H, W, C), which replaces a linear layer.

    >>> import torch
    >>> ChannelsLastPatchMoE(8, 16, experts=4, patches_per_expert=2)(torch.zeros(1, 4, 4, 8)).shape
    torch.Size([1, 4, 4, 16])
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self._channels_first(x)).permute(0, 2, 3, 1)

    def route(self, x: Tensor) -> Routing:
        return super().route(self._channels_first(x))

    def _channels_first(self, x: Tensor) -> Tensor:
        if x.ndim != 4:
            raise ValueError(f"ChannelsLastPatchMoE: takes maps (B, H, W, C), got {x.ndim} axes {tuple(x.shape)}")
        return x.permute(0, 3, 1, 2)


def _replacement(
    name: str, old: nn.Conv2d | nn.Linear, options: dict[str, Any], router: RouterLike, init: Init, seed: int
) -> PatchMoE:
    linear = isinstance(old, nn.Linear)
    C, O = (old.in_features, old.out_features) if linear else (old.in_channels, old.out_channels)
    E, combine = options["experts"], options["combine"]
    if combine == "concat" and O % E:
        near = sorted((e for e in range(1, O + 1) if O % e == 0), key=lambda e: abs(e - E))[:2]
        raise ValueError(
            f"convert: {name!r} has {O} output channels, which {E} experts cannot share under combine='concat'; "
            f"use {_either(sorted(near))} experts, or combine='sum'"
        )
    key = zlib.crc32(name.encode()) ^ (seed & 0xFFFFFFFF)
    with torch.random.fork_rng(devices=[]):  # new weights come from a separate generator
        torch.default_generator.manual_seed(key)
        made = _router(router, C, options, init)
        own: dict[str, Any] = {
            **options,
            "context": options["context"] or ("patch" if isinstance(made, SoftRouter) else "map"),
        }
        if made is not None:
            own["patches_per_expert"] = None
        kind = ChannelsLastPatchMoE if linear else PatchMoE
        kernel = 1 if linear else old.kernel_size[0]
        new = kind(C, O, **own, kernel_size=kernel, bias=old.bias is not None, router=made)
    generator = torch.Generator().manual_seed(key)
    assert isinstance(new.experts, ConvExperts)
    new.experts.reset_parameters(generator)
    if router in _DEFAULT:
        assert isinstance(new.router, ExpertChoice)
        new.router.reset_parameters(generator)
    new.to(old.weight.device, old.weight.dtype).train(old.training)
    if init == "upcycle":
        _copy_weights(old, new.experts, options)
    return new


def _router(router: RouterLike, in_channels: int, options: dict[str, Any], init: Init) -> nn.Module | None:
    """A router for a layer; None for the one that `PatchMoE` has by default."""
    E, L, p = options["experts"], options["patches_per_expert"], options["patch_size"]
    if router not in _DEFAULT:
        return build_router(router, in_channels, E, p, L, gate=options["gate"])
    if init == "upcycle":
        return RescaledExpertChoice(in_channels, E, L, p, gate=options["gate"], summed=options["combine"] == "sum")
    return None


def _copy_weights(old: nn.Conv2d | nn.Linear, experts: ConvExperts, options: dict[str, Any]) -> None:
    """Copies the layer's filters: to each expert its part of them, or all of them under ``combine="sum"``."""
    summed = options["combine"] == "sum"
    bias = old.bias
    if bias is not None and summed and options["gate_on"] == "input":
        bias = bias / len(experts)  # gates on the input do not scale the bias, so that each expert gets a part of it

    def copy(source: Tensor, target: Tensor) -> None:
        target.copy_(source.expand_as(target) if summed else source.reshape(target.shape))

    with torch.no_grad():
        copy(old.weight.reshape(old.weight.shape[0], *experts.weight.shape[2:]), experts.weight)
        if bias is not None and experts.bias is not None:
            copy(bias, experts.bias)


def _patches(
    name: str,
    experts: int,
    patch_size: int | str,
    pad: bool,
    patches_per_expert: int | None,
    maps: MapSizes | None,
) -> tuple[int, int]:
    """Returns patch size and patches per expert, checked against the sizes of the layer's maps."""
    near = _near(patch_size)
    if maps is None:
        missing = [
            option
            for option, given in (("patch_size", near is None), ("patches_per_expert", patches_per_expert))
            if not given
        ]
        if missing:
            raise ValueError(
                f"convert: {' and '.join(missing)} of {name!r} depend{'s' * (len(missing) == 1)} on the size of its "
                f"maps; give input_size, the side of your images, or {' and '.join(missing)}"
            )
    sizes = [] if maps is None else list(dict.fromkeys(maps[name]))
    common = math.gcd(*(side for size in sizes for side in size))  # 0 if no sizes are known
    divisors = [d for d in range(1, common + 1) if common % d == 0]

    def patches(H: int, W: int, p: int) -> int:
        return -(-H // p) * -(-W // p)

    def misfit(p: int) -> float:
        """Distance of the number of patches from 32, as a power of 2."""
        return abs(sum(math.log2(patches(*size, p)) for size in sizes) / len(sizes) - 5)

    if patch_size == "auto":
        # with padding any size will do; of equal ones that with the least padding
        sides = range(1, max(side for size in sizes for side in size) + 1) if pad else divisors
        p = min(sides, key=lambda p: (misfit(p), sum(-side % p for size in sizes for side in size), -p))
    elif near is not None:
        p = min(divisors, key=lambda d: (abs(d - near), -d))
    else:
        assert isinstance(patch_size, int)
        p = patch_size
    for H, W in sizes:
        if (H % p or W % p) and not pad:
            raise ValueError(
                f"convert: {name!r} runs on a {H}×{W} map, which {p}×{p} patches do not divide; use "
                f"patch_size={_either(divisors)}, patch_size='auto', patch_size='nearest-{p}', or pad=True"
            )
    fewest = min((patches(H, W, p) for H, W in sizes), default=None)
    if patches_per_expert is None:
        assert fewest is not None
        return p, max(1, fewest // experts)
    check_positive("convert", patches_per_expert=patches_per_expert)
    if fewest is not None and patches_per_expert > fewest:
        smallest = "×".join(map(str, min(sizes)))
        raise ValueError(
            f"convert: patches_per_expert={patches_per_expert}, but the {smallest} map of {name!r} has only {fewest} "
            f"patches of {p}×{p}; take at most {fewest}, a smaller patch_size, or larger images"
        )
    return p, patches_per_expert


def _near(patch_size: int | str) -> int | None:
    """N of ``"nearest-N"``, 0 of ``"auto"``, None of a number; refuses all else."""
    if not isinstance(patch_size, str):
        check_positive("convert", patch_size=patch_size)
        return None
    if patch_size == "auto":
        return 0
    number = patch_size.removeprefix("nearest-")
    if number == patch_size or not number.isdecimal() or int(number) < 1:
        raise ValueError(f"convert: patch_size={patch_size!r} is unknown; use a number, 'auto' or 'nearest-4'")
    return int(number)


def _trace(model: nn.Module, shape: tuple[int, int, int], failure: str) -> MapSizes:
    try:
        return trace_map_sizes(model, shape)
    except Exception as error:
        size = "×".join(map(str, shape))
        why = str(error).strip() or type(error).__name__
        raise ValueError(f"convert: {type(model).__name__} {failure} on an image of {size}: {why}") from error


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(filter(None, [", ".join(map(str, numbers[:-1])), str(numbers[-1])]))
