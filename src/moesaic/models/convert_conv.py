"""The part of `convert` for convolutions, and for linear layers on maps: a ``PatchMoE`` in place of a layer.

Each expert owns an equal part of the filters and runs on its own patches (Chowdhury et al. 2023, Section 5.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.argument_checks import check_positive, either, nearest_divisors
from moesaic.experts import ConvExperts
from moesaic.layers import PatchMoE
from moesaic.models.convert_plan import Init, Replacement, new_weights
from moesaic.models.input_shapes import MapSizes
from moesaic.models.rescaled_routers import RescaledExpertChoice
from moesaic.routing import ExpertChoice, RouterLike, SoftRouter
from moesaic.routing.registry import build_router, has_patch_count, is_default
from moesaic.routing_record import Routing

__all__ = ["ChannelsLastPatchMoE", "plan_conv"]


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


def plan_conv(
    name: str,
    old: nn.Conv2d | nn.Linear,
    arguments: dict[str, Any],
    router: RouterLike,
    init: Init,
    seed: int,
    maps: MapSizes | None,
) -> Replacement:
    """Plans the ``PatchMoE`` in place of a layer, with the ``arguments`` of `convert`."""
    counted = has_patch_count(router)
    if not counted and arguments["patches_per_expert"] is not None:
        raise ValueError(
            f"convert: patches_per_expert={arguments['patches_per_expert']}, but router={router!r} has no such number; "
            "leave it out"
        )
    count = arguments["patches_per_expert"] if counted else 1
    p, L = _patches(name, arguments["experts"], arguments["patch_size"], arguments["pad"], count, maps)
    options: dict[str, Any] = {
        "experts": arguments["experts"],
        "patches_per_expert": L if counted else None,
        "patch_size": p,
        "gate": arguments["gate"] or "softmax_selected",
        **{option: arguments[option] for option in ("gate_on", "context", "expert_norm", "combine")},
        **({"pad": True} if arguments["pad"] else {}),  # earlier versions have no such option
    }
    new = _replacement(name, old, options, router, init, seed)
    return Replacement({name: new}, {"layer": name, **options, "context": new.context})


def _replacement(
    name: str, old: nn.Conv2d | nn.Linear, options: dict[str, Any], router: RouterLike, init: Init, seed: int
) -> PatchMoE:
    linear = isinstance(old, nn.Linear)
    C, O = (old.in_features, old.out_features) if linear else (old.in_channels, old.out_channels)
    E, combine = options["experts"], options["combine"]
    if combine == "concat" and O % E:
        raise ValueError(
            f"convert: {name!r} has {O} output channels, which {E} experts cannot share under combine='concat'; "
            f"use {nearest_divisors(O, E)} experts, or combine='sum'"
        )
    with new_weights(name, seed, old.weight.device) as generator:
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
    assert isinstance(new.experts, ConvExperts)
    new.experts.reset_parameters(generator)
    if is_default(router):
        assert isinstance(new.router, ExpertChoice)
        new.router.reset_parameters(generator)
    new.to(old.weight.device, old.weight.dtype).train(old.training)
    if init == "upcycle":
        _copy_weights(old, new.experts, options)
    return new


def _router(router: RouterLike, in_channels: int, options: dict[str, Any], init: Init) -> nn.Module | None:
    """A router for a layer; None for the one that `PatchMoE` has by default."""
    E, L, p = options["experts"], options["patches_per_expert"], options["patch_size"]
    if not is_default(router):
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
    near = _nearest_size(patch_size)
    if maps is None:
        _check_sizes_given(name, patch_size=near is None, patches_per_expert=patches_per_expert is not None)
    sizes = [] if maps is None else list(dict.fromkeys(maps[name]))
    common = math.gcd(*(side for size in sizes for side in size))  # 0 if no sizes are known
    divisors = [d for d in range(1, common + 1) if common % d == 0]
    if patch_size == "auto":
        p = _automatic_patch_size(sizes, divisors, pad)
    elif near is not None:
        p = min(divisors, key=lambda d: (abs(d - near), -d))
    else:
        assert isinstance(patch_size, int)
        p = patch_size
    for H, W in sizes:
        if (H % p or W % p) and not pad:
            raise ValueError(
                f"convert: {name!r} runs on a {H}×{W} map, which {p}×{p} patches do not divide; use "
                f"patch_size={either(divisors)}, patch_size='auto', patch_size='nearest-{p}', or pad=True"
            )
    fewest = min((_patch_count(size, p) for size in sizes), default=None)
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


def _check_sizes_given(name: str, **given: bool) -> None:
    """Refuses options that depend on the sizes of maps, where these are unknown."""
    missing = " and ".join(option for option, is_given in given.items() if not is_given)
    if missing:
        depend = "depend" if " and " in missing else "depends"
        raise ValueError(
            f"convert: {missing} of {name!r} {depend} on the size of its maps; give input_size, the side of your "
            f"images, or {missing}"
        )


def _patch_count(size: tuple[int, int], p: int) -> int:
    H, W = size
    return -(-H // p) * -(-W // p)


def _automatic_patch_size(sizes: Sequence[tuple[int, int]], divisors: Sequence[int], pad: bool) -> int:
    """The patch size with the number of patches closest to 32, by its logarithm, the larger one of two.

    With padding any size will do; of equal ones that with the least padding.
    """

    def distance(p: int) -> float:
        return abs(sum(math.log2(_patch_count(size, p)) for size in sizes) / len(sizes) - 5)

    sides = range(1, max(side for size in sizes for side in size) + 1) if pad else divisors
    return min(sides, key=lambda p: (distance(p), sum(-side % p for size in sizes for side in size), -p))


def _nearest_size(patch_size: int | str) -> int | None:
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
