"""The layers of a network from its input to its classifier, for freezing and layer-wise learning rates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import nn

from moesaic.models.headed_network import HeadedNetwork
from moesaic.models.image_classifier import ImageClassifier

__all__ = ["classifier_names", "layer_groups"]


def classifier_names(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of the modules that make logits of features: one, or several in distilled networks of timm.

    They are what ``pretrained_cfg`` calls the classifier, what ``get_classifier()`` returns, ``head``, or else the
    last linear layer.

    >>> classifier_names(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 2)))
    ('2',)
    """
    config: Any = getattr(model, "pretrained_cfg", None)
    known = cast("dict[str, Any]", config) if isinstance(config, dict) else {}
    named: str | tuple[str, ...] | None = known.get("classifier")
    if named:
        return (named,) if isinstance(named, str) else tuple(named)
    modules = dict(cast("Iterable[tuple[str, nn.Module]]", model.named_modules()))
    if hasattr(model, "get_classifier"):
        found: Any = cast("Any", model).get_classifier()
        wanted = cast("tuple[nn.Module, ...]", found if isinstance(found, tuple) else (found,))
        return tuple(name for name, module in modules.items() if any(module is each for each in wanted))
    if isinstance(getattr(model, "head", None), nn.Module):
        return ("head",)
    return tuple([name for name, module in modules.items() if isinstance(module, nn.Linear)][-1:])


def layer_groups(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Returns the names of the parameters of each layer, from the input on; the last group is the classifier.

    A layer is a block of a stage, or a layer beside the stages together with the normalisation that follows it.

    >>> from moesaic.models import ResNet18
    >>> [group[0] for group in layer_groups(ResNet18(num_classes=10))][:3]
    ['body.0.0.weight', 'body.2.first.0.weight', 'body.3.first.0.weight']
    """
    heads = classifier_names(model)
    names = [name for name, _ in cast("Iterable[tuple[str, Any]]", model.named_parameters())]
    head = tuple(name for name in names if name.startswith(tuple(f"{each}." for each in heads)))
    left = [name for name in names if name not in head]
    shapes = {name: parameter.ndim for name, parameter in model.named_parameters()}
    groups: list[list[str]] = []
    for layer in _layers(model, ""):
        own = [name for name in left if name.startswith(f"{layer}.")]
        if not own:
            continue
        if groups and all(shapes[name] == 1 for name in own):
            groups[-1] += own
        else:
            groups.append(own)
    grouped = {name for group in groups for name in group}
    direct = [name for name in left if name not in grouped]  # tokens and position embeddings
    groups[:1] = [[*direct, *(groups[0] if groups else [])]]
    return tuple(tuple(group) for group in (*groups, head) if group)


def _layers(module: nn.Module, stem: str) -> Iterator[str]:
    for name, child in module.named_children():
        inside = f"{stem}{name}"
        # the body of our networks, and sequences of stages and blocks, are made of layers themselves
        if isinstance(child, nn.Sequential | nn.ModuleList) or isinstance(module, ImageClassifier | HeadedNetwork):
            leaf = not any(True for _ in child.children())
            yield from [inside] if leaf else _layers(child, f"{inside}.")
        else:
            yield inside
