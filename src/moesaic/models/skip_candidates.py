"""Blocks of a network that `skip` can let process some of the tokens, and why it refuses the others.

A block is fit for it if it maps any number of tokens (B, N, C) to as many, and treats a token alike wherever it stands
in the sequence. The network runs on one image to find the arguments of its blocks; then each block runs alone.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.layers.recording import RoutedLayer
from moesaic.layers.token_moe import TokenMoE
from moesaic.layers.token_skip import TokenSkip
from moesaic.models.inspection import all_named_modules, eval_mode, example_images, first_weight
from moesaic.routing.keep_choice import KeepChoice

__all__ = ["BlockCall", "find_blocks", "trace_calls", "why_not_skippable"]

_RULE = re.compile(r"(every|last)-([1-9]\d*)")
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class BlockCall:
    """Arguments of the first call of a block."""

    shape: tuple[int, ...] | None
    """Of its first argument; None if that is no tensor."""
    others: tuple[str, ...] = ()
    """Further arguments that are not None: names, or places such as ``"argument 2"``."""


def trace_calls(model: nn.Module, shape: tuple[int, int, int], failure: str, hint: str = "") -> dict[str, BlockCall]:
    """Runs a model on one image (C, H, W), and returns the arguments of the first call of each module."""
    calls: dict[str, BlockCall] = {}
    hooks: list[Any] = []
    for name, module in all_named_modules(model):

        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
            given = [*((f"argument {place}", value) for place, value in enumerate(args, 1)), *kwargs.items()]
            x = given[0][1] if given else None
            others = tuple(key for key, value in given[1:] if value is not None and value is not False)
            calls.setdefault(name, BlockCall(tuple(x.shape) if isinstance(x, Tensor) else None, others))

        hooks.append(module.register_forward_pre_hook(record, with_kwargs=True))
    try:
        with eval_mode(model), torch.no_grad():
            model(example_images(model, shape))
    except Exception as error:
        size = "×".join(map(str, shape))
        raise ValueError(
            f"skip: {type(model).__name__} {failure} on an image of {size}: {_one_line(error)}{hint}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def find_blocks(model: nn.Module, blocks: str | Sequence[str]) -> dict[str, nn.Module]:
    """Returns the modules that names, patterns or rules ask for, in the model's order.

    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2)) for _ in range(4)])
    >>> list(find_blocks(model, "every-2")), list(find_blocks(model, "[12]*")), list(find_blocks(model, "last-1"))
    (['1', '3'], ['1', '2'], ['3'])
    """
    modules = {name: module for name, module in all_named_modules(model) if name}
    found: set[str] = set()
    for pattern in [blocks] if isinstance(blocks, str) else blocks:
        rule = _RULE.fullmatch(pattern)
        if rule is not None:
            found |= set(_by_rule(model, pattern, int(rule[2])))
        elif pattern in modules:
            found.add(pattern)
        else:
            matched = [name for name in modules if fnmatchcase(name, pattern)]
            if not matched:
                raise ValueError(_not_found(type(model).__name__, pattern, modules))
            found |= {name for name in matched if not any(name.startswith(f"{other}.") for other in matched)}
    if not found:
        raise ValueError("skip: no block is given; name some, as 'blocks.*', or use a rule such as 'every-2'")
    for name in sorted(found):
        outer = next((other for other in found if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise ValueError(f"skip: {name!r} is in {outer!r}, which is to skip tokens as a whole; leave one out")
    return {name: module for name, module in modules.items() if name in found}


def why_not_skippable(
    model: nn.Module, name: str, call: BlockCall | None, tokens: tuple[int, int], router: KeepChoice, prefix_tokens: int
) -> str | None:
    """Returns why a block cannot run on some of the tokens, as the end of a sentence; None if it can.

    ``call`` is what it was called with, if the model was run; ``tokens`` are N and C of the tokens it is tried on, of
    which ``router`` would select some.
    """
    block = model.get_submodule(name)
    if isinstance(block, TokenSkip):
        return "skips tokens already"
    same = next((other for other, module in all_named_modules(model) if module is block and other != name), None)
    if same is not None:
        return f"is also {same!r}; give each a copy of its own first"
    if call is not None:
        if call.shape is None or len(call.shape) != 3:
            found = "no tensor" if call.shape is None else f"a tensor {call.shape}"
            return f"runs on {found}, not on tokens (B, N, C) as the blocks of a ViT; convert routes maps by patches"
        if call.others:
            return f"gets {' and '.join(call.others)} beside its tokens, which would no longer belong to those selected"
        if tokens[0] <= prefix_tokens:
            return f"runs on {tokens[0]} tokens, of which prefix_tokens={prefix_tokens}; at least one must follow them"
    N, C = tokens
    selected = router.prefix_tokens + router.count(N - router.prefix_tokens)
    return None if selected == N else _trial_fault(block, selected, N, C, prefix_tokens)


def _trial_fault(block: nn.Module, some: int, tokens: int, dim: int, prefix_tokens: int) -> str | None:
    """Why the outputs of a block on some of the tokens, or on these in another order, do not fit; None if they do."""
    block = copy.deepcopy(block).double()  # float64, as residual branches may begin close to 0
    like = first_weight(block)
    for inner in block.modules():
        if isinstance(inner, TokenMoE):
            inner.grid = None  # as `TokenSkip` does
    x = torch.randn(2, some, dim, generator=torch.Generator().manual_seed(0), device="cpu").to(like.device, like.dtype)
    order = [*range(min(prefix_tokens, some)), *reversed(range(prefix_tokens, some))]
    with torch.no_grad():
        try:
            block.eval()
            y: Any = block(x)
            again: Any = block(x[:, order])
        except Exception as error:
            return f"does not run on {some} of {tokens} tokens: {_one_line(error)}"
    if not isinstance(y, Tensor) or y.shape != x.shape:
        found = f"a tensor {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        return f"returns {found} for tokens {tuple(x.shape)}, not as many tokens"
    # routers break ties, and drop what is over capacity, by the order of tokens
    if y.is_meta or any(isinstance(module, RoutedLayer) for module in block.modules()):
        return None
    if (again - y[:, order]).abs().max() > _TOLERANCE * (y - x).abs().max():
        return (
            "treats a token by its place in the sequence, which is another one among selected tokens; if that is "
            "meant, wrap it yourself in moesaic.layers.TokenSkip"
        )
    return None


def _by_rule(model: nn.Module, rule: str, number: int) -> list[str]:
    """Some blocks of the longest list of blocks of one kind."""
    lists = [
        [f"{name}.{child}".lstrip(".") for child, _ in module.named_children()]
        for name, module in all_named_modules(model)
        if isinstance(module, nn.Sequential | nn.ModuleList) and _has_equal_blocks(module)
    ]
    names = max(lists, key=len, default=list[str]())
    if number > len(names):
        raise ValueError(
            f"skip: {rule!r} is a rule for {number} or more blocks of one kind in a list, and {type(model).__name__} "
            f"has {len(names)}; name the blocks"
        )
    return names[number - 1 :: number] if rule.startswith("every") else names[-number:]


def _has_equal_blocks(module: nn.Module) -> bool:
    children = [child.block if isinstance(child, TokenSkip) else child for child in module.children()]
    return len({type(child) for child in children}) == 1 and all(any(child.children()) for child in children)


def _not_found(owner: str, pattern: str, modules: Mapping[str, nn.Module]) -> str:
    near = get_close_matches(pattern, modules, n=2, cutoff=0.5)
    hint = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
    return (
        f"skip: {owner} has no block {pattern!r}{hint}; name modules of model.named_modules(), or use a rule such as "
        "'every-2'"
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
