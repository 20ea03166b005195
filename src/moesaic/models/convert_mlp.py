"""The part of `convert` for MLPs: a ``TokenMoE`` in place of fc1, activation, fc2 and their dropouts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from moesaic.argument_checks import check_numbers, check_positive, nearest_divisors
from moesaic.experts import MLPExperts
from moesaic.layers import TokenMoE
from moesaic.layers.token_moe import TokenGrid
from moesaic.models.convert_plan import Init, Replacement, new_weights
from moesaic.models.input_shapes import LayerInputs, TokenInput
from moesaic.models.inspection import eval_mode, first_weight, input_hooks
from moesaic.models.mlp_candidates import MLPUnit
from moesaic.models.mlp_expert_init import cluster_neurons, copy_mlp, neurons_in_order, split_mlp
from moesaic.models.rescaled_routers import RescaledExpertChoice, RescaledTokenChoice
from moesaic.routing import ExpertChoice, RouterLike, SoftRouter, TokenChoice
from moesaic.routing.registry import build_router, has_patch_count, is_default
from moesaic.routing_record import Routing

__all__ = ["AddResidual", "ChannelsFirstTokenMoE", "hidden_activations", "plan_mlp"]

_MAX_CLUSTERED_TOKENS = 2048
"""Tokens by whose activations hidden neurons are clustered, at most."""
_PREFIX_PARAMETERS = ("cls_token", "distillation_token", "dist_token", "register_tokens", "class_embedding")
"""Parameters of tokens that have no place on the grid, in transformers."""


class ChannelsFirstTokenMoE(TokenMoE):
    """A ``TokenMoE`` on maps (B, C, H, W), which replaces an MLP of 1×1 convolutions.

    >>> import torch
    >>> ChannelsFirstTokenMoE(8, experts=4, capacity=1.0)(torch.zeros(1, 8, 5, 4)).shape
    torch.Size([1, 8, 5, 4])
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(self._channels_last(x), mask).permute(0, 3, 1, 2)

    def route(self, x: Tensor, mask: Tensor | None = None) -> Routing:
        return super().route(self._channels_last(x), mask)

    def _channels_last(self, x: Tensor) -> Tensor:
        if x.ndim != 4:
            raise ValueError(f"ChannelsFirstTokenMoE: takes maps (B, C, H, W), got {x.ndim} axes {tuple(x.shape)}")
        return x.permute(0, 2, 3, 1)


class AddResidual(nn.Module):
    """Adds the residual, in place of the module ``output`` in blocks of transformers before version 5."""

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return hidden_states + input_tensor


def plan_mlp(
    model: nn.Module,
    unit: MLPUnit,
    arguments: Mapping[str, Any],
    traced: LayerInputs | None,
    activations: Tensor | None,
) -> Replacement:
    """Plans the ``TokenMoE`` in place of an MLP, with the ``arguments`` of `convert`."""
    inputs = () if traced is None else traced.tokens[unit.name]
    E, init, seed, router = (
        arguments["experts"],
        cast("Init", arguments["init"]),
        arguments["seed"],
        arguments["router"],
    )
    if init == "split" and unit.hidden_dim % E:
        raise ValueError(
            f"convert: {unit.name!r} has {unit.hidden_dim} hidden neurons, which {E} experts cannot share under "
            f"init='split'; use {nearest_divisors(unit.hidden_dim, E)} experts"
        )
    prefix_tokens = _prefix_tokens(model, unit, inputs)
    if arguments["prefix"] is not None and not prefix_tokens:
        raise ValueError(
            f"convert: prefix={arguments['prefix']!r}, but {unit.name!r} has no class or register tokens; leave it out"
        )
    options = _routing_options(unit, arguments, inputs)
    kind = ChannelsFirstTokenMoE if unit.channels_first else TokenMoE
    bias = unit.fc1.bias is not None or unit.fc2.bias is not None
    hidden = unit.hidden_dim // E if init == "split" else unit.hidden_dim
    sizes = (E, unit.in_dim, hidden, unit.out_dim)
    with new_weights(unit.name, seed, unit.fc1.weight.device) as generator:
        new = kind(
            unit.in_dim,
            experts=MLPExperts(*sizes, activation=unit.activation, bias=bias, dropout=unit.hidden_dropout),
            bias=bias,
            dropout=unit.dropout,
            prefix_tokens=prefix_tokens,
            prefix=arguments["prefix"] or "join",
            grid=_grid(model, unit, inputs, prefix_tokens),
            router=_router(unit.in_dim, E, options, router, init),
        )
    assert isinstance(new.experts, MLPExperts)
    new.experts.reset_parameters(generator)
    new.to(unit.fc1.weight.device, unit.fc1.weight.dtype).train(unit.module.training)
    _start(unit, new, init, activations, seed)
    modules: dict[str, nn.Module] = {unit.name: new}
    if unit.output_name is not None:
        modules[unit.output_name] = AddResidual() if unit.adds_residual else nn.Identity()
    named = {name: value for name, value in {**options, "prefix": arguments["prefix"]}.items() if value is not None}
    return Replacement(modules, {"layer": unit.name, "experts": E, **named})


def _start(unit: MLPUnit, new: TokenMoE, init: Init, activations: Tensor | None, seed: int) -> None:
    assert isinstance(new.experts, MLPExperts)
    E = len(new.experts)
    if init == "upcycle":
        copy_mlp(unit, new.experts)
    elif init == "split":
        if activations is None:
            neurons = neurons_in_order(unit.hidden_dim, E)
        else:
            neurons = cluster_neurons(activations, E, seed)
        # weights of slots sum to 1 over the experts, gates of other routers have a mean of 1
        split_mlp(unit, new.experts, neurons, scale=E if isinstance(new.router, SoftRouter) else 1)


def _routing_options(unit: MLPUnit, arguments: Mapping[str, Any], inputs: Sequence[TokenInput]) -> dict[str, Any]:
    """The options of the router, from the arguments of `convert` or by default."""
    router, E = arguments["router"], arguments["experts"]
    L, capacity, top_k, gate = (arguments[name] for name in ("tokens_per_expert", "capacity", "top_k", "gate"))
    if L is not None and capacity is not None:
        raise ValueError(
            f"convert: tokens_per_expert={L} and capacity={capacity} both say how many tokens an expert takes; leave "
            "one out"
        )
    if L is not None:
        check_positive("convert", tokens_per_expert=L)
    if capacity is not None:
        check_numbers("convert", "above 0", lambda value: 0 < value < math.inf, {"capacity": capacity})
    if is_default(router):
        _refuse(router, top_k=top_k)
        if L is None and capacity is None:
            capacity = 1.0
        _check_count(unit, L, inputs)
        return {"tokens_per_expert": L, "capacity": capacity, "gate": gate or "softmax_experts"}
    if _is_token_choice(router):
        _refuse(router, tokens_per_expert=L)
        top_k = min(2, E) if top_k is None else top_k
        check_positive("convert", top_k=top_k)
        return {
            "top_k": top_k,
            "capacity": capacity,
            "gate": gate or ("softmax_selected" if top_k > 1 else "softmax_all"),
        }
    _refuse(router, top_k=top_k, gate=gate)
    if not has_patch_count(router):
        _refuse(router, tokens_per_expert=L, capacity=capacity)
        return {}
    if L is not None:
        return {"tokens_per_expert": L}
    slots = math.ceil(round((capacity or 1.0) * _fewest(unit, inputs, router) / E, 6))
    return {"tokens_per_expert": max(slots, 1)}


def _is_token_choice(router: RouterLike) -> bool:
    return router in ("token-choice", TokenChoice)


def _refuse(router: RouterLike, **options: Any) -> None:
    """Refuses options that were given and that a router does not have."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"convert: {name}={value!r}, but router={router!r} has no such option; leave it out")


def _tokens(unit: MLPUnit, found: TokenInput) -> int:
    return math.prod(found.shape[1:]) // unit.in_dim


def _fewest(unit: MLPUnit, inputs: Sequence[TokenInput], router: RouterLike) -> int:
    if not inputs:
        raise ValueError(
            f"convert: router={router!r} needs a number of slots or tokens per expert, which depends on the tokens of "
            f"{unit.name!r}; give input_size, the side of your images, or tokens_per_expert"
        )
    return min(_tokens(unit, found) for found in inputs)


def _check_count(unit: MLPUnit, tokens_per_expert: int | None, inputs: Sequence[TokenInput]) -> None:
    fewest = min((_tokens(unit, found) for found in inputs), default=None)
    if tokens_per_expert is not None and fewest is not None and tokens_per_expert > fewest:
        raise ValueError(
            f"convert: tokens_per_expert={tokens_per_expert}, but {unit.name!r} has only {fewest} tokens; take at most "
            f"{fewest}, a capacity in its place, or larger images"
        )


def _router(in_dim: int, experts: int, options: Mapping[str, Any], router: RouterLike, init: Init) -> nn.Module:
    L = options.get("tokens_per_expert")
    # gates of weights that were trained without them: of copies they sum to 1, of parts each is 1 on average
    rescaled: dict[str, Any] = {} if init == "scratch" else {"summed": init == "upcycle"}
    if is_default(router):
        own = {"capacity": options["capacity"], "gate": options["gate"], **rescaled}
        return (RescaledExpertChoice if rescaled else ExpertChoice)(in_dim, experts, L, **own)
    if _is_token_choice(router):
        own = {"capacity_factor": options["capacity"], "gate": options["gate"], **rescaled}
        return (RescaledTokenChoice if rescaled else TokenChoice)(in_dim, experts, options["top_k"], **own)
    return build_router(router, in_dim, experts, 1, L)


def _prefix_tokens(model: nn.Module, unit: MLPUnit, inputs: Sequence[TokenInput]) -> int:
    """Class and register tokens in the input of an MLP: timm's ``num_prefix_tokens``, or transformers' parameters."""
    if unit.channels_first or any(len(found.shape) != 3 for found in inputs):
        return 0
    owners = list(_owners(model, unit.name))
    declared = next((n for each in owners if isinstance(n := getattr(each, "num_prefix_tokens", None), int)), None)
    if declared is None:
        declared = next((count for each in owners if (count := _token_parameters(each))), 0)
    patches = _patch_grid(owners)
    known = {_tokens(unit, found) for found in inputs}
    without = patches is not None and known == {math.prod(patches)}  # as in blocks before the class token joins
    return 0 if without or (known and min(known) <= declared) or _mixes_tokens(unit, owners, known) else declared


def _owners(model: nn.Module, name: str) -> Iterable[nn.Module]:
    """The modules around a module, from the inside."""
    while name:
        name = name.rpartition(".")[0]
        yield model.get_submodule(name)


def _token_parameters(owner: nn.Module) -> int:
    embeddings = getattr(owner, "embeddings", None)
    if not isinstance(embeddings, nn.Module):
        return 0
    found = dict(cast("Iterable[tuple[str, Tensor]]", embeddings.named_parameters(recurse=False)))
    return sum(found[name].shape[1] if found[name].ndim == 3 else 1 for name in _PREFIX_PARAMETERS if name in found)


def _patch_grid(owners: Sequence[nn.Module]) -> tuple[int, int] | None:
    """Rows and columns of patches that a network of timm has, unless it takes images of every size."""
    for owner in owners:
        embed = getattr(owner, "patch_embed", getattr(owner, "stem", None))
        grid = getattr(embed, "grid_size", None)
        if isinstance(grid, tuple) and len(cast("tuple[Any, ...]", grid)) == 2:
            return cast("tuple[int, int]", grid) if getattr(embed, "strict_img_size", True) else None
    return None


def _mixes_tokens(unit: MLPUnit, owners: Sequence[nn.Module], tokens: Collection[int]) -> bool:
    """Whether the "tokens" of an MLP are channels, and their features patches, as in the first MLP of an MLP-Mixer."""
    patches = _patch_grid(owners)
    return patches is not None and unit.in_dim == math.prod(patches) and unit.in_dim not in tokens


def _grid(model: nn.Module, unit: MLPUnit, inputs: Sequence[TokenInput], prefix_tokens: int) -> TokenGrid:
    """Rows and columns of the tokens, if they are known and no square."""
    if unit.channels_first or any(len(found.shape) != 3 for found in inputs):
        return "square"  # a map has rows and columns of its own
    owners = list(_owners(model, unit.name))
    known = {_tokens(unit, found) - prefix_tokens for found in inputs}
    if _mixes_tokens(unit, owners, known):
        return None
    blocks = {found.block[1:3] for found in inputs if len(found.block) == 4 and found.block[3] == unit.in_dim}
    patches = _patch_grid(owners)
    for grid in (*blocks, patches):
        if grid is not None and patches is not None and known == {math.prod(grid)}:
            H, W = grid
            return "square" if H == W else (H, W)
    return "square"


def hidden_activations(model: nn.Module, units: Collection[MLPUnit], images: Tensor, seed: int) -> dict[str, Tensor]:
    """Runs a model on images and returns the hidden activations (T, J) of MLPs, of T tokens at random."""
    if images.ndim != 4 or not len(images):
        raise ValueError(f"convert: images are {tuple(images.shape)}; give a batch (B, C, H, W)")
    by_name = {unit.name: unit for unit in units}
    found: dict[str, list[Tensor]] = {name: [] for name in by_name}

    def record(name: str, x: Tensor) -> None:
        hidden = x.movedim(1, -1) if by_name[name].channels_first else x
        rows = hidden.reshape(-1, hidden.shape[-1])
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed), device="cpu")
        chosen = order[:_MAX_CLUSTERED_TOKENS].to(rows.device)
        found[name].append(rows[chosen].float().cpu())

    like = first_weight(model)
    layers = {unit.name: unit.fc2 for unit in units}
    with input_hooks(layers, record), eval_mode(model), torch.no_grad():
        model(images.to(like.device, like.dtype))
    return {name: torch.cat(rows) for name, rows in found.items()}
