"""``skip``: lets blocks of any transformer process the best tokens of each image alone; see `TokenSkip`.

Raposo et al. 2024 (mixture of depths), for networks that exist, pretrained or not.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast, get_args

from torch import nn

from moesaic.argument_checks import check_choice, check_positive
from moesaic.layers.token_inputs import TokenGrid
from moesaic.layers.token_moe import TokenMoE
from moesaic.layers.token_skip import SkipPrefix, TokenSkip
from moesaic.models.convert_plan import new_weights, refuse_ddp
from moesaic.models.input_shapes import OTHER_SIZE, input_shape
from moesaic.models.inspection import first_weight
from moesaic.models.skip_candidates import BlockCall, find_blocks, trace_calls, why_not_skippable
from moesaic.models.vit import PatchEmbed
from moesaic.routing.keep_choice import KeepChoice, KeepGate

__all__ = ["applied_skips", "skip", "skip_options"]

Model = TypeVar("Model", bound=nn.Module)

_RECORD = "_moesaic_skips"
_EXAMPLE_TOKENS = 6
"""Tokens behind the prefix in the trial run of a block where the size of images is unknown."""


def skip(
    model: Model,
    blocks: str | Sequence[str],
    *,
    keep: float = 0.5,
    gate: KeepGate = "sigmoid",
    prefix: SkipPrefix = "always",
    prefix_tokens: int | None = None,
    dim: int | None = None,
    seed: int = 0,
    input_size: int | Sequence[int] | None = None,
) -> Model:
    """Puts blocks of ``model`` into `TokenSkip`, in place, and returns the model.

    A router for each block sends the best tokens of an image through the block; the others pass by unchanged. Blocks
    must be residual, x + f(x), as those of transformers are: name whole blocks, not their MLPs, beside which a token
    that passes by would be added to the residual stream once more. The block ``name`` becomes ``name.block``, its
    router is ``name.router``. Mixtures of experts in a block see the selected tokens.

    Args:
        model: any network; it is unchanged if an error is raised.
        blocks: names of blocks as in ``model.named_modules()``, patterns such as ``"blocks.*"``, whose outermost
            matches are taken, or several of them; or rules for the blocks of a transformer: ``"every-2"``, every
            second block from the second one on, or ``"last-4"``.
        keep: as in `TokenSkip`.
        gate: as in `TokenSkip`.
        prefix: as in `TokenSkip`.
        prefix_tokens: class and register tokens in front of the others; None: the model's ``num_prefix_tokens``, which
            timm's networks have, or 0.
        dim: features of a token, for models that take no images; others run on one image to find it.
        seed: seed of the routers' weights; every block has its own random numbers.
        input_size: height and width of the images, or (C, H, W). Networks of timm and `ViT` know their own size.

    >>> import torch, moesaic
    >>> model = moesaic.create_model("vit_tiny_patch4_32", num_classes=10, depth=4)
    >>> model = moesaic.skip(model, "every-2", keep=0.25)
    >>> with moesaic.record_routing(model) as routing:
    ...     logits = model(torch.randn(2, 3, 32, 32))
    >>> {name: tuple(each.index.shape) for name, each in routing.items()}
    {'blocks.1': (2, 1, 16), 'blocks.3': (2, 1, 16)}
    """
    refuse_ddp("skip", model)
    shape = _image_shape(model, input_size, dim)
    first = _prefix_tokens(model) if prefix_tokens is None else prefix_tokens
    check_choice("skip", "prefix", prefix, get_args(SkipPrefix))
    router = KeepChoice(1, keep, gate=gate, prefix_tokens=first if prefix == "always" else 0, device="meta")
    found = find_blocks(model, blocks)
    calls = None if shape is None else trace_calls(model, shape, "does not run", "" if input_size else OTHER_SIZE)
    tokens = {name: _tokens(name, calls, dim, first) for name in found}
    faults = {
        name: why_not_skippable(model, name, None if calls is None else calls[name], tokens[name], router, first)
        for name in found
    }
    refused = [f"{name!r} {fault}" for name, fault in faults.items() if fault]
    if refused:
        raise ValueError(f"skip: {refused[0]}" + (f" (and {len(refused) - 1} more blocks)" if refused[1:] else ""))
    options: dict[str, Any] = {"keep": keep, "gate": gate, "prefix": prefix, "prefix_tokens": first}
    with _restored(model, found):
        for name, block in found.items():
            N, C = tokens[name]
            grid = "square" if calls is None else _grid(model, N - first)
            model.set_submodule(name, _wrapped(name, block, C, {**options, "grid": grid}, seed))
        if shape is not None:
            trace_calls(model, shape, f"no longer runs with {', '.join(map(repr, found))} skipping tokens")
    given = {**options, "dim": dim, "seed": seed, "input_size": None if shape is None else list(shape)}
    records = [{"skip": name, **given} for name in found]
    model.__dict__[_RECORD] = [*model.__dict__.get(_RECORD, ()), *records]
    return model


def applied_skips(model: nn.Module) -> tuple[dict[str, Any], ...]:
    """Returns the calls of `skip` on a model, as entries of ``ModelSpec.conversions``; blocks are given by their names.

    Where layers were converted as well, the entries go behind those of `applied_conversions` if the layers were
    converted first, as the names of layers in a block change with it.

    >>> import moesaic
    >>> from moesaic.models import ModelSpec
    >>> model = moesaic.create_model("vit_tiny_patch4_32", num_classes=2, depth=2)
    >>> _ = moesaic.skip(model, "blocks.1", keep=0.25)
    >>> applied_skips(model)[0]["skip"], applied_skips(model)[0]["keep"]
    ('blocks.1', 0.25)
    >>> again = ModelSpec("vit_tiny_patch4_32", {"num_classes": 2, "depth": 2}, applied_skips(model)).build()
    """
    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    return tuple(
        {**record, "skip": f"{name}.{record['skip']}".lstrip(".")}
        for name, module in modules
        for record in module.__dict__.get(_RECORD, ())
    )


def skip_options() -> tuple[str, ...]:
    """Returns the options of `skip` that a model string or a file may contain.

    >>> skip_options()[:2]
    ('keep', 'gate')
    """
    return tuple(each.name for each in inspect.signature(skip).parameters.values() if each.kind is each.KEYWORD_ONLY)


def _wrapped(name: str, block: nn.Module, dim: int, options: Mapping[str, Any], seed: int) -> TokenSkip:
    like = first_weight(block)
    with new_weights(name, seed, like.device) as generator:
        new = TokenSkip(block, dim, **options)
    if not like.is_meta:
        new.router.reset_parameters(generator)
    new.router.to(like.device, like.dtype).train(block.training)
    new.training = block.training
    return new


@contextmanager
def _restored(model: nn.Module, blocks: Mapping[str, nn.Module]) -> Generator[None]:
    """Puts the blocks back if the work inside fails, with the grids of their mixtures of experts."""
    inside = (each for block in blocks.values() for each in cast("Iterable[nn.Module]", block.modules()))
    grids: list[tuple[TokenMoE, TokenGrid]] = [(each, each.grid) for each in inside if isinstance(each, TokenMoE)]
    try:
        yield
    except BaseException:
        for name, block in blocks.items():
            model.set_submodule(name, block)
        for mixture, grid in grids:
            mixture.grid = grid
        raise


def _tokens(name: str, calls: Mapping[str, BlockCall] | None, dim: int | None, prefix_tokens: int) -> tuple[int, int]:
    """N and C of the tokens of a block, or of those for its trial run if the model was not run."""
    if prefix_tokens:
        check_positive("skip", prefix_tokens=prefix_tokens)
    if dim is not None:
        check_positive("skip", dim=dim)
    if calls is None:
        assert dim is not None
        return prefix_tokens + _EXAMPLE_TOKENS, dim
    if name not in calls:
        raise ValueError(f"skip: {name!r} did not run on an image; name blocks that do")
    shape = calls[name].shape
    if shape is None or len(shape) != 3:
        return 0, 0  # refused by its call
    if dim not in (None, shape[2]):
        raise ValueError(f"skip: dim={dim}, but {name!r} runs on tokens of {shape[2]} features; leave dim out")
    return shape[1], shape[2]


def _image_shape(
    model: nn.Module, input_size: int | Sequence[int] | None, dim: int | None
) -> tuple[int, int, int] | None:
    if input_size is not None:
        sizes = [input_size] if isinstance(input_size, int) else list(input_size)
        if len(sizes) not in (1, 3) or any(size < 1 for size in sizes):
            raise ValueError(f"skip: input_size={input_size!r}; give the side of square images, or (C, H, W)")
    elif embed := next((each for each in model.modules() if isinstance(each, PatchEmbed)), None):
        return (embed.proj.in_channels, embed.image_size, embed.image_size)
    shape = input_shape(model, input_size)
    if shape is None and dim is None:
        raise ValueError(
            f"skip: the size of the tokens of {type(model).__name__} is unknown; give input_size, the side of its "
            "images, or dim, the features of a token"
        )
    return shape


def _prefix_tokens(model: nn.Module) -> int:
    found = (getattr(each, "num_prefix_tokens", None) for each in cast("Iterable[nn.Module]", model.modules()))
    return next((number for number in found if isinstance(number, int)), 0)


def _grid(model: nn.Module, tokens: int) -> TokenGrid:
    """The grid of tokens that are no square, if the model knows it; squares are found whatever the size of images."""
    for module in cast("Iterable[nn.Module]", model.modules()):
        grid: Any = getattr(module, "grid_size", None)
        if isinstance(grid, tuple) and len(cast("tuple[int, ...]", grid)) == 2:
            rows, columns = cast("tuple[int, int]", grid)
            if rows != columns and math.prod((rows, columns)) == tokens:
                return rows, columns
    return "square"
