"""``convert``: a convolution of any network becomes a ``PatchMoE`` of as many parameters.

Chowdhury et al. 2023, Section 5.2, make a WRN-pMoE so: of the last 3×3 convolution each expert owns a share
of the filters and sees only its patches. Here any network will do, pretrained ones as well.
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
from moesaic.models.convert_candidates import Maps, find_layers, input_shape, trial
from moesaic.ops import Combine, Context, GateOn
from moesaic.routing import ExpertChoice
from moesaic.routing.expert_choice import ExpertGate
from moesaic.routing_record import Routing, Unit

__all__ = ["ChannelsLastPatchMoE", "EvenChoice", "Init", "conversions_of", "convert"]

Init = Literal["scratch", "upcycle"]
Model = TypeVar("Model", bound=nn.Module)

_RECORD = "_moesaic_conversions"


def convert(
    model: Model,
    layer: str | Sequence[str],
    *,
    experts: int,
    patches_per_expert: int | None = None,
    patch_size: int | Literal["auto"] = "auto",
    gate: ExpertGate = "softmax_selected",
    gate_on: GateOn = "output",
    context: Context = "map",
    expert_norm: bool = False,
    combine: Combine = "concat",
    init: Init = "scratch",
    seed: int = 0,
    input_size: int | Sequence[int] | None = None,
) -> Model:
    """Replace convolutions of ``model`` by `PatchMoE`, in place, and return the model.

    Each expert owns out_channels / experts of the convolution's filters, so experts have as many
    parameters as it had; the router's E·C·p² come on top. The layer keeps its name. Linear layers that run
    over maps (B, H, W, C) are converted as 1×1 convolutions.

    Args:
        model: any network; it stays as it was when an error is raised.
        layer: its convolution's name as in ``model.named_modules()``, or a pattern such as
            ``"layer4.*.conv2"``, or several of them. `moesaic.models.convert_candidates` lists what fits.
        experts: E.
        patches_per_expert: L; None: N / E, at least 1, so that the experts together see as much as one map.
        patch_size: p, which must divide the maps that the layer sees; ``"auto"``: the one that cuts them
            into nearest to 32 patches (16 to 64 where there is such), the larger of two that are equally near.
        gate: as in `PatchMoE`.
        gate_on: as in `PatchMoE`.
        context: as in `PatchMoE`.
        expert_norm: as in `PatchMoE`.
        combine: as in `PatchMoE`; ``"sum"`` gives every expert all of the filters, E times as many parameters.
        init: ``"scratch"``: fresh weights; ``"upcycle"``: the convolution's own, with the gates of `EvenChoice`,
            which make up on an expert's patches for what is missing elsewhere. With ``gate="one"`` and L = N
            the converted model computes exactly what the original did. With L < N it starts near it, nearer
            once BatchNorm has met the new maps (``torch.optim.swa_utils.update_bn``); then train on.
        seed: of fresh weights, routers included; every layer has random numbers of its own.
        input_size: of the images, one side or (C, H, W), for a trial run before and after. What is
            ``"auto"`` or None above needs it. A model of timm brings its own along; say yours if it differs.

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
            "convert: expert_norm=True puts BatchNorm and ReLU in front of filters that were learned without them; "
            "use init='scratch', or expert_norm=False to upcycle"
        )
    shape = input_shape(model, input_size)
    maps = None if shape is None else _try(model, shape, "does not run")
    records: list[dict[str, Any]] = []
    made: dict[str, tuple[nn.Module, nn.Module]] = {}
    for name, old in find_layers(model, layer, maps).items():
        p, L = _patches(name, experts, patch_size, patches_per_expert, maps)
        options: dict[str, Any] = {
            "experts": experts,
            "patches_per_expert": L,
            "patch_size": p,
            "gate": gate,
            "gate_on": gate_on,
            "context": context,
            "expert_norm": expert_norm,
            "combine": combine,
        }
        assert isinstance(old, (nn.Conv2d, nn.Linear))
        made[name] = old, _replacement(name, old, options, init, seed)
        size = None if shape is None else list(shape)
        records.append({"layer": name, **options, "init": init, "seed": seed, "input_size": size})
    _swap(model, {name: new for name, (_, new) in made.items()})
    if shape is not None:
        try:
            _try(model, shape, f"no longer runs with {', '.join(map(repr, made))} converted")
        except BaseException:
            _swap(model, {name: old for name, (old, _) in made.items()})
            raise
    model.__dict__.setdefault(_RECORD, []).extend(records)
    return model


def conversions_of(model: nn.Module) -> tuple[dict[str, Any], ...]:
    """What `convert` did to a model: JSON-able arguments that do it again to one freshly built.

    Names of layers are exact, patch sizes and counts are numbers.

    >>> from torch import nn
    >>> model = convert(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)), "0", experts=4, input_size=16)
    >>> (done,) = conversions_of(model)
    >>> done["layer"], done["patch_size"], done["patches_per_expert"]
    ('0', 4, 4)
    >>> again = convert(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)), **done)
    """
    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    return tuple(
        {**record, "layer": f"{name}.{record['layer']}".lstrip(".")}
        for name, module in modules
        for record in module.__dict__.get(_RECORD, ())
    )


class EvenChoice(ExpertChoice):
    """Expert choice whose gates average 1 over the map: for filters that were learned without gates.

    As long as all patches score alike, each of an expert's L patches has the gate N / L, whichever ``gate`` it
    is, and so the mean over the map of what the filters answer stays about what it was. Where experts are
    ``summed``, the gates of all of them together average 1.

    >>> import torch
    >>> router = EvenChoice(3, experts=4, patches_per_expert=2)
    >>> router(torch.zeros(1, 3, 4, 4)).gate[0, 0].tolist()  # two of 16 patches
    [8.0, 8.0]
    """

    def __init__(self, *args: Any, summed: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.summed = summed

    def choose(self, scores: Tensor, *, unit: Unit = "patch", grid: tuple[int, int] | None = None) -> Routing:
        routing = super().choose(scores, unit=unit, grid=grid)
        N, L = scores.shape[1], self.patches_per_expert
        even = {"one": 1, "softmax_selected": 1 / L, "softmax_all": 1 / N}[self.gate]
        factor = N / (L * even * (self.experts if self.summed else 1))
        return replace(routing, gate=routing.gate * factor)


class ChannelsLastPatchMoE(PatchMoE):
    """A ``PatchMoE`` over maps (B, H, W, C), in the place of a linear layer.

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


def _replacement(name: str, old: nn.Conv2d | nn.Linear, options: dict[str, Any], init: Init, seed: int) -> PatchMoE:
    linear = isinstance(old, nn.Linear)
    C, O = (old.in_features, old.out_features) if linear else (old.in_channels, old.out_channels)
    E, combine = options["experts"], options["combine"]
    if combine == "concat" and O % E:
        near = sorted((e for e in range(1, O + 1) if O % e == 0), key=lambda e: abs(e - E))[:2]
        raise ValueError(
            f"convert: {name!r} has {O} output channels, which {E} experts cannot share under combine='concat'; "
            f"use {_either(sorted(near))} experts, or combine='sum'"
        )
    with torch.random.fork_rng(devices=[]):  # the weights come from a generator of their own
        router = None
        if init == "upcycle":
            router = EvenChoice(
                C,
                E,
                options["patches_per_expert"],
                options["patch_size"],
                gate=options["gate"],
                summed=combine == "sum",
            )
        kind = ChannelsLastPatchMoE if linear else PatchMoE
        kernel = 1 if linear else old.kernel_size[0]
        new = kind(C, O, **options, kernel_size=kernel, bias=old.bias is not None, router=router)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ (seed & 0xFFFFFFFF))
    assert isinstance(new.experts, ConvExperts) and isinstance(new.router, ExpertChoice)
    new.experts.reset_parameters(generator)
    new.router.reset_parameters(generator)
    new.to(old.weight.device, old.weight.dtype).train(old.training)
    if init == "upcycle":
        _take_over(old, new.experts, options)
    return new


def _take_over(old: nn.Conv2d | nn.Linear, experts: ConvExperts, options: dict[str, Any]) -> None:
    """The layer's own filters: each expert's share of them, or all of them for each."""
    summed = options["combine"] == "sum"
    bias = old.bias
    if bias is not None and summed and options["gate_on"] == "input":
        bias = bias / len(experts)  # behind gated inputs it has no gate: of the sum each expert gives a part

    def deal(whole: Tensor, own: Tensor) -> None:
        own.copy_(whole.expand_as(own) if summed else whole.reshape(own.shape))

    with torch.no_grad():
        deal(old.weight.reshape(old.weight.shape[0], *experts.weight.shape[2:]), experts.weight)
        if bias is not None and experts.bias is not None:
            deal(bias, experts.bias)


def _patches(
    name: str, experts: int, patch_size: int | Literal["auto"], patches_per_expert: int | None, maps: Maps | None
) -> tuple[int, int]:
    """Patch size and count, checked against the maps that the layer sees."""
    if maps is None:
        missing = [
            option
            for option, given in (("patch_size", patch_size != "auto"), ("patches_per_expert", patches_per_expert))
            if not given
        ]
        if missing:
            raise ValueError(
                f"convert: {' and '.join(missing)} of {name!r} hang{'s' * (len(missing) == 1)} on the size of the maps "
                f"it sees; give input_size, the side of your images, or {' and '.join(missing)}"
            )
    seen = [] if maps is None else list(dict.fromkeys(maps[name]))
    common = math.gcd(*(side for size in seen for side in size))  # 0 where none was seen
    divisors = [d for d in range(1, common + 1) if common % d == 0]
    if patch_size == "auto":
        area = sum(math.log2(H * W) for H, W in seen) / len(seen)
        p = min(divisors, key=lambda d: (abs(area - 2 * math.log2(d) - 5), -d))
    else:
        check_positive("convert", patch_size=patch_size)
        p = patch_size
    for H, W in seen:
        if H % p or W % p:
            raise ValueError(
                f"convert: {name!r} sees a {H}×{W} map, which {p}×{p} patches do not divide; "
                f"use patch_size={_either(divisors)}, or patch_size='auto'"
            )
    fewest = min((H * W // p**2 for H, W in seen), default=None)
    if patches_per_expert is None:
        assert fewest is not None
        return p, max(1, fewest // experts)
    check_positive("convert", patches_per_expert=patches_per_expert)
    if fewest is not None and patches_per_expert > fewest:
        smallest = "×".join(map(str, min(seen)))
        raise ValueError(
            f"convert: patches_per_expert={patches_per_expert}, but the {smallest} map of {name!r} has only {fewest} "
            f"patches of {p}×{p}; take at most {fewest}, a smaller patch_size, or larger images"
        )
    return p, patches_per_expert


def _try(model: nn.Module, shape: tuple[int, int, int], complaint: str) -> Maps:
    try:
        return trial(model, shape)
    except Exception as error:
        size = "×".join(map(str, shape))
        why = str(error).strip() or type(error).__name__
        raise ValueError(f"convert: {type(model).__name__} {complaint} on an image of {size}: {why}") from error


def _swap(model: nn.Module, layers: dict[str, nn.Module]) -> None:
    for name, layer in layers.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layer)


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(filter(None, [", ".join(map(str, numbers[:-1])), str(numbers[-1])]))
